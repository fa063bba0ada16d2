"""Makes quantized blocks of every format that Ringspan keeps in memory, and the numbers they stand for by the gguf package.

    pip install -r tools/requirements.txt && python tools/make_quantized_fixture.py

crates/ringspan-candle/tests/fixtures/quantized/blocks.safetensors gets for each format FORMAT.bytes `[rows, bytes of a row]`
and FORMAT.values `[rows, columns]`. Formats that gguf can quantize begin with two rows of quantized numbers; all other rows
are random bytes, with scales that are zero, subnormal, negative and the largest among them. gpt-oss.blocks, gpt-oss.scales and
gpt-oss.values are an MXFP4 matrix as gpt-oss stores it, and its numbers by transformers.
"""

import argparse
import pathlib

import gguf
import numpy as np
import torch
from safetensors.numpy import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

FOLDER = pathlib.Path("crates/ringspan-candle/tests/fixtures/quantized")
ROWS, COLUMNS = 6, 256

# Offsets of the half-precision scales in a block.
SCALES = {
    "F16": [],
    "BF16": [],
    "Q4_0": [0],
    "Q5_0": [0],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ4_NL": [0],
    "MXFP4": [],
}
# The bits of 0.1, 0, -0, the least subnormal number, a negative subnormal one, the least normal one, -1, 65504 and 0.003.
SPECIAL = np.array([0x2E66, 0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0xBC00, 0x7BFF, 0x1A25], np.uint16)
# Exponents of MXFP4 scales, which are powers of two; the first two give subnormal numbers.
EXPONENTS = np.array([0, 1, 2, 100, 127, 130, 250], np.uint8)


def random_blocks(name: str, rows: int, rng: np.random.Generator) -> np.ndarray:
    """Rows of random bytes that decode to finite numbers."""
    kind = gguf.GGMLQuantizationType[name]
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    count = rows * COLUMNS // block_len
    blocks = rng.integers(0, 256, (count, block_bytes), dtype=np.uint8)
    if name in ("F16", "BF16"):
        exponent = np.uint16(0x7C00 if name == "F16" else 0x7F80)
        bits = blocks.view(np.uint16)
        # An exponent of ones means infinity or NaN; with its last bit cleared, the number is large.
        bits[(bits & exponent) == exponent] &= ~(exponent & (~exponent << np.uint16(1)))
        # Some numbers are made subnormal.
        bits[::5] &= ~exponent
    elif name == "MXFP4":
        blocks[:, 0] = np.resize(EXPONENTS, count)
    for i, place in enumerate(SCALES[name]):
        # The minima of a block have another scale than its steps.
        blocks[:, place : place + 2] = np.resize(np.roll(SPECIAL, 4 * i), count)[:, None].view(np.uint8)
    return blocks.reshape(rows, -1)


def matrix(name: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    kind = gguf.GGMLQuantizationType[name]
    numbers = rng.standard_normal((2, COLUMNS)).astype(np.float32)
    try:
        quantized = gguf.quants.quantize(numbers, kind).view(np.uint8)
    except NotImplementedError:
        quantized = random_blocks(name, 2, rng)
    stored = np.concatenate([quantized, random_blocks(name, ROWS - 2, rng)])
    values = gguf.quants.dequantize(stored, kind)
    assert values.shape == (ROWS, COLUMNS) and np.isfinite(values).all(), name
    return {f"{name}.bytes": stored, f"{name}.values": values.astype(np.float32)}


def gpt_oss(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Two rows of one expert."""
    blocks = rng.integers(0, 256, (1, 2, COLUMNS // 32, 16), dtype=np.uint8)
    scales = rng.integers(100, 140, (1, 2, COLUMNS // 32), dtype=np.uint8)
    values = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32)
    # Transformers stores the transpose, by which it multiplies.
    values = np.ascontiguousarray(values[0].T.numpy())
    return {"gpt-oss.blocks": blocks[0], "gpt-oss.scales": scales[0], "gpt-oss.values": values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=FOLDER)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(7)
    tensors = {}
    for name in SCALES:
        tensors |= matrix(name, rng)
    save_file(tensors | gpt_oss(rng), out / "blocks.safetensors")
    print(f"{len(SCALES)} formats, {(out / 'blocks.safetensors').stat().st_size} bytes")


if __name__ == "__main__":
    main()
