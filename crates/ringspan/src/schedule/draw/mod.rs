//! Draws a schedule as a picture: the square of queries and keys, next to it what every rank computes and sends in each
//! step.
//!
//! A tile is drawn as one polygon, not as pixels, so the size of the file does not grow with the number of tokens.

mod cell;
mod panel;
mod square;
mod svg;

#[cfg(test)]
mod test;

pub use cell::Cell;

use super::{HeadShare, Pass, Schedule, TensorSizes};
use crate::error::{Error, Result};
use panel::Panel;
use square::Square;
use svg::{Anchor, INK, MUTED, Svg};

/// A point or a size in pixels: horizontal, vertical.
type Point = (f64, f64);

/// Maximum number of ring ranks: more cannot be told apart by colour, and their steps do not fit next to the square.
const MOST_RANKS: usize = 16;

const MARGIN: f64 = 24.0;
/// Width left of the square, for the axis label and the strip of ranks.
const LEFT: f64 = 76.0;
const TOP: f64 = 124.0;
/// Distance between the square and the panel.
const GAP: f64 = 40.0;

impl Schedule {
    /// Draws the schedule as an SVG: the rank and step that compute each visible pair; each rank's share, steps and bytes.
    ///
    /// `sizes` converts rows into bytes. Up to 128 tokens, borders follow every pair; beyond that, slanted borders are
    /// straight lines.
    ///
    /// ```
    /// use ringspan::schedule::TensorSizes;
    /// use ringspan::{Documents, Layout, LayoutKind, Mask, Schedule, StrategyKind};
    ///
    /// let layout = Layout::new(LayoutKind::Zigzag, &Documents::batch(1, 1 << 20), 4)?;
    /// let schedule = Schedule::new(StrategyKind::Ring, &layout, &layout, &Mask::causal(), (4, 1))?;
    /// let sizes = TensorSizes { heads: 32, kv_heads: 8, dim: 128, v_dim: 128, wire: 2, bias_heads: 0 };
    /// let svg = schedule.draw(&sizes)?;
    /// assert!(svg.starts_with("<svg") && svg.len() < 30_000);
    /// # Ok::<_, ringspan::Error>(())
    /// ```
    ///
    /// # Errors
    /// More ranks or cells than a picture can show, no tokens, or heads that do not fit the grid.
    pub fn draw(&self, sizes: &TensorSizes) -> Result<String> {
        let ranks = self.grid().ring;
        if ranks > MOST_RANKS {
            let problem = format!("{ranks} ring ranks, and a picture tells at most {MOST_RANKS} apart");
            return Err(Error::Drawing(problem));
        }
        let (queries, keys) = (self.query().documents().size(), self.key().documents().size());
        if queries == 0 || keys == 0 {
            return Err(Error::Drawing(format!("{queries} queries and {keys} keys are no square")));
        }
        let panel = Panel::new(self, sizes)?;
        let side = panel.height().clamp(480.0, 700.0);
        let square = Square::new(self, (LEFT, TOP), side)?;
        let caption = self.caption(&panel, sizes)?;

        let width = LEFT + side + GAP + panel::WIDTH + MARGIN;
        let bottom = TOP + side.max(panel.height());
        let mut svg = Svg::default();
        svg.bold((MARGIN, 40.0), 20.0, Anchor::Start, INK, &self.title());
        svg.text((MARGIN, 64.0), 13.0, Anchor::Start, MUTED, &panel.summary(self));
        square.draw(&mut svg);
        panel.draw(&mut svg, (LEFT + side + GAP, TOP), side);
        let mut y = bottom + 34.0;
        for line in caption.iter().flat_map(|paragraph| wrapped(paragraph, ((width - 2.0 * MARGIN) / 6.7) as usize)) {
            svg.text((MARGIN, y), 12.5, Anchor::Start, MUTED, &line);
            y += 19.0;
        }
        Ok(svg.finish(width, y + 6.0, &self.title()))
    }

