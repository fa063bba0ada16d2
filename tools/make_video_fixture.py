"""Makes tiny random video transformers of WAN's kinds, with what diffusers computes with them.

    pip install -r tools/requirements-video.txt && python tools/make_video_fixture.py

Each folder below crates/ringspan-video/tests/fixtures/transformer has a model as diffusers saves it, and reference.safetensors:
the inputs of one forward pass and its `out`, all f32. `loops` has schedulers' configurations and, for each, the latents after
every step of four, with guidance; `golden.json` has numbers of a model whose weights and inputs are sines.
"""

import argparse
import copy
import json
import math
import pathlib

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanTransformer3DModel,
    WanVACETransformer3DModel,
)
from safetensors.torch import save_file

TINY = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 256,
    "ffn_dim": 32,
    "num_layers": 2,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 32,
}
STEPS = 4
GUIDANCE = 5.0


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def randomised(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Makes norms, biases and modulation random: their initial values, 1 and 0, would hide a mistake. All weights are numbers
    that bf16 can hold."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if name.startswith(("vace_blocks", "blocks")) and parameter.dim() == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
            elif parameter.dim() == 1 and name.endswith("weight"):
                parameter.copy_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
            parameter.copy_(parameter.bfloat16())
    return model.float().eval()


def saved(model: torch.nn.Module, folder: pathlib.Path, in_bf16: bool, shard: str | None = None) -> None:
    """Saves the model, in bf16 if asked for, which changes none of its weights. A copy is converted, since the rotary tables,
    which are not saved, would be rounded, too."""
    sizes = {"max_shard_size": shard} if shard else {}
    (copy.deepcopy(model).bfloat16() if in_bf16 else model).save_pretrained(folder, **sizes)


def transformer(seed: int, kind: type = WanTransformer3DModel, **more) -> torch.nn.Module:
    torch.manual_seed(seed)
    return randomised(kind(**(TINY | more)), seed)


def reference(folder: pathlib.Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: tensor.float().contiguous() for name, tensor in tensors.items()}, folder / "reference.safetensors")


def text_to_video(out: pathlib.Path) -> None:
    """Two batch rows with time steps of their own, a grid with three different sizes, and files that an index lists."""
    folder, model = out / "t2v", transformer(1)
    saved(model, folder, False, "60KB")
    inputs = {
        "hidden_states": random(11, 2, 4, 3, 8, 12),
        "timestep": torch.tensor([999.0, 314.5]),
        "encoder_hidden_states": random(12, 2, 12, 16),
    }
    reference(folder, inputs | {"out": model(**inputs, return_dict=False)[0]})


def image_to_video(out: pathlib.Path) -> None:
    """WAN 2.1's image conditioning. The text has 512 tokens, a number that diffusers has as a constant there."""
    folder, model = out / "i2v", transformer(2, in_channels=12, freq_dim=32, text_dim=4, image_dim=8, added_kv_proj_dim=24)
    saved(model, folder, True)
    inputs = {
        "hidden_states": random(21, 1, 12, 2, 8, 8),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": random(22, 1, 512, 4),
        "encoder_hidden_states_image": random(23, 1, 9, 8),
    }
    reference(folder, inputs | {"out": model(**inputs, return_dict=False)[0]})


def first_and_last_frame(out: pathlib.Path) -> None:
    """Image conditioning by two images, whose embeddings have learned positions."""
    folder = out / "flf2v"
    sizes = {"in_channels": 12, "freq_dim": 32, "text_dim": 4, "image_dim": 8, "added_kv_proj_dim": 24, "pos_embed_seq_len": 10}
    model = transformer(3, **sizes, num_layers=1)
    saved(model, folder, True)
    inputs = {
        "hidden_states": random(31, 1, 12, 2, 8, 8),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": random(32, 1, 512, 4),
        "encoder_hidden_states_image": random(33, 2, 5, 8),
    }
    reference(folder, inputs | {"out": model(**inputs, return_dict=False)[0]})


def token_timesteps(out: pathlib.Path) -> None:
    """TI2V: a time step for each token, 0 in the first frame. A head's width that splits unevenly over the axes, a norm less,
    another output width."""
    folder = out / "ti2v"
    sizes = {"attention_head_dim": 8, "num_attention_heads": 3, "out_channels": 6, "freq_dim": 32, "cross_attn_norm": False}
    model = transformer(4, **sizes)
    saved(model, folder, True)
    timestep = torch.full((2, 3, 4, 6), 720.25)
    timestep[1] = 31.0
    timestep[:, 0] = 0
    inputs = {
        "hidden_states": random(41, 2, 4, 3, 8, 12),
        "timestep": timestep.flatten(1),
        "encoder_hidden_states": random(42, 2, 7, 16),
    }
    reference(folder, inputs | {"out": model(**inputs, return_dict=False)[0]})


def controlled(out: pathlib.Path) -> None:
    """VACE: four layers, two of which add what control blocks compute."""
    folder = out / "vace"
    model = transformer(5, WanVACETransformer3DModel, num_layers=4, freq_dim=32, vace_layers=[0, 2], vace_in_channels=48)
    saved(model, folder, True)
    inputs = {
        "hidden_states": random(51, 1, 4, 2, 8, 8),
        "timestep": torch.tensor([250.0]),
        "encoder_hidden_states": random(52, 1, 12, 16),
        "control_hidden_states": random(53, 1, 48, 2, 8, 8),
        "control_hidden_states_scale": torch.tensor([0.75, 1.5]),
    }
    reference(folder, inputs | {"out": model(**inputs, return_dict=False)[0]})


