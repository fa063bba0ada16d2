//! Writes SVG: shapes, text, colours.

use super::Point;
use std::fmt::{Display, Write};

/// Colours of text, lines and background.
pub(super) const INK: &str = "#1c2330";
pub(super) const MUTED: &str = "#5b6472";
pub(super) const LINE: &str = "#d5d9e0";
pub(super) const PAPER: &str = "#ffffff";
pub(super) const UNSEEN: &str = "#f3f4f7";

/// Colours from dark blue over green to light rose. Brightness rises monotonically, so ranks can be told apart without
/// colour.
const RAMP: [(f64, f64, f64); 7] = [
    (24.0, 44.0, 97.0),
    (33.0, 94.0, 112.0),
    (77.0, 130.0, 88.0),
    (150.0, 145.0, 62.0),
    (222.0, 150.0, 84.0),
    (243.0, 172.0, 160.0),
    (240.0, 196.0, 228.0),
];

/// The colour of rank `rank` of `ranks`, and the colour of text on it.
pub(super) fn colours(rank: usize, ranks: usize) -> (String, &'static str) {
    // A few ranks avoid the ends of the ramp, where blue is close to the ink and rose to the paper.
    let (from, to) = if ranks > 4 { (0.0, 1.0) } else { (0.08, 0.88) };
    let share = if ranks > 1 { rank as f64 / (ranks - 1) as f64 } else { 0.2 };
    let at = (from + (to - from) * share) * (RAMP.len() - 1) as f64;
    let low = (at as usize).min(RAMP.len() - 2);
    let (a, b, part) = (RAMP[low], RAMP[low + 1], at - low as f64);
    let mix = |a: f64, b: f64| a + (b - a) * part;
    let (red, green, blue) = (mix(a.0, b.0), mix(a.1, b.1), mix(a.2, b.2));
    let brightness = 0.299 * red + 0.587 * green + 0.114 * blue;
    let words = if brightness < 125.0 { "#ffffff" } else { INK };
    (format!("#{:02x}{:02x}{:02x}", red.round() as u8, green.round() as u8, blue.round() as u8), words)
}

/// The horizontal alignment of text relative to its point.
#[derive(Clone, Copy)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

/// An SVG being written.
#[derive(Default)]
pub(super) struct Svg {
    body: String,
}

