"""Linear systems solved by C++ from their first direction to their last residual."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases.kernels import needs_cpp
from solvers import CG, GMRES, Solution, Status, Tolerance, solve_linear
from solvers.krylov import solve
from solvers.krylov.product import OneMinus
from solvers.native import process
from solvers.native.steps import steps_for
from solvers.native.systems import GOES_ON, SOLVED, Limits, Systems, fits

pytestmark = needs_cpp
SETTINGS = settings(max_examples=80, deadline=None, derandomize=True)
LIMITS = Limits(1e-6, 0.0, 40.0, 0.5)


def system(
    seed: int, rows: int, size: int, strength: float, *, symmetric: bool
) -> tuple[Tensor, Tensor]:
    """M (rows, size, size) of this norm, and right-hand sides; the first is zero."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, size, size, generator=generator, dtype=torch.float64)
    matrix = matrix + matrix.mT if symmetric else matrix
    matrix = strength * matrix / torch.linalg.matrix_norm(matrix, 2)[:, None, None].clamp_min(1e-9)
    right = torch.randn(rows, size, generator=generator, dtype=torch.float64)
    right[0] = 0
    return matrix, right


def times(matrix: Tensor, v: Tensor) -> Tensor:
    return (matrix @ v[:, :, None])[:, :, 0]


def solved(
    matrix: Tensor, right: Tensor, native: bool, calls: list[int] | None = None, **options: Any
) -> Solution:
    def image(v: Tensor) -> Tensor:
        if calls is not None:
            calls.append(len(v))
        return times(matrix, v)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "ENABLED", native)
        return solve_linear(OneMinus(image), right, compact=False, on_failure="ignore", **options)


@SETTINGS
@given(
    seed=st.integers(0, 1 << 30),
    rows=st.integers(1, 40),
    size=st.integers(1, 40),
    strength=st.sampled_from([0.0, 0.3, 0.8, 0.95]),
    symmetric=st.booleans(),
    restart=st.sampled_from([2, 5, 20]),
    single=st.booleans(),
    rtol=st.sampled_from([1e-2, 1e-4, 1e-9]),
    each=st.booleans(),
)
def test_as_the_loop_solves_them(
    seed: int, rows: int, size: int, strength: float, symmetric: bool, restart: int, single: bool,
    rtol: float, each: bool,
) -> None:  # fmt: skip
    """True residuals, and statuses; counts where rounding cannot change them."""
    matrix, right = system(seed, rows, size, strength, symmetric=symmetric)
    if single:
        matrix, right, rtol = matrix.float(), right.float(), max(rtol, 1e-4)
    tolerance = Tolerance(torch.full((rows,), rtol) if each else rtol)
    options: Any = {"solver": CG() if symmetric else GMRES(restart), "tolerance": tolerance}
    found, wanted = (
        solved(matrix, right, each, max_steps=200, **options) for each in (True, False)
    )
    assert torch.equal(found.status, wanted.status)
    if symmetric or restart == 20:  # from restart to restart roundings add up
        apart = (found.evaluations - wanted.evaluations).abs()
        assert (apart <= (1 if single or rtol < 1e-6 else 0)).all()
    assert found.evaluations[0] == 0 and not found.value[0].any()
    rest = right - found.value + times(matrix, found.value)
    limit = rtol * right.norm(dim=1)
    slack = 3 if single else 1.01
    assert (rest.norm(dim=1) <= slack * limit)[found.converged].all()
    assert (found.residual_norm <= 1.0001 * limit)[found.converged].all()


@pytest.mark.parametrize("solver", [GMRES(), CG(), GMRES(3)], ids=["gmres", "cg", "restarts"])
def test_no_product_beyond_those_that_are_told(solver: Any) -> None:
    matrix, right = system(0, 9, 12, 0.6, symmetric=True)
    right[1:] = right[1]  # samples alike end together, so that their restarts are at one time, too
    matrix[1:] = matrix[1]
    calls: list[int] = []
    found = solved(matrix, right, True, calls, solver=solver, tolerance=Tolerance(1e-6))
    assert found.converged.all() and len(calls) == int(found.evaluations.max())


def test_a_doubtful_residual_is_verified() -> None:
    """In float32 to a tolerance near its rounding, by one more product."""
    matrix, right = (t.float() for t in system(1, 9, 12, 0.9, symmetric=False))
    calls: list[int] = []
    found = solved(matrix, right, True, calls, solver=GMRES(), tolerance=Tolerance(1e-6))
    assert found.converged.all() and len(calls) > int(found.steps.max())
    rest = right.double() - found.value.double() + times(matrix.double(), found.value.double())
    assert (rest.norm(dim=1) <= 1.05e-6 * right.norm(dim=1)).all()


def test_what_cannot_be_solved_ends_as_in_the_loop() -> None:
    """I - M singular, indefinite, not finite, or too far for the budget."""
    matrix, right = system(2, 5, 6, 0.5, symmetric=True)
    bad = {
        "singular": torch.eye(6, dtype=torch.float64),
        "indefinite": 3 * torch.eye(6, dtype=torch.float64),
        "not finite": torch.full((6, 6), torch.nan, dtype=torch.float64),
    }
    for name, values in bad.items():
        spoilt = matrix.clone()
        spoilt[3] = values
        for solver in (CG(),) if name == "indefinite" else (GMRES(), CG()):
            runs = [
                solved(spoilt, right, native, solver=solver, max_steps=50)
                for native in (True, False)
            ]
            assert torch.equal(runs[0].status, runs[1].status), (name, solver)
            assert runs[0].status[3] != Status.CONVERGED, (name, solver)
            assert (runs[0].status[[0, 1, 2, 4]] == Status.CONVERGED).all()
            assert torch.isfinite(runs[0].value).all()
    short = [solved(matrix, right, native, solver=GMRES(), max_steps=2) for native in (True, False)]
    assert torch.equal(short[0].status, short[1].status) and (short[0].evaluations <= 2).all()


