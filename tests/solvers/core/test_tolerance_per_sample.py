"""Tolerances of each sample: every sample ends where it would end alone with its own tolerance."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import solvers
from implicit_attn import DEQ
from solvers import Anderson, Forward, Implicit, Status, Tolerance, Unrolled

B, D = 40, 6


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """z = tanh(A z) / 2 + x, and rtols from 1e-1 to 1e-9, in no order."""
    torch.manual_seed(0)
    weight = torch.randn(D, D, dtype=dtype) / D**0.5
    x = torch.randn(B, D, dtype=dtype)
    return weight, x, (10.0 ** -(1 + torch.arange(B) * 7 % 9)).to(dtype)


def solve(x: Tensor, weight: Tensor, tolerance: Tolerance, **options: Any) -> solvers.Solution:
    def f(z: Tensor, x: Tensor) -> Tensor:
        return 0.5 * torch.tanh((z[:, None] * weight).sum(2)) + x

    return solvers.fixed_point(f, torch.zeros_like(x), (x,), tolerance=tolerance, **options)


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("solver", [Anderson(), Forward(), solvers.Broyden(), None], ids=str)
def test_a_sample_ends_as_it_does_alone(solver: Any, compact: bool) -> None:
    weight, x, rtol = problem()
    together = solve(x, weight, Tolerance(rtol), solver=solver, compact=compact)
    assert bool(together.converged.all())
    assert bool((together.residual <= rtol).all())
    assert len(together.evaluations.unique()) > 3
    for i in range(0, B, 7):
        alone = solve(x[i : i + 1], weight, Tolerance(float(rtol[i])), solver=solver)
        assert int(alone.evaluations) == int(together.evaluations[i])
        torch.testing.assert_close(alone.value[0], together.value[i], rtol=1e-13, atol=1e-13)


def test_absolute_parts_of_each_sample() -> None:
    weight, x, atol = problem()
    found = solve(x, weight, Tolerance(0.0, atol))
    assert bool((found.residual_norm <= atol).all())
    i = int(atol.argmax())
    assert float(found.residual_norm[i]) > float(atol.min())


def test_equal_numbers_are_one_number() -> None:
    weight, x, _ = problem()
    each = solve(x, weight, Tolerance(torch.full((B,), 1e-5, dtype=torch.float64)))
    whole = solve(x, weight, Tolerance(1e-5))
    torch.testing.assert_close(each.value, whole.value, rtol=0, atol=0)
    assert torch.equal(each.evaluations, whole.evaluations)


def test_float32_tolerances_of_a_float32_state() -> None:
    weight, x, rtol = problem(torch.float32)
    rtol = rtol.clamp_min(1e-5)
    found = solve(x, weight, Tolerance(rtol.double()))
    assert bool((found.residual <= rtol * (1 + 1e-6)).all())


def test_the_adjoint_follows() -> None:
    weight, x, rtol = problem()
    x.requires_grad_()
    found = solve(x, weight, Tolerance(rtol))
    found.value.square().sum().backward()
    adjoint = found.adjoint.solution
    assert adjoint is not None
    assert bool((adjoint.residual <= rtol).all())
    assert float(adjoint.residual.max()) > 1e-3  # nothing is solved further than asked for


def test_gradients_of_samples_solved_exactly() -> None:
    weight, x, rtol = problem()
    tight = rtol < 1e-6
    rtol = torch.where(tight, 1e-13, rtol)

    def gradient(tolerance: Tolerance, **options: Any) -> Tensor:
        own = x.clone().requires_grad_()
        found = solve(own, weight, tolerance, max_steps=200, **options)
        found.value.square().sum().backward()
        assert own.grad is not None
        return own.grad

    mixed = gradient(Tolerance(rtol))
    exact = gradient(Tolerance(1e-13))
    torch.testing.assert_close(mixed[tight], exact[tight], rtol=1e-10, atol=1e-10)
    unrolled = gradient(Tolerance(rtol), adjoint=Unrolled())
    torch.testing.assert_close(unrolled[tight], exact[tight], rtol=1e-9, atol=1e-9)


def test_an_adjoint_tolerance_of_its_own_and_where_rtol_is_0() -> None:
    weight, x, rtol = problem()
    x.requires_grad_()
    found = solve(x, weight, Tolerance(1e-8), adjoint=Implicit(tolerance=Tolerance(rtol)))
    found.value.sum().backward()
    assert found.adjoint.solution is not None
    assert bool((found.adjoint.solution.residual <= rtol).all())
    half = torch.tensor([0.0, 1e-2])
    assert torch.equal(Tolerance(half).of_adjoint(1e-6).rtol, torch.tensor([1e-6, 1e-2]))  # type: ignore[arg-type]


def test_a_sample_without_a_finite_value_takes_its_tolerance_along() -> None:
    weight, x, rtol = problem()

    def f(z: Tensor, x: Tensor) -> Tensor:
        value = 0.5 * torch.tanh((z[:, None] * weight).sum(2)) + x
        return torch.where(x[:, :1] > 1e3, torch.nan, value)

    x[3] = 1e4
    x.requires_grad_()
    options: dict[str, Any] = {"tolerance": Tolerance(rtol), "on_failure": "ignore"}
    found = solvers.fixed_point(f, torch.zeros_like(x), (x,), **options)
    found.value.sum().backward()
    others = torch.arange(B) != 3
    assert int(found.status[3]) == Status.NONFINITE
    assert found.adjoint.solution is not None
    assert bool((found.residual <= rtol)[others].all())
    assert bool((found.adjoint.solution.residual <= rtol)[others].all())


@pytest.mark.parametrize("solver", [solvers.CG(), solvers.MINRES(), solvers.GMRES()], ids=str)
def test_linear_systems(solver: Any) -> None:
    torch.manual_seed(1)
    root = torch.randn(D, D, dtype=torch.float64)
    matrix = root @ root.mT + torch.eye(D, dtype=torch.float64)
    b, rtol = torch.randn(B, D, dtype=torch.float64), problem()[2]

    def product(v: Tensor) -> Tensor:
        return v @ matrix

    found = solvers.solve_linear(product, b, solver=solver, tolerance=Tolerance(rtol))
    assert bool(found.converged.all())
    residual = (b - found.value @ matrix).norm(dim=1) / b.norm(dim=1)
    assert bool((residual <= rtol * 1.001).all())
    assert len(found.evaluations.unique()) > 2


def test_a_layer_takes_them_per_call_and_compiled() -> None:
    _, x, rtol = problem(torch.float32)
    rtol = rtol.clamp_min(1e-5)
    layer = DEQ.from_update(lambda z, x: 0.9 * torch.tanh(z.roll(1, 1)) + x)
    plain = layer.solve(x, tolerance=Tolerance(rtol))
    layer.compile(backend="eager")
    compiled = layer.solve(x, tolerance=Tolerance(rtol))
    assert torch.equal(plain.evaluations, compiled.evaluations)
    assert bool((compiled.residual <= rtol).all())
    few = layer.solve(x[:30], tolerance=Tolerance(rtol[:30]))  # padded to the size that is known
    assert torch.equal(few.evaluations, plain.evaluations[:30])
    own = x.clone().requires_grad_()
    solution = layer.solve(own, tolerance=Tolerance(rtol))
    solution.value.sum().backward()
    assert solution.adjoint.solution is not None
    assert bool((solution.adjoint.solution.residual <= rtol).all())


@pytest.mark.parametrize(
    ("part", "kind", "said"),
    [
        (torch.ones(2, 3), ValueError, "rtol must be a number or of shape"),
        (torch.ones(0), ValueError, "rtol must be a number or of shape"),
        (torch.ones(3, dtype=torch.int64), TypeError, "rtol must be a number or of a floating"),
        (torch.tensor([1e-3, -1.0]), ValueError, "rtol must be finite and >= 0 for every sample"),
        (torch.tensor([torch.nan]), ValueError, "rtol must be finite and >= 0 for every sample"),
    ],
    ids=["matrix", "empty", "integers", "negative", "nan"],
)
def test_tensors_that_are_no_tolerances(part: Tensor, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        Tolerance(part)


def test_a_batch_that_does_not_fit() -> None:
    weight, x, rtol = problem()
    few = Tolerance(rtol[:-1])
    with pytest.raises(ValueError, match="tolerance must hold one number for each of 40 samples"):
        solve(x, weight, few)
    with pytest.raises(ValueError, match=r"adjoint\.tolerance must hold one number for each of 40"):
        solve(x, weight, Tolerance(), adjoint=Implicit(tolerance=few))
    with pytest.raises(ValueError, match="tolerance must hold one number for each of 40 samples"):
        solvers.solve_linear(lambda v: v, x, tolerance=few)
    with pytest.raises(ValueError, match="rtol and atol must be of one batch, got 39 and 40"):
        Tolerance(rtol[:-1], rtol)
    with pytest.raises(ValueError, match="one number for all samples inside of torch"):
        torch.func.grad(lambda x: solve(x, weight, Tolerance(rtol)).value.sum())(x)


def test_they_are_values() -> None:
    _, _, rtol = problem()
    first = Tolerance(rtol)
    assert first == Tolerance(rtol.clone()) and hash(first) == hash(Tolerance(rtol.clone()))
    assert first != Tolerance(2 * rtol) and first != Tolerance() and Tolerance() == Tolerance(1e-4)
    assert copy.deepcopy(first) == pickle.loads(pickle.dumps(first)) == first
    given = rtol.clone()
    kept = Tolerance(given)
    given.zero_()
    assert kept == first


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_tolerances_of_any_floating_dtype(dtype: torch.dtype) -> None:
    weight, x, rtol = problem()
    rtol = rtol.clamp_min(1e-6).to(dtype)
    for solver in (Anderson(), Forward()):
        found = solve(x, weight, Tolerance(rtol), solver=solver)
        same = solve(x, weight, Tolerance(rtol.double()), solver=solver)
        assert bool(found.converged.all())
        assert torch.equal(found.evaluations, same.evaluations)
