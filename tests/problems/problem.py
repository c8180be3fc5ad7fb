"""What a problem of the zoo is, and how one is cast, scaled and cut into samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Generator, Tensor
from torch.utils import _pytree as pytree

Expect = Literal["converges", "diverges", "nonfinite", "mixed"]
PLAIN_LIMIT = 4000
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
        reference: computes the fixed point in float64 by a method that is none of our solvers.
        energy: ``energy(z, *args) -> (B,)`` with gradient ``z - f(z)``, where there is one.
        converges_plain: whether ``z <- f(z)`` reaches a relative residual of 1e-6 from every row of
            z0 within ``PLAIN_LIMIT`` evaluations.
        expect: ``converges`` (there is a fixed point and a plain or accelerated iteration finds
            it), ``diverges`` (there is none, the iterates run away),
            ``nonfinite`` (there is none, f leaves its domain or overflows), ``mixed`` (some rows
            converge, the others are ``nonfinite``: their rows of ``solution`` are NaN).
        unique: whether no other fixed point is in reach, so an answer must agree with ``solution``.
        name: in the zoo, which sets it.
    """

    f: Callable[..., Tensor]
    z0: Tensor
    args: tuple[Tensor, ...]
    symmetric: bool
    source: str
    reference: Callable[[], Tensor] | None = None
    energy: Callable[..., Tensor] | None = None
    converges_plain: bool = True
    expect: Expect = "converges"
    unique: bool = True
    name: str = ""

    @cached_property
    def solution(self) -> Tensor | None:
        """The known fixed point, like z0, or None; computed at the first use."""
        return None if self.reference is None else self.reference().to(self.z0)

    @property
    def batch(self) -> int:
        """Number of samples."""
        return self.z0.shape[0]


def tree_map(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply ``function`` to each tensor of a pytree."""
    return pytree.tree_map(function, tree)


def cast(problem: ZooProblem, dtype: torch.dtype, device: torch.device | str) -> ZooProblem:
    """The same problem in another precision and place, in tensors of its own."""

    def move(tensor: Tensor) -> Tensor:
        return tensor.detach().to(device=device, dtype=dtype, copy=True)

    return replace(problem, z0=move(problem.z0), args=tree_map(move, problem.args))


def rows(problem: ZooProblem, index: Tensor) -> ZooProblem:
    """The samples ``index`` (K,) of a problem as a problem of batch size K."""

    def take(tensor: Tensor) -> Tensor:
        return tensor.index_select(0, index.to(tensor.device))

    return replace(
        problem, z0=take(problem.z0), args=tree_map(take, problem.args),
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
