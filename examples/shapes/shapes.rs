//! Videos of moving shapes, and the prompts that describe them.

use ringspan_video::frames::RgbFrame;

/// Frames of a video.
pub(crate) const FRAMES: usize = 9;
/// Pixels of a side.
pub(crate) const SIDE: usize = 32;

/// Colors with their red, green and blue levels.
const COLORS: [(&str, [u8; 3]); 3] = [("red", [230, 40, 40]), ("green", [40, 200, 60]), ("blue", [50, 80, 240])];
const KINDS: [&str; 2] = ["circle", "square"];
/// Directions with the pixels to the right in each frame.
const DIRECTIONS: [(&str, f64); 2] = [("right", 1.5), ("left", -1.5)];
/// Paths with the pixels from the middle row down to them.
const PATHS: [(&str, f64); 3] = [("top", -10.0), ("middle", 0.0), ("bottom", 10.0)];
const BACKGROUND: [u8; 3] = [16, 16, 24];
/// Pixels from the middle of a shape to its border.
const RADIUS: f64 = 6.0;

/// Number of different prompts.
pub(crate) const PROMPTS: usize = COLORS.len() * KINDS.len() * DIRECTIONS.len() * PATHS.len();

/// The words of all prompts.
pub(crate) fn words() -> Vec<&'static str> {
    let colors = COLORS.iter().map(|(name, _)| *name);
    let directions = DIRECTIONS.iter().map(|(name, _)| *name);
    let paths = PATHS.iter().map(|(name, _)| *name);
    ["a", "moves", "along", "the"].into_iter().chain(colors).chain(KINDS).chain(directions).chain(paths).collect()
}

/// One of the prompts.
pub(crate) fn prompt(index: usize) -> String {
    let Parts { color, kind, direction, path } = parts(index);
    format!("a {} {} moves {} along the {}", COLORS[color].0, KINDS[kind], DIRECTIONS[direction].0, PATHS[path].0)
}

/// The indices of a prompt's words.
struct Parts {
    color: usize,
    kind: usize,
    direction: usize,
    path: usize,
}

fn parts(index: usize) -> Parts {
    let (rest, path) = (index / PATHS.len(), index % PATHS.len());
    let (rest, direction) = (rest / DIRECTIONS.len(), rest % DIRECTIONS.len());
    Parts { color: rest / KINDS.len() % COLORS.len(), kind: rest % KINDS.len(), direction, path }
}

/// The video of a prompt.
pub(crate) fn video(index: usize) -> Vec<RgbFrame> {
    let Parts { color, kind, direction, path } = parts(index);
    let (speed, below) = (DIRECTIONS[direction].1, PATHS[path].1);
    let middle = SIDE as f64 / 2.0;
    (0..FRAMES)
        .map(|frame| {
            let time = frame as f64 - (FRAMES - 1) as f64 / 2.0;
            picture([middle + time * speed, middle + below], COLORS[color].1, KINDS[kind])
        })
        .collect()
}

/// A frame with a shape at x pixels from the left and y from the top.
fn picture([x, y]: [f64; 2], color: [u8; 3], kind: &str) -> RgbFrame {
    let mut pixels = Vec::with_capacity(SIDE * SIDE * 3);
    for (row, column) in (0..SIDE).flat_map(|row| (0..SIDE).map(move |column| (row, column))) {
        let (dx, dy) = (column as f64 + 0.5 - x, row as f64 + 0.5 - y);
        let out = if kind == "circle" { dx.hypot(dy) - RADIUS } else { dx.abs().max(dy.abs()) - 0.9 * RADIUS };
        // The border is a pixel wide.
        let inside = (0.5 - out).clamp(0.0, 1.0);
        pixels.extend(
            (0..3).map(|i| (f64::from(color[i]) * inside + f64::from(BACKGROUND[i]) * (1.0 - inside)).round() as u8),
        );
    }
    RgbFrame { width: SIDE, height: SIDE, pixels }
}
