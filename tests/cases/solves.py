"""Solvers under test, the ways to pose problems of the zoo and linear systems to them, and counters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

import solvers
from problems import residual_norms
from problems.zoo import ZooProblem
from solvers import LBFGS, Anderson, Broyden, EnergyUpdate, Forward, GradientDescent, Newton, Solver

SOLVERS: dict[str, Solver] = {
    "forward": Forward(),
    "forward_damped": Forward(damping=0.5),
    "anderson": Anderson(memory=5),
    "anderson_1": Anderson(memory=1),
    "anderson_damped": Anderson(memory=10, damping=0.5),
    "broyden": Broyden(),
    "broyden_short": Broyden(memory=6),
    "gradient": GradientDescent(),
    "gradient_auto": GradientDescent(step_size="auto"),
    "momentum": GradientDescent(momentum=0.5),
    "nesterov": GradientDescent(momentum=0.5, nesterov=True),
    "newton": Newton(),
    "lbfgs": LBFGS(),
}
# One of each kind, for tests that are about the loop and not about the methods.
FEW = ["forward", "anderson", "broyden", "gradient_auto", "newton"]


class Given(EnergyUpdate):
    """A problem's map with its energy and the gradient ``z - f(z)`` (the zoo's convention)."""

    def __init__(self, problem: ZooProblem) -> None:
        if problem.energy is None:
            raise ValueError(f"{problem.name} has no energy")
        self.map, self.energy, self.symmetric = problem.f, problem.energy, problem.symmetric

    def joint(self, z: Tensor, *args: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fz = self.map(z, *args)
        return fz, self.energy(z, *args), z - fz


class Plain:
    """A problem's map alone, which says whether its Jacobian is symmetric."""

    def __init__(self, problem: ZooProblem) -> None:
        self.map, self.symmetric = problem.f, problem.symmetric

    def __call__(self, z: Tensor, *args: Tensor) -> Tensor:
        return self.map(z, *args)


@dataclass
class Counter:
    """``f(z, *args)`` that counts how often each sample was seen; give ``args`` as arguments.

    The last argument is the number of each sample, batched like everything else, so the count
    follows samples through a shrinking batch. ``sizes`` are the batch sizes of the calls.
    """

    f: Callable[..., Any]
    batch: int

    def __post_init__(self) -> None:
        self.index = torch.arange(self.batch)
        self.seen = torch.zeros_like(self.index)
        self.sizes: list[int] = []
        self.symmetric = bool(getattr(self.f, "symmetric", False))

    def __call__(self, z: Any, *args: Any) -> Any:
        self.note(args[-1])
        return self.f(z, *args[:-1])

    def note(self, index: Tensor) -> None:
        self.seen[index] += 1
        self.sizes.append(index.numel())


class EnergyCounter(EnergyUpdate):
    """The same for an :class:`EnergyUpdate`."""

    def __init__(self, update: EnergyUpdate, batch: int) -> None:
        self.counter = counter = Counter(update, batch)
        self.update, self.symmetric = update, update.symmetric
        self.index, self.seen, self.sizes = counter.index, counter.seen, counter.sizes

    def joint(self, z: Any, *args: Any) -> tuple[Any, Tensor, Any | None]:
        self.counter.note(args[-1])
        return self.update.joint(z, *args[:-1])


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Seeded standard normal numbers, float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def solve(
    problem: ZooProblem, solver: str | Solver, *, safeguarded: bool = False, rtol: float = 1e-6,
    max_steps: int = 500, **options: Any,
) -> solvers.Solution:  # fmt: skip
    """``fixed_point`` without gradient or warnings; minimisers get the energy, others on request."""
    chosen = SOLVERS[solver] if isinstance(solver, str) else solver
    energetic = safeguarded or chosen.needs_energy
    f = Given(problem) if energetic else Plain(problem)
    given: dict[str, Any] = {"adjoint": None, "on_failure": "ignore", "max_steps": max_steps}
    given |= {"solver": chosen, "tolerance": solvers.Tolerance(rtol=rtol)} | options
    return solvers.fixed_point(f, problem.z0, problem.args, **given)


def true_residuals(problem: ZooProblem, value: Tensor) -> tuple[Tensor, Tensor]:
    """Relative and absolute residual (B,) of ``value``, recomputed."""
    with torch.no_grad():
        residual, reference = residual_norms(value, problem.f(value, *problem.args))
    relative = torch.where(residual == 0, residual, residual / reference)
    return relative, residual


