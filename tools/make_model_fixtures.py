"""Makes tiny random models of each kind, with Hugging Face's logits, loss and gradients.

    pip install -r tools/requirements.txt && python tools/make_model_fixtures.py

Each folder below crates/ringspan-models/tests/fixtures gets config.json, safetensors as published models have them, and
reference.safetensors: tokens i64 [B, S], logits f32 [B, S, V], loss f32 [1] (mean over all shifted targets),
grad.<parameter> f32 by its name and shape in the file. A model whose short rows are computed otherwise gets
short.safetensors with tokens and logits of one, too.
"""

import argparse
import copy
import fnmatch
import itertools
import json
import pathlib
import shutil
import tempfile

import torch
from safetensors.torch import load_file, save_file
from tiny_mixtures import SPARSE
from tiny_models import DENSE, Tiny
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

MODELS = DENSE | SPARSE
ROWS, LENGTH = 2, 41
# If the scores of two experts are closer than this, another rounding could change which of them is chosen.
MARGIN = 1e-4
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    """Makes norms and biases random: their initial values, 1 and 0, would hide a mistake."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            if parameter.dim() == 3:
                parameter.copy_(0.15 * torch.randn_like(parameter))
            if parameter.dim() == 2 and name.endswith("_bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith(".e_score_correction_bias"):
                buffer.add_(0.2 * torch.randn_like(buffer))
    return model.float().eval()


def in_mxfp4(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gives experts weights that MXFP4 can hold, and all others those of bf16. Returns the experts as they are stored:
    blocks u8 [E, out, in / 32, 16] of two codes a byte, and scales u8 [E, out, in / 32] of powers of 2."""
    stored = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameter.bfloat16())
            if name.endswith(EXPERTS):
                experts, inputs, outputs = parameter.shape
                scales = torch.randint(127 - 6, 127 - 2, (experts, outputs, inputs // 32), dtype=torch.uint8)
                blocks = torch.randint(0, 256, (*scales.shape, 16), dtype=torch.uint8)
                parameter.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
                stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return stored


def margin(router: torch.nn.Module, logits: torch.Tensor) -> float:
    """The smallest distance of scores between the last chosen and the first other expert, and so for groups of experts."""

    def gap(scores: torch.Tensor, chosen: int) -> float:
        ordered = scores.sort(dim=-1, descending=True).values
        return (ordered[:, chosen - 1] - ordered[:, chosen]).min().item()

    bias = getattr(router, "e_score_correction_bias", None)
    scores = logits if bias is None else logits.sigmoid() + bias
    if not getattr(router, "num_group", None):
        return gap(scores, router.top_k)
    grouped = scores.view(len(scores), router.num_group, -1)
    of_groups = grouped.topk(1 if bias is None else 2, dim=-1).values.sum(dim=-1)
    chosen = of_groups.topk(router.topk_group, dim=-1).indices
    allowed = torch.zeros_like(of_groups).scatter_(1, chosen, 1.0).bool()
    scores = grouped.masked_fill(~allowed.unsqueeze(-1), -1e9).flatten(1)
    return min(gap(of_groups, router.topk_group), gap(scores, router.top_k))


def smallest_margin(model: torch.nn.Module, tokens: torch.Tensor) -> float:
    margins = [float("inf")]
    for module in model.modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            module.register_forward_hook(lambda router, _, output: margins.append(margin(router, output[0])))
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    return min(margins)


def drawn(name: str, tiny: Tiny) -> tuple[torch.nn.Module, torch.Tensor, dict[str, torch.Tensor]]:
    """A model, tokens, and its experts in MXFP4, with the first seed for which routing does not depend on rounding."""
    for seed in itertools.count(sum(map(ord, name))):
        torch.manual_seed(seed)
        model = randomised(MODEL_FOR_CAUSAL_LM_MAPPING[type(tiny.config)](copy.deepcopy(tiny.config)))
        quantised = in_mxfp4(model) if tiny.mxfp4 else {}
        tokens = torch.randint(3, tiny.config.vocab_size, (ROWS, LENGTH))
        if smallest_margin(copy.deepcopy(model), tokens) > MARGIN:
            return model, tokens, quantised


def changed(model: torch.nn.Module, ablation: dict) -> torch.nn.Module:
    """A copy of the model without one of its features."""
    config, weights = copy.deepcopy(model.config), dict(model.state_dict())
    for key, value in copy.deepcopy(ablation).items():
        if "*" in key:
            names = fnmatch.filter(weights, key)
            assert names, f"there is no {key}"
            weights |= {name: torch.full_like(weights[name], value) for name in names}
        else:
            setattr(config, key, value)
    other = type(model)(config).float().eval()
    other.load_state_dict(weights)
    return other


def save(model: torch.nn.Module, quantised: dict[str, torch.Tensor], folder: pathlib.Path, shard: str) -> None:
    """Saves a folder as transformers does; with experts in MXFP4, as published, all other tensors are in bf16."""
    if quantised:
        model = copy.deepcopy(model).bfloat16()
    model.save_pretrained(folder, max_shard_size=shard)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if not quantised:
        return
    path = folder / "model.safetensors"
    kept = {name: weight for name, weight in load_file(path).items() if not name.endswith(EXPERTS)}
    save_file(kept | quantised, path, metadata={"format": "pt"})
    whole = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = dict(modules_to_not_convert=whole, quant_method="mxfp4")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gradients by the names, and in the shapes, in which transformers stores their parameters."""
    named = copy.deepcopy(model)
    for parameter, of in zip(named.parameters(), model.parameters()):
        parameter.data = of.grad
    with tempfile.TemporaryDirectory() as folder:
        named.save_pretrained(folder)
        stored = load_file(pathlib.Path(folder) / "model.safetensors")
    buffers = {name for name, _ in model.named_buffers()}
    return {f"grad.{name}": gradient for name, gradient in stored.items() if name not in buffers}


def write(name: str, out: pathlib.Path) -> None:
    tiny = MODELS[name]
    model, tokens, quantised = drawn(name, tiny)
    config = model.config
    result = model(input_ids=tokens, use_cache=False)
    loss = torch.nn.functional.cross_entropy(
        result.logits[:, :-1].reshape(-1, config.vocab_size), tokens[:, 1:].reshape(-1)
    )
    if getattr(config, "output_router_logits", False):
        loss = loss + config.router_aux_loss_coef * result.aux_loss
    loss.backward()
    for ablation in tiny.ablations:
        others = changed(model, ablation)(input_ids=tokens, use_cache=False).logits
        change = (others - result.logits).abs().max().item()
        assert change > 1e-2, f"{name}: {ablation} changes logits by {change} only"
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    # One model is split into several files, to show that the index is read.
    save(model, quantised, folder, shard="30KB" if name == "llama" else "1GB")
    reference = {"tokens": tokens, "logits": result.logits.detach(), "loss": loss.detach().reshape(1)}
    reference |= gradients(model)
    if quantised:  # Weights in MXFP4 are not trained.
        reference = {key: value for key, value in reference.items() if not key.endswith(EXPERTS)}
    save_file({key: value.contiguous() for key, value in reference.items()}, folder / "reference.safetensors")
    if tiny.short:
        row = tokens[:1, : tiny.short].contiguous()
        logits = model(input_ids=row, use_cache=False).logits.detach()
        change = (logits - result.logits[:1, : tiny.short]).abs().max().item()
        assert change > 1e-2, f"{name}: in a short row logits differ by {change} only"
        save_file({"tokens": row, "logits": logits}, folder / "short.safetensors")

    dequantise = dict(quantization_config=Mxfp4Config(dequantize=True)) if quantised else {}
    read = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **dequantise)
    apart = (read(input_ids=tokens, use_cache=False).logits - result.logits).abs().max().item()
    assert apart < 1e-5, f"{name}: what was written is read as another model, with logits that are {apart} apart"
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
