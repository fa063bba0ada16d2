//! Draws the panel next to the square: the tokens of every ring rank, and its computations and transfers in each step.

use super::svg::{Anchor, INK, LINE, MUTED, Svg, UNSEEN, colours};
use super::{Point, digits, grouped, unit};
use crate::error::Result;
use crate::schedule::{Pass, Schedule, Step, TensorSizes};

pub(super) const WIDTH: f64 = 580.0;
/// Right end of the names of the passes; the steps begin at [`STEPS`].
const NAMES: f64 = 176.0;
const STEPS: f64 = 184.0;
/// Heights of the bars of computation and of bytes.
const BAR: Point = (14.0, 4.0);
const TRAFFIC: &str = "#7a8392";
/// Minimum width of a step for which the number of bytes is written.
const NUMBERED: f64 = 33.0;

/// A ring rank in one pass: for each step its number of pairs, the block it computes against its own (`k` or `q` and the owner),
/// and the bytes sent.
type PassSteps = Vec<(u64, Option<(char, usize)>, u64)>;

pub(super) struct Panel {
    ranks: Vec<Rank>,
    /// Number of steps of the longest pass.
    steps: usize,
    /// For each pass, the most pairs and the most bytes of any step, which set the scale of the bars.
    longest: [(u64, u64); 2],
}

struct Rank {
    tokens: usize,
    members: String,
    pairs: u64,
    passes: [PassSteps; 2],
}

