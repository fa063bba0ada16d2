"""Makes a PEFT adapter on the tiny Qwen3-MoE of the model fixtures, with PEFT's logits, loss and gradients.

    pip install -r tools/requirements.txt
    pip install --no-deps --target experts -r tools/requirements-experts.txt
    PYTHONPATH=experts python tools/make_expert_adapter_fixture.py

This script needs its own versions: since transformers 5 the experts of a mixture are two tensors and no linear layers, so
`all-linear` gives them no adapters. Older packages for this script alone are in a folder that is searched first, so that both
versions share one PyTorch.
Writes crates/ringspan-models/tests/fixtures/qwen3_moe_lora, as make_adapter_fixture.py does llama_lora; the
router has an adapter, too.
"""

import argparse
import json
import pathlib
import shutil

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

FIXTURES = pathlib.Path("crates/ringspan-models/tests/fixtures")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=FIXTURES / "qwen3_moe_lora")
    out = parser.parse_args().out
    torch.manual_seed(13)
    given = load_file(FIXTURES / "qwen3_moe" / "reference.safetensors")
    # The file was written by transformers 5, which has another name for the number of experts.
    config = Qwen3MoeConfig.from_pretrained(FIXTURES / "qwen3_moe")
    config.num_experts = config.num_local_experts
    model = Qwen3MoeForCausalLM.from_pretrained(FIXTURES / "qwen3_moe", config=config, attn_implementation="eager")
    model = model.float()
    apart = (model(input_ids=given["tokens"]).logits - given["logits"]).norm() / given["logits"].norm()
    assert apart < 1e-5, f"the model is read as another one: logits are {apart} apart"
    adapted = get_peft_model(model, LoraConfig(r=2, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:  # In a new adapter B is 0, so A would have no gradient.
                parameter.normal_(0.0, 0.1)
    shutil.rmtree(out, ignore_errors=True)
    adapted.save_pretrained(out)
    (out / "README.md").unlink(missing_ok=True)
    config = json.loads((out / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "../qwen3_moe"
    config["target_modules"] = sorted(config["target_modules"])
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True))

    answer = adapted(input_ids=given["tokens"], labels=given["tokens"])
    answer.loss.backward()
    reference = {"tokens": given["tokens"], "logits": answer.logits.detach(), "loss": answer.loss.detach().reshape(1)}
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            plain = name.removeprefix("base_model.model.").replace(".default.", ".")
            # An expert to which no token was routed has no gradient.
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            reference[f"grad.{plain}"] = gradient.contiguous()
    save_file(reference, out / "reference.safetensors")


if __name__ == "__main__":
    main()
