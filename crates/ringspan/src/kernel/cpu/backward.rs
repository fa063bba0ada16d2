//! The backward pass of a CPU kernel: divides the work among workers, and adds up their private sums.

use super::super::backward::{Backward, KeySums, Share, Sizes};
use super::super::buffer::{Aligned, Target, lines};
use super::super::terms::ScoreTerms;
use super::super::{Data, Inputs, Saved, Sums, Tile, isa};
use super::{Cpu, SEGMENT, plan};
use std::ops::Range;
use std::sync::Mutex;

impl Cpu {
    /// Adds the gradients of `tiles` to `sums`; `None` if statistics or sums are not in the memory of the CPU.
    pub(in crate::kernel) fn backward(
        &self,
        inputs: &Inputs,
        tiles: &[Tile],
        saved: &Saved,
        sums: &mut Sums,
    ) -> Option<()> {
        self.hook.begin();
        let Inputs { q, k, v, heads, score, bias } = *inputs;
        let Saved { statistics, delta: Data::F32(delta), d_out } = *saved else { return None };
        let (Data::F32(max), Data::F32(sum)) = (statistics.max, statistics.sum) else { return None };
        let (dq, dk, dv) = (sums.dq.host()?, sums.dk.host()?, sums.dv.host()?);
        let (d_table, d_bias) = (sums.d_table.host()?, sums.d_bias.host()?);
        let code = self.code_for(inputs);
        let lanes = code.lanes();
        let terms = ScoreTerms::new(score, bias);
        let plan = plan(inputs, tiles, code);
        if plan.keys.is_empty() || q.heads == 0 {
            return Some(());
        }
        // Heads that share a bias add to the same rows of its gradient, so each block is computed by one worker for all
        // heads.
        let threads = self.workers.count();
        let shared = bias.is_some_and(|bias| bias.heads < q.heads);
        let shares = if shared { plan.shares_by_block(q.heads, threads) } else { plan.shares(q.heads, threads) };
        let owners = |kv: usize| {
            let touches = |share: &[(usize, Range<usize>)]| share.iter().any(|(head, _)| heads.kv_of(*head) == kv);
            shares.iter().filter(|share| touches(share)).count()
        };
        // If several workers compute a key-value head, each has a private sum; these are added in the order of workers.
        let (k_size, v_size) = (lines(k.tokens * k.dim), lines(k.tokens * v.dim));
        let mut private: Vec<Vec<(usize, Aligned)>> = shares
            .iter()
            .map(|share| {
                let mut kv: Vec<usize> = share.iter().map(|(head, _)| heads.kv_of(*head)).collect();
                kv.dedup();
                kv.retain(|&kv| owners(kv) > 1);
                let zeroed = |kv| {
                    let mut buffer = self.pool.take(k_size + v_size);
                    buffer.fill(0.0);
                    (kv, buffer)
                };
                kv.into_iter().map(zeroed).collect()
            })
            .collect();
        let job = Backward {
            q,
            k,
            v,
            d_out,
            max,
            sum,
            delta,
            heads,
            plan: &plan,
            code,
            scale: score.scale,
            scaling: self.scaling(inputs, terms.is_some()),
            terms: terms.as_ref(),
            bias,
            dq: Target::new(dq),
            d_bias: Target::new(d_bias),
        };
        let tables: Vec<Mutex<Vec<f64>>> = shares.iter().map(|_| Mutex::new(vec![0.0; d_table.len()])).collect();
        let buckets = d_table.len() / q.heads;
        let targets: Vec<Vec<(usize, KeySums)>> = private
            .iter_mut()
            .map(|private| {
                let sums = |(kv, buffer): &mut (usize, Aligned)| {
                    let (dk, dv) = buffer.split_at_mut(k_size);
                    let (dk, dv) = (Target::new(dk), Target::new(dv));
                    (*kv, KeySums { dk, dv, strides: (k.dim, v.dim), offsets: (0, 0) })
                };
                private.iter_mut().map(sums).collect()
            })
            .collect();
        let (dk_target, dv_target) = (Target::new(dk), Target::new(dv));
        let sizes = Sizes::new(q.dim, v.dim, code, bias.is_some());
        self.workers.run(shares.len(), &|worker| {
            let most = shares[worker].iter().map(|(_, blocks)| blocks.len()).max().unwrap_or(0);
            let segment = SEGMENT / lanes;
            let mut scratch = self.pool.take(sizes.scratch(most.min(segment)));
            let mut table = tables[worker].lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            let progress = &|| self.progress(worker);
            for (head, blocks) in &shares[worker] {
                let kv = heads.kv_of(*head);
                let strides = (k.heads * k.dim, k.heads * v.dim);
                let direct = KeySums { dk: dk_target, dv: dv_target, strides, offsets: (kv * k.dim, kv * v.dim) };
                let sums = targets[worker].iter().find(|target| target.0 == kv).map_or(direct, |target| target.1);
                let table = &mut table[head * buckets..][..buckets];
                for from in blocks.clone().step_by(segment) {
                    let blocks = from..blocks.end.min(from + segment);
                    let share = Share { head: *head, blocks, sums, table: &mut *table, progress };
                    // SAFETY: shares are disjoint; a key-value head of several workers has private sums; the scratch has
                    // the required size.
                    unsafe { isa::backward_head(code, &job, share, &mut scratch) };
                }
            }
            self.pool.give(scratch);
        });
        for table in tables {
            let table = table.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
            d_table.iter_mut().zip(table).for_each(|(sum, x)| *sum += x as f32);
        }
        for (kv, buffer) in private.into_iter().flatten() {
            let (from_k, from_v) = buffer.split_at(k_size);
            for (from, to, dim) in [(from_k, &mut *dk, k.dim), (from_v, &mut *dv, v.dim)] {
                for (row, from) in from.chunks_exact(dim).take(k.tokens).enumerate() {
                    let to = &mut to[(row * k.heads + kv) * dim..][..dim];
                    to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
                }
            }
            self.pool.give(buffer);
        }
        Some(())
    }
}
