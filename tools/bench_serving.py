"""Times prefill and decode of `ringspan serve` and of llama.cpp's server, in turn, in one run, over HTTP.

    pip install -r tools/requirements-bench-serving.txt
    cargo build --release
    python tools/bench_serving.py target/release/ringspan model.gguf --depths 0,4096,16384 --threads 2

Both read the same GGUF file and get the same prompts as token ids. Prefill is the length of a prompt through the time to its first
token; decode is the number of further tokens through the time that they took. No prompt begins like one before it, so nothing is taken
from a prefix cache. Each round starts both servers anew, one after the other, so that only one has the processors; machines drift, and
what counts is the ratio, round by round. A depth of 0 is a prompt of 16 tokens, whose prefill is not reported.

`--ours NAME=FLAGS` (repeatable) also times the same server with other flags, such as `--ours "two ranks=--ring 2 --threads 1"`.
`--torch` also times a model of Hugging Face on PyTorch, in f32, which answers one request at a time; it needs
tools/requirements.txt too.
`--turns N` compares decoding alone, and more closely: all servers run at once, and answer the same prompts N times in turn, while the
others wait. All but the first answer find their prompt in the prefix cache (PyTorch's server has none, and reads it again). Each turn takes seconds, so machines drift less between the
sides of a ratio, and the middle half of the ratios is printed, too.
`--streams N` also sends N prompts of 16 tokens at once, and reports how many tokens a second all get together. With
`--alone`, only this server is timed. `--tiny` in place of a model takes a random one, alone, whose speed says nothing, to see that the
script works.
"""

import argparse
import concurrent.futures
import contextlib
import json
import pathlib
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

import tiny_server
import torch_server

SHORT = 16
PEER = "llama.cpp"
TORCH = "PyTorch"


def prompt(length: int, seed: int, tiny: bool) -> list[int]:
    # Ids below 2,000 are special tokens or bytes in many vocabularies; the tiny model has 256 bytes and no others.
    first, count = (0, 256) if tiny else (2_000, 5_000)
    return [first + (index * 7_919 + seed * 104_729) % count for index in range(length)]


def complete(url: str, tokens: list[int], count: int) -> tuple[float, float]:
    """Seconds to the first token, and seconds a token after it."""
    body = dict(prompt=tokens, max_tokens=count, temperature=0, ignore_eos=True, stream=True)
    body |= dict(stream_options=dict(include_usage=True), model="bench")
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began, first, last, generated = time.perf_counter(), None, None, None
    try:
        response = urllib.request.urlopen(request, timeout=1_200)
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{url}, a prompt of {len(tokens)} tokens: {error}: {error.read().decode(errors='replace')}")
    with response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            now, event = time.perf_counter(), json.loads(line[6:])
            if event.get("error"):
                raise SystemExit(f"{url}: {event['error']}")
            if event.get("usage"):
                generated = event["usage"]["completion_tokens"]
            if event.get("choices"):
                first, last = first or now, now
    if generated != count:
        raise SystemExit(f"{url}: {generated} tokens instead of {count}")
    return first - began, (last - first) / max(count - 1, 1)


@contextlib.contextmanager
def ringspan(arguments: argparse.Namespace, flags: str):
    command = [arguments.program, "serve", "--model", arguments.model, "--model-name", "bench", "--port", "0"]
    command += shlex.split(flags)
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said: list[str] = []
    # What the server says is kept for the case that it fails; a full pipe would stop it.
    reader = threading.Thread(target=lambda: said.extend(server.stderr), daemon=True)
    reader.start()
    try:
        line = server.stdout.readline()
        if "listening on " not in line:
            server.wait(10)
            raise SystemExit(f"{shlex.join(command)} did not start:\n{''.join(said)}")
        yield line.split("listening on ")[1].strip()
    finally:
        server.terminate()
        server.wait(30)


def serve_peer(arguments: argparse.Namespace) -> None:
    """Runs another server in this process: PyTorch's, or llama.cpp's until its standard input ends."""
    if arguments.serve_peer == TORCH:
        return torch_server.serve(pathlib.Path(arguments.model), arguments.threads)
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.port, params.warmup = arguments.model, 0, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = arguments.threads
    slots = max(arguments.streams, 1)
    params.n_parallel, params.kv_unified = slots, True
    params.n_ctx = max(arguments.depths) + slots * (SHORT + arguments.tokens) + 64
    server = xllamacpp.Server(params)
    print(f"listening on {server.listening_address}", flush=True)
    sys.stdin.read()


