//! The row sums of outputs times their gradients (delta), which the backward pass needs.

use super::super::View;
use super::super::buffer::Target;
use super::super::delta::{self, Delta, delta_head};
use super::Cpu;
use std::sync::atomic::{AtomicUsize, Ordering};

impl Cpu {
    /// Row sums of `out * d_out`, `[H, Tq]`, for out and d_out `[Tq, H, Dv]`; the backward pass subtracts them from dP.
    pub(in crate::kernel) fn delta(&self, out: View, d_out: View) -> Vec<f32> {
        let View { tokens, heads, dim, .. } = d_out;
        let mut delta = vec![0.0; heads * tokens];
        let features = self.features;
        let job = Delta { out, d_out, delta: Target::new(&mut delta) };
        let next = AtomicUsize::new(0);
        // Waking a thread costs about as much as some ten thousand of these products.
        let workers = self.workers.count().min(heads).min((tokens * heads * dim).div_ceil(1 << 15));
        self.workers.run(workers, &|_| {
            let mut scratch = self.pool.take(delta::scratch(dim, features.vector()));
            loop {
                let head = next.fetch_add(1, Ordering::Relaxed);
                if head >= heads {
                    break;
                }
                // SAFETY: the counter gives each head to one worker; the scratch has the required size.
                unsafe { delta_head(features, &job, head, &mut scratch) };
            }
            self.pool.give(scratch);
        });
        delta
    }
}
