//! Prints a plan.

use super::{Plan, descriptions};
use crate::human_readable::{bytes_text, grouped};
use ringspan_candle::gpu_memory::GpuMemoryUse;
use std::fmt;

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Parts below half a percent explain nothing, and are left out.
        let parts = |list: &[(&str, u64)]| {
            let least = list.iter().map(|(_, n)| n).sum::<u64>() / 200;
            let shown: Vec<String> =
                list.iter().filter(|(_, n)| *n > least).map(|(name, n)| format!("{name} {}", bytes_text(*n))).collect();
            shown.join(", ")
        };
        let total = |list: &[(&str, u64)]| bytes_text(list.iter().map(|(_, n)| n).sum());
        writeln!(f, "training   {}", self.training)?;
        writeln!(f, "model      {}", self.model)?;
        if !self.warning.is_empty() {
            writeln!(f, "warning    {}", self.warning)?;
        }
        writeln!(f, "data       {}", self.data)?;
        for line in &self.documents {
            writeln!(f, "           {line}")?;
        }
        for warning in &self.data_warnings {
            writeln!(f, "warning    {warning}")?;
        }
        writeln!(f, "mesh       {}", self.mesh)?;
        writeln!(f, "attention  {}", self.attention)?;
        for line in self.schedule.lines() {
            writeln!(f, "           {line}")?;
        }
        if !self.sharding.is_empty() {
            writeln!(f, "sharding   {}", self.sharding)?;
        }
        let most = self.tokens_per_rank.iter().max().unwrap_or(&0);
        let least = self.tokens_per_rank.iter().min().unwrap_or(&0);
        let each = if most == least { format!("{most} on each rank") } else { format!("{least} to {most} on a rank") };
        writeln!(f, "tokens     {} a step, {each} at a time", grouped(self.tokens_per_step))?;
        let (most, kept) = (total(&self.memory), grouped(self.kept_per_token));
        let of_cpu = if self.gpu_memory.is_empty() { "" } else { " of the CPU's" };
        let there = match (self.gpu_memory.is_empty(), self.load.offloads) {
            (true, _) => "",
            (false, false) => ", on the GPU",
            (false, true) => ", on the CPU; those of two layers on the GPU",
        };
        writeln!(f, "memory     about {most} a rank{of_cpu}, most {}: {}", self.peak_moment, parts(&self.memory))?;
        if !self.gpu_memory.is_empty() {
            let (most, moment) = (total(&self.gpu_memory), self.gpu_peak_moment);
            writeln!(f, "           about {most} a rank of a GPU's, most {moment}: {}", parts(&self.gpu_memory))?;
        }
        writeln!(f, "           {kept} bytes a token and layer wait for the backward pass{there}")?;
        if self.recompute_is_auto {
            let room = if self.has_headroom() { "the least for which there is room" } else { "for want of room" };
            writeln!(f, "           --recompute auto is {}, {room}", self.recompute)?;
        }
        for GpuMemoryUse { name, free, total, ranks: count } in &self.gpus {
            let (free, total) = (bytes_text(*free), bytes_text(*total));
            writeln!(f, "           {free} of {total} is free on {name}, for {}", descriptions::ranks(*count))?;
        }
        if !self.gpus_unknown.is_empty() {
            writeln!(f, "           how much a GPU has is not known here: {}", self.gpus_unknown)?;
        }
        if self.tokens_per_rank.len() > 1 {
            writeln!(f, "sent       about {} a step by a rank: {}", total(&self.traffic), parts(&self.traffic))?;
        }
        writeln!(f, "optimiser  {}", self.optimizer)?;
        let passes = match self.passes {
            Some(passes) if passes < 0.005 => ", less than 0.01 passes over the data".into(),
            Some(passes) => format!(", {passes:.2} passes over the data"),
            None => String::new(),
        };
        let each: Vec<String> = self.passes_of_sources.iter().map(|passes| format!("{passes:.2}")).collect();
        let each = if each.len() > 1 { format!(" ({} over its sources)", each.join(", ")) } else { String::new() };
        match self.first_step {
            0 => writeln!(f, "steps      {}{passes}{each}", self.steps)?,
            done => writeln!(f, "steps      {} to {}{passes}{each}, resumed", done + 1, self.steps)?,
        }
        write!(f, "output     {}", self.saving)
    }
}
