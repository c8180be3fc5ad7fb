"""What looking again at the returned value costs: python benchmarks/verify.py [--rounds 60]

Times of ``verify=True`` (every solve) and of the default (the first 8 solves and one in 32) over those of
``verify=False``, for training steps and inference: processor time, medians of rounds that take turns, on one
thread.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from benchmarks.measure import interleaved, table
from implicit_attn import DEQ, EquilibriumBlock
from implicit_attn.updates import MeanFieldAttention


def step(layer: Any, x: Tensor, training: bool, verify: bool | None) -> None:
    """A training step, or a call without gradients."""
    with torch.set_grad_enabled(training):
        y = layer(x, verify=verify)
    if training:
        y.square().mean().backward()


def main(rounds: int = 60) -> None:
    """Print the ratios."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers: dict[str, Any] = {
        "equilibrium block": EquilibriumBlock(64, heads=4),
        "mean-field layer": DEQ(MeanFieldAttention(16, 16, bound=0.9)),
    }
    rows = []
    modes = {"without": False, "default": None, "every solve": True}
    for (name, layer), width in zip(layers.items(), (64, 16), strict=True):
        x = torch.randn(16, 16, width)
        for training in (True, False):
            runs: dict[str, Any] = {
                m: partial(step, layer, x, training, verify) for m, verify in modes.items()
            }
            for _ in range(10):  # skips the first solves, which are all verified
                runs["default"]()
            times = interleaved(runs, rounds, time.process_time)
            rows.append(
                {
                    "layer": name,
                    "what": "training step" if training else "inference",
                    "evaluations": int(layer.last.evaluations.max()),
                    "ms without": times["without"] * 1e3,
                    "default / without": times["default"] / times["without"],
                    "every solve / without": times["every solve"] / times["without"],
                }
            )
    print(table(rows))


if __name__ == "__main__":
    tyro.cli(main)
