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
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
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

LINEAR = dict(rope_type="linear", rope_theta=10000.0, factor=2.5)
# The fixture's rows are longer than what the model was trained with.
DYNAMIC = dict(rope_type="dynamic", rope_theta=10000.0, factor=3.0)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16)
YARN_FINE = YARN | dict(beta_fast=2.0, beta_slow=0.5, truncate=False, mscale=0.7, mscale_all_dim=1.3)

# Two local layers, a global one, and another local one; windows shorter than a row.
GEMMA3 = SIZES | dict(
    num_hidden_layers=4,
    layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    head_dim=16,
    query_pre_attn_scalar=24,
    sliding_window=9,
    tie_word_embeddings=True,
    rope_parameters={
        "full_attention": dict(rope_type="linear", rope_theta=1000000.0, factor=8.0),
        "sliding_attention": dict(rope_type="default", rope_theta=10000.0),
    },
)

# Sparse and dense layers; more experts than are chosen.
MOE = SIZES | dict(
    num_hidden_layers=3,
    head_dim=16,
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    norm_topk_prob=True,
    output_router_logits=False,
    tie_word_embeddings=False,
)

MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=LLAMA3, tie_word_embeddings=False)),
    "llama_tied": (LlamaForCausalLM, LlamaConfig(**SIZES | dict(num_key_value_heads=1, tie_word_embeddings=True))),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=False)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False)),
    "llama_linear": (LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=LINEAR, tie_word_embeddings=True)),
    "llama_dynamic": (
        LlamaForCausalLM,
        LlamaConfig(**SIZES | dict(max_position_embeddings=16), rope_parameters=DYNAMIC, tie_word_embeddings=True),
    ),
    "qwen2_yarn": (
        Qwen2ForCausalLM,
        Qwen2Config(**SIZES | dict(max_position_embeddings=64), rope_parameters=YARN, tie_word_embeddings=True),
    ),
    "qwen3_yarn": (
        Qwen3ForCausalLM,
        Qwen3Config(
            **SIZES | dict(max_position_embeddings=64), head_dim=16, rope_parameters=YARN_FINE, tie_word_embeddings=True
        ),
    ),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig(**GEMMA3)),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**MOE, mlp_only_layers=[1])),
    "qwen3_moe_balanced": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **MOE
            | dict(norm_topk_prob=False, output_router_logits=True, num_experts_per_tok=3, num_hidden_layers=2),
            decoder_sparse_step=1,
            router_aux_loss_coef=0.5,
        ),
    ),
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=9, tie_word_embeddings=False)),
}



def plain_rope(config) -> None:
    config.rope_parameters = dict(rope_type="default", rope_theta=10000.0)


# What must change the logits, or the fixture would not show it.
ABLATIONS = {
    "gemma3": lambda config: setattr(config, "query_pre_attn_scalar", 16),
    "qwen3_moe": lambda config: setattr(config, "norm_topk_prob", False),
    "qwen2_yarn": plain_rope,
    "qwen3_yarn": plain_rope,
    "llama_linear": plain_rope,
    "llama_dynamic": plain_rope,
    "llama": plain_rope,
    "mistral": lambda config: setattr(config, "sliding_window", None),
}


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    """Norms and biases are 1 and 0 at first, which would hide a mistake in them."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            if parameter.dim() == 3:
                parameter.copy_(0.15 * torch.randn_like(parameter))
    return model.float().eval()


def as_stored(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Experts are one tensor in memory and many in files."""
    if name.endswith(".experts.gate_up_proj"):
        pairs = [(f"{name[:-13]}.{i}", expert.chunk(2)) for i, expert in enumerate(tensor)]
        return [(f"{at}.{part}.weight", half) for at, both in pairs for part, half in zip(("gate_proj", "up_proj"), both)]
    if name.endswith(".experts.down_proj"):
        return [(f"{name[:-10]}.{i}.down_proj.weight", expert) for i, expert in enumerate(tensor)]
    return [(name, tensor)]


def write(name: str, out: pathlib.Path) -> None:
    kind, config = MODELS[name]
    torch.manual_seed(sum(map(ord, name)))
    model = randomised(kind(config))
    tokens = torch.randint(3, config.vocab_size, (ROWS, LENGTH))
    result = model(input_ids=tokens, use_cache=False)
    loss = torch.nn.functional.cross_entropy(
        result.logits[:, :-1].reshape(-1, config.vocab_size), tokens[:, 1:].reshape(-1)
    )
    if getattr(config, "output_router_logits", False):
        loss = loss + config.router_aux_loss_coef * result.aux_loss
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
        reference |= {f"grad.{key}": value for key, value in as_stored(parameter_name, parameter.grad)}
    save_file({key: value.contiguous() for key, value in reference.items()}, folder / "reference.safetensors")
    print(f"{name}: loss {loss.item():.6f}, {sum(p.numel() for p in model.parameters())} parameters")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("crates/ringspan-models/tests/fixtures"))
    parser.add_argument("names", nargs="*", default=list(MODELS), help="models to make [all]")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.names:
        write(name, arguments.out)


if __name__ == "__main__":
    main()
