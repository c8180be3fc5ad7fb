"""Answers for made-up contestants, as ``benchmarks/jax_peers/protocol.py`` asks for them.

    python -m tests.workers.contestants NAME

The errors of "good" are its tolerances; the others misbehave.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

from benchmarks.jax_peers.protocol import Arrays, Contestant, serve

NAME = sys.argv[1]


class Good:
    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays

    def run(self, forward: float, backward: float) -> tuple[float, float]:
        print("progress", flush=True)  # as libraries do
        return forward, backward

    def read(self, result: Any) -> Arrays:
        forward, backward = result
        return {"z": self.arrays["x"] + forward, "weight": np.array(backward)}


class Raises(Good):
    def run(self, forward: float, backward: float) -> tuple[float, float]:
        raise ArithmeticError("no pivot")


class Dies(Good):
    def run(self, forward: float, backward: float) -> tuple[float, float]:
        os._exit(7)


def load(arrays: Arrays) -> dict[str, Contestant]:
    return {f"{NAME} {kind.__name__.lower()}": kind(arrays) for kind in (Good, Raises, Dies)}


if __name__ == "__main__":
    threads = {name: os.environ[name] for name in ("OMP_NUM_THREADS", "NPROC")}
    serve([f"{NAME} {kind}" for kind in ("good", "raises", "dies")], threads, load)