impl Panel {
    pub(super) fn new(schedule: &Schedule, sizes: &TensorSizes) -> Result<Self> {
        let sizes = schedule.largest_share(sizes)?;
        let keys = schedule.key().documents().row_len();
        let pass_steps = |pass: Pass, rank: usize| -> PassSteps {
            let of = |step: &Step| {
                let sent = step.send.iter().chain(&step.after);
                let bytes = sent.map(|transfer| transfer.rows.len() as u64 * sizes.row(transfer.block, keys)).sum();
                let compute = step.compute.as_ref();
                let block = compute.map(|it| if it.queries == rank { ('k', it.keys) } else { ('q', it.queries) });
                (compute.map_or(0, |compute| schedule.pairs_of(compute)), block, bytes)
            };
            schedule.steps(pass, rank).iter().map(of).collect()
        };
        let members = schedule.grid().members();
        let rank = |rank: usize| {
            let passes = [pass_steps(Pass::Forward, rank), pass_steps(Pass::Backward, rank)];
            let members = match &members[rank][..] {
                [_] => String::new(),
                [first, second, .., last] if last - first > 3 * (second - first) => {
                    format!("ranks {first}, {second}, .. {last}")
                }
                several => format!("ranks {}", several.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")),
            };
            let pairs = passes[0].iter().map(|step| step.0).sum();
            Rank { tokens: schedule.query_groups().tokens(rank), members, pairs, passes }
        };
        let ranks: Vec<Rank> = (0..schedule.grid().ring).map(rank).collect();
        let longest = [0, 1].map(|pass| {
            let steps = || ranks.iter().flat_map(move |rank: &Rank| &rank.passes[pass]);
            (steps().map(|step| step.0).max().unwrap_or(0), steps().map(|step| step.2).max().unwrap_or(0))
        });
        let steps = ranks.iter().flat_map(|rank| rank.passes.iter().map(Vec::len)).max().unwrap_or(0);
        Ok(Self { ranks, steps, longest })
    }

    /// Whether some rank computes queries of another.
    pub(super) fn moves_queries(&self) -> bool {
        let blocks = self.ranks.iter().flat_map(|rank| &rank.passes[0]).filter_map(|(_, block, _)| *block);
        blocks.into_iter().any(|(letter, _)| letter == 'q')
    }

    /// The minimum height without overlaps.
    pub(super) fn height(&self) -> f64 {
        self.ranks.len() as f64 * self.least_row()
    }

    fn least_row(&self) -> f64 {
        if self.step_width() < NUMBERED { 62.0 } else { 84.0 }
    }

    fn step_width(&self) -> f64 {
        (WIDTH - STEPS) / self.steps.max(3) as f64
    }

    /// The unit in which bytes are written.
    pub(super) fn unit(&self) -> (f64, &'static str) {
        unit(self.longest[0].1.max(self.longest[1].1))
    }

    /// A line of text with tokens, pairs and balance.
    pub(super) fn summary(&self, schedule: &Schedule) -> String {
        let total: u64 = self.ranks.iter().map(|rank| rank.pairs).sum();
        let most = self.ranks.iter().map(|rank| rank.pairs).max().unwrap_or(0);
        let balance = if most == 0 { 1.0 } else { total as f64 / self.ranks.len() as f64 / most as f64 };
        let documents = schedule.query().documents();
        let (queries, keys) = (documents.size(), schedule.key().documents().size());
        let tokens = match queries == keys {
            true => format!("{} tokens", grouped(queries as u64)),
            false => format!("{} queries, {} keys", grouped(queries as u64), grouped(keys as u64)),
        };
        let documents = match documents.len() {
            1 => String::new(),
            count => format!(" in {} documents", grouped(count as u64)),
        };
        format!(
            "{tokens}{documents}, {} visible pairs a head. Balance {:.1} %: the mean share of the ranks, of the largest.",
            grouped(total),
            100.0 * balance
        )
    }

    pub(super) fn draw(&self, svg: &mut Svg, (x, y): Point, side: f64) {
        let row = (side / self.ranks.len() as f64).clamp(self.least_row(), 120.0);
        let width = self.step_width();
        svg.text((x + NAMES, y - 12.0), 12.0, Anchor::End, MUTED, "step");
        for step in 0..self.steps {
            let at = x + STEPS + step as f64 * width;
            svg.text((at + 2.0, y - 12.0), 12.0, Anchor::Start, MUTED, &step.to_string());
        }
        let total = self.ranks.iter().map(|rank| rank.pairs).sum::<u64>().max(1);
        for (index, rank) in self.ranks.iter().enumerate() {
            let top = y + index as f64 * row;
            svg.line((x, top), (x + WIDTH, top), LINE, 1.0);
            self.name(svg, (x, top + (row - self.least_row()) / 2.0), index, rank, total);
            let first = top + (row - self.least_row()) / 2.0 + 9.0;
            let height = (self.least_row() - 12.0) / 2.0;
            for (pass, name) in ["forward", "backward"].into_iter().enumerate() {
                let at = first + pass as f64 * height;
                svg.text((x + NAMES, at + 11.0), 11.0, Anchor::End, MUTED, name);
                self.draw_pass(svg, (x + STEPS, at), index, pass, &rank.passes[pass]);
            }
        }
        let end = y + self.ranks.len() as f64 * row;
        svg.line((x, end), (x + WIDTH, end), LINE, 1.0);
    }

    /// Draws a rank's name, its tokens, and its share of the pairs.
    fn name(&self, svg: &mut Svg, (x, y): Point, index: usize, rank: &Rank, total: u64) {
        let colour = colours(index, self.ranks.len()).0;
        svg.rect((x, y + 8.0), (12.0, 12.0), &colour, 2.0);
        let name = if rank.members.is_empty() { format!("rank {index}") } else { format!("ring rank {index}") };
        svg.bold((x + 18.0, y + 19.0), 13.0, Anchor::Start, INK, &name);
        svg.text((x, y + 36.0), 11.0, Anchor::Start, MUTED, &format!("{} tokens", grouped(rank.tokens as u64)));
        let share = rank.pairs as f64 / total as f64;
        svg.text((x, y + 50.0), 11.0, Anchor::Start, MUTED, &format!("{:.1} % of pairs", 100.0 * share));
        if self.least_row() > 70.0 {
            let most = self.ranks.iter().map(|rank| rank.pairs).max().unwrap_or(0).max(1);
            svg.rect((x, y + 57.0), (100.0, 5.0), UNSEEN, 1.0);
            svg.rect((x, y + 57.0), (100.0 * rank.pairs as f64 / most as f64, 5.0), &colour, 1.0);
            if !rank.members.is_empty() {
                svg.text((x, y + 76.0), 11.0, Anchor::Start, MUTED, &rank.members);
            }
        }
    }

    fn draw_pass(&self, svg: &mut Svg, (x, y): Point, index: usize, pass: usize, steps: &PassSteps) {
        let (colour, words) = colours(index, self.ranks.len());
        let width = self.step_width();
        let room = width - 5.0;
        let (most_pairs, most_bytes) = self.longest[pass];
        let (factor, _) = self.unit();
        for (step, &(pairs, block, bytes)) in steps.iter().enumerate() {
            let x = x + step as f64 * width;
            svg.rect((x, y), (room, BAR.0), UNSEEN, 2.0);
            if let Some((letter, owner)) = block {
                let bar = (room * pairs as f64 / most_pairs.max(1) as f64).max(1.5);
                svg.rect((x, y), (bar, BAR.0), &colour, 2.0);
                let name = format!("{letter}{owner}");
                // A letter is up to 0.65 times its font size wide.
                let fit = |room: f64| ((room - 3.0) / (0.65 * name.len() as f64)).min(10.5);
                if fit(bar) >= 7.0 {
                    let at = (x + if bar > 30.0 { 4.0 } else { 1.5 }, y + 10.5);
                    svg.text(at, fit(bar), Anchor::Start, words, &name);
                } else if fit(room - bar) >= 7.0 {
                    svg.text((x + bar + 2.0, y + 10.5), fit(room - bar), Anchor::Start, MUTED, &name);
                }
            }
            if bytes > 0 {
                let bar = (room * bytes as f64 / most_bytes.max(1) as f64).max(1.5);
                svg.rect((x, y + BAR.0 + 2.0), (bar, BAR.1), TRAFFIC, 1.0);
                if width >= NUMBERED {
                    let number = digits(bytes as f64 / factor);
                    svg.text((x, y + BAR.0 + BAR.1 + 12.0), 10.0, Anchor::Start, MUTED, &number);
                }
            }
        }
    }
}
