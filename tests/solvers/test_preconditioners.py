"""Preconditioners of linear, adjoint and Newton solves: the same solution by fewer products."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from cases.solves import exact, matrices, multiply, normal, right_sides, true_residual
from solvers import (
    CG,
    GMRES,
    MINRES,
    Implicit,
    LinearSolver,
    Newton,
    Status,
    Tolerance,
    fixed_point,
    root,
    solve_linear,
)
from solvers.core.cuda import forced

SCALES = torch.logspace(0, 2, 40, dtype=torch.float64)


def scaled(kind: str) -> Tensor:
    """(6, 40, 40) matrices whose large condition number is removed by dividing by SCALES squared."""
    core = matrices(kind, size=40, condition=3.0)
    return SCALES[:, None] * core * SCALES


def divide(v: Tensor) -> Tensor:
    return v / SCALES.to(v.dtype) ** 2


SUITED: list[tuple[str, type[LinearSolver]]] = [
    ("definite", CG),
    ("definite", MINRES),
    ("indefinite", MINRES),
    ("definite", GMRES),
    ("indefinite", GMRES),
]


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize(("kind", "method"), SUITED)
def test_a_preconditioned_solve_takes_a_third_of_the_products(
    kind: str, method: type[LinearSolver], compact: bool
) -> None:
    matrix, right = scaled(kind), right_sides(size=40)
    right[:3] *= SCALES  # other right-hand sides take other numbers of products, so samples leave
    options: dict[str, Any] = {"args": (matrix,), "tolerance": 1e-9, "max_steps": 400}
    plain, fast = (
        solve_linear(multiply, right, solver=method(preconditioner=m), compact=compact,
                     on_failure="ignore", **options)
        for m in (None, divide)
    )  # fmt: skip
    assert fast.converged.all()
    assert (3 * fast.evaluations < plain.evaluations).all()
    torch.testing.assert_close(fast.residual, true_residual(matrix, right, fast), rtol=1e-4, atol=0)
    torch.testing.assert_close(fast.value, exact(matrix, right), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("method", [CG, MINRES, GMRES])
def test_the_recurrence_follows_the_residual(method: type[LinearSolver]) -> None:
    """The only product that is not a step verifies the residual, so the recurrence saw it coming."""
    matrix, right = scaled("definite"), right_sides(size=40)
    solver = GMRES(60, preconditioner=divide) if method is GMRES else method(preconditioner=divide)
    solution = solve_linear(multiply, right, args=(matrix,), solver=solver, max_steps=200)
    assert solution.converged.all()
    assert torch.equal(solution.evaluations, solution.steps + 1)


@pytest.mark.parametrize("method", [CG, MINRES, GMRES])
def test_an_exact_inverse_takes_one_step(method: type[LinearSolver]) -> None:
    matrix, right = matrices("definite"), right_sides()
    inverse = torch.linalg.inv(matrix)
    inverse = (inverse + inverse.mT) / 2
    solver = method(preconditioner=lambda v: multiply(v, inverse))
    solution = solve_linear(multiply, right, args=(matrix,), solver=solver, compact=False)
    assert solution.converged.all()
    assert (solution.steps <= 2).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_preconditioner_receives_the_structure_and_dtypes_of_the_right_side(
    dtype: torch.dtype,
) -> None:
    seen: list[tuple[torch.dtype, torch.Size]] = []

    def halve(v: dict[str, Tensor]) -> dict[str, Tensor]:
        seen.append((v["a"].dtype, v["b"].shape))
        return {"b": v["b"] / 2, "a": v["a"] / 4}

    b = {"a": torch.ones(2, 3, dtype=dtype), "b": torch.ones(2, 4, 5, dtype=dtype)}
    solution = solve_linear(
        lambda v: {"a": 4 * v["a"], "b": 2 * v["b"]}, b, solver=CG(preconditioner=halve),
        tolerance=1e-2,
    )  # fmt: skip
    assert solution.converged.all()
    assert set(seen) == {(dtype, torch.Size((2, 4, 5)))}
    torch.testing.assert_close(solution.value["a"], torch.full((2, 3), 0.25, dtype=dtype))


@pytest.mark.parametrize("method", [CG, MINRES])
def test_a_preconditioner_that_is_not_positive_definite_is_reported(
    method: type[LinearSolver],
) -> None:
    signs = torch.where(torch.arange(20) % 2 == 0, -1.0, 1.0).double()
    solution = solve_linear(
        multiply, right_sides(), args=(matrices("definite"),), on_failure="ignore",
        solver=method(preconditioner=lambda v: -v + 0.1 * signs * v),
    )  # fmt: skip
    assert (solution.status == Status.INDEFINITE).all()
    assert solution.value.isfinite().all()


def test_errors_of_preconditioners() -> None:
    with pytest.raises(TypeError, match="preconditioner must be callable or None"):
        MINRES(preconditioner=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="preconditioner must be callable or None"):
        GMRES(5, preconditioner="ilu")  # type: ignore[arg-type]
    b = torch.ones(3, 4)
    with pytest.raises(ValueError, match=r"preconditioner\(v\) must have the shape of v"):
        solve_linear(lambda v: v, b, solver=CG(preconditioner=lambda v: v[:, :2]))
    with pytest.raises(TypeError, match=r"preconditioner\(v\) must have the dtype of v"):
        solve_linear(lambda v: v, b, solver=GMRES(preconditioner=lambda v: v.double()))
    # Half of the samples are solved at the first step and leave.
    matrix = torch.diag_embed(torch.ones(4, 3).cumsum(1))
    matrix[:2] = torch.eye(3)
    batched = torch.ones(4, 1)
    with pytest.raises(RuntimeError, match="2 of 4 unsolved samples"):
        solve_linear(
            multiply, torch.ones(4, 3), args=(matrix,), tolerance=1e-6,
            solver=CG(preconditioner=lambda v: batched * v),
        )  # fmt: skip


def stiff(z: dict[str, Tensor], b: Tensor) -> dict[str, Tensor]:
    """A root ``D z + couplings + tanh z = b`` in two leaves, with a symmetric definite derivative."""
    d = SCALES[::10]
    mean = z["p"].mean(1, keepdim=True)
    return {
        "p": d * z["p"] + z["q"][:, :, 0].sum(1, keepdim=True) / 4 + z["p"].tanh() - b,
        "q": 50 * z["q"] + torch.stack((mean.expand(-1, 3), 0 * mean.expand(-1, 3)), 2),
    }


def stiff_inverse(v: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"p": v["p"] / (SCALES[::10] + 1), "q": v["q"] / 50}


@pytest.mark.parametrize("method", [CG, MINRES, GMRES])
def test_gradients_of_a_preconditioned_adjoint(method: type[LinearSolver]) -> None:
    linear = method(preconditioner=stiff_inverse)
    adjoint = Implicit(linear, tolerance=1e-12)

    def solve(b: Tensor) -> Tensor:
        start = {"p": torch.zeros_like(b), "q": b.new_zeros(len(b), 3, 2)}
        solution = root(
            stiff, start, (b,), solver=Newton(linear), adjoint=adjoint, symmetric=True,
            tolerance=Tolerance(0.0, 1e-12), max_steps=500,
        )  # fmt: skip
        assert solution.converged.all()
        return torch.cat([solution.value["p"], solution.value["q"].flatten(1)], 1)

    b = normal(2, 4).requires_grad_()
    assert gradcheck(solve, (b,))
    assert gradgradcheck(solve, (b,), fast_mode=True)


@pytest.mark.parametrize("linear", [CG, GMRES])
def test_newtons_method_with_a_preconditioner(linear: type[LinearSolver]) -> None:
    """``A z + z^3 = b`` for a stiff A and a known z."""
    matrix, answer = scaled("definite"), 0.1 * normal(6, 40)
    b = multiply(answer, matrix) + answer**3
    options: dict[str, Any] = {"tolerance": 1e-8, "max_steps": 400, "on_failure": "ignore"}

    def solve(m: Any) -> Any:
        return root(
            lambda z, a, b: multiply(z, a) + z**3 - b, torch.zeros_like(b), (matrix, b),
            solver=Newton(linear(preconditioner=m)), symmetric=True, adjoint=None, **options,
        )  # fmt: skip

    plain, fast = solve(None), solve(divide)
    assert fast.converged.all()
    torch.testing.assert_close(fast.value, answer, rtol=1e-5, atol=1e-7)
    assert (3 * fast.evaluations < plain.evaluations).all()


def test_a_symmetric_indefinite_root() -> None:
    """``A z + 0.02 z^3 = b`` for an indefinite A and a known z; its gradient against a dense solve.

    Eigenvalues of A are at least 1/3 in size, more than the derivative of the cubic term.
    """
    matrix, answer = matrices("indefinite", size=40, condition=3.0), 0.5 * normal(6, 40)
    b = (multiply(answer, matrix) + 0.02 * answer**3).requires_grad_()
    solution = root(
        lambda z, a, b: multiply(z, a) + 0.02 * z**3 - b, torch.zeros_like(answer), (matrix, b),
        symmetric=True, tolerance=1e-10, max_steps=500,
    )  # fmt: skip
    assert solution.converged.all()
    torch.testing.assert_close(solution.value, answer, rtol=1e-6, atol=1e-8)
    (slope,) = torch.autograd.grad(solution.value.sum(), b)
    derivative = matrix + torch.diag_embed(0.06 * answer**2)
    expected = torch.linalg.solve(derivative, torch.ones(6, 40, dtype=torch.float64))
    torch.testing.assert_close(slope, expected, rtol=1e-4, atol=1e-6)
    with pytest.raises(TypeError, match="symmetric"):
        root(lambda z: z, torch.zeros(2, 3), symmetric=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("most", [100, 400])
def test_the_default_adjoint_of_a_symmetric_map_continues_with_minres(most: int) -> None:
    """A larger limit costs no products: Anderson has 20 of them whatever the limit is.

    MINRES needs at most as many as there are different eigenvalues, up to rounding.
    """
    rates = torch.cat([torch.linspace(0.1, 0.98, 30), torch.full((10,), 0.5)]).double()

    def f(z: Tensor, x: Tensor) -> Tensor:
        return rates * z + x

    f.symmetric = True  # type: ignore[attr-defined]
    x = normal(2, 40).requires_grad_()
    adjoint = Implicit(tolerance=1e-10, max_steps=most)
    solution = fixed_point(f, x.detach(), (x,), tolerance=1e-6, max_steps=300, adjoint=adjoint)
    (slope,) = torch.autograd.grad(solution.value.sum(), x)
    torch.testing.assert_close(slope, (1 / (1 - rates)).expand(2, -1), rtol=1e-7, atol=0)
    report = solution.adjoint.solution
    assert report is not None
    assert (report.evaluations > 20).all() and (report.evaluations <= 80).all()


@pytest.mark.parametrize(
    ("record", "dtype"), [(False, torch.float64), (False, torch.float32), (True, torch.float64)]
)
def test_patience_loosens_the_rule_that_ends_a_stalled_sample(
    record: bool, dtype: torch.dtype
) -> None:
    """The first 300 evaluations turn a vector without shortening it; then it shrinks to zero."""

    def f(z: dict[str, Tensor]) -> dict[str, Tensor]:
        turned = torch.stack((-z["u"][:, 1], z["u"][:, 0]), 1)
        shrink = torch.where(z["t"] < 3, 1.0, 0.25)
        return {"u": shrink * turned, "t": (z["t"] + 0.01).clamp_max(3.0)}

    def solve(patience: int | None) -> Any:
        start = {"u": torch.ones(2, 2, dtype=dtype), "t": torch.zeros(2, 1, dtype=dtype)}
        return fixed_point(
            f, start, solver="forward", max_steps=1000, record=record, adjoint=None,
            tolerance=Tolerance(1e-4, atol=1e-4, patience=patience), on_failure="ignore",
        )  # fmt: skip

    assert solve(100).statuses == ["STALLED"] * 2
    assert solve(100).evaluations.tolist() == [200] * 2
    for patience in (500, None):
        solution = solve(patience)
        assert solution.converged.all()
        assert (solution.value["t"] == 3).all() and (solution.value["u"].abs() < 1e-3).all()
        assert ((solution.evaluations > 300) & (solution.evaluations < 330)).all()


@pytest.mark.parametrize("way", ["engine", "loop", "turns"])
def test_patience_holds_in_each_engine(way: str) -> None:
    """A map that jumps over its fixed point: the residual stays above 0.6."""

    def solve(patience: int | None) -> Any:
        with forced() if way == "turns" else nullcontext():
            return fixed_point(
                lambda z: torch.where(z > 0.3, -1.0, 1.0), torch.tensor([[0.5, 0.1], [0.2, 0.9]]),
                solver="anderson", max_steps=400, record=way == "loop", adjoint=None,
                tolerance=Tolerance(1e-6, patience=patience), on_failure="ignore",
            )  # fmt: skip

    for patience in (50, 100):
        assert solve(patience).statuses == ["STALLED"] * 2
        assert solve(patience).evaluations.tolist() == [2 * patience] * 2
    for slow in (300, None):
        assert solve(slow).statuses == ["MAX_STEPS"] * 2


def test_patience_is_a_number_of_evaluations_and_holds_for_the_adjoint() -> None:
    assert Tolerance().patience == 100
    with pytest.raises(ValueError, match="patience"):
        Tolerance(patience=0)
    with pytest.raises(TypeError, match="patience"):
        Tolerance(patience=1.5)  # type: ignore[arg-type]
    assert Implicit().own_tolerance(Tolerance(1e-3, patience=None)) == Tolerance(
        1e-3, patience=None
    )


def test_a_preconditioner_of_newton_leaves_masked_entries_alone() -> None:
    weight = normal(40, 40, seed=5)
    weight = 0.9 * weight / torch.linalg.matrix_norm(weight, 2)
    x, mask = normal(4, 40, seed=6), normal(4, 40, seed=7) > -0.5
    inverse = torch.linalg.inv(torch.eye(40, dtype=x.dtype) - weight)

    def f(z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ weight.mT + x)

    solver = Newton(GMRES(preconditioner=lambda v: v @ inverse.mT))
    options: Any = {"mask": mask, "tolerance": 1e-10, "max_steps": 300}
    solution = fixed_point(f, x, (x,), solver=solver, **options)
    plain = fixed_point(f, x, (x,), solver="anderson", **options)
    assert solution.converged.all() and plain.converged.all()
    assert torch.equal(solution.value[~mask], x[~mask])
    torch.testing.assert_close(solution.value, plain.value, rtol=1e-7, atol=1e-8)


def test_a_preconditioner_that_works_in_place_is_refused() -> None:
    with pytest.raises(ValueError, match="preconditioner must not modify its argument"):
        solve_linear(lambda v: 2 * v, normal(2, 3), solver=CG(preconditioner=lambda v: v.mul_(2)))
