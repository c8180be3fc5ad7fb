"""Limits of the solve in evaluation, and the observer of solves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from implicit_attn import DEQ, EquilibriumBlock
from solvers import Forward, Solution, Tolerance

LOOSE, TIGHT = Tolerance(1e-2), Tolerance(1e-8)


def halving(z: Tensor, x: Tensor) -> Tensor:
    return 0.5 * z + x


def test_other_limits_in_evaluation() -> None:
    options: dict[str, Any] = {"solver": Forward(), "on_failure": "ignore", "init": "zeros"}
    layer = DEQ.from_update(
        halving, tolerance=LOOSE, max_steps=50, eval_max_steps=20, eval_tolerance=TIGHT, **options
    )
    x = torch.ones(2, 3, 4, dtype=torch.float64)
    short = int(layer.solve(x).evaluations.max())
    assert short < 10 and bool(layer.last.converged.all())  # type: ignore[union-attr]
    layer.eval()
    assert layer.solve(x).evaluations.tolist() == [20, 20]  # which is too few for 1e-8
    assert layer.solve(x, max_steps=50).evaluations.max() > 20  # a call's own option comes first
    assert int(layer.solve(x, tolerance=LOOSE).evaluations.max()) == short
    assert int(layer.train().solve(x).evaluations.max()) == short
    same = DEQ.from_update(halving, tolerance=LOOSE, **options)
    assert int(same.eval().solve(x).evaluations.max()) == short


def test_in_a_block() -> None:
    torch.manual_seed(0)
    block = EquilibriumBlock(
        8, 2, 16, layer={"eval_tolerance": TIGHT, "eval_max_steps": 90}
    ).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    trained = block.solve(x).residual.max()
    assert trained > 1e-8 >= block.eval().solve(x).residual.max()


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"eval_max_steps": 0}, ValueError, "eval_max_steps must be >= 1"),
        ({"eval_max_steps": 2.5}, TypeError, "eval_max_steps must be an integer"),
        ({"eval_tolerance": 1e-3}, TypeError, "eval_tolerance must be a solvers.Tolerance or None"),
    ],
)
def test_wrong_limits(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        DEQ.from_update(halving, **options)


def test_the_observer_sees_every_solve() -> None:
    layer, seen = DEQ.from_update(halving), []
    x = torch.ones(2, 3, 4)
    layer.observer = lambda x, mask, solution: seen.append((x, mask, solution))
    value = layer(x)
    ((given, mask, solution),) = seen
    assert given is x and mask is None and isinstance(solution, Solution)
    assert solution.value is value
