"""Times a training step of Ringspan and of Hugging Face's model in PyTorch, in turn, in one run.

    pip install -r tools/requirements-bench.txt
    python tools/bench_training.py --lengths 4096 --threads 2

Both start from the same weights (a small Llama, random; `--tiny` takes one whose speed says nothing, to see that the script
works) and train on the same tokens in f32 with AdamW; before anything is timed, their losses of the first two steps are
compared. Machines drift, so the sides take turns in every round; what counts is the ratio, round by round: tokens a second
of Ringspan through those of PyTorch. Memory is the most that each process ever held, with its libraries.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import tempfile

from bench_peers import HERE, Worker, bound, machine

LR = 1e-4
# Upper limit of the relative distance of the losses: beyond it, another computation was timed.
TOLERANCE = 1e-4


SMALL = dict(
    hidden_size=512,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=32_000,
)
TINY = SMALL | dict(hidden_size=32, num_hidden_layers=2, head_dim=4, intermediate_size=48, vocab_size=96)


def model(folder: pathlib.Path, sizes: dict, length: int) -> pathlib.Path:
    import torch
    import transformers

    config = transformers.LlamaConfig(
        **sizes, max_position_embeddings=max(length, 4096), tie_word_embeddings=False
    )
    torch.manual_seed(7)
    path = folder / "model"
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def bench(arguments: argparse.Namespace) -> list[str]:
    # With the features of the whole workspace, so that an existing build can be used.
    return ["cargo", "bench", "--profile", arguments.profile, "--workspace", "--bench", "step"]


def ours(arguments: argparse.Namespace, path: pathlib.Path, length: int, steps: int) -> dict:
    command = [*bench(arguments), "-q", "--", "json", f"S={length}"]
    command += [f"model={path}", f"steps={steps}", f"ranks={arguments.ranks}", f"recompute={arguments.recompute}"]
    command += [f"activations={arguments.activations}"]
    command += [f"threads={max(arguments.threads // arguments.ranks, 1)}"]
    run = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, cwd=HERE.parent, preexec_fn=bound(arguments.threads)
    )
    return json.loads(run.stdout.strip().splitlines()[-1])


def measure(arguments: argparse.Namespace, length: int, checkpointing: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        sizes = TINY if arguments.tiny else SMALL
        path = model(pathlib.Path(name), sizes, length)
        # The same tokens as the benchmark in Rust makes.
        tokens = [(7919 * i + 13) % sizes["vocab_size"] for i in range(length)]
        job = dict(model=str(path), tokens=tokens, threads=arguments.threads, recompute=checkpointing, lr=LR)
        worker = Worker("torch_train.py", job, bound(arguments.threads))
        try:
            if reason := worker.about.get("missing"):
                raise SystemExit(f"PyTorch is missing: {reason}")
            first = ours(arguments, path, length, 2)
            theirs = [worker.about["loss"], worker.round()["loss"]]
            difference = max(abs(a / b - 1) for a, b in zip(first["losses"], theirs))
            if not difference <= TOLERANCE:
                raise SystemExit(f"S={length}: losses {first['losses']} and {theirs} differ by {difference:.1e}")
            ratios, speeds, memory = [], ([], []), None
            for _ in range(arguments.rounds):
                mine = ours(arguments, path, length, 3)
                other = worker.round()
                seconds = statistics.median(mine["seconds"])
                speeds[0].append(length / seconds)
                speeds[1].append(length / other["seconds"])
                ratios.append(other["seconds"] / seconds)
                memory = mine["resident_bytes"] / other["peak_bytes"]
        finally:
            worker.close()
    how = "checkpointed" if checkpointing else "all kept"
    mine, other = (statistics.median(speed) for speed in speeds)
    print(
        f"S={length} {arguments.ranks} ranks, recompute {arguments.recompute}, activations {arguments.activations}: "
        f"{mine:.0f} tokens/s; PyTorch "
        f"{worker.about['version']}, transformers {worker.about['transformers']}, {how}: {other:.0f}; ratio "
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}), memory {memory:.2f}, "
        f"losses differ by {difference:.0e}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=lambda text: [int(word) for word in text.split(",")], default=[4096])
    parser.add_argument("--threads", type=int, default=2, help="cores of each side")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of Ringspan that share the cores")
    parser.add_argument("--recompute", default="keep-attention", help="full, keep-attention, nothing")
    parser.add_argument("--activations", default="f32", help="f32, bf16")
    peers = ["whole", "checkpointed", "both"]
    parser.add_argument("--peer", default="both", choices=peers, help="PyTorch keeps all, recomputes, or both in turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a model of two narrow layers")
    parser.add_argument("--profile", default="bench", help="cargo's profile that Ringspan is built with")
    arguments = parser.parse_args()
    if arguments.threads % arguments.ranks:
        parser.error(f"{arguments.threads} cores do not divide among {arguments.ranks} ranks")
    subprocess.run([*bench(arguments), "--no-run"], check=True, cwd=HERE.parent)
    print(machine())
    for length in arguments.lengths:
        for checkpointing in {"whole": [False], "checkpointed": [True]}.get(arguments.peer, [False, True]):
            measure(arguments, length, checkpointing)


if __name__ == "__main__":
    main()
