//! `ringspan mesh`: shows which ranks form the groups of each axis.

mod drawing;

use crate::output;
use anyhow::{Context, Result, bail, ensure};
use ringspan::comm::process_group::ProcessGroup;
use ringspan::mesh::{Experts, Grid, Serving, Topology, Training};
use serde::Serialize;
use std::collections::BTreeMap;

/// Upper limit on ranks, since nobody reads a longer list of groups and coordinates.
const MOST_RANKS: usize = 1 << 16;

/// Show which ranks work together: the groups of every axis, and the coordinates of every rank.
///
/// Training reads the ranks as pp, dp_replicate, dp_shard, cp, tp, outermost first. With --serving there are tp x pp
/// ranks, and attention reads those of a stage as attn_dp, attn_cp, attn_tp. Experts read the ranks of a stage as moe_dp,
/// moe_ep, moe_tp. What is not given has size 1; attn_tp and moe_tp are what is left.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct TopologyArgs {
    /// The axes of serving instead of those of training
    #[arg(long)]
    serving: bool,
    /// Stages of the pipeline
    #[arg(long, value_name = "P")]
    pp: Option<usize>,
    /// Ranks that share a layer; with --serving, all ranks of a stage
    #[arg(long, value_name = "T")]
    tp: Option<usize>,
    /// Ranks that share the experts of a copy
    #[arg(long, value_name = "E")]
    ep: Option<usize>,
    /// Copies of the experts
    #[arg(long, value_name = "M")]
    moe_dp: Option<usize>,
    /// Copies of the model
    #[arg(long, value_name = "A", help_heading = "Training")]
    dp_replicate: Option<usize>,
    /// Ranks that share the parameters of a copy, each with sequences of its own
    #[arg(long, value_name = "B", help_heading = "Training")]
    dp_shard: Option<usize>,
    /// Ranks that share a sequence
    #[arg(long, value_name = "C", help_heading = "Training")]
    cp: Option<usize>,
    /// Neighbours among the ranks of --cp that exchange tokens for heads; between them is a ring
    #[arg(long, value_name = "U", help_heading = "Training")]
    ulysses: Option<usize>,
    /// Attention replicas of a stage, each with requests of its own
    #[arg(long, value_name = "N", help_heading = "Serving")]
    attn_dp: Option<usize>,
    /// Ranks that share a prompt
    #[arg(long, value_name = "N", help_heading = "Serving")]
    attn_cp: Option<usize>,
    /// Neighbours that share the cache of a sequence while it is decoded
    #[arg(long, value_name = "N", help_heading = "Serving")]
    dcp: Option<usize>,
    /// Print JSON: world, groups by name, and the coordinates of each rank
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &TopologyArgs, processes: &ProcessGroup) -> Result<()> {
    ensure!(processes.local().is_none(), "mesh computes nothing on ranks: start it as one process, without a launcher");
    let topology = if args.serving { args.serving()? } else { args.training()? };
    let ranks = topology.world();
    ensure!(ranks <= MOST_RANKS, "{topology}: at most {MOST_RANKS} ranks can be listed");
    if args.json {
        output::line(serde_json::to_string(&Listing::new(&topology)?).context("the listing as JSON")?)?;
    } else {
        output::write(&drawing::draw(&topology)?)?;
    }
    Ok(())
}

impl TopologyArgs {
    fn training(&self) -> Result<Topology> {
        let serving = [("attn-dp", self.attn_dp), ("attn-cp", self.attn_cp), ("dcp", self.dcp)];
        refuse(&serving, "without --serving: training has no such axis")?;
        if self.ep.is_none() {
            refuse(&[("moe-dp", self.moe_dp)], "without --ep: a mesh for a dense model has no experts to copy")?;
        }
        let (cp, ulysses) = (one(self.cp), one(self.ulysses));
        ensure!(
            ulysses > 0 && cp.is_multiple_of(ulysses),
            "--cp {cp} does not divide by --ulysses {ulysses}: cp is ring x ulysses ranks"
        );
        let training = Training {
            pp: one(self.pp),
            dp_replicate: one(self.dp_replicate),
            dp_shard: one(self.dp_shard),
            cp: Grid::new(cp / ulysses, ulysses),
            tp: one(self.tp),
            experts: self.ep.map(|ep| Experts { ep, moe_dp: one(self.moe_dp) }),
        };
        Ok(training.topology()?)
    }

    fn serving(&self) -> Result<Topology> {
        let training = [
            ("dp-replicate", self.dp_replicate),
            ("dp-shard", self.dp_shard),
            ("cp", self.cp),
            ("ulysses", self.ulysses),
        ];
        refuse(&training, "with --serving, whose axes are --tp, --pp, --attn-dp, --attn-cp, --ep, --moe-dp and --dcp")?;
        let serving = Serving {
            tp: one(self.tp),
            pp: one(self.pp),
            attn_dp: one(self.attn_dp),
            attn_cp: one(self.attn_cp),
            ep: one(self.ep),
            moe_dp: one(self.moe_dp),
            dcp: self.dcp,
        };
        Ok(serving.topology()?)
    }
}

fn one(size: Option<usize>) -> usize {
    size.unwrap_or(1)
}

fn refuse(flags: &[(&str, Option<usize>)], why: &str) -> Result<()> {
    match flags.iter().find(|(_, given)| given.is_some()) {
        Some((flag, _)) => bail!("--{flag} has no effect {why}"),
        None => Ok(()),
    }
}

/// The output of `--json`.
#[derive(Serialize)]
struct Listing {
    world: usize,
    groups: BTreeMap<&'static str, Vec<Vec<usize>>>,
    /// For each rank, its coordinate on every axis.
    ranks: Vec<BTreeMap<&'static str, usize>>,
}

impl Listing {
    fn new(topology: &Topology) -> Result<Self> {
        let groups = topology.names().map(|name| Ok((name, topology.groups(name)?)));
        Ok(Self {
            world: topology.world(),
            groups: groups.collect::<ringspan::Result<_>>()?,
            ranks: (0..topology.world()).map(|rank| topology.coordinates(rank).into_iter().collect()).collect(),
        })
    }
}
