"""What do the forward and the adjoint solve of a large symmetric system cost?

    python benchmarks/bratu.py

Bratu's problem ``-div grad u = s exp(u)`` on n x n interior points, with u = 0 at the border. As a root its
derivative is symmetric and positive definite with a condition number of about n^2 / 2. The inverse of the
Laplacian, by sine transforms, is a preconditioner of the linear solves; applied to the equation it makes a
fixed point with a small derivative. The table has the evaluations of the forward solve, the products of the
adjoint solve, and errors relative to a tight solve of the fixed point.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import tyro
from torch import Tensor

import solvers
from solvers import CG, GMRES, MINRES, Descent, Implicit, LinearSolver, Newton, Solution, Tolerance


def laplace(u: Tensor) -> Tensor:
    """Minus the Laplacian of fields (B, n, n) that are zero at the border, times the squared distance."""
    v = torch.nn.functional.pad(u, (1, 1, 1, 1))
    return 4 * u - v[:, 2:, 1:-1] - v[:, :-2, 1:-1] - v[:, 1:-1, 2:] - v[:, 1:-1, :-2]


def inverse_laplace(r: Tensor) -> Tensor:
    n = r.shape[-1]
    k = torch.arange(1, n + 1, dtype=r.dtype)
    sines = (2 / (n + 1)) ** 0.5 * torch.sin(math.pi * k[:, None] * k / (n + 1))
    waves = (2 * torch.sin(math.pi * k / (2 * (n + 1)))) ** 2
    return sines @ (sines @ r @ sines / (waves[:, None] + waves)) @ sines


def source(u: Tensor, strength: Tensor) -> Tensor:
    return strength[:, None, None] * u.exp() / (u.shape[-1] + 1) ** 2


def residual(u: Tensor, strength: Tensor) -> Tensor:
    """F(u), scaled so that the eigenvalues of its derivative are below 1."""
    return (laplace(u) - source(u, strength)) / 8


def fixed_point(u: Tensor, strength: Tensor) -> Tensor:
    return inverse_laplace(source(u, strength))


def energy(u: Tensor, strength: Tensor) -> Tensor:
    """The energy (B,) whose gradient is :func:`residual`."""
    return (u * laplace(u) / 2 - source(u, strength)).sum((1, 2)) / 8


def precondition(r: Tensor) -> Tensor:
    """Approximate inverse of the derivative of :func:`residual`."""
    return 8 * inverse_laplace(r)


def ways(start: Tensor, strength: Tensor, most: int) -> dict[str, Callable[[], Solution]]:
    """The solves of the table by name."""
    options = {"tolerance": Tolerance(0.0, 1e-8), "max_steps": most, "on_failure": "ignore"}

    def by(linear: LinearSolver | None) -> Implicit:
        return Implicit(linear, max_steps=most, tolerance=1e-8, on_failure="ignore")

    def root(adjoint: LinearSolver | None, **more: Any) -> Solution:
        return solvers.root(residual, start, (strength,), adjoint=by(adjoint), **options, **more)

    def plain(update: Callable[..., Tensor]) -> Solution:
        return solvers.fixed_point(update, start, (strength,), adjoint=by(None), **options)

    usual, inverse = CG(), CG(preconditioner=precondition)
    return {
        "root": lambda: root(GMRES()),
        "root, symmetric": lambda: root(MINRES(), symmetric=True),
        "root, CG": lambda: root(usual, symmetric=True, solver=Newton(usual)),
        "root, preconditioned CG": lambda: root(inverse, symmetric=True, solver=Newton(inverse)),
        "energy": lambda: plain(Descent(energy)),
        "z - F(z)": lambda: plain(lambda u, strength: u - residual(u, strength)),
        "preconditioned fixed point": lambda: plain(fixed_point),
    }


def exact(start: Tensor, strength: Tensor) -> Solution:
    """The tight solve that errors refer to."""
    adjoint = Implicit(tolerance=1e-12)
    options = {"tolerance": 1e-12, "adjoint": adjoint}
    return solvers.fixed_point(fixed_point, start, (strength,), **options)


def main(n: int = 64, strength: float = 6.0, most: int = 5000) -> None:
    torch.set_num_threads(1)
    start = torch.zeros(1, n, n, dtype=torch.float64)
    given = torch.tensor([strength], dtype=torch.float64, requires_grad=True)
    reference = exact(start, given)
    (slope,) = torch.autograd.grad(reference.value.square().sum(), given)
    print(f"{'':28}evaluations  products  error of u  of the gradient  statuses")
    for name, solve in ways(start, given, most).items():
        solution = solve()
        (found,) = torch.autograd.grad(solution.value.square().sum(), given)
        adjoint = solution.adjoint.solution
        assert adjoint is not None
        error = (solution.value - reference.value).norm() / reference.value.norm()
        print(
            f"{name:28}{int(solution.evaluations):11}{int(adjoint.evaluations):10}"
            f"{error.item():12.1e}{float((found - slope).abs() / slope.abs()):17.1e}  "
            f"{solution.statuses[0]}, {adjoint.statuses[0]}",
            flush=True,
        )


if __name__ == "__main__":
    tyro.cli(main)
