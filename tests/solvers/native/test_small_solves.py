"""Small solves without compilation whose judgements and steps are all made in C++."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.kernels import needs_cpp
from solvers import Anderson, Forward, Implicit, Solution, Status, Tolerance, fixed_point
from solvers.core.loop import Loop
from solvers.methods import turns
from solvers.native import process, spare

pytestmark = needs_cpp
ROWS, SIZE = 6, 5


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


OFFSET = numbers(ROWS, SIZE) + 2


def update(z: Tensor, offset: Tensor) -> Tensor:
    return 0.7 * torch.sin(z.flip(1)) + offset


def solved(
    f: Callable[..., Tensor] = update, start: Tensor | None = None, **options: Any
) -> Solution:
    options = {"tolerance": Tolerance(1e-10), "adjoint": None, "on_failure": "ignore"} | options
    start = torch.zeros_like(OFFSET) if start is None else start
    return fixed_point(f, start, (OFFSET.to(start.dtype),), **options)


@pytest.fixture(autouse=True)
def looped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """C++ is wanted; the numbers of samples of the solves that the ordinary loop has made."""
    monkeypatch.setattr(process, "ENABLED", True)
    batches: list[int] = []
    run = Loop.run

    def noting(self: Loop) -> Solution:
        batches.append(len(self.trial.z))
        return run(self)

    monkeypatch.setattr(Loop, "run", noting)
    return batches


def without_cpp(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> Any:
    monkeypatch.setattr(process, "ENABLED", False)
    found = run()
    monkeypatch.setattr(process, "ENABLED", True)
    return found


def same(found: Solution, wanted: Solution, tolerance: float = 1e-12) -> None:
    for name in ("status", "evaluations", "steps"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    torch.testing.assert_close(
        found.value, wanted.value, rtol=tolerance, atol=tolerance, equal_nan=True
    )


@pytest.mark.parametrize("solver", [Anderson(), Anderson(memory=2, damping=0.8), Forward(0.9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_counts_and_values_are_those_of_the_loop(
    solver: Any, dtype: torch.dtype, looped: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    single = dtype == torch.float32
    options: Any = {"start": numbers(ROWS, SIZE, seed=2).to(dtype), "max_steps": 40}
    options |= {"solver": solver, "tolerance": Tolerance(1e-3 if single else 1e-10)}
    found = solved(**options)
    assert looped == [] and found.converged.all()
    same(found, without_cpp(monkeypatch, lambda: solved(**options)), 1e-3 if single else 1e-12)
    assert looped == [ROWS]


def test_the_map_may_keep_its_points() -> None:
    """No point is overwritten by a later one, and the caller's start stays what it is."""
    kept: list[tuple[Tensor, Tensor]] = []

    def keeping(z: Tensor, offset: Tensor) -> Tensor:
        kept.append((z, z.clone()))
        return update(z, offset)

    start = numbers(ROWS, SIZE, seed=2)
    before = start.clone()
    found = solved(keeping, start)
    assert len(kept) > 5 and torch.equal(start, before)
    assert all(torch.equal(z, copy) for z, copy in kept)
    assert all(z.data_ptr() != found.value.data_ptr() for z, _ in kept)


def test_a_map_that_returns_its_point() -> None:
    start = numbers(ROWS, SIZE, seed=2)
    found = solved(lambda z, offset: z, start)
    assert torch.equal(found.value, start) and found.evaluations.tolist() == [1] * ROWS


def test_an_ended_sample_is_evaluated_where_it_ended() -> None:
    """Where the map is defined there alone, it is asked for nothing else."""
    seen: list[Tensor] = []

    def half(z: Tensor, offset: Tensor) -> Tensor:
        seen.append(z[0].clone())
        slope = torch.full((ROWS, 1), 0.8, dtype=z.dtype)
        slope[0] = 0
        return slope * z + offset

    found = solved(half, solver=Forward())
    assert found.evaluations.tolist()[0] == 2 and len(seen) > 20
    assert all(torch.equal(z, OFFSET[0]) for z in seen[1:])


