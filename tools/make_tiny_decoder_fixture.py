"""Makes a tiny decoder of the architecture of TAEHV with random weights, and decodes latents with PyTorch.

    pip install -r tools/requirements-video.txt && python tools/make_tiny_decoder_fixture.py

Writes crates/ringspan-video/tests/fixtures/tiny_decoder, or --out: for WAN 2.1 and 2.2 a file of weights with the names of TAEHV, and
NAME_reference.safetensors with `latents` [B,C,F,H,W] and the `frames` [B,3,4F-3,H,W] in [-1,1]. Here each layer computes all frames
before the next layer begins, and resizing comes before the convolution that lengthens time, as in TAEHV.
"""

import argparse
import pathlib

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

OUT = pathlib.Path("crates/ringspan-video/tests/fixtures/tiny_decoder")

# For each file: channels of the latents, channels of the scales, pixels of a patch's side, shape of the latents, and frames that the
# first layer that lengthens time was trained to make, of which the last is taken.
MODELS = {
    "taew2_1": (16, [8, 6, 4, 5], 1, [2, 16, 3, 3, 2], 1),
    "taew2_2": (4, [6, 4, 4, 4], 2, [1, 4, 2, 2, 3], 2),
}
TIMES = [1, 2, 2]


def weights(channels: int, widths: list[int], patch: int, first_time: int) -> dict[str, torch.Tensor]:
    tensors = {}

    def add(name: str, outputs: int, inputs: int, side: int, bias: bool) -> None:
        tensors[f"{name}.weight"] = 1.4 * torch.randn(outputs, inputs, side, side) / (inputs * side * side) ** 0.5
        if bias:
            tensors[f"{name}.bias"] = 0.1 * torch.randn(outputs)

    add("decoder.1", widths[0], channels, 3, True)
    for scale, time in enumerate(TIMES):
        width, layer = widths[scale], 3 + 6 * scale
        for block in range(layer, layer + 3):
            for index, inputs in [(0, 2 * width), (2, width), (4, width)]:
                add(f"decoder.{block}.conv.{index}", width, inputs, 3, True)
                if index == 4:
                    tensors[f"decoder.{block}.conv.4.weight"] *= 0.3
        trained = first_time if scale == 0 else time
        add(f"decoder.{layer + 4}.conv", trained * width, width, 1, False)
        add(f"decoder.{layer + 5}", widths[scale + 1], width, 3, False)
    add("decoder.22", 3 * patch * patch, widths[3], 3, True)
    tensors["decoder.22.weight"] *= 0.2
    tensors["decoder.22.bias"] += 0.5
    # The file has an encoder, too, which is not read.
    tensors["encoder.0.weight"] = torch.zeros(4, 3, 3, 3)
    return tensors


def decode(w: dict[str, torch.Tensor], latents: torch.Tensor, patch: int) -> torch.Tensor:
    def conv(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w[f"{name}.weight"], w.get(f"{name}.bias"), padding="same")

    batch = latents.shape[0]
    x = latents.transpose(1, 2).flatten(0, 1)
    x = conv("decoder.1", 3 * torch.tanh(x / 3)).relu()
    for scale, time in enumerate(TIMES):
        layer = 3 + 6 * scale
        for block in range(layer, layer + 3):
            frames = x.unflatten(0, (batch, -1))
            before = torch.cat([torch.zeros_like(frames[:, :1]), frames[:, :-1]], 1).flatten(0, 1)
            inner = conv(f"decoder.{block}.conv.0", torch.cat([x, before], 1)).relu()
            inner = conv(f"decoder.{block}.conv.2", inner).relu()
            x = (conv(f"decoder.{block}.conv.4", inner) + x).relu()
        x = F.interpolate(x, scale_factor=2, mode="nearest")
        width = x.shape[1]
        longer = F.conv2d(x, w[f"decoder.{layer + 4}.conv.weight"][-time * width :])
        x = conv(f"decoder.{layer + 5}", longer.unflatten(1, (time, width)).flatten(0, 1))
    x = conv("decoder.22", x.relu())
    x = F.pixel_shuffle(x, patch) if patch > 1 else x
    inside = ((x > 0) & (x < 1)).float().mean()
    assert inside > 0.8, f"only {inside:.0%} of the pixels are not clamped, so a test would see little"
    return (x.clamp(0, 1) * 2 - 1).unflatten(0, (batch, -1))[:, 3:].transpose(1, 2)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=OUT)
    root = parser.parse_args().out
    root.mkdir(parents=True, exist_ok=True)
    for name, (channels, widths, patch, shape, first_time) in MODELS.items():
        torch.manual_seed(5)
        tensors = weights(channels, widths, patch, first_time)
        latents = torch.randn(shape)
        frames = decode(tensors, latents, patch)
        save_file(tensors, root / f"{name}.safetensors")
        reference = {"latents": latents, "frames": frames.contiguous()}
        save_file(reference, root / f"{name}_reference.safetensors")


if __name__ == "__main__":
    main()
