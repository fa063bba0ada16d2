"""Times the gaps between tokens of streams of `ringspan serve` before and while a long prompt is read.

    cargo build --release
    python tools/bench_gaps.py target/release/ringspan model.gguf --threads 2 --streams 1,4 --prompt 8192

Prints the gap without the prompt, the mean of the medians before and after it is read (since the texts of the streams grow meanwhile), and, as
multiples of that, the gaps with and without the prompt: the median, the 95th and 99th percentile, the longest, and the share within three
times; and the longest as a multiple of the median of the same gaps. Those without it show how far the machine's own steps are apart; the
longer `--seconds`, the more there are. `--tiny` in place of a model takes a random one, whose speed says nothing, to see that the script
works.
"""

import argparse
import json
import pathlib
import statistics
import tempfile
import threading
import time
import urllib.request

import bench_serving
import tiny_server


def stream(url: str, tokens: list[int], stop: threading.Event, times: list[float]) -> None:
    """Appends when each token of a text comes, until it ends or `stop` is set."""
    # A text may fill the context, so that it does not end before a long prompt is read.
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as response:
        longest = json.load(response)["data"][0]["max_model_len"]
    most = longest - len(tokens)
    body = dict(prompt=tokens, max_tokens=most, temperature=0, ignore_eos=True, stream=True, model="bench")
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=1_200) as response:
        for line in response:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
            if stop.is_set():
                return


def gaps(streams: list[list[float]], begin: float, end: float) -> list[float]:
    return [b - a for times in streams for a, b in zip(times, times[1:]) if begin <= a and b <= end]


def described(gaps: list[float], alone: float) -> str:
    times = sorted(gap / alone for gap in gaps)
    at = lambda share: times[int(share * (len(times) - 1))]
    within = sum(gap <= 3 for gap in times) / len(times)
    return (
        f"{statistics.median(times):.2f} times in the median, {at(0.95):.2f} and {at(0.99):.2f} in the 95th and 99th percentile, "
        f"{times[-1]:.2f} at most, {100 * within:.1f}% within 3; at most {times[-1] / statistics.median(times):.2f} times their own median"
    )


def measure(url: str, count: int, arguments: argparse.Namespace) -> None:
    stop, streams = threading.Event(), [[] for _ in range(count)]
    clients = []
    for number, times in enumerate(streams):
        tokens = bench_serving.prompt(16, 1_000 * count + number, arguments.tiny)
        clients.append(threading.Thread(target=stream, args=(url, tokens, stop, times)))
    for client in clients:
        client.start()
    time.sleep(arguments.seconds)
    begin = time.perf_counter()
    seconds, _ = bench_serving.complete(url, bench_serving.prompt(arguments.prompt, 77 + count, arguments.tiny), 1)
    end = begin + seconds
    # Nothing is compiled or measured for the first time in the second half of the time before.
    around = arguments.seconds / 2
    time.sleep(around)
    stop.set()
    for client in clients:
        client.join()
    before, after = gaps(streams, begin - around, begin), gaps(streams, end, end + around)
    during = gaps(streams, begin, end)
    if not before or not during or not after:
        raise SystemExit(f"{count} streams ended before the prompt was read: a shorter --prompt")
    alone = (statistics.median(before) + statistics.median(after)) / 2
    print(f"{count} streams: {1e3 * alone:.1f} ms between tokens; a prompt of {arguments.prompt} took {seconds:.1f} s")
    print(f"  while it was read: {described(during, alone)}")
    print(f"  before and after:  {described(before + after, alone)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--streams", type=lambda text: [int(count) for count in text.split(",")], default=[1, 4])
    parser.add_argument("--prompt", type=int, default=8_192)
    parser.add_argument("--seconds", type=float, default=4, help="time before the prompt; its second half counts, and as much after")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--flags", default="", help="further flags of `ringspan serve`")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    if (arguments.model is None) != arguments.tiny:
        parser.error("a model, or --tiny in its place")
    with tempfile.TemporaryDirectory() as folder:
        if arguments.tiny:
            tiny_server.write_model(pathlib.Path(folder))
            arguments.model = folder
        with bench_serving.ringspan(arguments, f"--threads {arguments.threads} {arguments.flags}") as url:
            for count in arguments.streams:
                measure(url, count, arguments)


if __name__ == "__main__":
    main()
