//! The tiny decoder against PyTorch.

use super::distance;
use ringspan_video::vae::{TinyDecoderFile, VideoTensor};
use safetensors::SafeTensors;
use std::path::{Path, PathBuf};

fn file(name: &str) -> PathBuf {
    Path::new("tests/fixtures/tiny_decoder").join(format!("{name}.safetensors"))
}

fn reference(name: &str, tensor: &str) -> VideoTensor {
    super::tensor_of(&file(&format!("{name}_reference")), tensor)
}

#[test]
fn frames_are_those_of_pytorch() {
    for (name, sizes) in [("taew2_1", [16, 4, 8]), ("taew2_2", [4, 4, 16])] {
        let decoder = TinyDecoderFile::open(&file(name)).expect("a tiny decoder");
        assert_eq!(decoder.sizes(), sizes, "{name}");
        let latents = reference(name, "latents");
        for threads in [1, 3] {
            let frames = decoder.decode(&latents, threads).expect("frames");
            let far = distance(&frames, &reference(name, "frames"));
            assert!(far < 1e-5, "{name}: {far:e}");
        }
    }
}

#[test]
fn what_is_not_a_tiny_decoder_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let refused = |bytes: &[u8], name: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).expect("written");
        TinyDecoderFile::open(&path).expect_err("refused").to_string()
    };
    let bytes = std::fs::read(file("taew2_1")).expect("a fixture");
    assert!(refused(&bytes, "a.pth").contains("pickle"));
    assert!(refused(&bytes[..500], "a.safetensors").contains("a.safetensors"));
    let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
    let with = |name: &str, change: Option<&[usize]>| {
        let all: Vec<_> = tensors
            .iter()
            .filter(|(found, _)| change.is_some() || *found != name)
            .map(|(found, view)| {
                let shape = if found == name { change.unwrap_or_default().to_vec() } else { view.shape().to_vec() };
                let bytes = &view.data()[..4 * shape.iter().product::<usize>()];
                (found.to_owned(), safetensors::tensor::TensorView::new(view.dtype(), shape, bytes).expect("a view"))
            })
            .collect();
        refused(&safetensors::serialize(all, None).expect("safetensors"), "b.safetensors")
    };
    let missing = with("decoder.9.conv.2.bias", None);
    assert!(missing.contains("decoder.9.conv.2.bias"), "{missing}");
    let narrow = with("decoder.16.conv.0.weight", Some(&[4, 7, 3, 3]));
    assert!(narrow.contains("[4, 7, 3, 3]") && narrow.contains("[4, 8, 3, 3]"), "{narrow}");
    let colors = with("decoder.22.weight", Some(&[2, 5, 3, 3]));
    assert!(colors.contains("2 channels"), "{colors}");
    let empty = with("decoder.1.weight", Some(&[0, 16, 3, 3]));
    assert!(empty.contains("none of them 0"), "{empty}");
    let latents = TinyDecoderFile::open(&file("taew2_1")).expect("a tiny decoder").frames([1, 48, 3, 4, 4]);
    let said = latents.expect_err("too many channels").to_string();
    assert!(said.contains("48") && said.contains("16"), "{said}");
}
