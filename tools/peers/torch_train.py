"""Training steps of a Hugging Face model in PyTorch on the CPU: forward, backward, AdamW, in f32."""

import json
import os
import pathlib
import sys
import time


def peak_bytes() -> int:
    """The peak memory of this process, with all its libraries."""
    text = pathlib.Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("VmHWM"))


def main() -> None:
    # Libraries may print to standard output, so answers are written to a duplicate of it.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(message: dict) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    job = json.loads(sys.stdin.readline())
    try:
        import torch
        import transformers
    except ImportError as error:
        return answer(dict(missing=str(error)))
    torch.set_num_threads(job["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=torch.float32, attn_implementation="sdpa"
    )
    if job["recompute"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    model.config.use_cache = False
    model.train()
    constants = dict(lr=job["lr"], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), **constants)
    tokens = torch.tensor(job["tokens"])[None]

    def step() -> float:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    answer(dict(version=torch.__version__, transformers=transformers.__version__, loss=step()))
    for _ in sys.stdin:
        start = time.perf_counter()
        loss = step()
        answer(dict(seconds=time.perf_counter() - start, loss=loss, peak_bytes=peak_bytes()))


main()
