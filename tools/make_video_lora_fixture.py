"""Makes adapters of a tiny video transformer of WAN's, with what diffusers computes with them.

    pip install -r tools/requirements-video.txt && python tools/make_video_lora_fixture.py

Below crates/ringspan-video/tests/fixtures/lora are `diffusers` (a folder as `save_lora_weights` writes it, with an alpha in its
metadata), and files with the names of the original model: `original`, with alphas and with differences of biases and of a
weight, and `musubi`, with underscores. The model is that of the fixture `transformer/t2v`. reference.safetensors has the inputs
of a forward pass and, for each adapter, what `load_lora_weights` makes of it; `both` is the first two with scales of their own,
`steps` the latents after each of four steps of Euler's method with `original`, without guidance.
"""

import argparse
import pathlib

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
from diffusers.training_utils import _collate_lora_metadata
from make_video_fixture import random, reference, transformer
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import save_file

SCALES = {"diffusers": 0.5, "original": 1.25}


def pipeline() -> WanPipeline:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    return WanPipeline(tokenizer=None, text_encoder=None, vae=None, scheduler=scheduler, transformer=transformer(1))


def by_diffusers(out: pathlib.Path) -> None:
    """Attention and feed-forward; ranks and alphas differ between layers, and B is not 0."""
    model = transformer(1)
    targets = ["attn1.to_q", "attn1.to_out.0", "attn2.to_k", "ffn.net.0.proj", "ffn.net.2"]
    patterns = {"rank_pattern": {"ffn.net.2": 2}, "alpha_pattern": {"ffn.net.2": 3}}
    model.add_adapter(LoraConfig(r=3, lora_alpha=6, target_modules=targets, init_lora_weights=False, **patterns))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "lora_" in name:
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
    WanPipeline.save_lora_weights(
        out / "diffusers",
        transformer_lora_layers=get_peft_model_state_dict(model),
        transformer_lora_adapter_metadata=_collate_lora_metadata({"transformer": model})["transformer_lora_adapter_metadata"],
    )


def original(out: pathlib.Path) -> None:
    """As distilled adapters have them: products with alphas, and differences of biases and of the head's weight."""
    tensors, seed = {}, iter(range(100, 1000))

    # Diffusers takes such a file only if each layer has a difference of its bias.
    def product(name: str, inputs: int, outputs: int, rank: int, alpha: float | None) -> None:
        tensors[f"{name}.lora_down.weight"] = 0.15 * random(next(seed), rank, inputs)
        tensors[f"{name}.lora_up.weight"] = 0.15 * random(next(seed), outputs, rank)
        if alpha is not None:
            tensors[f"{name}.alpha"] = torch.tensor(alpha)
        tensors[f"{name}.diff_b"] = 0.1 * random(next(seed), outputs)

    for block in range(2):
        for attention in ["self_attn", "cross_attn"]:
            for layer in "qkvo":
                product(f"diffusion_model.blocks.{block}.{attention}.{layer}", 24, 24, 4, 2.0)
        product(f"diffusion_model.blocks.{block}.ffn.0", 24, 32, 4, 8.0)
        product(f"diffusion_model.blocks.{block}.ffn.2", 32, 24, 4, 8.0)
    product("diffusion_model.time_projection.1", 24, 144, 3, None)
    product("diffusion_model.text_embedding.0", 16, 24, 4, None)
    product("diffusion_model.text_embedding.2", 24, 24, 4, None)
    product("diffusion_model.time_embedding.0", 256, 24, 4, None)
    product("diffusion_model.time_embedding.2", 24, 24, 4, None)
    tensors["diffusion_model.head.head.diff"] = 0.1 * random(next(seed), 16, 24)
    tensors["diffusion_model.head.head.diff_b"] = 0.1 * random(next(seed), 16)
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, out / "original.safetensors")


def musubi(out: pathlib.Path) -> None:
    tensors, seed = {}, iter(range(1000, 2000))
    layers = [f"{attention}_{layer}" for attention in ["self_attn", "cross_attn"] for layer in "qkvo"]
    for block in range(2):
        for layer, inputs, outputs in [(layer, 24, 24) for layer in layers] + [("ffn_0", 24, 32), ("ffn_2", 32, 24)]:
            name = f"lora_unet_blocks_{block}_{layer}"
            tensors[f"{name}.lora_down.weight"] = 0.15 * random(next(seed), 4, inputs)
            tensors[f"{name}.lora_up.weight"] = 0.15 * random(next(seed), outputs, 4)
            tensors[f"{name}.alpha"] = torch.tensor(1.0)
    save_file({name: tensor.half() for name, tensor in tensors.items()}, out / "musubi.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = pathlib.Path(__file__).resolve().parent.parent / "crates/ringspan-video/tests/fixtures/lora"
    parser.add_argument("--out", type=pathlib.Path, default=default)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_grad_enabled(False)
    by_diffusers(out)
    original(out)
    musubi(out)
    files = {"diffusers": "diffusers", "original": "original.safetensors", "musubi": "musubi.safetensors"}
    inputs = {
        "hidden_states": random(11, 1, 4, 2, 6, 8),
        "timestep": torch.tensor([700.0]),
        "encoder_hidden_states": random(12, 1, 12, 16),
    }
    found = {}
    for name, file in files.items():
        pipe = pipeline()
        pipe.load_lora_weights(out / file) if (out / file).is_dir() else pipe.load_lora_weights(out, weight_name=file)
        found[name] = pipe.transformer(**inputs, return_dict=False)[0]
    pipe = pipeline()
    for name in SCALES:
        file = files[name]
        where = {} if (out / file).is_dir() else {"weight_name": file}
        pipe.load_lora_weights(out / file if not where else out, adapter_name=name, **where)
    pipe.set_adapters(list(SCALES), list(SCALES.values()))
    found["both"] = pipe.transformer(**inputs, return_dict=False)[0]
    pipe.set_adapters(["original"], [1.0])
    pipe.scheduler.set_timesteps(4)
    latents, steps = random(13, 1, 4, 2, 6, 8), []
    for time in pipe.scheduler.timesteps:
        text = inputs["encoder_hidden_states"]
        velocity = pipe.transformer(latents, encoder_hidden_states=text, timestep=time.expand(1), return_dict=False)[0]
        latents = pipe.scheduler.step(velocity, time, latents, return_dict=False)[0]
        steps.append(latents)
    found |= {"latents": random(13, 1, 4, 2, 6, 8), "steps": torch.stack(steps)}
    reference(out, inputs | found)


if __name__ == "__main__":
    main()
