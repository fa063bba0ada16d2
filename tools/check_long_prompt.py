"""Prefills a prompt as long as asked on several numbers of ranks, chunk by chunk, and prints how fast it is read and what memory it takes;
checks that each rank caches its share of the pages, and that the text after the prompt is the same on every number of ranks.

    check_long_prompt.py PROGRAM                         131,072 tokens of a tiny random model on 1, 2 and 4 ranks, some minutes
    check_long_prompt.py PROGRAM --tokens 4096           some seconds
"""

import argparse
import json
import random
import re
import tempfile
import time
import urllib.request
from pathlib import Path

from tiny_server import server, write_model

# A token has keys and values of 2 heads of 8 floats in each of the 2 layers of the tiny model.
BYTES_PER_TOKEN = 256
PAGE = 64


def most_resident(process):
    """The most bytes of memory that a process has had; `None` where the system does not say."""
    try:
        return int(re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{process}/status").read_text())[1]) * 1024
    except OSError:
        return None


def ask(url, body):
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def read(program, folder, prompt, ranks, chunk):
    """Lets a server read the prompt; returns the tokens after it, seconds, bytes of memory it took beyond those of a short prompt,
    and the pages that each rank has of it."""
    pages = -(-(len(prompt) + 64) // PAGE)
    kv_cache = (-(-pages // ranks) + 1) * PAGE * BYTES_PER_TOKEN
    command = [program, "serve", "--model", str(folder), "--port", "0", "--ring", str(ranks), "--threads", "1", "--page", str(PAGE)]
    command += ["--kv-cache", str(kv_cache), "--prefill-chunk", str(chunk)]
    with server(command) as (url, process):
        # As many tokens as a step has, so that its buffers are there.
        ask(url, {"prompt": prompt[::-1][: 2 * chunk], "max_tokens": 2, "temperature": 0})
        before, began = most_resident(process), time.monotonic()
        answer = ask(url, {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True})
        seconds, after = time.monotonic() - began, most_resident(process)
        metrics = urllib.request.urlopen(url + "/metrics").read().decode()
    # The text's pages may still count as its request's.
    of_kind = lambda kind: map(float, re.findall(rf"^ringspan:kv_pages_{kind}\{{.*\}} (\S+)", metrics, re.MULTILINE))
    cached = [int(used + kept) for used, kept in zip(of_kind("used"), of_kind("cached"), strict=True)]
    return answer["choices"][0]["token_ids"], seconds, None if None in (before, after) else after - before, cached


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("program")
    parser.add_argument("--tokens", type=int, default=131072, help="tokens of the prompt")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a step")
    parser.add_argument("--ranks", default="1,2,4")
    arguments = parser.parse_args()
    draw = random.Random(2)
    # A beginning of its own, so that nothing of the prompt is cached before.
    prompt = [draw.randrange(97, 123) for _ in range(arguments.tokens)]
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), arguments.tokens + 64)
        expected = None
        for ranks in map(int, arguments.ranks.split(",")):
            tokens, seconds, memory, cached = read(arguments.program, folder, prompt, ranks, arguments.chunk)
            expected = expected or tokens
            assert tokens == expected, f"{ranks} ranks continue with {tokens} instead of {expected}"
            pages = arguments.tokens / PAGE
            share = max(abs(pages_of_rank - pages / ranks) for pages_of_rank in cached)
            # A page more or less, and up to two that were left of the first request.
            assert len(cached) == ranks and share <= 3, f"{ranks} ranks have cached {cached} pages of {pages:.0f}"
            grown = "" if memory is None else f"; memory grew by {memory / 1e6:.1f} MB"
            each = "/".join(f"{pages_of_rank * PAGE * BYTES_PER_TOKEN / 1e6:.1f}" for pages_of_rank in cached)
            print(f"{ranks} ranks: {arguments.tokens / seconds:.0f} tokens/s, cache by rank {each} MB{grown}", flush=True)
            # Keys and values of a token take 256 bytes here; its number in requests, texts and plans takes up to three times as much.
            most = arguments.tokens * (BYTES_PER_TOKEN + 800) + 48e6
            assert memory is None or memory < most, f"{ranks} ranks took {memory} bytes more than for a short prompt"


if __name__ == "__main__":
    main()
