//! Attention in generation: over all ranks during prefill, over their caches during decode.

use crate::cache::{Cache, owner};
use candle_core::{Result, Tensor, bail};
use ringspan::attention::{Group, Tokens};
use ringspan::kernel::Score;
use ringspan::{Mask, Run};
use ringspan_candle::decode::decode;
use ringspan_candle::experts::Local;
use ringspan_candle::rope::Rotations;
use ringspan_candle::tensor_parallel::NO_TENSOR_PARALLEL;
use ringspan_candle::{Attend, AttentionInputs, Context, Experts, InputDropout, TensorParallel};
use std::cell::RefCell;

/// Attention of the prefill: it runs over all ranks, and each rank caches the keys and values of its own tokens.
pub(crate) struct Prefill<'a> {
    context: &'a Context,
    cache: RefCell<&'a mut Cache>,
}

impl<'a> Prefill<'a> {
    /// The prompt must be distributed over the ranks by the context's layout; the cache must be empty.
    pub(crate) fn new(context: &'a Context, cache: &'a mut Cache) -> Self {
        cache.announce(context.layout().runs(context.group().rank()));
        Self { context, cache: RefCell::new(cache) }
    }
}

impl Attend for Prefill<'_> {
    fn layer_attention(&self, layer: usize, inputs: &AttentionInputs, mask: &Mask, score: &Score) -> Result<Tensor> {
        self.cache.borrow_mut().append(layer, inputs.k, inputs.v)?;
        self.context.layer_attention(layer, inputs, mask, score)
    }

    fn positions(&self) -> &[usize] {
        self.context.positions()
    }

    fn rotations(&self) -> Option<&Rotations> {
        self.context.rotations()
    }

    fn length(&self) -> usize {
        self.context.length()
    }

    fn experts(&self) -> &dyn Experts {
        self.context.experts()
    }

    fn tensor_parallel(&self) -> &TensorParallel {
        self.context.tensor_parallel()
    }

    fn input_dropout(&self) -> Option<&InputDropout> {
        self.context.input_dropout()
    }
}

/// Attention of a new token, which every rank computes: each attends to the keys in its cache, and the partial results are
/// merged.
pub(crate) struct Decode<'a> {
    group: &'a Group,
    cache: RefCell<&'a mut Cache>,
    position: [usize; 1],
    length: usize,
    owns_token: bool,
}

impl<'a> Decode<'a> {
    /// The new token is at `position`, after all others, in a text that may grow to `length` tokens.
    pub(crate) fn new(group: &'a Group, cache: &'a mut Cache, position: usize, length: usize) -> Self {
        let owns_token = owner(position, group.size()) == group.rank();
        if owns_token {
            cache.announce(&[Run { document: 0, start: position, len: 1, step: 1 }]);
        }
        Self { group, cache: RefCell::new(cache), position: [position], length, owns_token }
    }
}

impl Attend for Decode<'_> {
    fn layer_attention(&self, layer: usize, inputs: &AttentionInputs, mask: &Mask, score: &Score) -> Result<Tensor> {
        let AttentionInputs { q, k, v, .. } = *inputs;
        let tokens = q.dim(0)?;
        if tokens != 1 {
            bail!("decoding takes one token at a time, not {tokens}");
        }
        if self.owns_token {
            self.cache.borrow_mut().append(layer, k, v)?;
        }
        let cache = self.cache.borrow();
        let (k, v) = match cache.layer(layer)? {
            Some(held) => held,
            // This rank has no cached keys yet.
            None => (k.narrow(0, 0, 0)?, v.narrow(0, 0, 0)?),
        };
        let query = [Run { document: 0, start: self.position[0], len: 1, step: 1 }];
        // The positions of query and keys count from the same origin; only masks that are aligned to the end look at the
        // length.
        let seq_len = self.position[0] + 1;
        let tokens = Tokens { queries: &query, keys: cache.runs(), seq_lens: (seq_len, seq_len) };
        decode(self.group, mask, &tokens, &AttentionInputs { k: &k, v: &v, ..*inputs }, score)
    }

    fn positions(&self) -> &[usize] {
        &self.position
    }

    fn length(&self) -> usize {
        self.length
    }

    fn experts(&self) -> &dyn Experts {
        &Local
    }

    fn tensor_parallel(&self) -> &TensorParallel {
        &NO_TENSOR_PARALLEL
    }

    fn input_dropout(&self) -> Option<&InputDropout> {
        None
    }
}
