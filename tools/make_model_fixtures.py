"""Tiny random models of each kind, with Hugging Face's logits, loss and gradients.

    pip install -r tools/requirements.txt && python tools/make_model_fixtures.py

Each folder below crates/ringspan-models/tests/fixtures gets config.json, safetensors, and reference.safetensors:
tokens i64 [B, S], logits f32 [B, S, V], loss f32 [1] (mean over all shifted targets), grad.<parameter> f32.
"""

import argparse
import copy
import pathlib
import shutil

import torch
from safetensors.torch import save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

ROWS, LENGTH = 2, 41

SIZES = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.15,
    attn_implementation="eager",
    bos_token_id=1,
    eos_token_id=2,
)

LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)

MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=LLAMA3, tie_word_embeddings=False)),
    "llama_tied": (LlamaForCausalLM, LlamaConfig(**SIZES | dict(num_key_value_heads=1, tie_word_embeddings=True))),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=False)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False)),
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=9, tie_word_embeddings=False)),
}

# What must change the logits, or the fixture would not show it.
ABLATIONS = {
    "llama": lambda config: setattr(config, "rope_parameters", dict(rope_type="default", rope_theta=10000.0)),
    "mistral": lambda config: setattr(config, "sliding_window", None),
}


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    """Norms and biases are 1 and 0 at first, which would hide a mistake in them."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.float().eval()


def write(name: str, out: pathlib.Path) -> None:
    kind, config = MODELS[name]
    torch.manual_seed(sum(map(ord, name)))
    model = randomised(kind(config))
    tokens = torch.randint(3, config.vocab_size, (ROWS, LENGTH))
    result = model(input_ids=tokens, use_cache=False)
    loss = torch.nn.functional.cross_entropy(
        result.logits[:, :-1].reshape(-1, config.vocab_size), tokens[:, 1:].reshape(-1)
    )
    loss.backward()
    if name in ABLATIONS:
        changed = copy.deepcopy(config)
        ABLATIONS[name](changed)
        other = kind(changed).float().eval()
        other.load_state_dict(model.state_dict())
        change = (other(input_ids=tokens, use_cache=False).logits - result.logits).abs().max().item()
        assert change > 1e-2, f"{name}: the special feature changes logits by {change} only"
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    # One model is sharded, to show that the index is read.
    model.save_pretrained(folder, max_shard_size="30KB" if name == "llama" else "1GB")
    (folder / "generation_config.json").unlink(missing_ok=True)
    reference = {"tokens": tokens, "logits": result.logits.detach(), "loss": loss.detach().reshape(1)}
    for parameter_name, parameter in model.named_parameters():
        reference[f"grad.{parameter_name}"] = parameter.grad
    save_file({key: value.contiguous() for key, value in reference.items()}, folder / "reference.safetensors")
    print(f"{name}: loss {loss.item():.6f}, {sum(p.numel() for p in model.parameters())} parameters")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("crates/ringspan-models/tests/fixtures"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in MODELS:
        write(name, arguments.out)


if __name__ == "__main__":
    main()
