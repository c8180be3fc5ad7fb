"""Compiled maps against the same maps without: python benchmarks/compiled/maps.py [--rounds 100]

The training step of the mean-field layer at its four targets by ``solvers.fixed_point``, its map a compiled
module, or a function that is compiled anew at every step and closes over its couplings. The two take turns;
times are lower thirds. Recompilations are counted after the second step.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import solvers
from benchmarks.compiled.solves import CASES, MeanFieldUpdate
from benchmarks.layers import MeanField
from benchmarks.measure import lower_thirds, table
from implicit_attn.command_line import Parser, command, count

Step = Callable[[], None]


def module_steps(layer: MeanField, goal: tuple[float, float]) -> list[Step]:
    """A step by the module that holds the weights, not compiled and compiled."""
    module = MeanFieldUpdate(layer)
    return [lambda f=f: step(layer, f, goal) for f in (module, torch.compile(module))]


def closure_steps(layer: MeanField, goal: tuple[float, float]) -> list[Step]:
    """A step by a function of its own."""

    def plain() -> None:
        couplings = layer.couplings()
        step(layer, lambda z, x: layer.update(z, x, couplings), goal)

    def compiled() -> None:
        couplings = layer.couplings()

        @torch.compile
        def f(z: Tensor, x: Tensor) -> Tensor:
            return layer.update(z, x, couplings)

        step(layer, f, goal)

    return [plain, compiled]


def step(layer: MeanField, f: Any, goal: tuple[float, float]) -> None:
    forward, backward = (solvers.Tolerance(each) for each in goal)
    adjoint = solvers.Implicit(tolerance=backward)
    options: dict[str, Any] = {"tolerance": forward, "adjoint": adjoint, "max_steps": 200}
    solution = solvers.fixed_point(f, torch.zeros_like(layer.x), (layer.x,), **options)
    layer.zero_grad()
    solution.value.backward(layer.cotangent)


def compilations() -> int:
    """Graphs that torch's compiler has seen, and those that Inductor has made or found in its cache."""
    counters: Any = torch._dynamo.utils.counters
    names = ("fxgraph_cache_miss", "fxgraph_cache_hit", "fxgraph_cache_bypass")
    return counters["stats"]["unique_graphs"] + sum(counters["inductor"][name] for name in names)


def compare(name: str, steps: list[Step], rounds: int) -> dict[str, Any]:
    for run in steps:
        run()
        run()
    before = compilations()
    plain, fast = lower_thirds(steps, rounds)
    return {
        "map": name,
        "not compiled, ms": f"{1e3 * plain:.1f}",
        "compiled, ms": f"{1e3 * fast:.1f}",
        "ratio": f"{fast / plain:.2f}",
        f"compilations in {rounds} steps": compilations() - before,
    }


def main() -> None:
    parser = Parser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=count, default=100, help="timed steps")
    parser.add_argument("--threads", type=count, default=2)
    with command(parser):
        options = parser.parse_args()
        torch.set_num_threads(options.threads)
        warnings.simplefilter("ignore", solvers.SolveWarning)
        rows = []
        for kind, make in (("module", module_steps), ("closure", closure_steps)):
            for scale, goal in CASES:
                name = f"{kind}, couplings x {scale:g}, residual {goal[0]:g}"
                rows.append(compare(name, make(MeanField(scale), goal), options.rounds))
        print(table(rows))


if __name__ == "__main__":
    main()
