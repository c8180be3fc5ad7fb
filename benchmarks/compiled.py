"""Compiled layers against the same layers without: python benchmarks/compiled.py [--rounds 80]

The training step of the mean-field layer of ``benchmarks/step.py`` at its four targets, and of an equilibrium
block. The two take turns; times are lower thirds, as other processes only ever add to them.
"""

from __future__ import annotations

import copy
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import solvers
from benchmarks.measure import lower_thirds, table
from benchmarks.step import MeanField, MeanFieldUpdate
from implicit_attn import DEQ, EquilibriumBlock, compile_layers

CASES = [(scale, goal) for scale in (1.0, 2.0) for goal in ((1e-4, 1e-3), (1e-6, 1e-5))]


def mean_field(scale: float, goal: tuple[float, float]) -> tuple[nn.Module, Tensor, Tensor]:
    """The layer to tolerances of the solve and of the adjoint, an input and a cotangent."""
    update = MeanFieldUpdate(MeanField(scale))
    forward, backward = (solvers.Tolerance(each) for each in goal)
    layer = DEQ(
        update, tolerance=forward, adjoint=solvers.Implicit(tolerance=backward), max_steps=200
    )
    return layer, update.layer.x, update.layer.cotangent


def block() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(32, 16, 64)
    return EquilibriumBlock(64, 4, 128), x, torch.randn_like(x)


def compare(name: str, made: tuple[nn.Module, Tensor, Tensor], rounds: int) -> dict[str, Any]:
    model, x, cotangent = made
    compiled = copy.deepcopy(model)
    compile_layers(compiled)
    start = time.perf_counter()
    gradients = [step(each, x, cotangent) for each in (model, compiled)]
    first = time.perf_counter() - start
    error = max((a - b).norm().item() / a.norm().item() for a, b in zip(*gradients, strict=True))
    runs = [partial(step, each, x, cotangent) for each in (model, compiled)]
    plain, fast = (1e3 * seconds for seconds in lower_thirds(runs, rounds))
    row = {"training step": name, "not compiled, ms": f"{plain:.1f}", "compiled, ms": f"{fast:.1f}"}
    row |= {"ratio": f"{fast / plain:.2f}", "gradients differ by": f"{error:.0e}"}
    return row | {"first step, s": f"{first:.0f}"}


def step(model: nn.Module, x: Tensor, cotangent: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).backward(cotangent)
    return [p.grad for p in model.parameters() if p.grad is not None]


def main(rounds: int = 80, threads: int = 2) -> None:
    """Compiled layers against the same layers without; ``rounds`` timed steps of each."""
    torch.set_num_threads(threads)
    rows = []
    for scale, goal in CASES:
        name = f"couplings x {scale:g}, residual {goal[0]:g}"
        rows.append(compare(name, mean_field(scale, goal), rounds))
    rows.append(compare("equilibrium block (32, 16, 64)", block(), rounds))
    print(table(rows))


if __name__ == "__main__":
    tyro.cli(main)
