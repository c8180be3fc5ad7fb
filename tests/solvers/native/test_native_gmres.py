"""Cycles of GMRES in C++ beside those in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.kernels import needs_cpp
from cases.linear import matrices
from solvers import GMRES, Status, solve_linear
from solvers.krylov.gmres import GMRESRun
from solvers.native import process

pytestmark = needs_cpp


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def right_sides(rows: int, size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rows, size, generator=generator, dtype=torch.float64).to(dtype)


def times(matrix: Tensor, v: Tensor) -> Tensor:
    return (matrix @ v[:, :, None])[:, :, 0]


Change = Callable[[int, GMRESRun], GMRESRun]


def cycle(
    matrix: Tensor,
    right: Tensor,
    steps: int,
    restart: int = 20,
    rtol: float = 1e-9,
    image: bool = False,
    spoil: dict[int, float] | None = None,
    change: Change | None = None,
) -> GMRESRun:
    """A run of so many steps: ``spoil`` puts a number into the second row's product of a step."""
    active = torch.ones(len(right), 1, dtype=torch.bool)
    run = GMRES(restart=restart).start(right, rtol * right.norm(dim=1, keepdim=True), active)
    for step in range(steps):
        product = times(matrix[: len(run.direction)], run.direction)
        if spoil and step in spoil:
            product[1, 2] = spoil[step]
        if image:
            run.absorb_image(run.direction - product)
        else:
            run.absorb(product)
        if change is not None:
            run = change(step, run)
    return run


def same_runs(native: GMRESRun, ordinary: GMRESRun, tolerance: float) -> None:
    assert native.native is not None and ordinary.native is None
    for name in ("running", "used", "columns", "broken"):
        assert getattr(native, name).tolist() == getattr(ordinary, name).tolist(), name
    assert native.verdict().tolist() == ordinary.verdict().tolist()
    whole = ~native.broken  # the recurrence says nothing of the others, and final() does not use it
    for one, other in (
        (native.matrix_norm, ordinary.matrix_norm),
        (native.residual_norm[whole], ordinary.residual_norm[whole]),
        *zip(native.final(), ordinary.final(), strict=True),
    ):
        torch.testing.assert_close(
            torch.as_tensor(one), torch.as_tensor(other), rtol=tolerance, atol=tolerance
        )


def in_both(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> tuple[Any, Any]:
    found = []
    for enabled in (True, False):
        monkeypatch.setattr(process, "ENABLED", enabled)
        with torch.no_grad():
            found.append(run())
    return found[0], found[1]


def stops_one(step: int, run: GMRESRun) -> GMRESRun:
    if step == 2:
        run.stop(torch.tensor([[False], [True], [False], [False], [False], [False]]))
    return run


def leaves_two(step: int, run: GMRESRun) -> GMRESRun:
    part = run.rows(torch.arange(4).numpy()) if step == 3 else run
    assert isinstance(part, GMRESRun)
    return part


CYCLES: dict[str, dict[str, Any]] = {
    "plain": {"kind": "contraction", "steps": 12},
    "of I - M": {"kind": "contraction", "steps": 12, "image": True},
    "the restart": {"kind": "nonsymmetric", "steps": 6, "restart": 6},
    "growing": {"kind": "contraction", "steps": 30, "restart": 50, "size": 60},
    "an exhausted space": {"kind": "nonsymmetric", "steps": 7, "size": 5, "rtol": 0.0},
    "a singular matrix": {"kind": "singular", "steps": 19, "rtol": 1e-14},
    "NaN": {"kind": "contraction", "steps": 9, "spoil": {4: torch.nan}},
    "infinite": {"kind": "contraction", "steps": 9, "spoil": {4: torch.inf}},
    "NaN at once": {"kind": "contraction", "steps": 3, "spoil": {0: torch.nan}},
    "stopped": {"kind": "contraction", "steps": 10, "change": stops_one},
    "fewer rows": {"kind": "contraction", "steps": 10, "change": leaves_two},
    "converged": {"kind": "contraction", "steps": 20, "rtol": 1e-3},
}


@pytest.mark.parametrize("case", list(CYCLES))
def test_a_cycle(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = dict(CYCLES[case])
    kind, size = options.pop("kind"), options.pop("size", 20)
    matrix, right = matrices(kind, 6, size), right_sides(6, size)
    if case == "an exhausted space":  # within two steps in one sample
        right[0] = torch.linalg.eigh(matrix[0] + matrix[0].mT)[1][:, 0]
        matrix[0] = torch.eye(size, dtype=torch.float64) + torch.outer(right[0], right[0])
    native, ordinary = in_both(monkeypatch, lambda: cycle(matrix, right, **options))
    same_runs(native, ordinary, 1e-10 if case == "a singular matrix" else 1e-12)
    if case == "NaN":
        assert native.verdict()[1] == Status.NONFINITE
    if case == "an exhausted space":
        assert native.broken[0]


def test_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, right = matrices("contraction", 6, 20).float(), right_sides(6, 20, torch.float32)
    native, ordinary = in_both(monkeypatch, lambda: cycle(matrix, right, 6, rtol=1e-6))
    same_runs(native, ordinary, 1e-5)


def test_long_vectors_and_threads(
    threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums over 6000 numbers in float32; rows shared by two threads are computed alike."""
    monkeypatch.setattr(process, "ENABLED", True)
    right, weights = right_sides(8, 6000, torch.float32), torch.linspace(0.5, 2, 6000)
    found = []
    with torch.no_grad():
        for number in (1, 2):
            threads(number)
            run = GMRES().start(right, right.new_zeros(8, 1), torch.ones(8, 1, dtype=torch.bool))
            for _ in range(5):
                run.absorb(weights * run.direction)
            found.append(run.final())
    assert torch.equal(found[0][0], found[1][0]) and (found[0][1] == found[1][1]).all()
    left = (right.double() - weights.double() * found[0][0].double()).norm(dim=1, keepdim=True)
    torch.testing.assert_close(torch.as_tensor(found[0][1]).double(), left, rtol=1e-4, atol=0.0)
    length = right.double().norm(dim=1, keepdim=True)
    first = (weights.double() * (right.double() / length)).norm(dim=1, keepdim=True)
    with torch.no_grad():
        run = GMRES().start(right, right.new_zeros(8, 1), torch.ones(8, 1, dtype=torch.bool))
        run.absorb(weights * run.direction)
    torch.testing.assert_close(
        torch.as_tensor(run.matrix_norm).double(), first, rtol=1e-6, atol=0.0
    )


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("restart", [4, 20, 80])
def test_whole_solves(restart: int, compact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart beyond 64 vectors is left to NumPy; products in which one sample is spoilt."""
    matrix, right = matrices("contraction", 20, 20), right_sides(20, 20)
    matrix[3] *= 1e-3
    right[5], right[6, 0] = 0, torch.nan

    def run() -> Any:
        return solve_linear(
            lambda v, m: times(m, v), right, args=(matrix,), solver=GMRES(restart), max_steps=60,
            compact=compact, on_failure="ignore",
        )  # fmt: skip

    native, ordinary = in_both(monkeypatch, run)
    assert native.evaluations.tolist() == ordinary.evaluations.tolist()
    assert native.status.tolist() == ordinary.status.tolist()
    torch.testing.assert_close(native.value, ordinary.value, rtol=1e-9, atol=1e-9)
    assert native.counts()["NONFINITE"] == 1
