"""What steps in C++ could get silently wrong: memory that is not laid out in rows, steps of other solvers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.kernels import needs_cpp
from solvers import GMRES, Anderson, Forward, Solution, Tolerance, fixed_point, solve_linear
from solvers.core import loop
from solvers.krylov.product import OneMinus
from solvers.methods import turns
from solvers.native import process, steps

pytestmark = needs_cpp
ROWS, SIZE = 5, 7


@pytest.fixture(autouse=True)
def judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop judges, as for batches that are not small; those are in test_small_solves.py."""
    monkeypatch.setattr(turns, "SMALL", 0)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


START, OFFSET = numbers(ROWS, SIZE), numbers(ROWS, SIZE, seed=1) + 2


def update(z: Tensor, offset: Tensor) -> Tensor:
    return 0.7 * torch.sin(z.flip(1)) + offset


def solved(f: Callable[..., Tensor] = update, start: Tensor = START, **options: Any) -> Solution:
    options = {"solver": Anderson(), "tolerance": Tolerance(1e-10), **options}
    return fixed_point(f, start, (OFFSET,), adjoint=None, on_failure="ignore", **options)


def in_both(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Solution]) -> tuple[Solution, ...]:
    found = []
    for enabled in (True, False):
        monkeypatch.setattr(process, "ENABLED", enabled)
        found.append(run())
    return tuple(found)


def same(native: Solution, ordinary: Solution, tolerance: float = 1e-12) -> None:
    assert native.status.tolist() == ordinary.status.tolist()
    assert native.evaluations.tolist() == ordinary.evaluations.tolist()
    torch.testing.assert_close(native.value, ordinary.value, rtol=tolerance, atol=tolerance)


def transposed(tensor: Tensor) -> Tensor:
    """The same numbers, column by column in memory."""
    return tensor.mT.contiguous().mT


def negated(tensor: Tensor) -> Tensor:
    """The same numbers as torch keeps ``x.conj().imag``: those of the opposite sign, to be flipped."""
    return torch.ops.aten._neg_view(-tensor)


Change = Callable[[Tensor], Tensor]