def plain_batch(
    batch: int, dim: int = 6, seed: int = 0
) -> tuple[Any, Tensor, tuple[Tensor, Tensor]]:
    """A small tanh layer ``tanh(W z + x)`` with batched weights of norm 0.8: (f, z0, args)."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(batch, dim, dim, generator=generator, dtype=torch.float64)
    weight = 0.8 * weight / torch.linalg.matrix_norm(weight, 2).reshape(-1, 1, 1)
    x = torch.randn(batch, dim, generator=generator, dtype=torch.float64)
    return tanh_layer, torch.zeros_like(x), (weight, x)


def tanh_layer(z: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """``tanh(W z + x)``."""
    return torch.tanh(torch.einsum("bmd,bd->bm", weight, z) + x)


def accepted_energies(trace: Any) -> Tensor:
    """(B, T), NaN and rejected trials replaced by the last accepted value of the row."""
    valid = torch.isfinite(trace.energy)
    valid = valid if trace.accepted is None else valid & trace.accepted
    columns = torch.arange(valid.shape[1]).expand_as(valid)
    return trace.energy.gather(1, torch.where(valid, columns, 0).cummax(dim=1).values)


# --- linear systems: batches of matrices with known spectra, and products that count ---------------


def orthogonal(batch: int, size: int, generator: torch.Generator) -> Tensor:
    draw = torch.randn(batch, size, size, generator=generator, dtype=torch.float64)
    return torch.from_numpy(numpy.linalg.qr(draw.numpy())[0])


def matrices(
    kind: str, batch: int = 6, size: int = 20, *, condition: float = 20.0, seed: int = 0
) -> Tensor:
    """(B, D, D) float64: definite, indefinite, nonsymmetric, contraction, singular or skew."""
    generator = torch.Generator().manual_seed(seed)
    left = orthogonal(batch, size, generator)
    values = torch.logspace(0, -float(numpy.log10(condition)), size, dtype=torch.float64)
    if kind == "definite":
        return left @ torch.diag(values) @ left.mT
    if kind == "indefinite":
        signs = torch.where(torch.arange(size) % 3 == 0, -1.0, 1.0)
        return left @ torch.diag(values * signs) @ left.mT
    if kind == "singular":  # symmetric, with a null space of three dimensions
        signs = torch.where(torch.arange(size) % 2 == 0, -1.0, 1.0)
        signs[:3] = 0
        return left @ torch.diag(values * signs) @ left.mT
    if kind == "nonsymmetric":
        return left @ torch.diag(values) @ orthogonal(batch, size, generator).mT
    draw = torch.randn(batch, size, size, generator=generator, dtype=torch.float64)
    if kind == "contraction":  # I - J with a spectral radius of J of about 0.8
        return torch.eye(size, dtype=torch.float64) - 0.8 * draw / size**0.5
    if kind == "skew":
        return (draw - draw.mT) / size**0.5
    raise ValueError(kind)


def mixed(batch: int, size: int = 40, hardest: float = 30.0) -> tuple[Tensor, Tensor]:
    """Definite systems from easy to hard, and right-hand sides."""
    generator = torch.Generator().manual_seed(2)
    basis = orthogonal(batch, size, generator)
    condition = 2 + hardest * (torch.arange(batch) % 5) / 4
    exponents = torch.linspace(0, 1, size, dtype=torch.float64)
    values = condition[:, None].double() ** -exponents
    return (basis * values[:, None, :]) @ basis.mT, right_sides(batch, size)


def right_sides(batch: int = 6, size: int = 20, *, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, size, generator=generator, dtype=torch.float64)


def multiply(vectors: Tensor, matrix: Tensor) -> Tensor:
    """(n, D), (n, D, D) -> (n, D): the matvec of the tests."""
    return (matrix * vectors.unsqueeze(1)).sum(2)


def exact(matrix: Tensor, right: Tensor) -> Tensor:
    """Dense solution in float64 by LAPACK through NumPy."""
    solved = numpy.linalg.solve(matrix.double().numpy(), right.double().unsqueeze(2).numpy())
    return torch.from_numpy(solved).squeeze(2)


def true_residual(matrix: Tensor, right: Tensor, solution: solvers.Solution) -> Tensor:
    """``|b - A x| / |b|`` in float64, (B,)."""
    matrix, right, value = matrix.double(), right.double(), solution.value.double()
    return (right - multiply(value, matrix)).norm(dim=1) / right.norm(dim=1)