SCHEDULERS = {
    "euler": FlowMatchEulerDiscreteScheduler(shift=7.0),
    "unipc": UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
    ),
}


def guided(scheduler, latents: torch.Tensor, velocity, guidance) -> dict[str, torch.Tensor]:
    """The latents after every step. `velocity(latents, time, which)` is the model's for the prompt (0) or the negative prompt
    (1); `guidance(time)` the factor of their difference."""
    scheduler.set_timesteps(STEPS)
    all_latents = []
    for time in scheduler.timesteps:
        with_prompt, without = velocity(latents, time, 0), velocity(latents, time, 1)
        guided = without + guidance(time) * (with_prompt - without)
        latents = scheduler.step(guided, time, latents, return_dict=False)[0]
        all_latents.append(latents)
    return {"steps": torch.stack(all_latents), "timesteps": scheduler.timesteps, "sigmas": scheduler.sigmas}


def loops(out: pathlib.Path) -> None:
    folder = out / "loops"
    prompts = [random(61, 1, 12, 16), random(62, 1, 12, 16)]
    start = random(63, 1, 4, 3, 8, 8)
    first, second = transformer(1), transformer(6)
    saved(second, folder / "transformer_2", True)
    tensors = {"prompt_embeds": prompts[0], "negative_prompt_embeds": prompts[1], "latents": start}
    boundary = 875.0

    def one(latents, time, which):
        return first(latents, time.expand(1), prompts[which], return_dict=False)[0]

    def two(latents, time, which):
        model = first if time >= boundary else second
        return model(latents, time.expand(1), prompts[which], return_dict=False)[0]

    # TI2V: the first frame is given; it has time step 0, and is put back at the end.
    condition = random(64, 1, 4, 1, 8, 8)
    free = torch.ones(1, 1, 3, 8, 8)
    free[:, :, 0] = 0

    def from_frame(latents, time, which):
        latents = (1 - free) * condition + free * latents
        times = (free[0, 0, :, ::2, ::2] * time).flatten().unsqueeze(0)
        return first(latents, times, prompts[which], return_dict=False)[0]

    tensors["condition"] = condition
    for name, scheduler in SCHEDULERS.items():
        scheduler.save_pretrained(folder / name)
        all_of = {
            "one": guided(scheduler, start, one, lambda _: GUIDANCE),
            "two": guided(scheduler, start, two, lambda time: 4.0 if time >= boundary else 3.0),
            "frame": guided(scheduler, start, from_frame, lambda _: GUIDANCE),
        }
        last = all_of["frame"]["steps"][-1]
        all_of["frame"]["out"] = (1 - free) * condition + free * last
        tensors |= {f"{name}.{loop}.{key}": tensor for loop, found in all_of.items() for key, tensor in found.items()}
    reference(folder, tensors)


def schedules(out: pathlib.Path) -> None:
    """Sigmas and time steps for many settings, and the steps of a velocity that is a formula: 0.5 x + sigma^2, from x = 1."""
    kinds = {
        "euler": lambda shift: FlowMatchEulerDiscreteScheduler(shift=shift),
        "unipc": lambda shift: UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
        ),
    }
    rows = []
    for kind, make in kinds.items():
        for shift, steps in [(1.0, 3), (3.0, 1), (3.0, 2), (3.0, 5), (5.0, 4), (7.0, 20), (3.0, 50)]:
            scheduler = make(shift)
            scheduler.set_timesteps(steps)
            x, path = torch.ones(1, 1, 1, dtype=torch.float64), []
            for index, time in enumerate(scheduler.timesteps):
                velocity = 0.5 * x + scheduler.sigmas[index].double() ** 2
                x = scheduler.step(velocity, time, x, return_dict=False)[0]
                path.append(x.item())
            times = [float(time) for time in scheduler.timesteps]
            row = {"kind": kind, "shift": shift, "steps": steps, "timesteps": times}
            rows.append(row | {"sigmas": [float(sigma) for sigma in scheduler.sigmas], "path": path})
    (out / "schedules.json").write_text(json.dumps(rows, indent=1) + "\n")


def golden(out: pathlib.Path) -> None:
    model = WanTransformer3DModel(**TINY).float().eval()
    with torch.no_grad():
        for n, (name, parameter) in enumerate(sorted(model.named_parameters())):
            at = torch.arange(parameter.numel(), dtype=torch.float64)
            one = float(name.endswith(("norm_q.weight", "norm_k.weight", "norm2.weight")))
            parameter.copy_((0.1 * torch.sin(0.7 * at + 1.3 * n) + one).view(parameter.shape))
    x = torch.sin(0.11 * torch.arange(2048, dtype=torch.float64) + 0.5).view(1, 4, 2, 16, 16)
    text = torch.cos(0.23 * torch.arange(192, dtype=torch.float64)).view(1, 12, 16)
    found = model(x.float(), torch.tensor([500.0]), text.float(), return_dict=False)[0].flatten().double()
    numbers = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "mean": found.mean().item(),
        "deviation": math.sqrt(found.var(unbiased=False).item()),
        "greatest": found.abs().max().item(),
        "first": found[:8].tolist(),
        "from_1000": found[1000:1004].tolist(),
        "last": found[-8:].tolist(),
    }
    (out / "golden.json").write_text(json.dumps(numbers, indent=1) + "\n")


@torch.no_grad()
def main() -> None:
    root = pathlib.Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=pathlib.Path, default=root / "crates/ringspan-video/tests/fixtures/transformer")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for make in (text_to_video, image_to_video, first_and_last_frame, token_timesteps, controlled, loops, schedules, golden):
        make(out)


if __name__ == "__main__":
    main()
