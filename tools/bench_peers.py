"""Times Ringspan and its peers on the same tensors, in turn, in one run.

    cargo build --release && pip install -r tools/requirements-bench.txt
    python tools/bench_peers.py --cases a,b --threads 1,2 --dtype f32
    python tools/bench_peers.py --cases a,f --threads 1,2 --dtype f32 --isa avx2 --peers torch

and on an NVIDIA GPU, with `cargo build --release --features cuda` and a PyTorch that has CUDA:

    python tools/bench_peers.py --device cuda --cases g --masks causal --dtype bf16
    python tools/bench_peers.py --device cuda --cases long --masks causal --dtype bf16 --peers alone --rings 8

Peers: PyTorch's scaled_dot_product_attention (one rank; on a GPU the fastest of FlashAttention's, cuDNN's and its own), a
ring written in JAX (as many devices as ranks), and Ringspan itself with one rank (`alone`), which shows what a ring costs: on
a CPU one of as many threads, on a GPU all ranks share it. One that is not installed is skipped. Machines drift, so all take turns in every round; what counts is the ratio, round by round:
seconds of the peer through seconds of Ringspan, above 1 where Ringspan is faster. Every contender is bound to as many
cores as it has threads, and all results are compared with Ringspan's before anything is timed. Seconds are those of the
computation: no contender's reading, compiling or first call counts.
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))

import numpy as np  # noqa: E402
import tensors  # noqa: E402

# S tokens, H query heads, G key-value heads, D head width.
CASES = {
    "a": (4096, 16, 16, 64),
    "b": (8192, 16, 4, 128),
    "c": (16384, 8, 2, 128),
    "f": (4096, 16, 4, 128),
    "g": (16384, 16, 16, 128),
    "long": (65536, 16, 16, 128),
    "tiny": (256, 4, 2, 32),
}
# Upper limit of the relative L2 distance from Ringspan: beyond it, another computation was timed.
TOLERANCE = {"f32": 1e-4, "bf16": 3e-2}


@dataclass(frozen=True)
class Run:
    case: str
    mask: str
    dtype: str
    ring: int
    threads: int
    device: str
    isa: str

    def name(self) -> str:
        s, h, g, d = CASES[self.case]
        device = self.device if self.isa == "auto" else self.isa
        return f"S={s} H={h} G={g} D={d} {self.mask} {self.dtype} {device} ring {self.ring} x {self.threads}"

    def environment(self) -> dict:
        """Environment variables with which PyTorch uses the same instruction set."""
        avx2 = dict(ATEN_CPU_CAPABILITY="avx2", ONEDNN_MAX_CPU_ISA="AVX2", MKL_ENABLE_INSTRUCTIONS="AVX2")
        return dict(os.environ, **(avx2 if self.isa == "avx2" else {}))

    def cores(self) -> int:
        return self.ring * self.threads

    def bind(self):
        """A `preexec_fn` that binds the process to its cores; on a GPU it may use all."""
        return bound(self.cores()) if self.device == "cpu" else None


def bound(threads: int):
    """A `preexec_fn` that binds a child process to as many cores as it has threads, where the system can bind."""

    def bind() -> None:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])

    return bind


class Ringspan:
    def __init__(self, run: Run, binary: pathlib.Path, source: pathlib.Path, folder: pathlib.Path, repeat: int):
        self.out, self.report = folder / "out.safetensors", folder / "report.json"
        self.bind = run.bind()
        self.command = [binary, "attend", source, "--out", self.out, "--report", self.report, "--mask", run.mask]
        self.command += ["--backward", "--ring", run.ring, "--repeat", repeat]
        self.command += ["--device", "cuda"] if run.device == "cuda" else ["--threads", run.threads, "--isa", run.isa]
        self.command = [str(part) for part in self.command]

    def round(self) -> dict:
        subprocess.run(self.command, check=True, stdout=subprocess.DEVNULL, preexec_fn=self.bind)
        report = json.loads(self.report.read_text())
        forward = report["seconds_forward"]
        return dict(forward=forward, both=forward + report["seconds_backward"])


class Alone(Ringspan):
    """Ringspan with one rank that has the threads of all ranks of the run."""

    def __init__(self, run: Run, binary: pathlib.Path, source: pathlib.Path, folder: pathlib.Path, repeat: int):
        super().__init__(replace(run, ring=1, threads=run.cores()), binary, source, folder / "alone", repeat)
        self.out.parent.mkdir()
        self.round()
        found = tensors.difference(tensors.read(folder / "out.safetensors"), tensors.read(self.out))
        how = f"{run.cores()} threads" if run.device == "cpu" else "the same GPU"
        self.about = dict(version="1 rank", how=how, difference=found)

    def close(self) -> None:
        pass


class Worker:
    """Times a peer in a process of its own (see peers/worker.py)."""

    def __init__(self, script: str, job: dict, bind, environment: dict | None = None):
        command = [sys.executable, str(HERE / "peers" / script)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=bind, env=environment
        )
        self.about = self.ask(job)

    def ask(self, message) -> dict:
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args[-1]} ended with status {self.process.wait()}")
        return json.loads(line)

    def round(self) -> dict:
        return self.ask("round")

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def takes_part(peer: str, run: Run, arguments: argparse.Namespace) -> bool:
    # PyTorch is run without a ring, and a device of JAX has no threads of its own.
    return run.ring == 1 if peer == "torch" else run.threads == 1 and run.ring in arguments.rings


def measure(run: Run, arguments: argparse.Namespace, missing: dict) -> list[dict]:
    """Prints one line for each peer."""
    s, h, g, d = CASES[run.case]
    random = np.random.default_rng(7)
    values = {
        name: random.standard_normal((1, s, heads, d), np.float32)
        for name, heads in (("q", h), ("k", g), ("v", g), ("d_out", h))
    }
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        source = folder / "in.safetensors"
        tensors.write(source, values, run.dtype)
        del values
        ringspan = Ringspan(run, arguments.binary, source, folder, arguments.repeat)
        ringspan.round()
        job = asdict(run) | dict(input=str(source), ours=str(ringspan.out), repeat=arguments.repeat)
        peers = {}
        try:
            for peer in arguments.peers:
                if peer in missing or not takes_part(peer, run, arguments):
                    continue
                if peer == "alone":
                    worker = Alone(run, arguments.binary, source, folder, arguments.repeat)
                else:
                    worker = Worker({"torch": "torch_sdpa.py", "jax": "jax_ring.py"}[peer], job, run.bind(), run.environment())
                if reason := worker.about.get("missing"):
                    missing[peer] = reason
                    print(f"{peer} is skipped: {reason}", file=sys.stderr)
                    continue
                if not worker.about["difference"] <= TOLERANCE[run.dtype]:
                    raise SystemExit(f"{run.name()}: {peer} differs from Ringspan by {worker.about['difference']:.1e}")
                peers[peer] = worker
            if not peers:
                return []
            rounds = [
                {"ringspan": ringspan.round()} | {peer: worker.round() for peer, worker in peers.items()}
                for _ in range(arguments.rounds)
            ]
        finally:
            for worker in peers.values():
                worker.close()
    return [line(run, peer, worker.about, rounds) for peer, worker in peers.items()]


def line(run: Run, peer: str, about: dict, rounds: list[dict]) -> dict:
    result = asdict(run) | dict(name=run.name(), peer=peer) | about | dict(rounds=rounds)
    for what in ("forward", "both"):
        ours, theirs = ([entry[who][what] for entry in rounds] for who in ("ringspan", peer))
        ratios = [b / a for a, b in zip(ours, theirs)]
        result[what] = dict(
            ringspan=statistics.median(ours),
            peer=statistics.median(theirs),
            ratio=statistics.median(ratios),
            ratios=[min(ratios), max(ratios)],
        )
    return result


def show(result: dict) -> None:
    columns = [f"{result['name']:47} {result['peer'] + ' ' + result['version']:20}"]
    for what in ("forward", "both"):
        times = result[what]
        low, high = times["ratios"]
        columns.append(f"{times['ringspan']:8.4g} {times['peer']:8.4g} {times['ratio']:5.2f} ({low:.2f}-{high:.2f})")
    print("  ".join(columns), f" {result['difference']:.0e}  {result['how']}", flush=True)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> str:
    model = platform.processor() or platform.machine()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [text.split(":", 1)[1].strip() for text in cpuinfo.read_text().splitlines() if "model name" in text]
        model = names[0] if names else model
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{model}, {cores()} cores{load}, {platform.system()}, Python {platform.python_version()}"


def main() -> None:
    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    def numbers(text: str) -> list[int]:
        return [int(word) for word in words(text)]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=pathlib.Path, default=HERE.parent / "target" / "release" / "ringspan")
    shapes = "S, H, G, D: " + ", ".join(f"{name} {shape}" for name, shape in CASES.items())
    parser.add_argument("--cases", type=words, default=["a", "b", "c"], help=shapes)
    parser.add_argument("--masks", type=words, default=["causal", "full"])
    parser.add_argument("--dtype", type=words, default=["f32", "bf16"], help="f32, bf16")
    parser.add_argument("--threads", type=numbers, default=[1, 2], help="threads of one rank, compared with PyTorch")
    parser.add_argument("--rings", type=numbers, default=[2], help="ranks of one thread each, compared with JAX and one rank")
    parser.add_argument("--isa", choices=["auto", "avx2"], default="auto", help="instructions of Ringspan and PyTorch on a CPU")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--peers", type=words, help="torch, jax, alone (torch and jax on a CPU, torch on a GPU)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=3, help="calls in a round, of which the median counts")
    parser.add_argument("--json", type=pathlib.Path, help="write all times here")
    arguments = parser.parse_args()
    arguments.peers = arguments.peers or (["torch", "jax"] if arguments.device == "cpu" else ["torch"])
    if arguments.isa != "auto" and (arguments.device == "cuda" or "jax" in arguments.peers):
        parser.error("--isa is for Ringspan and PyTorch on a CPU: add --peers torch, alone or both")
    if arguments.device == "cuda" and "jax" in arguments.peers:
        parser.error("the ring in JAX runs on CPUs; possible with --device cuda are torch, alone")
    for given, known in ((arguments.cases, CASES), (arguments.dtype, TOLERANCE), (arguments.peers, ["torch", "jax", "alone"])):
        if unknown := [word for word in given if word not in known]:
            parser.error(f"unknown: {', '.join(unknown)}; possible are {', '.join(known)}")
    if not arguments.binary.is_file():
        parser.error(f"there is no {arguments.binary}; build it with `cargo build --release`")

    version = subprocess.run([arguments.binary, "--version"], check=True, capture_output=True, text=True).stdout.strip()
    print(f"{machine()}; {version}; {arguments.rounds} rounds, each the median of {arguments.repeat} calls")
    print("ratio: seconds of the peer / seconds of Ringspan, median (least-most) of the rounds")
    head = f"{'ringspan':>8} {'peer':>8} {'ratio':>17}"
    print(f"{'':47} {'':20}  {head:35}  {head:35}")
    print(f"{'':47} {'':20}  {'forward, s':>35}  {'forward + backward, s':>35}")
    # On a GPU the number of threads has no effect.
    threads = arguments.threads if arguments.device == "cpu" else [1]
    meshes = [(1, threads) for threads in threads if "torch" in arguments.peers]
    meshes += [(ring, 1) for ring in arguments.rings if set(arguments.peers) & {"jax", "alone"}]
    if arguments.device == "cpu" and (crowded := [mesh for mesh in meshes if mesh[0] * mesh[1] > cores()]):
        print(f"note: {cores()} cores are fewer than ring x threads of {crowded}", file=sys.stderr)
    missing, results = {}, []
    for case in arguments.cases:
        for mask in arguments.masks:
            for dtype in arguments.dtype:
                for ring, threads in dict.fromkeys(meshes):
                    for result in measure(Run(case, mask, dtype, ring, threads, arguments.device, arguments.isa), arguments, missing):
                        show(result)
                        results.append(result)
    if arguments.json:
        about = dict(machine=machine(), ringspan=version, repeat=arguments.repeat, missing=missing, results=results)
        arguments.json.write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    main()
