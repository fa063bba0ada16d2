"""A tiny random video transformer of WAN's kind in a GGUF file, with what diffusers computes with it.

    pip install -r tools/requirements-video.txt && python tools/make_video_gguf_fixture.py

crates/ringspan-video/tests/fixtures/gguf gets wan.gguf, with the names of the original checkpoints, without a configuration, and with
several types of quantization; and reference.safetensors with the inputs of one forward pass and the `out` of diffusers' model with the
weights as the gguf package decodes them. diffusers reads the same file, and rounds somewhat more when it decodes. The file
has no K-quants, which the gguf package cannot write.
"""

import argparse
import pathlib
import re
import shutil
import tempfile

import gguf
import numpy as np
import torch
from diffusers import GGUFQuantizationConfig, WanTransformer3DModel
from safetensors.torch import save_file

from make_video_fixture import random, saved, transformer

OUT = pathlib.Path("crates/ringspan-video/tests/fixtures/gguf")
# A head of 128, as all of WAN's models have, since the file does not say it.
SIZES = {"num_attention_heads": 1, "attention_head_dim": 128, "num_layers": 1, "ffn_dim": 64, "freq_dim": 32, "text_dim": 32}

# Names of diffusers and of the original checkpoints, in which the second and the third norm change places.
NAMES = [
    (r"condition_embedder\.time_embedder\.linear_1", "time_embedding.0"),
    (r"condition_embedder\.time_embedder\.linear_2", "time_embedding.2"),
    (r"condition_embedder\.time_proj", "time_projection.1"),
    (r"condition_embedder\.text_embedder\.linear_1", "text_embedding.0"),
    (r"condition_embedder\.text_embedder\.linear_2", "text_embedding.2"),
    (r"attn1\.norm_", "self_attn.norm_"),
    (r"attn2\.norm_", "cross_attn.norm_"),
    (r"attn1\.to_out\.0", "self_attn.o"),
    (r"attn2\.to_out\.0", "cross_attn.o"),
    (r"attn1\.to_", "self_attn."),
    (r"attn2\.to_", "cross_attn."),
    (r"ffn\.net\.0\.proj", "ffn.0"),
    (r"ffn\.net\.2", "ffn.2"),
    (r"(blocks\.\d+)\.norm2", r"\1.norm3"),
    (r"(blocks\.\d+)\.scale_shift_table", r"\1.modulation"),
    (r"^scale_shift_table", "head.modulation"),
    (r"^proj_out", "head.head"),
]
# The types of matrices by the ends of their original names, and of all others.
TYPES = {
    "self_attn.q.weight": "Q4_0",
    "self_attn.k.weight": "Q5_0",
    "self_attn.o.weight": "BF16",
    "ffn.0.weight": "Q4_1",
    "ffn.2.weight": "Q4_0",
    "time_projection.1.weight": "Q4_0",
    "text_embedding.0.weight": "F16",
    "patch_embedding.weight": "F16",
}
OTHERS = "Q8_0"


def original(name: str) -> str:
    for ours, theirs in NAMES:
        name = re.sub(ours, theirs, name)
    return name


def stored_type(name: str, weight: torch.Tensor) -> gguf.GGMLQuantizationType:
    """Vectors and modulation stay in f32."""
    kind = next((kind for end, kind in TYPES.items() if name.endswith(end)), OTHERS if weight.dim() == 2 else "F32")
    return gguf.GGMLQuantizationType[kind]


def write(model: torch.nn.Module, file: pathlib.Path) -> None:
    """Writes the model's weights, which become what the file decodes to."""
    writer = gguf.GGUFWriter(str(file), "wan")
    for name, weight in sorted(model.state_dict().items()):
        name, kind = original(name), stored_type(original(name), weight)
        values = gguf.quants.quantize(weight.float().numpy().astype(np.float32), kind)
        writer.add_tensor(name, values, raw_dtype=kind)
        weight.copy_(torch.from_numpy(gguf.quants.dequantize(values, kind)).reshape(weight.shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=OUT)
    out = parser.parse_args().out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    model, exact = transformer(91, **SIZES), transformer(91, **SIZES)
    write(model, out / "wan.gguf")
    with tempfile.TemporaryDirectory() as folder:
        saved(model, pathlib.Path(folder) / "transformer", False)
        read = WanTransformer3DModel.from_single_file(
            str(out / "wan.gguf"),
            config=folder,
            subfolder="transformer",
            quantization_config=GGUFQuantizationConfig(compute_dtype=torch.float32),
            torch_dtype=torch.float32,
        ).eval()
    inputs = {
        "hidden_states": random(92, 1, 4, 3, 4, 6),
        "timestep": torch.tensor([640.0]),
        "encoder_hidden_states": random(93, 1, 12, 32),
    }
    result = model(**inputs, return_dict=False)[0]
    others = [other(**inputs, return_dict=False)[0] for other in (read, exact)]
    by_diffusers, unquantized = [(result - other).norm() / result.norm() for other in others]
    assert by_diffusers < 1e-3, f"diffusers reads something else from the file: {by_diffusers:.1e}"
    assert 0.01 < unquantized < 0.5, f"quantization changes the result by {unquantized:.1%}"
    tensors = inputs | {"out": result}
    save_file({name: tensor.float().contiguous() for name, tensor in tensors.items()}, out / "reference.safetensors")


if __name__ == "__main__":
    main()
