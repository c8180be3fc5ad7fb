"""Units and magnitudes change no answer and no count."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from cases.solves import SOLVERS, solve
from problems.zoo import make, scaled
from solvers import (
    CG,
    GMRES,
    MINRES,
    Anderson,
    Broyden,
    Forward,
    Implicit,
    LinearSolver,
    Solver,
    Status,
    Tolerance,
    fixed_point,
)

# Powers of two move no rounding error, so that even a chaotic solve repeats itself exactly.
EXACT = [2.0**-10, 2.0**10]


@pytest.mark.parametrize("factor", EXACT)
@pytest.mark.parametrize("safeguarded", [False, True])
@pytest.mark.parametrize("name", ["energy_rosenbrock_10", "linear_expanding"])
@pytest.mark.parametrize("solver", list(SOLVERS))
def test_powers_of_two_change_nothing_at_all(
    solver: str, name: str, safeguarded: bool, factor: float
) -> None:
    problem = make(name)
    original = solve(problem, solver, safeguarded=safeguarded, max_steps=80)
    other = solve(scaled(problem, factor), solver, safeguarded=safeguarded, max_steps=80)
    assert other.evaluations.tolist() == original.evaluations.tolist()
    assert other.status.tolist() == original.status.tolist()
    assert torch.equal(other.value / factor, original.value)
    assert torch.equal(other.residual, original.residual)


@pytest.mark.parametrize("linear", [None, CG(), MINRES(), GMRES()])
@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_a_scaled_loss_costs_the_same(factor: float, linear: LinearSolver | None) -> None:
    """torchdeq's absolute backward tolerance is never met for a large loss in float32."""
    problem = make("linear_symmetric_0.9", dtype=torch.float32)
    matrix, offset = problem.args
    offset.requires_grad_()
    gradients, products = [], []
    for scale in (1.0, factor):
        solution = fixed_point(
            problem.f, problem.z0, (matrix, offset), tolerance=1e-4,
            max_steps=100, adjoint=Implicit(solver=linear),
        )  # fmt: skip
        loss = scale * solution.value.pow(3).sum()
        gradients.append(torch.autograd.grad(loss, offset)[0] / scale)
        report = solution.adjoint.solution
        assert report is not None
        assert bool(report.converged.all())
        products.append(report.evaluations.tolist())
    assert products[0] == products[1]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-3)


SCALES = {torch.float32: [1e-36, 1e-25, 1.0, 1e35], torch.float64: [1e-300, 1e-161, 1.0, 1e300]}
CASES = [(dtype, scale) for dtype, scales in SCALES.items() for scale in scales]


@pytest.mark.defect("A4")
@pytest.mark.parametrize(("dtype", "scale"), CASES)
@pytest.mark.parametrize("solver", [Forward(), Anderson(), Broyden()], ids=repr)
def test_converged_means_converged_at_any_magnitude(
    solver: Solver, dtype: torch.dtype, scale: float
) -> None:
    b = torch.linspace(0.5, 1.5, 12, dtype=dtype).reshape(3, 4) * scale
    solution = fixed_point(
        lambda z, b: 0.5 * z + b, torch.zeros_like(b), (b,), solver=solver, on_failure="ignore"
    )
    value, b = solution.value.double() / scale, b.double() / scale
    found = 0.5 * value + b
    relative = (found - value).norm(dim=1) / found.norm(dim=1)
    if isinstance(solver, Forward):
        assert solution.converged.all()
    assert (relative[solution.converged] <= 1.001e-4).all()
    torch.testing.assert_close(solution.residual.double(), relative, rtol=1e-3, atol=1e-7)


@pytest.mark.defect("A4")
def test_an_absolute_tolerance_below_the_range_of_squares_holds() -> None:
    b = torch.full((2, 3), 1e-25)
    solution = fixed_point(
        lambda z, b: 0.5 * z + b, torch.zeros_like(b), (b,), solver=Forward(),
        tolerance=Tolerance(rtol=0.0, atol=1e-28),
    )  # fmt: skip
    assert solution.converged.all()
    assert ((0.5 * solution.value - b).double().norm(dim=1) <= 1e-28).all()


def test_rows_that_are_not_finite_leave_the_others_their_norm() -> None:
    def f(z: Tensor) -> Tensor:
        return torch.where(z > 2, torch.nan, 0.5 * z)

    solution = fixed_point(
        f, torch.tensor([[1e-30], [3.0]]), solver=Forward(), on_failure="ignore", max_steps=2
    )
    assert solution.status.tolist() == [Status.MAX_STEPS, Status.NONFINITE]
    torch.testing.assert_close(solution.residual_norm[0] * 1e30, torch.tensor(0.5))


@pytest.mark.defect("C5")
@pytest.mark.parametrize("memory", [2, 10])
def test_a_basis_that_overflows_half_precision_is_not_heard_of(memory: int) -> None:
    """Two finite residuals of opposite sign: their difference is infinite, and 0 times it NaN."""
    z0 = torch.tensor([[2e4, 0.0, 1e4], [1e-3, 0.0, 1.0]]).half()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solution = fixed_point(
            lambda z: -z, z0, solver=Anderson(memory=memory), on_failure="ignore", max_steps=30
        )
    assert solution.value.isfinite().all()


def test_a_subnormal_state_has_its_own_residual() -> None:
    start = torch.full((1, 4), 1e-310, dtype=torch.float64)
    solution = fixed_point(
        lambda z: 2 * z, start, solver=Forward(), max_steps=1, on_failure="ignore"
    )
    assert float(solution.residual) == pytest.approx(0.5, rel=1e-6)  # |2z - z| / |2z|


def test_a_norm_out_of_range_changes_no_other_sample() -> None:
    """In bfloat16, where z + (f(z) - z) is f(z) but for a rounding of half a percent."""
    z = torch.tensor([[1.0, 1.703125, -0.5], [1e-30, 1e-30, 1e-30]], dtype=torch.bfloat16)

    def f(z: Tensor) -> Tensor:
        return z * 0.0142822265625

    options = {"solver": Forward(), "max_steps": 1, "on_failure": "ignore", "adjoint": None}
    both, alone = fixed_point(f, z, **options), fixed_point(f, z[:1], **options)
    assert float(both.residual[0]) == pytest.approx(float(alone.residual[0]), rel=1e-6)