def test_right_hand_sides_of_any_size_and_layout() -> None:
    matrix, right = system(3, 4, 5, 0.5, symmetric=False)
    for scale in (1e-30, 1.0, 1e30):
        found = solved(matrix, scale * right, True, solver=GMRES(), tolerance=Tolerance(1e-9))
        rest = scale * right - found.value + times(matrix, found.value)
        assert (
            found.converged.all() and (rest.norm(dim=1) <= 2e-9 * scale * right.norm(dim=1)).all()
        )
        single = solved(
            matrix.float(), (scale * right).float(), True, solver=GMRES(), tolerance=Tolerance(1e-4)
        )
        torch.testing.assert_close(single.value.double(), found.value, rtol=1e-3, atol=1e-4 * scale)
    strided = right.mT.contiguous().mT
    first, second = (solved(matrix, b, True, solver=GMRES()) for b in (right, strided))
    assert torch.equal(first.value, second.value)


@pytest.mark.parametrize("solver", [GMRES(), CG()])
def test_small_gradients_stay_in_native_code(solver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a mean over many samples, beside ordinary ones and zero, to a tight tolerance in float32."""
    matrix, right = (t.float() for t in system(6, 8, 10, 0.6, symmetric=True))
    right[1], right[2], right[3] = 1e-9 * right[1], 1e9 * right[2], 3e-10 * right[3]

    def never(*given: Any, **options: Any) -> None:
        raise AssertionError("not to be called")

    monkeypatch.setattr(solve, "LinearLoop", never)
    found = solved(matrix, right, True, solver=solver, tolerance=Tolerance(1e-6))
    rest = right.double() - found.value.double() + times(matrix.double(), found.value.double())
    assert found.converged.all()
    assert (rest.norm(dim=1) <= 2e-6 * right.double().norm(dim=1)).all()
    right[3] = 1e-12 * right[4]  # squares of its residuals would be 0
    with pytest.raises(AssertionError):
        solved(matrix, right, True, solver=solver, tolerance=Tolerance(1e-6))


def test_who_asks_for_more_gets_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*given: Any) -> None:
        raise AssertionError("not to be called")

    monkeypatch.setattr(solve, "solve_in_native", never)
    monkeypatch.setattr(process, "ENABLED", True)
    matrix, right = system(3, 4, 5, 0.5, symmetric=False)
    product = OneMinus(lambda v: times(matrix, v))
    for options in ({"record": True}, {"callback": lambda progress: None}, {"x0": 0 * right}):
        given: Any = {"compact": False, **options}
        assert solve_linear(product, right, solver=GMRES(), **given).converged.all()
    plain: Any = {"solver": GMRES(), "compact": False}
    assert solve_linear(lambda v: v - times(matrix, v), right, **plain).converged.all()
    with pytest.raises(AssertionError):
        solve_linear(product, right, solver=GMRES(), compact=False)


def test_products_of_another_kind_are_refused() -> None:
    right = torch.ones(3, 4)
    steps = steps_for(right, asked=True)
    assert steps is not None
    systems = Systems(right, 5, LIMITS, steps)
    with pytest.raises(ValueError, match=r"\(3, 4\) torch.float32, got \(3, 2\)"):
        systems.absorb(torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"got \(3, 4\) torch.float64"):
        systems.absorb(torch.ones(3, 4, dtype=torch.float64))


@pytest.mark.parametrize("restart", [3, None])
def test_cycles_by_hand(restart: int | None) -> None:
    """A cycle that is ended early is verified, and the next one goes on from there."""
    matrix, right = system(5, 6, 8, 0.7, symmetric=True)
    steps = steps_for(right, asked=True)
    assert steps is not None
    systems = Systems(right, restart, LIMITS, steps)
    assert systems.running == 5  # one right-hand side is zero
    sizes, outcome = list[float](), GOES_ON
    for _ in range(30):
        for _ in range(3):
            systems.absorb(times(matrix, systems.direction))
        outcome = systems.verify(times(matrix, systems.correct()))
        rest = right - systems.u + times(matrix, systems.u)
        torch.testing.assert_close(systems.size, rest.norm(dim=1), rtol=1e-6, atol=1e-12)
        sizes.append(float(systems.size.max()))
        if outcome != GOES_ON:
            break
    assert outcome == SOLVED and len(sizes) > 1 and sizes == sorted(sizes, reverse=True)
    torch.testing.assert_close(systems.relative[1:], (systems.size / right.norm(dim=1))[1:])


def test_cycles_that_are_too_long() -> None:
    right = torch.ones(2, 3)
    assert fits(right, None) and fits(right, 63) and not fits(right, 64)
    assert not fits(torch.empty(1).expand(1 << 20, 16), 20)
    assert not fits(torch.empty(1).expand(1 << 16, 1), 20)  # whose tables are larger