impl Svg {
    /// Returns the whole file.
    pub(super) fn finish(self, width: f64, height: f64, title: &str) -> String {
        let (width, height, title) = (number(width), number(height), escape(title));
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
             height=\"{height}\" role=\"img\" font-family=\"Inter, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif\">\n\
             <title>{title}</title>\n<rect width=\"{width}\" height=\"{height}\" fill=\"{PAPER}\"/>\n{}</svg>\n",
            self.body
        )
    }

    /// A filled rectangle with corners rounded by `round`.
    pub(super) fn rect(&mut self, (x, y): Point, (width, height): Point, fill: &str, round: f64) {
        let (x, y, width, height) = (number(x), number(y), number(width), number(height));
        let round = if round > 0.0 { format!(" rx=\"{}\"", number(round)) } else { String::new() };
        self.push(format_args!(
            "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\"{round} fill=\"{fill}\"/>"
        ));
    }

    /// Closed polygons as one shape, with a thin border.
    pub(super) fn polygons(&mut self, outlines: &[Vec<Point>], fill: &str, border: &str, width: f64) {
        let mut path = String::new();
        for outline in outlines {
            // In an SVG path, points that follow the first point of an `M` command are joined by lines.
            let mut word = "M";
            for &(x, y) in outline {
                let _ = write!(path, "{word}{} {}", number(x), number(y));
                word = " ";
            }
            path.push('z');
        }
        let width = number(width);
        self.push(format_args!(
            "<path d=\"{path}\" fill=\"{fill}\" stroke=\"{border}\" stroke-width=\"{width}\" stroke-linejoin=\"round\"/>"
        ));
    }

    /// A line.
    pub(super) fn line(&mut self, (x1, y1): Point, (x2, y2): Point, colour: &str, width: f64) {
        let [x1, y1, x2, y2, width] = [x1, y1, x2, y2, width].map(number);
        self.push(format_args!(
            "<line x1=\"{x1}\" y1=\"{y1}\" x2=\"{x2}\" y2=\"{y2}\" stroke=\"{colour}\" stroke-width=\"{width}\"/>"
        ));
    }

    /// Text on a baseline.
    pub(super) fn text(&mut self, at: Point, size: f64, anchor: Anchor, colour: &str, words: &str) {
        self.styled(at, size, anchor, colour, "", words);
    }

    /// Bold text on a baseline.
    pub(super) fn bold(&mut self, at: Point, size: f64, anchor: Anchor, colour: &str, words: &str) {
        self.styled(at, size, anchor, colour, " font-weight=\"600\"", words);
    }

    /// Short labels of the same style, each centred on its point.
    pub(super) fn labels(&mut self, size: f64, colour: &str, labels: &[(Point, String)]) {
        self.push(format_args!("<g font-size=\"{}\" text-anchor=\"middle\" fill=\"{colour}\">", number(size)));
        for ((x, y), words) in labels {
            let (x, y, words) = (number(*x), number(y + 0.36 * size), escape(words));
            self.push(format_args!("<text x=\"{x}\" y=\"{y}\">{words}</text>"));
        }
        self.push("</g>");
    }

    /// Text that reads upwards.
    pub(super) fn upwards(&mut self, (x, y): Point, size: f64, colour: &str, words: &str) {
        let turn = format!(" transform=\"rotate(-90 {} {})\"", number(x), number(y));
        self.styled((x, y), size, Anchor::Middle, colour, &turn, words);
    }

    fn styled(&mut self, (x, y): Point, size: f64, anchor: Anchor, colour: &str, more: &str, words: &str) {
        let anchor = match anchor {
            Anchor::Start => "",
            Anchor::Middle => " text-anchor=\"middle\"",
            Anchor::End => " text-anchor=\"end\"",
        };
        let (x, y, size, words) = (number(x), number(y), number(size), escape(words));
        self.push(format_args!(
            "<text x=\"{x}\" y=\"{y}\" font-size=\"{size}\"{anchor} fill=\"{colour}\"{more}>{words}</text>"
        ));
    }

    fn push(&mut self, element: impl Display) {
        // Writing to a string does not fail.
        let _ = writeln!(self.body, "{element}");
    }
}

/// A coordinate with up to two decimals, without trailing zeros.
fn number(value: f64) -> String {
    let text = format!("{value:.2}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" { "0".into() } else { text.into() }
}

fn escape(words: &str) -> String {
    words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_get_brighter_and_words_stay_readable() {
        let brightness = |colour: &str| {
            let part = |at: usize| f64::from(u8::from_str_radix(&colour[at..at + 2], 16).expect("hex"));
            0.299 * part(1) + 0.587 * part(3) + 0.114 * part(5)
        };
        for ranks in 1..=16 {
            let shades: Vec<Point> =
                (0..ranks).map(|rank| colours(rank, ranks)).map(|(a, b)| (brightness(&a), brightness(b))).collect();
            assert!(shades.windows(2).all(|pair| pair[1].0 > pair[0].0 + 3.0), "{shades:?}");
            assert!(shades.iter().all(|(back, words)| (back - words).abs() > 85.0), "{shades:?}");
        }
    }

    #[test]
    fn numbers_are_short_and_words_are_escaped() {
        assert_eq!([number(1.0), number(-0.001), number(2.346), number(10.5)], ["1", "0", "2.35", "10.5"]);
        assert_eq!(escape("a<b & \"c\""), "a&lt;b &amp; &quot;c&quot;");
    }
}
