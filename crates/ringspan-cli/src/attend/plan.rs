//! Decides how `attend` computes: grid, layout, strategy, type on the wire.

use super::args::{AttendArgs, WireName};
use super::input::{Input, InputSizes};
use super::parameters::ScoreTerms;
use anyhow::{Context, Result, ensure};
use ringspan::attention::Wire;
use ringspan::mesh::Grid;
use ringspan::schedule::{Choice, HeadShare, Link, Machine, Pass, StrategyChoice, TensorSizes};
use ringspan::{Layout, LayoutKind, Mask, Schedule, Strategy, StrategyKind};
use safetensors::Dtype;
use std::path::Path;
use std::sync::Arc;

/// The decisions on how to compute.
pub(super) struct Plan {
    pub(super) schedule: Schedule,
    pub(super) layout: LayoutKind,
    pub(super) wire: Wire,
    /// The estimates that led to the strategy, if it was to be chosen.
    pub(super) choice: Option<Choice>,
}

impl Plan {
    pub(super) fn new(
        args: &AttendArgs,
        path: &Path,
        input: &Input<'_>,
        mask: &Mask,
        terms: &ScoreTerms<'_>,
        threads: Option<usize>,
    ) -> Result<Self> {
        let sizes = input.sizes;
        let (ring, ulysses) = (args.mesh.ring, args.mesh.ulysses);
        let mut grid = Grid::new(ring, ulysses);
        if args.ulysses_outer {
            ensure!(
                ring > 1 && ulysses > 1,
                "--ulysses-outer orders two axes, but this is --ring {ring} --ulysses {ulysses}"
            );
            grid = grid.with_ulysses_outer();
        }
        ensure!(
            args.head_chunks.is_none_or(|chunks| chunks == 1 || ulysses > 1),
            "--head-chunks cuts the exchange of heads into parts, but with --ulysses 1 there is none"
        );
        HeadShare::all(sizes.heads, sizes.kv_heads, grid)?;
        let layout = args.layout();
        let (query, key) = Layout::pair(layout, &input.query_documents, &input.key_documents, mask, ring * ulysses)?;
        let schedule = |strategy: Arc<dyn Strategy>| -> Result<Schedule> {
            let schedule = Schedule::new(strategy, &query, &key, mask, grid)?;
            Ok(schedule.with_head_chunks(args.head_chunks.map_or(1, |chunks| chunks as usize)))
        };
        let wire = wire(args, input);
        check_range(path, args, input)?;
        let machine = [args.link_bandwidth, args.link_latency, args.rank_speed];
        match &args.strategy {
            StrategyChoice::Fixed(strategy) => {
                ensure!(
                    machine.iter().all(Option::is_none),
                    "--link-bandwidth, --link-latency and --rank-speed are of use with --strategy auto only"
                );
                Ok(Self { schedule: schedule(strategy.clone())?, layout, wire, choice: None })
            }
            StrategyChoice::Auto => {
                let candidates =
                    StrategyKind::ALL.into_iter().map(|kind| schedule(Arc::new(kind))).collect::<Result<Vec<_>>>()?;
                let link = Link {
                    bandwidth: args.link_bandwidth.unwrap_or(10.0) * 1e9,
                    latency: args.link_latency.unwrap_or(5.0) * 1e-6,
                };
                let speed = args.rank_speed.or(threads.map(|threads| 100.0 * threads as f64));
                let speed = speed.context("--strategy auto on a GPU needs --rank-speed, its GFLOP/s in attention")?;
                let flops = speed * 1e9;
                let machine = Machine { flops, ring: link, ulysses: link, line: false };
                let bytes = if wire == Wire::F32 { 4 } else { 2 };
                let InputSizes { heads, kv_heads, dim, v_dim, .. } = sizes;
                let bias_heads = terms.bias.as_ref().map_or(0, |bias| bias.shape[1]);
                let sizes = TensorSizes { heads, kv_heads, dim, v_dim, wire: bytes, bias_heads };
                let passes = if args.backward { &[Pass::Forward, Pass::Backward][..] } else { &[Pass::Forward] };
                let choice = Choice::cheapest(candidates, &sizes, &machine, passes)?;
                Ok(Self { schedule: choice.schedule.clone(), layout, wire, choice: Some(choice) })
            }
        }
    }
}

/// Refuses a wire type whose range does not hold all values of q, k and v. All ranks check all tokens, also where none travels,
/// so the answer is the same on every mesh.
fn check_range(path: &Path, args: &AttendArgs, Input { q, k, v, .. }: &Input<'_>) -> Result<()> {
    let (name, limit) = match args.dtype {
        Some(WireName::Bf16) => ("bf16", half::bf16::MAX.to_f32()),
        Some(WireName::F16) => ("f16", half::f16::MAX.to_f32()),
        Some(WireName::F32) | None => return Ok(()),
    };
    for (tensor, given) in [("q", q), ("k", k), ("v", v)] {
        let greatest = given.greatest(f32::abs);
        ensure!(
            greatest.abs() <= limit,
            "{}: `{tensor}` holds {greatest:?}, but with --dtype {name} it would travel in {name}, which ends at {limit:?}",
            path.display()
        );
    }
    Ok(())
}

/// The requested type on the wire, or else the one in which everything travels without loss.
fn wire(args: &AttendArgs, Input { q, k, v, .. }: &Input<'_>) -> Wire {
    match (args.dtype, q.dtype, k.dtype, v.dtype) {
        (Some(WireName::F32), ..) => Wire::F32,
        (Some(WireName::Bf16), ..) | (None, Dtype::BF16, Dtype::BF16, Dtype::BF16) => Wire::Bf16,
        (Some(WireName::F16), ..) | (None, Dtype::F16, Dtype::F16, Dtype::F16) => Wire::F16,
        _ => Wire::F32,
    }
}
