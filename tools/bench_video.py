"""Times stages of a video in turn with `ringspan` and with diffusers and PyTorch, in one run, on as many threads.

    pip install -r tools/requirements-video.txt
    cargo build --release
    python tools/bench_video.py target/release/ringspan --threads 2

`block`: a step of a transformer with blocks of WAN 2.1 1.3B (width 1536, 12 heads, feed-forward 8960), random weights, and 8,192 tokens.
A step is the time of a run of several steps without that of a run of one, so that reading of weights does not count.
`decode`: 9 frames of 256 x 256 from latents, with WAN 2.1's autoencoder and random weights. Here the whole command counts, with
starting and reading, and only PyTorch's imports do not; memory is what the process has at most, and for PyTorch what is beyond its
imports.

Each is timed on one rank of all threads and on two ranks that share them. `--tiny` takes tiny sizes, whose speed says nothing, to see
that the script works.
"""

import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

PEER = "diffusers"


def rows(tiny: bool) -> dict[str, dict]:
    """The configurations of the models and the shapes of latents `[B, C, F, H, W]`."""
    heads, layers, feed_forward, text = (2, 1, 64, 32) if tiny else (12, 2, 8960, 4096)
    return {
        "block": {
            "config": {
                "patch_size": [1, 2, 2], "num_attention_heads": heads, "attention_head_dim": 16 if tiny else 128,
                "in_channels": 16, "out_channels": 16, "text_dim": text, "freq_dim": 256, "ffn_dim": feed_forward,
                "num_layers": layers, "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads",
            },
            "latents": [1, 16, 2, 8, 8] if tiny else [1, 16, 8, 64, 64],
        },
        "decode": {
            "config": {"base_dim": 4, "num_res_blocks": 1} if tiny else {},
            "latents": [1, 16, 3, 4, 4] if tiny else [1, 16, 3, 32, 32],
        },
    }  # fmt: skip


def make(folder: pathlib.Path, tiny: bool) -> None:
    """Writes both models with random weights, and the inputs."""
    import torch
    from diffusers import AutoencoderKLWan, WanTransformer3DModel
    from safetensors.torch import save_file

    torch.manual_seed(1)
    cases = rows(tiny)
    WanTransformer3DModel(**cases["block"]["config"]).save_pretrained(folder / "block")
    AutoencoderKLWan(**cases["decode"]["config"]).save_pretrained(folder / "decode")
    text = cases["block"]["config"]["text_dim"]
    embeds = {"prompt_embeds": torch.randn(1, 512, text), "latents": torch.randn(cases["block"]["latents"])}
    save_file(embeds, folder / "embeds.safetensors")
    save_file({"latents": torch.randn(cases["decode"]["latents"])}, folder / "latents.safetensors")


def run(command: list) -> tuple[float, int]:
    """Seconds that a command takes, and bytes that it has at most."""
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen([str(word) for word in command], stdout=said, stderr=said, env={**os.environ, "NO_COLOR": "1"})
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        took = time.perf_counter() - began
        said.seek(0)
        if process.returncode != 0:
            raise SystemExit(f"{' '.join(map(str, command))} failed:\n{said.read()}")
    return took, usage.ru_maxrss * 1024


def ringspan(program: str, folder: pathlib.Path, case: str, mesh: list[str], steps: int) -> dict[str, float]:
    out = ["--out", folder / "out.safetensors"]
    if case == "decode":
        took, memory = run([program, "decode-latents", "--model", folder / case, "--latents", folder / "latents.safetensors", *out, *mesh])
        return {"seconds": took, "memory": memory}

    def denoise(steps: int) -> float:
        model = ["--model", folder / case, "--embeds", folder / "embeds.safetensors", "--guidance", "1", "--scheduler", "euler"]
        return run([program, "denoise", *model, "--steps", str(steps), *out, *mesh])[0]

    return {"seconds": (denoise(1 + steps) - denoise(1)) / steps}


def resident() -> int:
    """Bytes that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peer(folder: pathlib.Path, case: str, threads: int, steps: int) -> dict[str, float]:
    """Runs in a process of its own, so that its memory is only that of this case."""
    import torch
    from diffusers import AutoencoderKLWan, WanTransformer3DModel
    from safetensors.torch import load_file

    torch.set_num_threads(threads)
    imported, began = resident(), time.perf_counter()
    with torch.no_grad():
        if case == "decode":
            latents = load_file(folder / "latents.safetensors")["latents"]
            AutoencoderKLWan.from_pretrained(folder / case).eval().decode(latents)
            return {"seconds": time.perf_counter() - began, "memory": resident() - imported}
        model, inputs = WanTransformer3DModel.from_pretrained(folder / case).eval(), load_file(folder / "embeds.safetensors")
        times = []
        for _ in range(1 + steps):
            began = time.perf_counter()
            model(inputs["latents"], torch.tensor([500.0]), inputs["prompt_embeds"])
            times.append(time.perf_counter() - began)
        return {"seconds": sum(times[1:]) / steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--cases", type=lambda text: text.split(","), default=["block", "decode"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="steps of `block` that are timed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flags", default="", help="further flags of `ringspan`")
    parser.add_argument("--alone", action="store_true", help="without diffusers")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--folder", type=pathlib.Path, help="keeps the models here")
    parser.add_argument("--peer", choices=["make", "block", "decode"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer == "make":
        return make(arguments.folder, arguments.tiny)
    if arguments.peer:
        return print(json.dumps(peer(arguments.folder, arguments.peer, arguments.threads, arguments.steps)))
    if arguments.folder:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        return compare(arguments)
    with tempfile.TemporaryDirectory() as folder:
        arguments.folder = pathlib.Path(folder)
        compare(arguments)


def compare(arguments: argparse.Namespace) -> None:
    folder, threads = arguments.folder, arguments.threads
    again = [sys.executable, __file__, arguments.program, "--folder", str(folder), "--threads", str(threads)]
    again += ["--steps", str(arguments.steps)] + ["--tiny"] * arguments.tiny
    if not (folder / "latents.safetensors").exists():
        subprocess.run([*again, "--peer", "make"], check=True)
    for case in arguments.cases:
        flags = arguments.flags.split()
        meshes = {"one rank": ["--threads", str(threads)], "two ranks": ["--ring", "2", "--threads", str(max(threads // 2, 1))]}
        sides = {
            name: lambda mesh=mesh: ringspan(arguments.program, folder, case, mesh + flags, arguments.steps)
            for name, mesh in meshes.items()
        }
        if not arguments.alone:
            sides[PEER] = lambda: json.loads(subprocess.run([*again, "--peer", case], check=True, stdout=subprocess.PIPE).stdout)
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        for _ in range(arguments.rounds):
            for name, measure in sides.items():
                rounds[name].append(measure())
        reference = PEER if PEER in sides else "one rank"
        print(f"{case}: medians of seconds; after them, by rounds, the speed as a multiple of that of {reference}")
        for name, results in rounds.items():
            ratios = [its["seconds"] / mine["seconds"] for mine, its in zip(results, rounds[reference])]
            line = f"    {name:>10} {statistics.median(result['seconds'] for result in results):>8.2f}"
            line += "" if name == reference else "  " + " ".join(f"{ratio:.2f}" for ratio in ratios)
            if "memory" in results[0]:
                line += f"  {max(result['memory'] for result in results) / 1e6:.0f} MB"
            print(line, flush=True)


if __name__ == "__main__":
    main()
