"""One rule in three forms: ``Rule``, which the loop and the turn in torch share, C++ and Triton's kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.kernels import needs_engine, without_engine
from solvers import Anderson, Solution, Tolerance, fixed_point
from solvers.methods.turns import Turns

MAX_STEPS, ROWS = 40, 6


def uniform(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=generator, dtype=torch.float64) * 2 - 1


def contraction(seed: int) -> tuple[Callable[..., Any], Tensor]:
    """Rates up to 0.97, so that the residual and the error are far apart."""
    rates, offset = 0.97 * uniform(seed, 12), uniform(seed + 1, ROWS, 12)
    return lambda z: rates * torch.sin(z).flip(1) + offset, torch.zeros(ROWS, 12).double()


def saturating(seed: int) -> tuple[Callable[..., Any], Tensor]:
    """Accelerated steps run away, are rejected, and come back."""
    return lambda z: z - torch.atan(z - 1), 6 * uniform(seed, ROWS, 3) + 1


def expanding(seed: int) -> tuple[Callable[..., Any], Tensor]:
    """Some rows diverge, some are not finite."""
    factors = torch.tensor([0.5, 1.5, 3.0, 1e4, -0.9, 0.0], dtype=torch.float64)[:, None]
    start = uniform(seed, ROWS, 4)
    start[5] = 0.0
    return lambda z: factors * z + 1 / z.square(), start


def slow(seed: int) -> tuple[Callable[..., Any], Tensor]:
    """A soft threshold, whose kinks make accelerated steps fail."""
    matrix, target = uniform(seed, ROWS, 5, 9), uniform(seed + 1, ROWS, 5)
    step = 1 / torch.linalg.matrix_norm(matrix, 2).square()[:, None]

    def f(z: Tensor) -> Tensor:
        rest = torch.einsum("bmn,bn->bm", matrix, z) - target
        moved = z - step * torch.einsum("bmn,bm->bn", matrix, rest)
        return moved.sign() * (moved.abs() - 0.1 * step).clamp_min(0)

    return f, torch.zeros(ROWS, 9).double()


FAMILIES = {
    "contraction": contraction,
    "saturating": saturating,
    "expanding": expanding,
    "slow": slow,
}


def by_turns(f: Callable[..., Any], start: Tensor, fused: bool) -> Solution:
    turns = Turns(start, Anderson(4), MAX_STEPS, Tolerance(1e-4), fused=fused)
    turns.start(start)
    while True:
        turns.turn(f(turns.z.clone()))
        if not int(turns.left) and not turns.sharpen():
            return turns.solution()


def assert_alike(one: Solution, other: Solution) -> None:
    assert one.statuses == other.statuses
    assert one.evaluations.tolist() == other.evaluations.tolist()
    assert one.error is not None and other.error is not None
    known = one.converged
    torch.testing.assert_close(other.value[known], one.value[known], rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(other.error[known], one.error[known], rtol=1e-3, atol=1e-9)


@needs_engine
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FAMILIES)
def test_the_forms_of_the_rule_agree(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal statuses and counts, and equal values and errors of what has converged."""
    f, start = FAMILIES[name](seed)
    options: dict[str, Any] = {
        "solver": Anderson(4), "tolerance": 1e-4, "max_steps": MAX_STEPS, "adjoint": None,
        "on_failure": "ignore", "compact": False, "verify": False,
    }  # fmt: skip
    engine = fixed_point(f, start, **options)
    without_engine(monkeypatch)
    loop = fixed_point(f, start, **options)
    assert_alike(loop, engine)
    assert_alike(loop, by_turns(f, start, fused=False))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("fused", [False, True])
def test_iterates_of_an_energy_are_compared_by_the_norm_of_all_parts(fused: bool) -> None:
    """The largest part of the residual stays the same, while the others fall."""
    if fused:
        pytest.importorskip("triton", reason="Triton is not installed")
    start = torch.ones(1, 4)
    options: dict[str, Any] = {"sizes": (2, 2), "unit_free": True, "fused": fused}
    turns = Turns(start, Anderson(2), 9, Tolerance(1e-4), **options)
    turns.start(start)
    for residual in ([3.0, 0.0, 3.0, 0.0], [3.0, 0.0, 2.0, 0.0], [3.0, 0.0, 1.0, 0.0]):
        turns.turn(torch.tensor([residual]))
    torch.testing.assert_close(turns.score.float(), torch.tensor([10.0]).sqrt())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("fused", [False, True])
def test_the_relative_error_of_a_value_at_zero_is_finite(fused: bool) -> None:
    """An infinite one would be an unknown one."""
    if fused:
        pytest.importorskip("triton", reason="Triton is not installed")
    start = torch.tensor([[1e-2, 2e-2, -3e-2, 5e-2]])
    turns = Turns(start, Anderson(2, damping=0.5), 9, Tolerance(1e-4, 1e-4), fused=fused)
    turns.start(start)
    while int(turns.left) or not bool(turns.evaluations.any()):
        turns.turn(torch.zeros_like(start))
    found = turns.solution()
    assert found.statuses == ["CONVERGED"]
    assert found.error is not None and bool(torch.isfinite(found.error).all())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", ["contraction", "saturating", "expanding"])
def test_the_kernels_agree_with_the_turn_in_torch(name: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    importlib.import_module("solvers.methods.triton_kernels")
    f, start = FAMILIES[name](0)
    assert_alike(by_turns(f, start, fused=False), by_turns(f, start, fused=True))
