//! The report of `attend`, as text for people and as JSON for programs.

use super::compute::{RankReport, RankResult, RankWork};
use super::input::InputSizes;
use super::plan::Plan;
use crate::files::type_name;
use serde::Serialize;

/// Times and counts of a run, with its settings.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    /// Median over the repetitions of the time from the barrier before the forward pass to the barrier after it.
    seconds_forward: f64,
    /// Like `seconds_forward`, for the backward pass; `None` without `--backward`.
    seconds_backward: Option<f64>,
    ranks: Vec<RankReport>,
    run: Run,
    /// Estimated costs of all strategies; empty unless the strategy was to be chosen.
    estimates: Vec<Estimate>,
    #[serde(skip)]
    choice: Option<String>,
}

/// The estimated cost of a strategy.
#[derive(Debug, Serialize)]
struct Estimate {
    strategy: String,
    seconds: f64,
    compute_seconds: f64,
    bytes_sent: u64,
}

/// The settings of the run.
#[derive(Debug, Serialize)]
struct Run {
    version: &'static str,
    sizes: InputSizes,
    #[serde(rename = "type")]
    dtype: String,
    documents: usize,
    ring: usize,
    ulysses: usize,
    ulysses_outer: bool,
    head_chunks: usize,
    strategy: String,
    layout: String,
    mask: String,
    /// The type in which q, k and v travel.
    wire: String,
    scale: f32,
    /// `cpu` or `cuda`.
    device: &'static str,
    /// Numbers and names of the GPUs.
    gpus: Vec<String>,
    /// Number of CPU threads of each rank; `None` on GPUs.
    threads: Option<usize>,
    /// Instruction set that the kernels used; `None` on GPUs.
    isa: Option<String>,
    /// A description of the threads or GPUs, for people.
    #[serde(skip)]
    devices: String,
    /// How blocks travelled between GPUs, where ranks are processes.
    #[serde(skip_serializing_if = "Option::is_none")]
    blocks: Option<String>,
    repeat: usize,
}

impl Report {
    pub(super) fn new(work: &RankWork<'_>, plan: &Plan, parts: &[RankResult]) -> Self {
        let schedule = work.schedule;
        let estimate = |e: &ringspan::schedule::Estimate| Estimate {
            strategy: e.strategy.to_string(),
            seconds: e.seconds,
            compute_seconds: e.compute_seconds,
            bytes_sent: e.bytes_sent,
        };
        // All ranks leave the same barriers, so the times of the first rank stand for all.
        let seconds = |times: fn(&RankResult) -> &Vec<f64>| parts.first().map_or(0.0, |part| median(times(part)));
        Self {
            seconds_forward: seconds(|part| &part.seconds_forward),
            seconds_backward: work.input.d_out.is_some().then(|| seconds(|part| &part.seconds_backward)),
            ranks: parts.iter().map(|part| part.report.clone()).collect(),
            run: Run {
                version: env!("CARGO_PKG_VERSION"),
                sizes: work.input.sizes,
                dtype: type_name(work.input.q.dtype),
                documents: work.input.query_documents.len(),
                ring: schedule.grid().ring,
                ulysses: schedule.grid().ulysses,
                ulysses_outer: schedule.grid().ulysses_outer,
                head_chunks: schedule.head_chunks(),
                strategy: schedule.strategy().name(),
                layout: plan.layout.to_string(),
                mask: schedule.mask().to_string(),
                wire: format!("{:?}", work.wire).to_lowercase(),
                scale: work.terms.score.scale,
                device: if work.devices.threads().is_some() { "cpu" } else { "cuda" },
                gpus: work.devices.names(),
                threads: work.devices.threads(),
                isa: work.devices.isa().map(|isa| isa.to_string()),
                devices: work.devices.to_string(),
                blocks: work.blocks.clone(),
                repeat: work.repeat,
            },
            estimates: plan.choice.iter().flat_map(|choice| &choice.estimates).map(estimate).collect(),
            choice: plan.choice.as_ref().map(ToString::to_string),
        }
    }
}

fn median(times: &[f64]) -> f64 {
    let mut times = times.to_vec();
    times.sort_by(f64::total_cmp);
    match times.len() {
        0 => 0.0,
        n if n.is_multiple_of(2) => (times[n / 2 - 1] + times[n / 2]) / 2.0,
        n => times[n / 2],
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Run { sizes, dtype, ring, ulysses, strategy, layout, mask, wire, devices, .. } = &self.run;
        if let Some(choice) = &self.choice {
            writeln!(f, "{choice}")?;
        }
        let InputSizes { batch, queries, keys, heads, kv_heads, dim, v_dim } = sizes;
        writeln!(
            f,
            "B {batch}, Sq {queries}, Sk {keys}, H {heads}, G {kv_heads}, D {dim}, Dv {v_dim}, {dtype}; mask {mask}"
        )?;
        writeln!(f, "ring {ring} x ulysses {ulysses}, {devices}, {strategy}, {layout}, {wire} on the wire")?;
        writeln!(
            f,
            "{:>5} {:>9} {:>13} {:>13} {:>13} {:>13}",
            "rank", "tokens", "GFLOP", "MB sent", "MB back", "peak MB"
        )?;
        for (rank, r) in self.ranks.iter().enumerate() {
            let mega = |bytes: u64| bytes as f64 / 1e6;
            writeln!(
                f,
                "{rank:>5} {:>9} {:>13.3} {:>13.3} {:>13.3} {:>13.3}",
                r.tokens,
                r.flops_forward as f64 / 1e9,
                mega(r.bytes_sent_forward),
                mega(r.bytes_sent_backward),
                mega(r.peak_bytes)
            )?;
        }
        let flops: u64 = self.ranks.iter().map(|rank| rank.flops_forward).sum();
        let speed = flops as f64 / 1e9 / self.seconds_forward.max(1e-9);
        write!(f, "forward {:.4} s ({speed:.1} GFLOP/s)", self.seconds_forward)?;
        if let Some(seconds) = self.seconds_backward {
            write!(f, ", backward {seconds:.4} s")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn the_median_is_the_middle_or_the_mean_of_the_two_middles() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
    }
}
