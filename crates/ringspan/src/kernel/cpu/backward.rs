//! The backward pass of a CPU kernel: divides the work among workers, and adds up their private sums.

use super::super::backward::{Backward, BufferSizes, HeadTask, KeySums, backward_head};
use super::super::buffer::{Aligned, Target, lines};
use super::super::terms::ScoreTerms;
use super::super::{Data, HeadMap, Inputs, Saved, Sums, Tile, View};
use super::{Cpu, SEGMENT, plan};
use std::ops::Range;
use std::sync::Mutex;

/// The query heads of a worker, each with the range of its blocks of queries.
type WorkerShare = Vec<(usize, Range<usize>)>;

/// The gradients of one key-value head to which only one worker adds: dk `[Tk, D]`, then dv `[Tk, Dv]`.
struct PrivateSum {
    kv: usize,
    buffer: Aligned,
}

/// The tensors, shares and sums of a call, which its workers read.
struct BackwardWork<'a> {
    job: Backward<'a>,
    shares: &'a [WorkerShare],
    /// The sums of all key-value heads, to which a worker adds unless it has a private sum.
    keys: KeySums,
    /// For each worker, the key-value heads for which it has private sums.
    private: Vec<Vec<(usize, KeySums)>>,
    /// For each worker, the gradients of its buckets of relative positions, `[H, count]`.
    tables: &'a [Mutex<Vec<f64>>],
    /// Number of buckets of a head.
    buckets: usize,
}

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
        let features = self.features_for(inputs);
        let terms = ScoreTerms::new(score, bias);
        let plan = plan(inputs, tiles, features);
        if plan.keys.is_empty() || q.heads == 0 {
            return Some(());
        }
        // Heads that share a bias add to the same rows of its gradient, so each block is computed by one worker for all
        // heads.
        let threads = self.workers.count();
        let shared = bias.is_some_and(|bias| bias.heads < q.heads);
        let shares = if shared { plan.shares_by_block(q.heads, threads) } else { plan.shares(q.heads, threads) };
        let tables: Vec<Mutex<Vec<f64>>> = shares.iter().map(|_| Mutex::new(vec![0.0; d_table.len()])).collect();
        let mut private = self.private_sums(&shares, heads, k, v);
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
            features,
            scale: score.scale,
            scaling: self.scaling(inputs, terms.is_some()),
            terms: terms.as_ref(),
            bias,
            dq: Target::new(dq),
            d_bias: Target::new(d_bias),
        };
        let strides = (k.heads * k.dim, k.heads * v.dim);
        let keys = KeySums { dk: Target::new(dk), dv: Target::new(dv), strides, offsets: (0, 0) };
        let private_targets = |sums: &mut Vec<PrivateSum>| sums.iter_mut().map(|sum| sum.target(k, v)).collect();
        let work = BackwardWork {
            job,
            shares: &shares,
            keys,
            private: private.iter_mut().map(private_targets).collect(),
            tables: &tables,
            buckets: d_table.len() / q.heads,
        };
        self.workers.run(shares.len(), &|worker| self.run_share(&work, worker));
        for table in tables {
            let table = table.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
            d_table.iter_mut().zip(table).for_each(|(sum, x)| *sum += x as f32);
        }
        for PrivateSum { kv, buffer } in private.into_iter().flatten() {
            let (from_k, from_v) = buffer.split_at(k_size(k));
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

    /// Zeros for the key-value heads that several workers compute: each of these has a private sum, and the sums are added
    /// in the order of workers.
    fn private_sums(&self, shares: &[WorkerShare], heads: &HeadMap, k: View, v: View) -> Vec<Vec<PrivateSum>> {
        // A worker's query heads ascend, and so do the key-value heads that they read.
        let key_heads = |share: &WorkerShare| {
            let mut kv: Vec<usize> = share.iter().map(|(head, _)| heads.kv_of(*head)).collect();
            kv.dedup();
            kv
        };
        let mut owners = vec![0; k.heads];
        shares.iter().flat_map(key_heads).for_each(|kv| owners[kv] += 1);
        let zeros = |kv: usize| {
            let mut buffer = self.pool.take(k_size(k) + lines(k.tokens * v.dim));
            buffer.fill(0.0);
            PrivateSum { kv, buffer }
        };
        let of_worker = |share| key_heads(share).into_iter().filter(|&kv| owners[kv] > 1).map(zeros).collect();
        shares.iter().map(of_worker).collect()
    }

    /// Computes the share of a worker, a segment of blocks at a time.
    fn run_share(&self, work: &BackwardWork, worker: usize) {
        let BackwardWork { job, shares, keys, private, tables, buckets } = work;
        let sizes = BufferSizes::new(job.q.dim, job.v.dim, job.features, job.bias.is_some());
        let segment = SEGMENT / job.features.lanes();
        let most = shares[worker].iter().map(|(_, blocks)| blocks.len()).max().unwrap_or(0);
        let mut scratch = self.pool.take(sizes.scratch(most.min(segment)));
        let mut table = tables[worker].lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let progress = &|| self.progress(worker);
        for (head, blocks) in &shares[worker] {
            let kv = job.heads.kv_of(*head);
            let direct = KeySums { offsets: (kv * job.k.dim, kv * job.v.dim), ..*keys };
            let sums = private[worker].iter().find(|(own, _)| *own == kv).map_or(direct, |(_, sums)| *sums);
            let table = &mut table[head * buckets..][..*buckets];
            for from in blocks.clone().step_by(segment) {
                let blocks = from..blocks.end.min(from + segment);
                let task = HeadTask { head: *head, blocks, sums, table: &mut *table, progress };
                // SAFETY: shares are disjoint; a key-value head of several workers has private sums; the scratch has the
                // required size.
                unsafe { backward_head(job.features, job, task, &mut scratch) };
            }
        }
        self.pool.give(scratch);
    }
}

impl PrivateSum {
    /// The key-value head, and its sums as a worker writes them.
    fn target(&mut self, k: View, v: View) -> (usize, KeySums) {
        let (dk, dv) = self.buffer.split_at_mut(k_size(k));
        let (dk, dv) = (Target::new(dk), Target::new(dv));
        (self.kv, KeySums { dk, dv, strides: (k.dim, v.dim), offsets: (0, 0) })
    }
}

/// Number of elements of dk in a private sum, in whole cache lines.
fn k_size(k: View) -> usize {
    lines(k.tokens * k.dim)
}