@pytest.mark.parametrize("lost", [torch.nan, torch.inf, 1e30])
def test_what_is_out_of_the_ordinary_is_left_to_the_loop(
    lost: float, looped: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def losing(z: Tensor, offset: Tensor) -> Tensor:
        far = (z.norm(dim=1, keepdim=True) > 3.5) & (offset[:, :1] > 2)
        return torch.where(far, lost, update(z, offset))

    found = solved(losing, solver=Anderson(), max_steps=60)
    assert len(looped) == 1 and 0 < looped[0] < ROWS
    same(found, without_cpp(monkeypatch, lambda: solved(losing, solver=Anderson(), max_steps=60)))


def test_a_budget_is_kept() -> None:
    calls: list[int] = []

    def counted(z: Tensor, offset: Tensor) -> Tensor:
        calls.append(len(z))
        return update(z, offset)

    found = solved(counted, max_steps=4)
    assert len(calls) == 4 and found.counts() == {"MAX_STEPS": ROWS}
    assert found.evaluations.tolist() == [4] * ROWS
    residual = update(found.value, OFFSET) - found.value
    torch.testing.assert_close(residual.norm(dim=1), found.residual_norm)


OBSERVED: dict[str, dict[str, Any]] = {
    "record": {"record": True},
    "callback": {"callback": lambda progress: None},
    "states": {"states_at": (2,)},
    "mask": {"mask": torch.ones(ROWS, SIZE, dtype=torch.bool), "start": torch.zeros(ROWS, SIZE, 1).double()},
    "energy": {"energy": lambda z, offset: z.square().sum(1)},
}  # fmt: skip


@pytest.mark.parametrize("options", OBSERVED.values(), ids=OBSERVED)
def test_what_only_the_loop_can_do(options: dict[str, Any], looped: list[int]) -> None:
    f = (lambda z, offset: 0.5 * z + 1) if "start" in options else update
    solved(f, **options)
    assert looped[0] == ROWS


def test_larger_batches_let_finished_samples_leave(
    looped: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "SMALL", ROWS * SIZE - 1)
    solved()
    assert looped == [ROWS]
    monkeypatch.setattr(turns, "SMALL", ROWS * SIZE)
    solved()
    assert looped == [ROWS]


def test_a_solve_within_a_solve() -> None:
    """Of the same kind, so that both would have the same memory."""

    def nested(z: Tensor, offset: Tensor) -> Tensor:
        inner = solved(lambda y, o: 0.3 * torch.cos(y) + 0.1 * z + o, torch.zeros_like(z))
        return 0.5 * torch.sin(inner.value)

    found = solved(nested)
    assert found.converged.all()
    torch.testing.assert_close(nested(found.value, OFFSET), found.value, rtol=1e-9, atol=1e-9)


def test_memory_is_kept_for_the_next_solve_and_given_back_when_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spare, "_KEPT", {})
    first = solved()
    assert len(spare._KEPT) == 1
    value = first.value.clone()
    second = solved(lambda z, offset: -update(z, offset))
    assert len(spare._KEPT) == 1 and torch.equal(first.value, value)
    assert not torch.equal(second.value, value)
    monkeypatch.setattr(spare, "_KEPT", {})
    monkeypatch.setattr(spare, "SMALL", 10)
    solved()
    assert not spare._KEPT
    for memory in range(1, 5):  # never more than so many kinds
        monkeypatch.setattr(spare, "SMALL", 1 << 20)
        monkeypatch.setattr(spare, "KINDS", 3)
        solved(solver=Anderson(memory=memory))
        assert len(spare._KEPT) <= 3


def test_inference_mode_and_back() -> None:
    with torch.inference_mode():
        first = solved().value
    assert torch.equal(solved().value, first)


def test_statuses_of_samples_that_stall(looped: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples without a fixed point: the loop finds that they have stalled, and tries Newton's method."""

    def jumping(z: Tensor, offset: Tensor) -> Tensor:
        return torch.where(offset[:, :1] > 2, torch.where(z > 0, -1.0, 1.0), update(z, offset))

    def run() -> Solution:
        return solved(jumping, max_steps=250)

    found = run()
    assert looped[0] < ROWS and bool((found.status != Status.CONVERGED).any())
    same(found, without_cpp(monkeypatch, run), 1e-6)


@pytest.mark.parametrize("symmetric", [False, True])
def test_gradients(symmetric: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By GMRES and by conjugate gradients, beside the ordinary loops and finite differences."""
    matrix = 0.15 * numbers(SIZE, SIZE, seed=4)
    matrix = matrix + matrix.mT if symmetric else matrix

    class Linear:
        def __init__(self) -> None:
            self.symmetric = symmetric

        def __call__(self, z: Tensor, x: Tensor) -> Tensor:
            return (z if symmetric else torch.sin(z)) @ matrix + x

    def value(x: Tensor) -> Tensor:
        exact = Tolerance(1e-12)
        start = torch.zeros_like(x)
        return fixed_point(
            Linear(), start, (x,), tolerance=exact, adjoint=Implicit(tolerance=exact)
        ).value

    x = OFFSET[:2].clone().requires_grad_()
    assert torch.autograd.gradcheck(value, (x,))
    (found,) = torch.autograd.grad(value(x).sin().sum(), x)
    (wanted,) = without_cpp(monkeypatch, lambda: torch.autograd.grad(value(x).sin().sum(), x))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
