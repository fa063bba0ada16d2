//! Draws losses over steps as an SVG.

use crate::document::DIGITS;
use crate::stage::Stage;
use std::fmt::Write;

const INK: &str = "#1c2330";
const MUTED: &str = "#5b6472";
const LINE: &str = "#d5d9e0";
const BAND: &str = "#f3f4f7";
/// Colours of the curves; one is dark and one light, so that they differ without colour, too.
const COLOURS: [&str; 2] = ["#215e70", "#de9654"];

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 430.0;
const LEFT: f64 = 60.0;
const RIGHT: f64 = 876.0;
const TOP: f64 = 118.0;
const BOTTOM: f64 = 372.0;

/// One model's training.
pub(crate) struct Curve {
    pub(crate) name: String,
    /// Loss of each step, in nats a token.
    pub(crate) losses: Vec<f64>,
}

/// The contents of the plot.
pub(crate) struct Plot<'a> {
    pub(crate) stages: &'a [Stage],
    pub(crate) curves: Vec<Curve>,
}

impl Plot<'_> {
    pub(crate) fn svg(&self) -> String {
        let losses = self.curves.iter().flat_map(|curve| &curve.losses);
        let most = losses.copied().fold(1.0, f64::max).ceil();
        // Stages are equally wide, however many steps they have.
        let width = (RIGHT - LEFT) / self.stages.len().max(1) as f64;
        let y = |loss: f64| BOTTOM - (BOTTOM - TOP) * loss / most;

        let mut svg = Svg::new();
        let longest = self.stages.iter().map(|stage| stage.length).max().unwrap_or(0);
        svg.text((24.0, 34.0), 19.0, INK, "start", &format!("A pass key in {longest} tokens, across two ranks"));
        for (index, (curve, colour)) in self.curves.iter().zip(COLOURS).enumerate() {
            let at = 62.0 + 22.0 * index as f64;
            svg.line([(24.0, at - 4.0), (46.0, at - 4.0)], colour, 3.0);
            svg.text((54.0, at), 13.0, INK, "start", &curve.name);
        }
        let mut first = 0;
        for (index, stage) in self.stages.iter().enumerate() {
            let from = LEFT + width * index as f64;
            if index % 2 == 0 {
                svg.rect((from, TOP), (width, BOTTOM - TOP));
            }
            let rope_scaling =
                stage.rope_scaling.map(|rope_scaling| format!(", scaled: {rope_scaling}")).unwrap_or_default();
            let words = format!("{} x {} tokens{rope_scaling}", stage.texts, stage.length);
            svg.text((from + width / 2.0, TOP - 8.0), 12.0, MUTED, "middle", &words);
            svg.text((from, BOTTOM + 18.0), 12.0, MUTED, "middle", &first.to_string());
            first += stage.steps;
        }
        svg.text((RIGHT, BOTTOM + 18.0), 12.0, MUTED, "middle", &first.to_string());
        svg.text(((LEFT + RIGHT) / 2.0, BOTTOM + 42.0), 13.0, INK, "middle", "steps");
        for tick in 0..=most as u32 {
            let at = y(f64::from(tick));
            svg.line([(LEFT, at), (RIGHT, at)], LINE, 0.6);
            svg.text((LEFT - 8.0, at + 4.0), 12.0, MUTED, "end", &tick.to_string());
        }
        svg.body += &format!(
            "<text transform=\"translate(24 {}) rotate(-90)\" font-size=\"13\" fill=\"{INK}\" text-anchor=\"middle\">\
             loss, nats a token</text>\n",
            (TOP + BOTTOM) / 2.0
        );
        for (curve, colour) in self.curves.iter().zip(COLOURS) {
            let steps = self.stages.iter().enumerate().flat_map(|(index, stage)| {
                let at = move |step: u64| (step as f64 + 0.5) / stage.steps as f64;
                (0..stage.steps).map(move |step| LEFT + width * (index as f64 + at(step)))
            });
            svg.line(steps.zip(curve.losses.iter().map(|&loss| y(loss))), colour, 1.4);
        }
        let chance = y(chance());
        svg.dashes((LEFT, chance), (RIGHT, chance));
        svg.text((RIGHT - 6.0, chance - 8.0), 12.0, INK, "end", "chance: the digits are guessed");
        svg.finish()
    }
}

/// Loss of a model that guesses each of the key's digits, one of ten, and is certain of the end of the text, which is learned,
/// too.
fn chance() -> f64 {
    DIGITS as f64 * 10f64.ln() / (DIGITS + 1) as f64
}

struct Svg {
    body: String,
}

impl Svg {
    fn new() -> Self {
        Self { body: String::new() }
    }

    fn finish(self) -> String {
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" \
             height=\"{HEIGHT}\" role=\"img\" font-family=\"Inter, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif\">\n\
             <title>Loss of a model that looks for a pass key, over steps</title>\n\
             <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#ffffff\"/>\n{}</svg>\n",
            self.body
        )
    }

    fn text(&mut self, (x, y): (f64, f64), size: f64, fill: &str, anchor: &str, words: &str) {
        self.body += &format!(
            "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{size}\" fill=\"{fill}\" text-anchor=\"{anchor}\">{words}</text>\n"
        );
    }

    fn rect(&mut self, (x, y): (f64, f64), (width, height): (f64, f64)) {
        self.body +=
            &format!("<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{BAND}\"/>\n");
    }

    fn line(&mut self, points: impl IntoIterator<Item = (f64, f64)>, stroke: &str, width: f64) {
        let mut path = String::new();
        for (x, y) in points {
            // In an SVG path, points after the first one of M are connected by lines.
            let word = if path.is_empty() { "M" } else { " " };
            // Writing to a string cannot fail.
            let _ = write!(path, "{word}{x:.1} {y:.1}");
        }
        self.body += &format!("<path d=\"{path}\" fill=\"none\" stroke=\"{stroke}\" stroke-width=\"{width}\"/>\n");
    }

    fn dashes(&mut self, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) {
        self.body += &format!(
            "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{INK}\" stroke-dasharray=\"4 4\"/>\n"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_step_is_a_point_within_the_axes() {
        let stage = |length, steps| Stage { length, texts: 2, steps, lr: 1e-3, rope_scaling: None };
        let stages = [stage(128, 3), stage(256, 2)];
        let curve = |name: &str, losses: &[f64]| Curve { name: name.into(), losses: losses.to_vec() };
        let curves = vec![curve("one", &[5.5, 2.0, 1.0, 0.1, 0.0]), curve("two", &[5.5, 1.9, 1.9, 1.9, 1.9])];
        let svg = Plot { stages: &stages, curves }.svg();
        let path = svg.lines().find(|line| line.contains(&format!("stroke=\"{}\" stroke-width=\"1.4\"", COLOURS[0])));
        let path = path.and_then(|line| line.split('"').nth(1)).expect("a path");
        let numbers: Vec<f64> = path[1..].split(' ').map(|n| n.parse().expect("a number")).collect();
        assert_eq!(numbers.len(), 10);
        for point in numbers.chunks_exact(2) {
            assert!((LEFT..=RIGHT).contains(&point[0]) && (TOP..=BOTTOM).contains(&point[1]), "{point:?}");
        }
        assert_eq!(numbers[9], BOTTOM, "a loss of 0");
        assert!(svg.contains("2 x 256 tokens") && svg.contains("one") && (chance() - 1.9188).abs() < 1e-4);
    }
}
