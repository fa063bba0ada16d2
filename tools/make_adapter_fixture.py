"""Makes PEFT adapters on the tiny models of the model fixtures, with PEFT's logits, loss and gradients.

    pip install -r tools/requirements.txt && python tools/make_adapter_fixture.py

Writes llama_lora and the folders of adapters into crates/ringspan-models/tests/fixtures, or into --out: each an adapter as PEFT saves
it, and reference.safetensors as make_model_fixtures.py describes it, with the gradients of the adapter's matrices.
"""

import argparse
import json
import os
import pathlib
import shutil
import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

FIXTURES = pathlib.Path("crates/ringspan-models/tests/fixtures")
TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]

# For each folder: the base model, and the arguments of PEFT's LoraConfig.
ADAPTERS = {
    "llama_lora": ("llama", {"r": 3, "lora_alpha": 12, "target_modules": TARGETS}),
    # The layers are given by one regular expression with a lookahead, ranks and alphas by others.
    "adapters/regex": (
        "llama",
        {
            "r": 3,
            "lora_alpha": 5,
            "target_modules": r"model\.layers\.\d+\.(?!mlp\.up)(self_attn\.[qv]_proj|mlp\.(gate|up|down)_proj)",
            "exclude_modules": r".*\.1\.self_attn\.v_proj",
            "rank_pattern": {"down_proj": 5, r"^model\.layers\.0\.self_attn\.q_proj": 2},
            "alpha_pattern": {"q_proj|gate_proj": 9, "mlp": 1},
        },
    ),
    # Layers are given by names of several parts and by numbers, and scaled by the root of the rank.
    "adapters/layers": (
        "gemma3",
        {
            "r": 4,
            "lora_alpha": 3,
            "target_modules": ["q_proj", "self_attn.k_proj", "mlp.down_proj", "model.layers.1.mlp.gate_proj"],
            "layers_to_transform": [0, 2],
            "layers_pattern": "layers",
            "exclude_modules": ["layers.0.self_attn.k_proj"],
            "rank_pattern": {"2.mlp.down_proj": 2},
            "alpha_pattern": {"k_proj": 7.5},
            "use_rslora": True,
        },
    ),
    "adapters/one_layer": ("llama", {"r": 2, "lora_alpha": 4, "target_modules": ["v_proj"], "layers_to_transform": 1}),
}


def moved(adapted: torch.nn.Module) -> None:
    """Draws B at random, as if the adapter had been trained: in a new adapter B is 0, so A would have no gradient."""
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1)


def load(base: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(FIXTURES / base, attn_implementation="eager").float()


def clean(out: pathlib.Path, folder: str, base: str) -> None:
    """Completes a folder that PEFT saved: its configuration names the base model by its place among the fixtures."""
    (out / "README.md").unlink(missing_ok=True)
    path = out / "adapter_config.json"
    config = json.loads(path.read_text())
    config["base_model_name_or_path"] = os.path.relpath(FIXTURES / base, FIXTURES / folder)
    for key in ["target_modules", "exclude_modules"]:
        if isinstance(config[key], list):
            config[key] = sorted(config[key])
    path.write_text(json.dumps(config, indent=2, sort_keys=True))


def save_reference(out: pathlib.Path, base: str, adapted: torch.nn.Module) -> None:
    tokens = load_file(FIXTURES / base / "reference.safetensors")["tokens"]
    answer = adapted(input_ids=tokens, labels=tokens)
    answer.loss.backward()
    reference = {"tokens": tokens, "logits": answer.logits.detach(), "loss": answer.loss.detach().reshape(1)}
    for name, parameter in adapted.named_parameters():
        if parameter.grad is not None:
            plain = name.removeprefix("base_model.model.").replace(".default.", ".")
            reference[f"grad.{plain}"] = parameter.grad.contiguous()
    save_file(reference, out / "reference.safetensors")


def make(root: pathlib.Path, folder: str, base: str, asked: dict) -> None:
    torch.manual_seed(11)
    out = root / folder
    adapted = get_peft_model(load(base), LoraConfig(task_type="CAUSAL_LM", **asked))
    moved(adapted)
    shutil.rmtree(out, ignore_errors=True)
    adapted.save_pretrained(out)
    clean(out, folder, base)
    save_reference(out, base, adapted)


def make_converted(root: pathlib.Path, folder: str, base: str) -> None:
    """PiSSA changes its base model when it begins; PEFT can convert the adapter to one for the unchanged model."""
    torch.manual_seed(11)
    out = root / folder
    asked = LoraConfig(
        r=3, lora_alpha=6, target_modules=["q_proj", "o_proj"], init_lora_weights="pissa", task_type="CAUSAL_LM"
    )
    adapted = get_peft_model(load(base), asked)
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as first:
        # PEFT converts by comparing with the initial adapter, which must not be initialised by PiSSA again when it is loaded.
        adapted.peft_config["default"].init_lora_weights = True
        adapted.save_pretrained(first)
        adapted.peft_config["default"].init_lora_weights = "pissa"
        moved(adapted)
        adapted.save_pretrained(out, path_initial_model_for_weight_conversion=first)
    clean(out, folder, base)
    # The unchanged model with the converted adapter must equal the trained model.
    again = PeftModel.from_pretrained(load(base), out, is_trainable=True)
    tokens = load_file(FIXTURES / base / "reference.safetensors")["tokens"]
    wanted = adapted(input_ids=tokens).logits
    apart = (again(input_ids=tokens).logits - wanted).norm() / wanted.norm()
    assert apart < 1e-5, f"PEFT's conversion is {apart} apart from what was trained"
    save_reference(out, base, again)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=FIXTURES)
    root = parser.parse_args().out
    for folder, (base, asked) in ADAPTERS.items():
        make(root, folder, base, asked)
    make_converted(root, "adapters/pissa_converted", "llama")


if __name__ == "__main__":
    main()
