"""Safetensors files by numpy alone: f32, and bf16 as rounded f32."""

import json
import pathlib
import struct

import numpy as np


def to_bf16(values: np.ndarray) -> np.ndarray:
    """bf16 bits: the upper halves of f32, rounded to the nearest, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(words: np.ndarray) -> np.ndarray:
    return (words.astype(np.uint32) << 16).view(np.float32)


def write(path: pathlib.Path, tensors: dict[str, np.ndarray], dtype: str) -> None:
    header, parts, end = {}, [], 0
    for name, values in tensors.items():
        data = (to_bf16(values) if dtype == "bf16" else values.astype(np.float32)).tobytes()
        header[name] = dict(dtype=dtype.upper(), shape=values.shape, data_offsets=[end, end + len(data)])
        parts.append(data)
        end += len(data)
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.writelines(parts)


def read(path: pathlib.Path) -> dict[str, np.ndarray]:
    """All tensors of a file, as f32."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name == "__metadata__":
            continue
        start, end = (8 + length + place for place in entry["data_offsets"])
        words = np.frombuffer(data[start:end], np.uint16 if entry["dtype"] == "BF16" else np.float32)
        values = from_bf16(words) if entry["dtype"] == "BF16" else words
        tensors[name] = values.reshape(entry["shape"])
    return tensors


def difference(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    """The largest relative L2 distance of out, dq, dk, dv."""

    def relative(a: np.ndarray, b: np.ndarray) -> float:
        a, b = a.astype(np.float64), b.astype(np.float64)
        return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))

    return max(relative(ours[name], theirs[name]) for name in ("out", "dq", "dk", "dv"))
