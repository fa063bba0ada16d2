"""Makes the fixture of steps of training adapters of a tiny video transformer of WAN's by flow matching, with diffusers and PEFT on one process.

    pip install -r tools/requirements-video.txt && python tools/make_video_training_fixture.py

Below crates/ringspan-video/tests/fixtures/training: `initial` is an adapter as `save_lora_weights` writes it, of all layers that
can have one and with a B that is not 0, so that no gradient vanishes; data.safetensors has latents, prompts, noise and time
steps of two videos; reference.safetensors the loss of the first step and all its gradients, the losses of four steps of AdamW,
and the matrices after them. The model is that of the fixture `transformer/t2v`.
"""

import argparse
import pathlib

import torch
from diffusers import WanPipeline
from diffusers.training_utils import _collate_lora_metadata
from make_video_fixture import random, transformer
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import save_file

TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2", "time_proj", "linear_1", "linear_2", "proj_out"]
STEPS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = pathlib.Path(__file__).resolve().parent.parent / "crates/ringspan-video/tests/fixtures/training"
    parser.add_argument("--out", type=pathlib.Path, default=default)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    model = transformer(1)
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=3, lora_alpha=6, target_modules=TARGETS))
    trained = {name: parameter for name, parameter in sorted(model.named_parameters()) if parameter.requires_grad}
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in trained.values():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    WanPipeline.save_lora_weights(
        out / "initial",
        transformer_lora_layers=get_peft_model_state_dict(model),
        transformer_lora_adapter_metadata=_collate_lora_metadata({"transformer": model})["transformer_lora_adapter_metadata"],
    )
    data = {
        "latents": random(11, 2, 4, 2, 6, 4),
        "prompt_embeds": random(12, 2, 5, 16),
        "noise": random(13, 2, 4, 2, 6, 4),
        "timesteps": torch.tensor([850.0, 312.5]),
    }
    save_file(data, out / "data.safetensors")
    # Gradients of keys are small differences of large numbers, so f32 would not be good enough to compare with. The model
    # converts to f32 where it wants precision.
    torch.Tensor.float = torch.Tensor.double
    model.double()
    data = {name: tensor.double() for name, tensor in data.items()}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    sigma = (data["timesteps"] / 1000)[:, None, None, None, None]
    noisy = (1 - sigma) * data["latents"] + sigma * data["noise"]
    found, losses = {}, []
    plain = {name: name.replace(".default.weight", ".weight") for name in trained}
    for step in range(STEPS):
        velocity = model(noisy, data["timesteps"], data["prompt_embeds"], return_dict=False)[0]
        loss = (velocity - (data["noise"] - data["latents"])).square().mean()
        losses.append(loss.detach())
        loss.backward()
        if step == 0:
            found |= {f"gradient.{plain[name]}": parameter.grad.clone() for name, parameter in trained.items()}
        optimizer.step()
        optimizer.zero_grad()
    found |= {f"after.{plain[name]}": parameter.detach().clone() for name, parameter in trained.items()}
    found |= {"losses": torch.stack(losses)}
    save_file({name: tensor.to(torch.float32) for name, tensor in found.items()}, out / "reference.safetensors")


if __name__ == "__main__":
    main()