@contextlib.contextmanager
def peer(arguments: argparse.Namespace, name: str):
    command = [sys.executable, __file__, arguments.program, arguments.model, "--serve-peer", name]
    command += ["--threads", str(arguments.threads), "--streams", str(arguments.streams)]
    command += ["--tokens", str(arguments.tokens), "--depths", ",".join(map(str, arguments.depths))]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        for line in server.stdout:
            if "listening on http" in line:
                yield line.split("listening on ")[1].strip()
                return
        raise SystemExit(f"the server of {name} did not start")
    finally:
        server.kill()
        server.wait()


def measure(url: str, arguments: argparse.Namespace, seed: int) -> dict[str, float]:
    def tokens(length: int, number: int) -> list[int]:
        return prompt(length, seed + number, arguments.tiny)

    complete(url, tokens(SHORT, 1), 8)
    result = {}
    for depth in arguments.depths:
        first, between = complete(url, tokens(max(depth, SHORT), 2 + depth), arguments.tokens)
        if depth > 0:
            result[f"prefill of {depth}"] = depth / first
        result[f"decode at {depth}"] = 1 / between
    if arguments.streams > 1:
        began = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(arguments.streams) as pool:
            prompts = [tokens(SHORT, 100_000 + stream) for stream in range(arguments.streams)]
            list(pool.map(lambda prompt: complete(url, prompt, arguments.tokens), prompts))
        result[f"{arguments.streams} streams"] = arguments.streams * arguments.tokens / (time.perf_counter() - began)
    return result


def decode_in_turn(sides: dict, arguments: argparse.Namespace) -> None:
    """Prints the speed of decoding behind each depth, of servers that answer the same prompts in turn."""
    with contextlib.ExitStack() as stack:
        urls = {name: stack.enter_context(start()) for name, start in sides.items()}
        reference = PEER if PEER in sides else "ringspan"
        print("tokens a second, medians; after them, as a multiple of", reference, "in each turn: lower quartile, median, upper quartile")
        for depth in arguments.depths:
            tokens = prompt(max(depth, SHORT), depth, arguments.tiny)
            for url in urls.values():
                complete(url, tokens, 8)
            speeds: dict[str, list[float]] = {name: [] for name in urls}
            for turn in range(arguments.turns):
                # Each side comes first in every other turn.
                for name in list(urls)[:: -1 if turn % 2 else 1]:
                    speeds[name].append(1 / complete(urls[name], tokens, arguments.tokens)[1])
            print(f"decode at {depth}")
            for name, own in speeds.items():
                ratios = [mine / its for mine, its in zip(own, speeds[reference])]
                quartiles = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
                shown = "" if name == reference else "  " + " ".join(f"{ratio:.2f}" for ratio in quartiles)
                print(f"    {name:>12} {statistics.median(own):>8.1f}{shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--depths", type=lambda text: [int(depth) for depth in text.split(",")], default=[0, 4096])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--streams", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--turns", type=int, default=0)
    parser.add_argument("--flags", default="", help="further flags of `ringspan serve`")
    parser.add_argument("--ours", action="append", default=[], metavar="NAME=FLAGS")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--serve-peer", choices=[PEER, TORCH], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.turns and (arguments.streams or arguments.rounds):
        parser.error("--turns has neither --streams nor --rounds")
    arguments.streams, arguments.rounds = arguments.streams or 1, arguments.rounds or 2
    if arguments.serve_peer:
        return serve_peer(arguments)
    if (arguments.model is None) != arguments.tiny:
        parser.error("a model, or --tiny in its place")
    if not arguments.tiny:
        return compare(arguments)
    with tempfile.TemporaryDirectory() as folder:
        tiny_server.write_model(pathlib.Path(folder))
        arguments.model, arguments.alone = folder, True
        compare(arguments)


def compare(arguments: argparse.Namespace) -> None:
    sides = {"ringspan": lambda: ringspan(arguments, f"--threads {arguments.threads} {arguments.flags}")}
    for other in arguments.ours:
        name, flags = other.split("=", 1)
        sides[name] = lambda flags=flags: ringspan(arguments, f"{flags} {arguments.flags}")
    if not arguments.alone:
        sides[PEER] = lambda: peer(arguments, PEER)
    if arguments.torch:
        sides[TORCH] = lambda: peer(arguments, TORCH)
    if arguments.turns:
        return decode_in_turn(sides, arguments)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for turn in range(arguments.rounds):
        for name, start in sides.items():
            with start() as url:
                rounds[name].append(measure(url, arguments, 1_000_000 * turn))
    reference = PEER if PEER in sides else "ringspan"
    print("tokens a second, medians; after them, by rounds, as a multiple of", reference)
    for what in rounds["ringspan"][0]:
        print(what)
        for name, results in rounds.items():
            ratios = [mine[what] / its[what] for mine, its in zip(results, rounds[reference])]
            shown = "" if name == reference else "  " + " ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"    {name:>12} {statistics.median(result[what] for result in results):>8.1f}{shown}")


if __name__ == "__main__":
    main()
