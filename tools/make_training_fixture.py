"""Makes the fixture of ten steps of PyTorch's AdamW on a tiny Llama, which `ringspan train --tokens` must reproduce.

    pip install -r tools/requirements.txt && python tools/make_training_fixture.py

Writes model/ (the weights before the first step), tokens.safetensors (tokens i64 [B, S], lengths i32 [B]) and
losses.json below crates/ringspan-train/tests/fixtures/ten_steps. Every step takes the whole batch; the loss is the sum
over valid targets divided by their number; matrices decay, vectors do not.
"""

import argparse
import json
import pathlib
import shutil

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

LENGTHS = [48, 37]
STEPS, WARMUP, LR, DECAY, BETAS, EPS, CLIP = 10, 2, 1e-2, 0.1, (0.9, 0.95), 1e-8, 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("crates/ringspan-train/tests/fixtures/ten_steps")
    )
    out = parser.parse_args().out
    torch.set_num_threads(1)
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.1,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).float()
    shutil.rmtree(out, ignore_errors=True)
    model.save_pretrained(out / "model")
    (out / "model" / "generation_config.json").unlink(missing_ok=True)
    tokens = torch.randint(3, 96, (len(LENGTHS), max(LENGTHS)))
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    save_file({"tokens": tokens, "lengths": lengths}, out / "tokens.safetensors")

    valid = torch.arange(max(LENGTHS))[None] < lengths[:, None]
    labels = torch.where(valid, tokens, -100)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    losses, norms = [], []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / WARMUP)
        logits = model(input_ids=tokens, attention_mask=valid.long(), use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 96), labels[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        losses.append(loss.item())
    report = {
        "losses": losses,
        "grad_norms": norms,
        "steps": STEPS,
        "warmup": WARMUP,
        "schedule": "constant",
        "lr": LR,
        "weight_decay": DECAY,
        "beta1": BETAS[0],
        "beta2": BETAS[1],
        "eps": EPS,
        "grad_clip": CLIP,
    }
    (out / "losses.json").write_text(json.dumps(report, indent=2) + "\n")
    print(losses)


if __name__ == "__main__":
    main()
