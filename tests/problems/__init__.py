"""What a problem of the zoo is; references: fixed points by methods that share no code with the solvers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Generator, Tensor

Expect = Literal["converges", "diverges", "mixed"]
Build = Callable[[Generator], "ZooProblem"]


@dataclass(frozen=True, eq=False, kw_only=True)
class ZooProblem:
    """A fixed-point problem ``z = f(z, *args)`` with a known answer; one sample a row.

    Attributes:
        f: ``f(z, *args) -> like z``; a row of the result depends on that row of z and args alone.
        z0: (B, ...) starting points.
        args: tensors (B, ...); everything that f needs, so a batch may be cut anywhere.
        symmetric: whether the Jacobian of f is symmetric everywhere.
        source: where the problem comes from.
        reference: computes the fixed point in float64 by a method that is none of our solvers; None where
            there is none, or where another one is in reach.
        energy: ``energy(z, *args) -> (B,)`` with gradient ``z - f(z)``, where there is one.
        expect: ``converges`` (an iteration finds a fixed point), ``diverges`` (there is none), ``mixed``
            (some rows converge, others leave the domain of f: their rows of ``solution`` are NaN).
        name: in the zoo, which sets it.
    """

    f: Callable[..., Tensor]
    z0: Tensor
    args: tuple[Tensor, ...]
    symmetric: bool
    source: str
    reference: Callable[[], Tensor] | None = None
    energy: Callable[..., Tensor] | None = None
    expect: Expect = "converges"
    name: str = ""

    @cached_property
    def solution(self) -> Tensor | None:
        """The known fixed point, like z0, or None; computed at the first use."""
        return None if self.reference is None else self.reference().to(self.z0)

    @property
    def batch(self) -> int:
        """Number of samples."""
        return self.z0.shape[0]


def cast(problem: ZooProblem, dtype: torch.dtype) -> ZooProblem:
    """The same problem in another precision, in tensors of its own."""

    def copy(tensor: Tensor) -> Tensor:
        return tensor.detach().to(dtype, copy=True)

    return replace(problem, z0=copy(problem.z0), args=tuple(map(copy, problem.args)))


def rows(problem: ZooProblem, index: Tensor) -> ZooProblem:
    """The samples ``index`` (K,) of a problem as a problem of batch size K."""

    def take(tensor: Tensor) -> Tensor:
        return tensor.index_select(0, index.to(tensor.device))

    return replace(
        problem, z0=take(problem.z0), args=tuple(map(take, problem.args)),
        reference=_transformed(problem, take),
    )  # fmt: skip


def scaled(problem: ZooProblem, factor: float) -> ZooProblem:
    """The problem in units ``factor`` times as small: ``z -> factor * f(z / factor)``.

    A solver whose criteria are relative spends the same number of evaluations on it.
    """
    original, energy = problem.f, problem.energy

    def f(z: Tensor, *args: Tensor) -> Tensor:
        return factor * original(z / factor, *args)

    def scaled_energy(z: Tensor, *args: Tensor) -> Tensor:
        assert energy is not None
        return factor**2 * energy(z / factor, *args)

    return replace(
        problem, name=f"{problem.name}_times_{factor:g}", f=f, z0=factor * problem.z0,
        energy=None if energy is None else scaled_energy,
        reference=_transformed(problem, lambda solution: factor * solution),
    )  # fmt: skip


def residual_norms(z: Tensor, fz: Tensor) -> tuple[Tensor, Tensor]:
    """``|f(z) - z|`` and ``|f(z)|`` per sample, (B,) each."""
    difference = (fz - z).flatten(1)
    return difference.norm(dim=1), fz.flatten(1).norm(dim=1)


def normal(generator: Generator, *shape: int) -> Tensor:
    """Standard normal float64 draws."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def uniform(generator: Generator, low: float, high: float, *shape: int) -> Tensor:
    """Uniform float64 draws from [low, high)."""
    return low + (high - low) * torch.rand(*shape, generator=generator, dtype=torch.float64)


def orthogonal(generator: Generator, batch: int, dim: int) -> Tensor:
    """Random orthogonal matrices (batch, dim, dim)."""
    return torch.linalg.qr(normal(generator, batch, dim, dim)).Q


def matvec(matrix: Tensor, vector: Tensor) -> Tensor:
    """(B, M, D), (B, D) -> (B, M)."""
    return torch.einsum("bmd,bd->bm", matrix, vector)


def _transformed(
    problem: ZooProblem, function: Callable[[Tensor], Tensor]
) -> Callable[[], Tensor] | None:
    """The reference of a problem made from ``problem``."""
    original = problem.reference
    return None if original is None else lambda: function(original().to(problem.z0.device))


Map = Callable[..., Tensor]
ACCURACY = 1e-12  # of |f(z) - z| relative to |z|, demanded of every reference


def row(index: int, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Row ``index`` of each argument, as a batch of one."""
    return tuple(tensor[index : index + 1] for tensor in args)


def check(f: Map, z: Tensor, args: tuple[Tensor, ...]) -> Tensor:
    """``z`` itself if it is a fixed point of f to ``ACCURACY``; raises RuntimeError otherwise."""
    error = (f(z, *args) - z).flatten(1).norm(dim=1) / z.flatten(1).norm(dim=1)
    if not bool((error <= ACCURACY).all()):
        raise RuntimeError(f"reference not found: relative residuals {error.tolist()}")
    return z


def newton(f: Map, z: Tensor, args: tuple[Tensor, ...], steps: int = 60) -> Tensor:
    """Newton's method with dense Jacobians and backtracking on the residual, sample by sample."""
    found = [_newton_row(f, z[i : i + 1], row(i, args), steps) for i in range(z.shape[0])]
    return check(f, torch.cat(found), args)


def _newton_row(f: Map, z: Tensor, args: tuple[Tensor, ...], steps: int) -> Tensor:
    def residual(flat: Tensor) -> Tensor:
        return f(flat.view_as(z), *args).reshape(-1) - flat

    flat = z.reshape(-1)
    value = residual(flat)
    for _ in range(steps):
        jacobian: Any = torch.autograd.functional.jacobian(residual, flat, vectorize=True)
        direction = torch.linalg.lstsq(jacobian, -value.unsqueeze(1)).solution.squeeze(1)
        length = 1.0
        trial = residual(flat + direction)
        # the negated comparison also backs away from NaN
        while not bool(trial.norm() < value.norm()) and length > 1e-6:
            length /= 2
            trial = residual(flat + length * direction)
        if not bool(trial.norm() < value.norm()):
            break
        flat, value = flat + length * direction, trial
    return flat.view_as(z)


def contraction(f: Map, z: Tensor, args: tuple[Tensor, ...], steps: int) -> Tensor:
    """``steps`` plain iterations, then Newton steps (semi-smooth ones where f has kinks)."""
    for _ in range(steps):
        z = f(z, *args)
    return newton(f, z, args)
