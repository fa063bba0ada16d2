"""Makes WAN's autoencoder with tiny random weights: latents that diffusers decodes to frames, and the latents that it encodes these to.

    pip install -r tools/requirements-video.txt && python tools/make_video_vae_fixture.py

Writes crates/ringspan-video/tests/fixtures/vae, or --out: folders as diffusers saves them, each with reference.safetensors, which
has `latents` [1,C,F,H,W] as a transformer gives them (normalised by the configuration's mean and standard deviation), the `frames`
[1,3,F,H,W] that they are decoded to, and `encoded`, the normalised mode of the posterior of these frames.
"""

import argparse
import pathlib
import shutil

import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import save_file

OUT = pathlib.Path("crates/ringspan-video/tests/fixtures/vae")

# For each folder: the model's configuration, and the shape of its latents.
MODELS = {
    # The configuration of diffusers' own tests.
    "tiny": (
        {"base_dim": 3, "z_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1},
        [1, 16, 3, 4, 3],
    ),
    # Channels that change, several residual blocks, and time that is halved at the first level only.
    "wide": (
        {
            "base_dim": 4,
            "z_dim": 3,
            "dim_mult": [1, 2, 2],
            "num_res_blocks": 2,
            "temperal_downsample": [True, False],
            "scale_factor_temporal": 2,
            "scale_factor_spatial": 4,
            "latents_mean": [0.3, -0.2, 0.1],
            "latents_std": [1.5, 0.7, 2.0],
        },
        [1, 3, 5, 5, 4],
    ),
    # WAN 2.2's autoencoder of its 5B model: shortcuts around the resampling, and patches of 2 x 2 pixels.
    "residual": (
        {
            "base_dim": 4,
            "decoder_base_dim": 4,
            "z_dim": 4,
            "dim_mult": [1, 2, 2, 2],
            "num_res_blocks": 1,
            "is_residual": True,
            "in_channels": 12,
            "out_channels": 12,
            "patch_size": 2,
            "scale_factor_spatial": 16,
            "latents_mean": [0.3, -0.2, 0.1, 0.4],
            "latents_std": [1.5, 0.7, 2.0, 0.9],
        },
        [1, 4, 3, 2, 3],
    ),
}


def randomized(model: torch.nn.Module) -> None:
    """Draws gains and biases, which are 1 and 0 in a new model, at random, so that no test passes without them."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gamma"):
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))


@torch.no_grad()
def make(out: pathlib.Path, config: dict, shape: list[int]) -> None:
    torch.manual_seed(3)
    model = AutoencoderKLWan(**config).eval()
    randomized(model)
    shutil.rmtree(out, ignore_errors=True)
    model.save_pretrained(out)
    statistics = [model.config.latents_mean, model.config.latents_std]
    mean, std = (torch.tensor(values).reshape(1, -1, 1, 1, 1) for values in statistics)
    latents = torch.randn(shape)
    frames = model.decode(latents * std + mean).sample
    inside = (frames.abs() < 1).float().mean()
    assert inside > 0.9, f"only {inside:.0%} of the elements are not clamped, so a test would see little"
    encoded = (model.encode(frames).latent_dist.mode() - mean) / std
    reference = {"latents": latents, "frames": frames, "encoded": encoded}
    save_file({name: tensor.contiguous() for name, tensor in reference.items()}, out / "reference.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=OUT)
    root = parser.parse_args().out
    for folder, (config, shape) in MODELS.items():
        make(root / folder, config, shape)


if __name__ == "__main__":
    main()
