//! The peak memory of the fused layers, counted by the allocator.

use candle_core::{DType, Device, Tensor, Var};
use ringspan_candle::activation::Activation;
use ringspan_candle::gated_mlp::{TILE, gated_mlp};
use ringspan_candle::tensor_parallel::NO_TENSOR_PARALLEL;
use ringspan_candle::{backward_from, loss};
use ringspan_testing::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

/// The peak of allocated bytes while `work` runs, above those allocated before.
fn peak_of(work: impl FnOnce() -> candle_core::Result<()>) -> usize {
    let (computed, peak) = ALLOCATOR.peak_of(work);
    computed.expect("computes");
    peak
}

/// This is a single test, since a process has one allocator and tests run concurrently.
#[test]
fn memory_grows_with_tokens_by_the_outputs_of_layers_and_not_by_their_intermediates() -> candle_core::Result<()> {
    let (hidden, wide) = (8, 256);
    let ones = |shape: (usize, usize)| Tensor::ones(shape, DType::F32, &Device::Cpu);
    let gated = |tokens: usize| {
        peak_of(|| {
            let (x, gate) = (Var::ones((tokens, hidden), DType::F32, &Device::Cpu)?, ones((wide, hidden))?);
            let y = gated_mlp(&x, &gate, &gate, &ones((hidden, wide))?, Activation::Silu)?;
            backward_from::backward(&y, &ones((tokens, hidden))?).map(drop)
        })
    };
    // The first product makes allocations that later ones use again, so one product is computed before memory is counted.
    gated(TILE);
    let (few, many) = (gated(2 * TILE), gated(6 * TILE));
    let row = (many - few) as f64 / (4 * TILE * 4) as f64;
    // The bound allows x, y, their gradients, and a few of them twice in candle's graph; a row of gate or up would add 256.
    assert!(row < 10.0 * hidden as f64, "{row:.1} numbers a token");

    let vocabulary = 4096;
    let head_loss = |tokens: usize| {
        let (x, head) = (ones((tokens, hidden))?, ones((vocabulary, hidden))?);
        Ok::<_, candle_core::Error>(peak_of(|| {
            loss::head_loss(&x, &head, &vec![1; tokens], 1.0, true, &NO_TENSOR_PARALLEL).map(drop)
        }))
    };
    let (few, many) = (head_loss(1024)?, head_loss(3072)?);
    let row = (many - few) as f64 / (2048 * 4) as f64;
    assert!(row < 4.0 * hidden as f64, "{row:.1} numbers a token, of a vocabulary of {vocabulary}");
    // The bound allows one chunk of 512 rows of logits, and what is packed for its products.
    assert!(few < 512 * vocabulary * 4 * 3 / 2, "{few} bytes");
    Ok(())
}
