//! Tests of recomputation: attention whose output is stored runs forward only once, on ranks with tokens and without.

use crate::support::{load, relative_l2};
use candle_core::{Result, Tensor};
use ringspan::attention::Group;
use ringspan::comm::threads::{self, Options};
use ringspan::{Documents, Kernel, Layout, LayoutKind, Mask, Score, StrategyKind};
use ringspan_candle::attention::SavedAttention;
use ringspan_candle::experts::{Local, SavedExperts};
use ringspan_candle::gradients::{Gradients, loss_and_gradients};
use ringspan_candle::stored_activation::Storage;
use ringspan_candle::{
    Attend, AttentionInputs, CheckpointPolicy, Context, Expert, ExpertLoad, Experts, InputDropout, Recompute, Routing,
    TensorParallel,
};
use ringspan_models::TokenBatch;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Counts the forward computations of attention.
struct Counting {
    context: Context,
    computed: Cell<usize>,
}

impl Attend for Counting {
    fn layer_attention(&self, layer: usize, inputs: &AttentionInputs, mask: &Mask, score: &Score) -> Result<Tensor> {
        self.computed.set(self.computed.get() + 1);
        self.context.layer_attention(layer, inputs, mask, score)
    }

    fn attention_saving(
        &self,
        memory: &mut SavedAttention,
        layer: usize,
        inputs: &AttentionInputs,
        mask: &Mask,
        score: &Score,
    ) -> Result<Tensor> {
        self.computed.set(self.computed.get() + usize::from(memory.is_empty()));
        self.context.attention_saving(memory, layer, inputs, mask, score)
    }

