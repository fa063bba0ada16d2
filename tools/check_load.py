"""Loads `ringspan serve` with many streaming clients at a time, some of which leave, and with malformed bodies; checks that every
stream has its own whole text, that every malformed body is refused, that nothing is left at the end, and that memory does not grow
after warm-up.

    check_load.py PROGRAM                                                             a few seconds
    check_load.py PROGRAM --clients 200 --seconds 180 --longest-prompt 16000          the whole load
    check_load.py PROGRAM -- --ring 2 --max-running 16                                with further flags of `ringspan serve`
"""

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
import time
from pathlib import Path

from tiny_server import server, write_model

# A token has keys and values of 2 heads of 8 floats in each of the 2 layers of the tiny model.
BYTES_PER_TOKEN = 256

# Bodies that no request may have, and the statuses that fit.
MALFORMED = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe{}",
    b'{"prompt": 1.5, "stream": true}',
    b'{"prompt": "x", "max_tokens": -1}',
    b'{"prompt": "x", "max_tokens": "many"}',
    b'{"prompt": "x", "temperature": 1e999}',
    b'{"prompt": "x", "stream": true, "top_p": 7}',
    b'{"prompt": [], "stream": true}',
    b'{"prompt": [999999], "stream": true}',
    b'{"prompt": "x", "model": "another"}',
    b'{"prompt": "x", "stop": [1, 2]}',
    b'{"prompt": "x", "guided_regex": "("}',
    b"[" * 5000,
]


class Refused(Exception):
    """The server answered with an error."""


class Load:
    def __init__(self, address, seed, positions):
        self.host, self.port = address.removeprefix("http://").split(":")
        self.random = random.Random(seed)
        self.malformed = [*MALFORMED, json.dumps({"prompt": "a" * (positions + 1)}).encode()]
        self.texts = {}
        self.done = {"streams": 0, "left": 0, "malformed": 0, "hung up": 0}
        self.problems = []

    async def connect(self):
        return await asyncio.open_connection(self.host, int(self.port))

    async def send(self, method, path, body=b"", length=None):
        """Sends a request; returns the connection and the status once the head of the answer has come."""
        reader, writer = await self.connect()
        head = f"{method} {path} HTTP/1.0\r\nhost: load\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body) if length is None else length}\r\n\r\n".encode() + body)
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        return reader, writer, int(head.split()[1])

    async def get(self, path):
        reader, writer, status = await self.send("GET", path)
        body = await reader.read()
        writer.close()
        return status, body.decode()

    async def stream(self, prompt, max_tokens, leave_after=None):
        """The text of a streamed completion; `None` if this client left before its end."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True, "ignore_eos": True}
        reader, writer, status = await self.send("POST", "/v1/completions", json.dumps(body).encode())
        try:
            if status != 200:
                raise Refused(f"{status}: {(await reader.read()).decode()}")
            text, events, ended = "", 0, False
            while True:
                line = await reader.readline()
                if not line:
                    raise Refused("the stream broke off")
                if not line.startswith(b"data: "):
                    continue
                if line.strip() == b"data: [DONE]":
                    if not ended:
                        raise Refused("the stream ended without a finish_reason")
                    return text
                event = json.loads(line[6:])
                if "error" in event:
                    raise Refused(event["error"])
                for choice in event["choices"]:
                    text += choice["text"]
                    ended |= choice["finish_reason"] is not None
                events += 1
                if leave_after is not None and events > leave_after:
                    return None
        finally:
            writer.close()

    async def prepare(self, prompts, longest):
        """Asks for the text of every prompt while nobody else does. The shortest prompt has one token, the longest `longest`."""
        for number in range(prompts):
            # Short ones are frequent, as with users: the logarithms of lengths are uniform.
            length = round(longest ** (number if number < 2 else self.random.random()))
            prompt = "".join(self.random.choice("abcdefgh \n") for _ in range(length))
            max_tokens = self.random.randrange(1, 64)
            self.texts[prompt, max_tokens] = await self.stream(prompt, max_tokens)

    async def client(self, until):
        while time.monotonic() < until:
            kind = self.random.random()
            (prompt, max_tokens), expected = self.random.choice(list(self.texts.items()))
            try:
                if kind < 0.7:
                    text = await self.stream(prompt, max_tokens)
                    if text != expected:
                        self.problems.append(f"a prompt of {len(prompt)} got {text!r} instead of {expected!r}")
                    self.done["streams"] += 1
                elif kind < 0.85:
                    await self.stream(prompt, max_tokens, self.random.randrange(8))
                    self.done["left"] += 1
                elif kind < 0.9:
                    # Hangs up in the middle of its body.
                    _, writer = await self.connect()
                    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: load\r\ncontent-length: 1000\r\n\r\n{")
                    await writer.drain()
                    writer.close()
                    self.done["hung up"] += 1
                else:
                    body = self.random.choice(self.malformed)
                    reader, writer, status = await self.send("POST", "/v1/completions", body)
                    answer = await reader.read()
                    writer.close()
                    if not 400 <= status < 500 or "message" not in json.loads(answer)["error"]:
                        self.problems.append(f"{body[:60]} got {status}: {answer[:200]}")
                    self.done["malformed"] += 1
            except (Refused, OSError, asyncio.IncompleteReadError, ValueError, KeyError) as problem:
                self.problems.append(f"{type(problem).__name__}: {problem}")

    async def rests(self):
        """Waits until nothing runs or waits and no page is in use."""
        for _ in range(100):
            status, metrics = await self.get("/metrics")
            left = re.findall(r"^(?:vllm:num_requests_\w+|ringspan:kv_pages_used)\{.*\} (\S+)", metrics, re.MULTILINE)
            if status == 200 and len(left) > 2 and not any(map(float, left)):
                return (await self.get("/health"))[0] == 200
            await asyncio.sleep(0.1)
        return False


def resident(process):
    """Bytes of memory that a process has; `None` where the system does not say."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * 4096
    except OSError:
        return None


