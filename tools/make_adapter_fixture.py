"""A PEFT adapter on the tiny Llama of the model fixtures, with PEFT's logits, loss and gradients.

    pip install -r tools/requirements.txt && python tools/make_adapter_fixture.py

Writes crates/ringspan-models/tests/fixtures/llama_lora: the adapter as PEFT saves it, and reference.safetensors as
make_model_fixtures.py describes it, with the gradients of the adapter's matrices.
"""

import argparse
import json
import pathlib
import shutil

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

FIXTURES = pathlib.Path("crates/ringspan-models/tests/fixtures")
TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=FIXTURES / "llama_lora")
    out = parser.parse_args().out
    torch.manual_seed(11)
    model = LlamaForCausalLM.from_pretrained(FIXTURES / "llama", attn_implementation="eager").float()
    adapted = get_peft_model(model, LoraConfig(r=3, lora_alpha=12, target_modules=TARGETS, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:  # New adapters have 0 here, and then A has no gradient.
                parameter.normal_(0.0, 0.1)
    shutil.rmtree(out, ignore_errors=True)
    adapted.save_pretrained(out)
    (out / "README.md").unlink(missing_ok=True)
    config = json.loads((out / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "../llama"
    config["target_modules"] = sorted(config["target_modules"])
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True))

    tokens = load_file(FIXTURES / "llama" / "reference.safetensors")["tokens"]
    answer = adapted(input_ids=tokens, labels=tokens)
    answer.loss.backward()
    reference = {"tokens": tokens, "logits": answer.logits.detach(), "loss": answer.loss.detach().reshape(1)}
    for name, parameter in adapted.named_parameters():
        if parameter.grad is not None:
            plain = name.removeprefix("base_model.model.").replace(".default.", ".")
            reference[f"grad.{plain}"] = parameter.grad.contiguous()
    save_file(reference, out / "reference.safetensors")


if __name__ == "__main__":
    main()
