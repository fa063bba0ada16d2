//! The square of queries and keys, with strips that show which rank holds each token.

use super::Point;
use super::cell::Cell;
use super::svg::{Anchor, LINE, MUTED, PAPER, Svg, UNSEEN, colours};
use crate::error::Result;
use crate::layout::Layout;
use crate::schedule::Schedule;
use std::collections::BTreeMap;

/// Up to this number of tokens, borders follow every pair.
const EXACT: usize = 128;
/// Thickness of a strip, and its distance from the square.
const STRIP: Point = (16.0, 4.0);

/// The square and its cells, ready to be drawn.
pub(super) struct Square<'a> {
    schedule: &'a Schedule,
    cells: Vec<Cell>,
    origin: Point,
    /// Pixels per token.
    scale: f64,
    /// Number of queries and of keys.
    size: (usize, usize),
}

impl<'a> Square<'a> {
    pub(super) fn new(schedule: &'a Schedule, origin: Point, side: f64) -> Result<Self> {
        let size = (schedule.query().documents().size(), schedule.key().documents().size());
        let scale = side / size.0.max(size.1).max(1) as f64;
        Ok(Self { schedule, cells: schedule.cells()?, origin, scale, size })
    }

    pub(super) fn draw(&self, svg: &mut Svg) {
        let (x, y) = self.origin;
        let (width, height) = (self.size.1 as f64 * self.scale, self.size.0 as f64 * self.scale);
        svg.rect((x, y), (width, height), UNSEEN, 0.0);
        self.lines(svg);
        self.bands(svg);
        self.numbers(svg);
        let across = |start: f64, len: f64| ((x + start, y - STRIP.0 - STRIP.1), (len, STRIP.0));
        let down = |start: f64, len: f64| ((x - STRIP.0 - STRIP.1, y + start), (STRIP.0, len));
        self.strip(svg, self.schedule.key_groups(), across);
        self.strip(svg, self.schedule.query_groups(), down);
        svg.text((x + width / 2.0, y - STRIP.0 - STRIP.1 - 8.0), 12.0, Anchor::Middle, MUTED, "keys");
        svg.upwards((x - STRIP.0 - STRIP.1 - 9.0, y + height / 2.0), 12.0, MUTED, "queries");
    }

    /// Draws, below the bands, lines at which another rank's tokens or another document begins.
    fn lines(&self, svg: &mut Svg) {
        let (x, y) = self.origin;
        let (rows, columns) = (self.size.0 as f64 * self.scale, self.size.1 as f64 * self.scale);
        for at in borders(self.schedule.query_groups()) {
            let at = y + at as f64 * self.scale;
            svg.line((x, at), (x + columns, at), LINE, 0.6);
        }
        for at in borders(self.schedule.key_groups()) {
            let at = x + at as f64 * self.scale;
            svg.line((at, y), (at, y + rows), LINE, 0.6);
        }
    }

    /// Draws all cells of a rank and step as one shape.
    fn bands(&self, svg: &mut Svg) {
        let ranks = self.schedule.grid().ring;
        let exact = self.size.0.max(self.size.1) <= EXACT;
        let mut shapes: BTreeMap<(usize, usize), Vec<Vec<Point>>> = BTreeMap::new();
        for cell in &self.cells {
            let outline = cell.outline(exact).into_iter().map(|point| self.at(point)).collect();
            shapes.entry((cell.rank, cell.step)).or_default().push(outline);
        }
        // The white border between two cells is thin enough to leave small cells visible.
        let mean =
            self.cells.iter().map(|cell| (cell.pairs as f64).sqrt()).sum::<f64>() / self.cells.len().max(1) as f64;
        let border = 0.08 * mean * self.scale;
        for ((rank, _), outlines) in &shapes {
            svg.polygons(outlines, &colours(*rank, ranks).0, PAPER, border.min(1.2));
        }
    }

    /// Draws the numbers of the steps, as large as their cells allow.
    fn numbers(&self, svg: &mut Svg) {
        let ranks = self.schedule.grid().ring;
        // Labels are grouped by rank and by size in half pixels, so that each style is written once.
        let mut looks: BTreeMap<(usize, usize), Vec<(Point, String)>> = BTreeMap::new();
        for cell in &self.cells {
            let words = cell.step.to_string();
            let (middle, half) = cell.middle();
            let room = 2.0 * half * self.scale * if cell.pairs == 1 { 0.92 } else { 0.76 };
            let room = if words.len() > 1 { 0.85 * room } else { room };
            if room >= 5.5 {
                let size = (2.0 * room.min(16.0)) as usize;
                looks.entry((cell.rank, size)).or_default().push((self.at(middle), words));
            }
        }
        for ((rank, size), labels) in &looks {
            svg.labels(*size as f64 / 2.0, colours(*rank, ranks).1, labels);
        }
    }

    fn strip(&self, svg: &mut Svg, layout: &Layout, place: impl Fn(f64, f64) -> (Point, Point)) {
        let ranks = layout.ranks();
        for (rank, spans) in spans(layout).into_iter().enumerate() {
            let (colour, words) = colours(rank, ranks);
            let mut outlines = Vec::new();
            let mut names = Vec::new();
            for (start, end) in spans {
                let (start, len) = (start as f64 * self.scale, (end - start) as f64 * self.scale);
                let ((x, y), (width, height)) = place(start, len);
                outlines.push(vec![(x, y), (x + width, y), (x + width, y + height), (x, y + height)]);
                if len >= 16.0 {
                    names.push((x + width / 2.0, y + height / 2.0 + 4.0));
                }
            }
            if !outlines.is_empty() {
                svg.polygons(&outlines, &colour, PAPER, (self.scale * 0.1).min(1.0));
            }
            for at in names {
                svg.bold(at, 11.0, Anchor::Middle, words, &rank.to_string());
            }
        }
    }

    fn at(&self, (x, y): Point) -> Point {
        (self.origin.0 + x * self.scale, self.origin.1 + y * self.scale)
    }
}

/// For each rank, its tokens in the flat batch as spans of consecutive tokens.
fn spans(layout: &Layout) -> Vec<Vec<(usize, usize)>> {
    let layout = layout.merged();
    let of = |rank: usize| {
        let mut spans: Vec<(usize, usize)> = Vec::new();
        for run in layout.runs(rank) {
            let start = layout.documents().get(run.document).offset + run.start;
            if run.step == 1 {
                spans.push((start, start + run.len));
            } else {
                spans.extend((0..run.len).map(|i| (start + i * run.step, start + i * run.step + 1)));
            }
        }
        spans
    };
    (0..layout.ranks()).map(of).collect()
}

/// The ends of all spans, or nothing if there are too many to tell apart.
fn borders(layout: &Layout) -> Vec<usize> {
    let mut starts: Vec<usize> = spans(layout).into_iter().flatten().flat_map(|(start, end)| [start, end]).collect();
    starts.sort_unstable();
    starts.dedup();
    if starts.len() > 66 { Vec::new() } else { starts }
}