    fn title(&self) -> String {
        let name = self.strategy().name();
        let strategy = name[..1].to_uppercase() + &name[1..];
        let grid = match self.grid().ulysses {
            1 if self.grid().ring == 1 => "1 rank".into(),
            1 => format!("{} ranks", self.grid().ring),
            _ => self.grid().to_string(),
        };
        format!("{strategy} over {grid}: {} layout, mask {}", self.query().kind(), self.mask())
    }

    /// The explanation below the picture.
    fn caption(&self, panel: &Panel, sizes: &TensorSizes) -> Result<Vec<String>> {
        let most = |pass| -> Result<u64> {
            let sent = (0..self.query().ranks()).map(|rank| self.bytes_sent(pass, rank, sizes));
            Ok(sent.collect::<Result<Vec<_>>>()?.into_iter().max().unwrap_or(0))
        };
        let (forward, backward) = (most(Pass::Forward)?, most(Pass::Backward)?);
        let TensorSizes { heads, kv_heads, dim, wire, .. } = *sizes;
        let exchange = match self.grid().ulysses {
            1 => "",
            _ => ", the exchange of heads inside a ring rank included, which the steps leave out",
        };
        let block = match panel.moves_queries() {
            true => "kN: its queries against the keys of ring rank N; qN: queries of ring rank N against its own keys",
            false => "kN: its queries against the keys of ring rank N",
        };
        Ok(vec![
            "Square: a row is a query, a column a key. A visible pair has the colour of the ring rank that computes it; \
             the number is the step. The strips show who holds which tokens."
                .into(),
            format!(
                "Steps: above, what is computed ({block}); below, what is sent, in {}. The longest bar of a pass fills its \
                 step.",
                panel.unit().1
            ),
            format!(
                "A rank sends up to {} forward and {} backward{exchange}: {heads} query heads and {kv_heads} key-value \
                 heads of width {dim}, {wire} bytes an element; partial results and gradients in 4.",
                in_words(forward),
                in_words(backward)
            ),
        ])
    }

    /// The head counts of the Ulysses rank with the most heads, and the widths in `sizes`.
    fn largest_share(&self, sizes: &TensorSizes) -> Result<TensorSizes> {
        let shares = HeadShare::all(sizes.heads, sizes.kv_heads, self.grid())?;
        let most = shares.iter().max_by_key(|share| (share.kv.len(), share.query.len()));
        let (heads, kv_heads) = most.map_or((1, 1), |share| (share.query.len(), share.kv.len()));
        Ok(TensorSizes { heads, kv_heads, ..*sizes })
    }
}

/// The unit in which a number of bytes is written: its factor and name.
fn unit(bytes: u64) -> (f64, &'static str) {
    match bytes {
        0..10_000 => (1.0, "bytes"),
        10_000..1_000_000 => (1e3, "kB"),
        1_000_000..1_000_000_000 => (1e6, "MB"),
        _ => (1e9, "GB"),
    }
}

/// The value with three digits, or with all digits before the decimal point if there are more.
fn digits(value: f64) -> String {
    match value {
        0.0 => "0".into(),
        v if v < 9.995 => format!("{v:.2}"),
        v if v < 99.95 => format!("{v:.1}"),
        v => format!("{v:.0}"),
    }
}

fn in_words(bytes: u64) -> String {
    let (factor, name) = unit(bytes);
    match name {
        "bytes" => format!("{bytes} bytes"),
        _ => format!("{} {name}", digits(bytes as f64 / factor)),
    }
}

/// The number with commas between thousands: 1234567 becomes 1,234,567.
fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let first = digits.len() % 3;
    let mut out = digits[..first].to_owned();
    for start in (first..digits.len()).step_by(3) {
        if !out.is_empty() {
            out.push(',');
        }
        out.push_str(&digits[start..start + 3]);
    }
    out
}

/// Breaks text into lines of at most `width` characters, unless a single word is longer.
fn wrapped(words: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in words.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}
