"""A peer in a process of its own, so that it keeps its threads and buffers while others are timed between its rounds.

A peer is a function `prepare(job) -> Peer`. Standard input and output carry one line of JSON a message: first the job,
then any number of "round"; each round answers with seconds of forward and of forward and backward together.
"""

import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import tensors


@dataclass
class Peer:
    version: str
    how: str
    """A description of the computation that is timed."""
    forward: Callable[[], object]
    both: Callable[[], object]
    """`forward` and `both` return when everything is computed."""
    results: Callable[[], dict]
    """out, dq, dk, dv as numpy arrays [B, S, H, D]."""


def seconds(work: Callable[[], object], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def serve(prepare: Callable[[dict], Peer]) -> None:
    # Libraries may print to standard output, so answers are written to a duplicate of it.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(message: dict) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    job = json.loads(sys.stdin.readline())
    try:
        peer = prepare(job)
        ours = tensors.read(pathlib.Path(job["ours"]))
        difference = tensors.difference(ours, peer.results())
        peer.forward()
    except ImportError as error:
        return answer(dict(missing=str(error)))
    answer(dict(version=peer.version, how=peer.how, difference=difference))
    for _ in sys.stdin:
        answer(dict(forward=seconds(peer.forward, job["repeat"]), both=seconds(peer.both, job["repeat"])))