    fn positions(&self) -> &[usize] {
        self.context.positions()
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

#[test]
fn attention_runs_forward_once_a_layer_unless_everything_is_recomputed() {
    let (decoder, weights, batch, _) = load("llama");
    let layers = decoder.config().num_hidden_layers;
    // With two tokens in a contiguous layout over three ranks, the last rank has none.
    let layout = Arc::new(Layout::new(LayoutKind::Contiguous, &Documents::batch(1, 2), 3).expect("ranks"));
    for (recompute, wanted) in
        [(Recompute::Full, 2 * layers), (Recompute::KeepAttention, layers), (Recompute::Nothing, layers)]
    {
        let counts = threads::run(3, Options::default(), |comm| {
            let rank = comm.rank();
            let group = Arc::new(Group::new(comm, (3, 1), Kernel::new(1))?);
            let shard = |all: &[u32]| layout.shard(rank, all, 1);
            let (tokens, targets) = (shard(&batch.tokens[..2])?, shard(&batch.targets()[..2])?);
            let run = || {
                let context = Context::new(group, layout.clone(), StrategyKind::Ring)?;
                let attend = Counting { context, computed: Cell::new(0) };
                let mut drop = |_, _| Ok(());
                let batch = TokenBatch { tokens: &tokens, targets: &targets, scale: 1.0 };
                loss_and_gradients(&decoder, &weights, &batch, recompute, &attend, &mut drop)?;
                Ok::<_, candle_core::Error>((tokens.len(), attend.computed.get()))
            };
            run().map_err(|error| ringspan::Error::Layout(error.to_string()))
        })
        .expect("runs");
        assert_eq!(counts.iter().map(|(tokens, _)| tokens).sum::<usize>(), 2);
        assert!(counts.iter().any(|(tokens, _)| *tokens == 0), "a rank without tokens takes part");
        for (tokens, computed) in counts {
            assert_eq!(computed, wanted, "recompute {recompute}, {tokens} tokens");
        }
    }
}

/// Stored activations have errors of at most 2^-9, and the forward pass does not read them: losses are the same to the last
/// bit, and gradients, sums over tokens of products of a few such numbers, are wrong by a few of these errors.
#[test]
fn activations_stored_in_bf16_leave_losses_unchanged_and_gradients_close() {
    for name in ["llama", "qwen3", "gemma3", "qwen3_moe"] {
        let (decoder, weights, batch, _) = load(name);
        let layout = Layout::new(LayoutKind::Contiguous, &Documents::batch(batch.rows, batch.len), 1).expect("a rank");
        let layout = Arc::new(layout);
        let differentiate = |keep: CheckpointPolicy| {
            let answers = threads::run(1, Options::default(), |comm| {
                let run = || {
                    let group = Arc::new(Group::new(comm, (1, 1), Kernel::new(1)).map_err(candle_core::Error::wrap)?);
                    let context = Context::new(group, layout.clone(), StrategyKind::Ring)?;
                    let mut all = BTreeMap::new();
                    let mut take = |_, of_unit: Gradients| {
                        for (name, gradient) in of_unit {
                            all.insert(name, gradient.flatten_all()?.to_vec1::<f32>()?);
                        }
                        Ok(())
                    };
                    let batch = TokenBatch { tokens: &batch.tokens, targets: &batch.targets(), scale: 1.0 };
                    let nll = loss_and_gradients(&decoder, &weights, &batch, keep, &context, &mut take)?;
                    Ok::<_, candle_core::Error>((nll, all))
                };
                run().map_err(|error| ringspan::Error::Layout(error.to_string()))
            });
            answers.expect("runs").remove(0)
        };
        let (loss, exact) = differentiate(CheckpointPolicy::default());
        for recompute in [Recompute::Full, Recompute::KeepAttention, Recompute::Nothing] {
            let (rounded_loss, rounded) =
                differentiate(CheckpointPolicy { recompute, storage: Storage::Bf16, offload: None });
            assert_eq!(rounded_loss, loss, "{name}, recompute {recompute}");
            let off = |name: &String| relative_l2(&rounded[name], &exact[name]);
            let worst = exact.keys().map(off).fold(0.0, f64::max);
            assert!((1e-5..1.5e-2).contains(&worst), "{name}, recompute {recompute}: gradients are off by {worst:.1e}");
        }
    }
}

/// Experts that record what their routers report.
#[derive(Default)]
struct RecordingExperts {
    loads: Mutex<Vec<(usize, ExpertLoad)>>,
}

impl Experts for RecordingExperts {
    fn mix(
        &self,
        layer: usize,
        x: &Tensor,
        routing: &Routing,
        expert: &dyn Fn(usize) -> Result<Expert>,
    ) -> Result<Tensor> {
        Local.mix(layer, x, routing, expert)
    }

    fn mix_saving(
        &self,
        memory: &mut SavedExperts,
        layer: usize,
        x: &Tensor,
        routing: &Routing,
        expert: &dyn Fn(usize) -> Result<Expert>,
    ) -> Result<Tensor> {
        Local.mix_saving(memory, layer, x, routing, expert)
    }

    fn local_experts(&self, experts: usize) -> std::ops::Range<usize> {
        Local.local_experts(experts)
    }

    fn local_width(&self, whole: usize) -> std::ops::Range<usize> {
        Local.local_width(whole)
    }

    fn routed(&self, layer: usize, load: ExpertLoad) -> Result<()> {
        self.loads.lock().expect("no panics").push((layer, load));
        Ok(())
    }
}

/// A layer that is recomputed from a rounded input must not route its tokens differently.
#[test]
fn a_router_gives_the_same_probabilities_when_its_layer_is_recomputed() {
    let (decoder, weights, batch, _) = load("qwen3_moe");
    let layout = Layout::new(LayoutKind::Contiguous, &Documents::batch(batch.rows, batch.len), 1).expect("a rank");
    let layout = Arc::new(layout);
    for recompute in [Recompute::Full, Recompute::KeepAttention, Recompute::Nothing] {
        for storage in [Storage::F32, Storage::Bf16] {
            let noting = Arc::new(RecordingExperts::default());
            threads::run(1, Options::default(), |comm| {
                let run = || {
                    let group = Arc::new(Group::new(comm, (1, 1), Kernel::new(1)).map_err(candle_core::Error::wrap)?);
                    let context = Context::new(group, layout.clone(), StrategyKind::Ring)?.with_experts(noting.clone());
                    let batch = TokenBatch { tokens: &batch.tokens, targets: &batch.targets(), scale: 1.0 };
                    let keep = CheckpointPolicy { recompute, storage, offload: None };
                    let mut drop = |_, _| Ok(());
                    loss_and_gradients(&decoder, &weights, &batch, keep, &context, &mut drop)
                };
                run().map_err(|error| ringspan::Error::Layout(error.to_string()))
            })
            .expect("runs");
            let loads = noting.loads.lock().expect("no panics");
            let (first, again) = loads.split_at(loads.len() / 2);
            assert!(!first.is_empty());
            assert!(first.iter().rev().eq(again), "recompute {recompute}, {storage}: {first:?}, then {again:?}");
        }
    }
}
