//! The transformer against diffusers, and any number of ranks against one.

use crate::support::{Pass, distance};
use candle_core::Result as TensorResult;
use ringspan_video::Result;
use ringspan_video::transformer::WeightType;

const KINDS: [&str; 5] = ["t2v", "i2v", "flf2v", "ti2v", "vace"];

#[test]
fn the_velocity_is_that_of_diffusers() -> Result<()> {
    for kind in KINDS {
        for weights in [WeightType::F32, WeightType::AsStored] {
            let pass = Pass::of(kind, weights)?;
            let got = &pass.velocities((1, 1))?[0];
            let far = distance(got, &pass.inputs["out"]);
            assert!(far < 1e-5, "{kind}, weights {weights}: {far:e}");
        }
    }
    Ok(())
}

#[test]
fn in_bf16_the_velocity_is_close() -> Result<()> {
    for kind in KINDS {
        let pass = Pass::of(kind, WeightType::Bf16)?;
        let far = distance(&pass.velocities((1, 1))?[0], &pass.inputs["out"]);
        assert!(far > 1e-5 && far < 3e-2, "{kind}: {far:e}");
    }
    Ok(())
}

#[test]
fn every_mesh_gives_the_velocity_of_one_rank() -> Result<()> {
    for kind in KINDS {
        let pass = Pass::of(kind, WeightType::F32)?;
        let one = &pass.velocities((1, 1))?[0];
        let heads = pass.folder.transformer().config().num_attention_heads;
        for (ring, ulysses) in (1..=8).flat_map(|ring| (1..=8 / ring).map(move |ulysses| (ring, ulysses))) {
            if ulysses > heads {
                continue;
            }
            let all = pass.velocities((ring, ulysses))?;
            for got in &all {
                let far = distance(got, one);
                assert!(far < 1e-5, "{kind} on ring {ring} x ulysses {ulysses}: {far:e}");
                let equal = |a: &candle_core::Tensor| a.flatten_all().and_then(|all| all.to_vec1::<f32>());
                let (got, first): (TensorResult<_>, _) = (equal(got), equal(&all[0]));
                assert_eq!(got?, first?, "all ranks get the same bits");
            }
        }
    }
    Ok(())
}
