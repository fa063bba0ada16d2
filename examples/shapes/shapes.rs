//! Videos of moving shapes, and the prompts that describe them.

use ringspan_video::frames::RgbFrame;

/// Frames of a video.
pub(crate) const FRAMES: usize = 9;
/// Pixels of a side.
pub(crate) const SIDE: usize = 32;

/// Colors with their red, green and blue levels.
const COLORS: [(&str, [u8; 3]); 3] = [("red", [230, 40, 40]), ("green", [40, 200, 60]), ("blue", [50, 80, 240])];
const KINDS: [&str; 2] = ["circle", "square"];
/// Directions with their pixels to the right, and down, in a frame.
const DIRECTIONS: [(&str, [f64; 2]); 2] = [("right", [1.5, 0.0]), ("left", [-1.5, 0.0])];
const BACKGROUND: [u8; 3] = [16, 16, 24];
/// Pixels from the middle of a shape to its border.
const RADIUS: f64 = 6.0;

/// Number of different prompts.
pub(crate) const PROMPTS: usize = COLORS.len() * KINDS.len() * DIRECTIONS.len();

/// The words of all prompts.
pub(crate) fn words() -> Vec<&'static str> {
    let colors = COLORS.iter().map(|(name, _)| *name);
    let directions = DIRECTIONS.iter().map(|(name, _)| *name);
    ["a", "moves"].into_iter().chain(colors).chain(KINDS).chain(directions).collect()
}

/// One of the prompts.
pub(crate) fn prompt(index: usize) -> String {
    let (color, kind, direction) = parts(index);
    format!("a {} {} moves {}", COLORS[color].0, KINDS[kind], DIRECTIONS[direction].0)
}

fn parts(index: usize) -> (usize, usize, usize) {
    let (rest, direction) = (index / DIRECTIONS.len(), index % DIRECTIONS.len());
    (rest / KINDS.len() % COLORS.len(), rest % KINDS.len(), direction)
}

/// A video of a prompt. `across` says how far down its path is, from 0 to 1.
pub(crate) fn video(index: usize, across: f64) -> Vec<RgbFrame> {
    let (color, kind, direction) = parts(index);
    let speed = DIRECTIONS[direction].1;
    let middle = SIDE as f64 / 2.0;
    let beside = (across - 0.5) * (SIDE as f64 - 2.0 * RADIUS);
    (0..FRAMES)
        .map(|frame| {
            let time = frame as f64 - (FRAMES - 1) as f64 / 2.0;
            // Two numbers: pixels from the left, and from the top.
            let at = [middle + time * speed[0], middle + time * speed[1] + beside];
            picture(at, COLORS[color].1, KINDS[kind])
        })
        .collect()
}

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
