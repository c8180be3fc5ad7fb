"""Steps in C++ beside those in NumPy and torch: the same numbers, in every corner that they know."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.kernels import needs_cpp
from solvers import Anderson, Forward, Solution, Solver, Status, Tolerance, fixed_point
from solvers.core import loop
from solvers.core.guards import telling
from solvers.core.layout import Layout
from solvers.core.problem import Problem
from solvers.core.rows import Point
from solvers.core.solver import Turn
from solvers.methods import turns
from solvers.native import library, process

pytestmark = needs_cpp
Threads = Callable[[int], None]


@pytest.fixture(autouse=True)
def judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop judges, as for batches that are not small; those are in test_small_solves.py."""
    monkeypatch.setattr(turns, "SMALL", 0)


@pytest.fixture
def threads() -> Iterator[Threads]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def in_both(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> tuple[Any, Any]:
    """What ``run`` gives with the steps in C++, and without."""
    found = []
    for enabled in (True, False):
        monkeypatch.setattr(process, "ENABLED", enabled)
        found.append(run())
    return found[0], found[1]


def draws(number: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for _ in range(number)
    ]


def candidates(
    solver: Solver,
    points: list[tuple[Tensor, Tensor]],
    accepted: dict[int, Tensor] | None = None,
) -> list[Tensor]:
    """The solver's proposals after these points with their residuals."""
    problem = Problem(lambda z: z, Layout.of(points[0][0]), (), None)
    state, found = None, []
    with torch.no_grad():
        for number, (z, residual) in enumerate(points):
            norm = residual.norm(dim=1)
            point = Point(z, residual, norm, norm + 1)
            state = solver.init(point, problem) if number == 0 else state
            taken = None if accepted is None else accepted.get(number)
            told = Turn(point, point, taken, torch.zeros(len(z)), problem, 100)
            found.append(solver.step(state, told))
    return found


@pytest.mark.parametrize(
    "solver",
    [
        Anderson(),
        Anderson(damping=0.7),
        Anderson(memory=1),
        Anderson(memory=3),
        Anderson(memory=40),
    ],
    ids=["default", "damped", "one", "three", "more than dimensions"],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_andersons_steps(
    solver: Anderson, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirty points, more than there are slots; as many as dimensions are an ill-conditioned system."""
    size = 5 if solver.memory > 30 else 23
    z = draws(30, (4, size), dtype)
    # Large steps and residuals that shrink, as in a solve.
    points = [
        (a, b * 0.8**k)
        for k, (a, b) in enumerate(zip(z, draws(30, (4, size), dtype, 1), strict=True))
    ]
    native, ordinary = in_both(monkeypatch, lambda: candidates(solver, points))
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}[dtype] * (1000 if size == 5 else 1)
    for one, other in zip(native, ordinary, strict=True):
        assert ((one - other).norm(dim=1) <= tolerance * other.norm(dim=1)).all()
    assert not torch.equal(native[-1], ordinary[-1]) or solver.memory == 1  # it was C++


def test_points_that_are_not_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = draws(6, (9, 3), torch.float64)
    points = [(parts[k].mT, parts[k + 3].mT) for k in range(3)]
    native, ordinary = in_both(monkeypatch, lambda: candidates(Anderson(), points))
    for one, other in zip(native, ordinary, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_rows_whose_step_was_rejected_forget_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop has a step of its own for them; afterwards they start from no history."""
    z, r = draws(12, (3, 8), torch.float64), draws(12, (3, 8), torch.float64, 1)
    accepted = {k: torch.tensor([True, k != 4, k not in (4, 7)]) for k in (4, 7)}
    points = list(zip(z, r, strict=True))
    native, ordinary = in_both(
        monkeypatch, lambda: candidates(Anderson(memory=4), points, accepted)
    )
    for number, (one, other) in enumerate(zip(native, ordinary, strict=True)):
        rows = accepted.get(number, torch.ones(3, dtype=torch.bool))
        torch.testing.assert_close(one[rows], other[rows], rtol=1e-11, atol=1e-11)


SPEED = torch.tensor([0.2, 0.5, 0.8, 0.9, 0.95, 0.3], dtype=torch.float64)


def uneven(z: Tensor, speed: Tensor) -> Tensor:
    """A contraction whose samples need different numbers of evaluations."""
    return speed[:, None] * torch.sin(z.flip(1)) + torch.linspace(
        0.5, 1.5, z.shape[1], dtype=z.dtype
    )


def solved(f: Callable[..., Tensor] = uneven, size: int = 12, **options: Any) -> Solution:
    start, speed = torch.zeros(6, size, dtype=torch.float64), SPEED
    options = {"tolerance": Tolerance(1e-8), "on_failure": "ignore", **options}
    return fixed_point(f, start, (speed,), adjoint=None, **options)


def leaves_for_nan(z: Tensor, speed: Tensor) -> Tensor:
    """A sample that came near its solution has none, all at once."""
    value = uneven(z, speed)
    lost = (speed == 0.9)[:, None] & ((value - z).norm(dim=1, keepdim=True) < 1e-3)
    return torch.where(lost, torch.nan, value)


def at_origin(z: Tensor, speed: Tensor) -> Tensor:
    """Its solution 0 is no scale for a residual."""
    return speed[:, None] * z.flip(1)


def turning(z: Tensor, speed: Tensor) -> Tensor:
    """It leads around its solution for ever."""
    centre = torch.linspace(1, 2, z.shape[1], dtype=z.dtype)
    return centre + (z - centre).roll(1, 1)


PER_SAMPLE = Tolerance(rtol=torch.tensor([1e-3, 1e-9, 1e-4, 1e-6, 1e-2, 1e-8]))
SOLVES: dict[str, dict[str, Any]] = {
    "default": {},
    "plain steps": {"solver": Forward(0.8), "max_steps": 400},
    "a cap": {"solver": Anderson(memory=2), "max_steps": 7},
    "tolerances of samples": {"tolerance": PER_SAMPLE},
    "absolute": {"f": at_origin, "tolerance": Tolerance(0.0, atol=1e-9), "max_steps": 200},
    "not finite": {"f": leaves_for_nan},
    "no shrinking": {"compact": False},
    "stalling": {"f": turning, "solver": Forward(), "max_steps": 250},
    "seventy vectors": {"solver": Anderson(memory=70), "size": 90},
}  # fmt: skip


@pytest.mark.parametrize("case", list(SOLVES))
def test_whole_solves(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts and verdicts of every sample are those of the ordinary loop."""
    options = dict(SOLVES[case])
    if case == "not finite":
        options["solver"] = Anderson()  # named, it is not tried again
    native, ordinary = in_both(monkeypatch, lambda: solved(**options))
    assert native.counts() == ordinary.counts()
    assert native.evaluations.tolist() == ordinary.evaluations.tolist()
    assert native.status.tolist() == ordinary.status.tolist()
    torch.testing.assert_close(native.value, ordinary.value, rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(native.residual, ordinary.residual, rtol=0.05, atol=1e-9)
    if case == "stalling":
        assert native.counts() == {"STALLED": 6}
    if case == "not finite":
        assert native.status[3] != Status.CONVERGED and native.counts()["CONVERGED"] == 5


def test_most_evaluations_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop judges only where samples end."""
    seen: list[int] = []
    judge = loop.Loop._account

    def counting(self: loop.Loop, evaluation: int) -> bool:
        seen.append(evaluation)
        return judge(self, evaluation)

    monkeypatch.setattr(loop.Loop, "_account", counting)
    monkeypatch.setattr(process, "ENABLED", True)
    found = solved(solver=Forward(), max_steps=400)
    last = int(found.evaluations.max())
    assert {1, *found.evaluations.tolist()} <= set(seen) and max(seen) == last
    assert len(seen) < last / 3


@pytest.mark.parametrize("size", [1500, 5000])
def test_sums_over_many_numbers(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, to its rounding, not to that of a long running sum."""
    z = draws(1, (2, size), torch.float32)[0] + 1

    def f(z: Tensor) -> Tensor:
        return 0.5 * z + 1

    monkeypatch.setattr(process, "ENABLED", True)
    found = fixed_point(f, z, solver=Forward(), max_steps=2, adjoint=None, on_failure="ignore")
    once = f(z)
    residual = (f(once) - once).double().norm(dim=1) / f(once).double().norm(dim=1)
    assert ((found.residual.double() - residual).abs() < 1e-6 * residual).all()


def test_two_threads_give_what_one_gives(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "ENABLED", True)
    start = draws(1, (32, 400), torch.float32)[0]

    def f(z: Tensor) -> Tensor:
        return 0.9 * torch.sin(z.flip(1)) + 0.1 * start[: len(z)]

    found = []
    for number in (1, 2):
        threads(number)
        found.append(fixed_point(f, start, adjoint=None, compact=False, tolerance=Tolerance(1e-6)))
    assert torch.equal(found[0].value, found[1].value)
    assert found[0].evaluations.tolist() == found[1].evaluations.tolist()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_solves(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of the parent, which a child does not have, are not waited for."""
    monkeypatch.setattr(process, "ENABLED", True)
    threads(2)
    expected = solved(size=3000).value  # the parent's threads are there now
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)  # for torch's own operations, which would wait
            code = 0 if torch.equal(solved(size=3000).value, expected) else 2
        finally:
            os._exit(code)
    for _ in range(300):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.05)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 0


def test_without_a_compiler_it_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "ENABLED", True)
    monkeypatch.setattr(library, "find_compiler", lambda: None)
    monkeypatch.setattr(telling, "_TOLD_OF_NONE", set())
    library.forget()
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("default")
            found = [solved().value for _ in range(2)]
        messages = [str(each.message) for each in told if each.category is RuntimeWarning]
    finally:
        library.forget()
    assert len(messages) == 1
    assert "IMPLICIT_ATTN_CPP is 1, but" in messages[0] and "no C++ compiler" in messages[0]
    monkeypatch.setattr(process, "ENABLED", False)
    assert torch.equal(found[0], solved().value) and torch.equal(found[1], found[0])


def test_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the solve of the adjoint by GMRES, whose products are of I - J."""
    z0 = torch.zeros(3, 4, dtype=torch.float64)
    x, weight = draws(1, (3, 4), torch.float64)[0], draws(1, (4, 4), torch.float64, 1)[0] / 4
    for tensor in (x, weight):
        tensor.requires_grad_()

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return fixed_point(
            lambda z, x: torch.tanh(z @ weight + x), z0, (x,), tolerance=Tolerance(1e-13)
        ).value

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(layer(x, weight).square().sum(), (x, weight))

    for one, other in zip(*in_both(monkeypatch, gradients), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    monkeypatch.setattr(process, "ENABLED", True)
    assert torch.autograd.gradcheck(layer, (x, weight), atol=1e-6)
