//! Tests of activations that are offloaded to the CPU and copied back.

use super::*;
use ringspan_candle::Offload;
use ringspan_candle::offload::RESIDENT_LAYERS;

const LAYERS: usize = 6;

/// The activations of layer `layer` in a pass: tensors of both types and of odd sizes, one of them a view.
fn made(gpu: &RankDevice, layer: usize, pass: usize) -> Result<Vec<Tensor>> {
    let on =
        |shape: &[usize], seed| random(shape, seed + 100 * layer as u64 + 1000 * pass as u64).to_device(gpu.tensors());
    // They are computed on the GPU, not copied there, so that a copy to the CPU that begins too early reads memory that is
    // not written yet.
    let wide = (on(&[9, 33], 1)? * 3.0)?;
    let narrow = cast(&(on(&[7 + pass, 129], 2)? * 0.5)?, DType::BF16)?;
    Ok(vec![wide.narrow(0, 2, 5)?, narrow, (on(&[1], 3)? + 1.0)?, on(&[0, 4], 4)?])
}

#[test]
fn what_layers_keep_comes_back_to_the_bit_pass_after_pass() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let offload = Offload::new(&gpu).expect("a GPU");
    let mut held = Vec::new();
    for pass in 0..3 {
        offload.begin(LAYERS);
        let mut kept = Vec::new();
        for layer in 0..LAYERS {
            offload.forward(layer)?;
            for tensor in made(&gpu, layer, pass)? {
                kept.push((layer, StoredActivation::new(&tensor, Storage::F32)?.offload(&offload)?));
            }
        }
        held.push(offload.held());
        let mut at = LAYERS;
        while let Some((layer, again)) = kept.pop() {
            if layer < at {
                at = layer;
                offload.backward(layer)?;
            }
            let tensor = again.tensor()?;
            assert!(tensor.device().same_device(gpu.tensors()));
            let wanted = &made(&gpu, layer, pass)?[kept.iter().filter(|(of, _)| *of == layer).count()];
            assert_eq!((tensor.dims(), tensor.dtype()), (wanted.dims(), wanted.dtype()), "layer {layer}");
            // The tensor is read by an operation on candle's stream, as a layer would read it.
            assert_eq!(numbers(&(&tensor + &tensor)?), numbers(&(wanted + wanted)?), "pass {pass}, layer {layer}");
        }
    }
    // Three tensors of each offloaded layer take one page each; the longer ones of later passes fit into the same buffers.
    assert_eq!(held, [(LAYERS - RESIDENT_LAYERS) * 3 * 4096; 3], "bytes of the CPU");
    Ok(())
}

#[test]
fn passes_that_were_left_and_layers_that_were_left_out_do_no_harm() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let offload = Offload::new(&gpu).expect("a GPU");
    for pass in 0..4 {
        offload.begin(LAYERS);
        let mut kept = Vec::new();
        for layer in 0..LAYERS {
            offload.forward(layer)?;
            kept.push(StoredActivation::new(&made(&gpu, layer, pass)?[0], Storage::F32)?.offload(&offload)?);
        }
        match pass {
            // A pass may end anywhere, with an error.
            0 => drop(kept),
            1 => {
                offload.backward(LAYERS - 1)?;
                offload.backward(LAYERS - 2)?;
                offload.backward(LAYERS - 3)?;
            }
            // Tensors are read without announcing the layers.
            _ => {
                for layer in [3, 0, 5, 1] {
                    let wanted = numbers(&made(&gpu, layer, pass)?[0]);
                    assert_eq!(numbers(&kept[layer].tensor()?), wanted, "layer {layer}");
                    assert_eq!(numbers(&kept[layer].tensor()?), wanted, "layer {layer}, once more");
                }
            }
        }
    }
    offload.begin(LAYERS);
    offload.begin(LAYERS);
    assert_eq!(offload.held(), 0, "what a pass did not use is given back");
    assert!(Offload::new(&RankDevice::CPU).is_err_and(|error| error.to_string().contains("no GPU")));
    Ok(())
}

#[test]
fn what_is_on_the_cpu_stays_there() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let offload = Offload::new(&gpu).expect("a GPU");
    offload.begin(LAYERS);
    offload.forward(0)?;
    let x = random(&[3, 5], 1);
    for storage in [Storage::F32, Storage::Bf16] {
        assert_eq!(numbers(&StoredActivation::new(&x, storage)?.offload(&offload)?.tensor()?), numbers(&x));
    }
    assert_eq!(offload.held(), 0);
    Ok(())
}

#[test]
fn a_longer_pass_does_not_hold_what_a_shorter_one_used() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let offload = Offload::new(&gpu).expect("a GPU");
    for (numbers, pinned) in [(1000, 4096), (5000, 20480), (1000, 4096)] {
        offload.begin(LAYERS);
        let mut kept = Vec::new();
        for layer in 0..LAYERS {
            offload.forward(layer)?;
            kept.push(
                StoredActivation::new(&random(&[numbers], 1).to_device(gpu.tensors())?, Storage::F32)?
                    .offload(&offload)?,
            );
        }
        assert_eq!(offload.held(), (LAYERS - RESIDENT_LAYERS) * pinned, "{numbers} numbers a layer");
    }
    Ok(())
}