async def run(address, process, positions, arguments):
    load = Load(address, arguments.seed, positions)
    await load.prepare(arguments.prompts, arguments.longest_prompt)
    lengths = sorted(len(prompt) for prompt, _ in load.texts)
    print(f"prompts of {lengths[0]} to {lengths[-1]} tokens, half of them of at most {lengths[(len(lengths) - 1) // 2]}")
    # The peaks of a short load differ by chance. Memory that a server loses is lost in a longer load, too.
    for seconds in [arguments.seconds, 2 * arguments.seconds, 4 * arguments.seconds]:
        memory = await memory_under(load, process, arguments.clients, seconds)
        assert not load.problems, f"{len(load.problems)} problems: " + "; ".join(load.problems[:5])
        assert await load.rests(), "requests or pages are left, or the server is not healthy"
        assert load.done["streams"] > 0 and load.done["left"] > 0 and load.done["malformed"] > 0, load.done
        if None in memory:
            return
        # By a third of the time, every prompt has been there and the cache is full.
        third = len(memory) // 3
        early, late = max(memory[third : 2 * third]), max(memory[2 * third :])
        print(f"memory: {early / 1e6:.1f} MB in the second third, {late / 1e6:.1f} MB in the last")
        if late < early * 1.05 + 8e6:
            return
    raise AssertionError("memory grows")


async def memory_under(load, process, clients, seconds):
    """Bytes of memory that the process has in each sixtieth of the time in which so many clients send requests."""
    began, before = time.monotonic(), dict(load.done)
    running = asyncio.gather(*(load.client(began + seconds) for _ in range(clients)))
    memory = []
    while not running.done():
        await asyncio.wait([running], timeout=seconds / 60)
        memory.append(resident(process))
    await running
    done = ", ".join(f"{count - before[what]} {what}" for what, count in load.done.items())
    print(done, f"in {time.monotonic() - began:.0f} s")
    return memory


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("program")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--longest-prompt", type=int, default=2000, help="tokens of the longest prompt, each a character")
    parser.add_argument("--seed", type=int, default=1)
    given = sys.argv[1:]
    at = given.index("--") if "--" in given else len(given)
    arguments, flags = parser.parse_args(given[:at]), given[at + 1 :]
    # The cache of a rank holds as many tokens as four of the longest prompts, so that pages are scarce.
    positions = 2 * max(arguments.longest_prompt, 2048)
    kv_cache = str(2 * positions * BYTES_PER_TOKEN)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), positions)
        command = [arguments.program, "serve", "--model", folder, "--port", "0", "--kv-cache", kv_cache, *flags]
        with server(command) as (address, process):
            asyncio.run(run(address, process, positions, arguments))


if __name__ == "__main__":
    main()