@pytest.mark.parametrize("image", [False, True], ids=["A", "I - M"])
@pytest.mark.parametrize("change", [transposed, negated])
def test_layouts_of_a_linear_system(
    change: Change, image: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right-hand sides and products; a restart, and samples that leave."""
    unit = torch.eye(SIZE, dtype=torch.float64)
    matrix, right = unit + 0.2 * numbers(ROWS, SIZE, SIZE), numbers(ROWS, SIZE)
    matrix[1] = unit

    def times(v: Tensor, m: Tensor) -> Tensor:
        return change((m @ v[:, :, None])[:, :, 0])

    class Image(OneMinus):
        def __call__(self, v: Tensor, *args: Any) -> Tensor:
            return v - self.image(v, *args)

    def rest(v: Tensor, *args: Tensor) -> Tensor:
        return change(v - times(v, *args))

    matvec = Image(rest) if image else times

    def run() -> Solution:
        return solve_linear(
            matvec, change(right), args=(matrix,), solver=GMRES(4), tolerance=Tolerance(1e-10),
            max_steps=60,
        )  # fmt: skip

    native, ordinary = in_both(monkeypatch, run)
    same(native, ordinary, 1e-9)
    left = right - (matrix @ native.value[:, :, None])[:, :, 0]
    assert (left.norm(dim=1) <= 1e-9 * right.norm(dim=1)).all()


@pytest.mark.parametrize("change", [transposed, negated])
def test_layouts_of_a_fixed_point(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the start and of what the map returns."""

    def f(z: Tensor, offset: Tensor) -> Tensor:
        return change(update(z, offset))

    native, ordinary = in_both(monkeypatch, lambda: solved(f, change(START)))
    same(native, ordinary)
    same(native, solved())


class Quarter(Forward):
    """A solver of a user's own, of whose ring C++ would make plain steps."""

    def step(self, state: None, turn: Any) -> Tensor:
        return turn.current.z + 0.25 * turn.current.residual


class QuarterAnderson(Anderson):
    def step(self, state: Any, turn: Any) -> Tensor:
        return turn.current.z + 0.25 * turn.current.residual


@pytest.mark.parametrize("solver", [Quarter(), QuarterAnderson()])
def test_a_subclass_takes_its_own_steps(
    solver: Forward | Anderson, monkeypatch: pytest.MonkeyPatch
) -> None:
    native, ordinary = in_both(
        monkeypatch, lambda: solved(solver=solver, tolerance=Tolerance(1e-3), max_steps=100)
    )
    assert torch.equal(native.value, ordinary.value)
    same(native, ordinary)
    same(native, solved(solver=Forward(0.25), tolerance=Tolerance(1e-3), max_steps=100))


def test_a_default_device_is_not_that_of_the_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    steps._number.cache_clear()
    monkeypatch.setattr(process, "ENABLED", True)
    with torch.device("meta"):
        found = solved()
    steps._number.cache_clear()
    same(found, solved())


def test_an_output_on_another_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """At any evaluation; its address would be none of this memory."""
    monkeypatch.setattr(process, "ENABLED", True)
    calls = []

    def f(z: Tensor, offset: Tensor) -> Tensor:
        calls.append(len(z))
        return update(z, offset).to("meta") if len(calls) == 4 else update(z, offset)

    with pytest.raises(ValueError, match="must return tensors on cpu"):
        solved(f)


def test_buffers_and_views_of_the_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may give its input back, or one buffer again and again; no earlier solution changes."""
    monkeypatch.setattr(process, "ENABLED", True)
    expected, buffer = solved(), torch.empty_like(START)

    def buffered(z: Tensor, offset: Tensor) -> Tensor:
        buffer[: len(z)] = update(z, offset)
        return buffer[: len(z)]

    found = [solved(buffered) for _ in range(2)]
    kept = found[0].value.clone(), found[0].residual.clone()
    solved(buffered, START + 1)
    buffer.zero_()
    for each in found:
        assert torch.equal(each.value, expected.value)
        assert torch.equal(each.residual, expected.residual)
    assert torch.equal(kept[0], found[0].value) and torch.equal(kept[1], found[0].residual)
    seen: list[int] = []

    def input_in_the_end(z: Tensor, offset: Tensor) -> Tensor:
        seen.append(len(z))
        return z if len(seen) > 3 else update(z, offset)

    assert solved(input_in_the_end).evaluations.tolist() == [4] * ROWS


def test_a_solve_within_a_solve_and_errors_within(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails half-way leaves nothing behind."""
    monkeypatch.setattr(process, "ENABLED", True)
    expected, calls = solved(), []

    def nested(z: Tensor, offset: Tensor) -> Tensor:
        solved(start=z.new_zeros(ROWS, SIZE), max_steps=6)
        return update(z, offset)

    def fails(z: Tensor, offset: Tensor) -> Tensor:
        calls.append(len(z))
        if len(calls) == 5:
            raise ArithmeticError("by design")
        return update(z, offset)

    with pytest.raises(ArithmeticError, match="by design"):
        solved(fails)
    same(solved(nested), expected)
    assert torch.equal(solved().value, expected.value)


def test_solves_in_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "ENABLED", True)
    starts = [numbers(ROWS, SIZE, seed=seed) for seed in range(6)]
    expected, found = [solved(start=start).value for start in starts], [None] * len(starts)

    def work(own: range) -> None:
        for number in own:
            for _ in range(4):
                found[number] = solved(start=starts[number]).value

    threads = [threading.Thread(target=work, args=(range(k, 6, 2),)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(found, expected, strict=True):
        assert one is not None and torch.equal(one, other)


def test_stalls_are_looked_for_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where every sample has come a little nearer: from evaluation 8 on by nothing to speak of."""
    monkeypatch.setattr(loop, "PATIENCE", 4)

    def run() -> Solution:
        calls = []

        def f(z: Tensor, offset: Tensor) -> Tensor:
            calls.append(len(z))
            return z + 0.5 ** min(len(calls), 8)

        return solved(f, START.abs() + 1, solver=Forward(), max_steps=30)

    native, ordinary = in_both(monkeypatch, run)
    same(native, ordinary)
    assert native.counts() == {"STALLED": ROWS} and native.evaluations.tolist() == [12] * ROWS


def test_an_ended_sample_stays_as_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has stalled comes nearer afterwards, as all others do: it is carried along, no more."""
    monkeypatch.setattr(loop, "PATIENCE", 4)

    def run() -> Solution:
        calls = []

        def f(z: Tensor, offset: Tensor) -> Tensor:
            calls.append(len(z))
            size = torch.full((len(z), 1), 0.5 ** len(calls), dtype=z.dtype)
            size[0] = 1e-3 if len(calls) < 9 else 0.01 * size[0]
            return z + size

        return solved(f, START.abs() + 1, solver=Forward(), max_steps=25, compact=False)

    native, ordinary = in_both(monkeypatch, run)
    same(native, ordinary)
    torch.testing.assert_close(native.residual, ordinary.residual)
    assert native.counts() == {"STALLED": 1, "MAX_STEPS": ROWS - 1}


def test_gradients_that_are_not_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes back from a transposed use of the solution is the right-hand side of the adjoint."""
    monkeypatch.setattr(process, "ENABLED", True)
    offset, cotangent = OFFSET.clone().requires_grad_(), numbers(ROWS, SIZE, seed=3)

    def gradient(change: Change) -> Tensor:
        found = fixed_point(update, START, (offset,), tolerance=Tolerance(1e-12)).value
        return torch.autograd.grad(found, offset, change(cotangent))[0]

    torch.testing.assert_close(gradient(transposed), gradient(torch.clone), rtol=1e-9, atol=1e-9)
