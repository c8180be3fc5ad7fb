"""Linear maps ``z <- A z + b``: contractions of every kind, at several scales, and expansions."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from problems.problem import Build, ZooProblem, matvec, normal, orthogonal, uniform

BATCH, DIM = 6, 40
RADII = (0.5, 0.9, 0.98)
SCALES = (1e-3, 1.0, 1e3)
SAAD = "Y. Saad, Iterative Methods for Sparse Linear Systems (2nd ed., 2003), section 4.2"
WALKER_NI = "H. Walker and P. Ni, SIAM J. Numer. Anal. 49 (2011) 1715, theorem 2.2"


def affine(z: Tensor, matrix: Tensor, offset: Tensor) -> Tensor:
    """``A z + b``: z (B, D), matrix (B, D, D), offset (B, D)."""
    return matvec(matrix, z) + offset


def affine_energy(z: Tensor, matrix: Tensor, offset: Tensor) -> Tensor:
    """``1/2 z^T (I - A) z - b.z`` for symmetric A, (B,)."""
    return (0.5 * z * (z - matvec(matrix, z)) - offset * z).sum(1)


def dense_solve(matrix: Tensor, offset: Tensor) -> Tensor:
    """``(I - A)^-1 b`` by an LU factorisation."""
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype)
    return torch.linalg.solve(identity - matrix, offset)


def symmetric_matrix(generator: Generator, eigenvalues: Tensor) -> Tensor:
    """``Q diag(eigenvalues) Q^T`` with random orthogonal Q; eigenvalues (B, D)."""
    return with_spectrum(orthogonal(generator, *eigenvalues.shape), eigenvalues)


def with_spectrum(basis: Tensor, eigenvalues: Tensor) -> Tensor:
    """``Q diag(eigenvalues) Q^T``: basis Q (B, D, D), eigenvalues (B, D)."""
    return torch.einsum("bij,bj,bkj->bik", basis, eigenvalues, basis)


def affine_problem(
    matrix: Tensor, offset: Tensor, z0: Tensor, source: str, *, symmetric: bool = True, **other: Any
) -> ZooProblem:
    """``z = A z + b``: the reference by an LU factorisation, an energy where A is symmetric.

    ``other`` are fields of the problem, which may replace these two.
    """
    fields: dict[str, Any] = {"reference": lambda: dense_solve(matrix, offset)}
    fields["energy"] = affine_energy if symmetric else None
    fields |= {"symmetric": symmetric, "source": source, **other}
    return ZooProblem(f=affine, z0=z0, args=(matrix, offset), **fields)


def _spectrum(generator: Generator, radius: float) -> Tensor:
    """Real eigenvalues in [-radius / 2, radius], the largest equal to radius; (B, D)."""
    eigenvalues = uniform(generator, -0.5 * radius, radius, BATCH, DIM)
    eigenvalues[:, 0] = radius
    return eigenvalues


def _rotations(generator: Generator, radius: float) -> Tensor:
    """Block-diagonal scaled rotations, eigenvalues ``rho exp(+-i theta)``, largest rho = radius."""
    half = DIM // 2
    moduli = uniform(generator, 0.0, radius, BATCH, half)
    moduli[:, 0] = radius
    angles = uniform(generator, 0.0, torch.pi, BATCH, half)
    blocks = torch.zeros(BATCH, DIM, DIM, dtype=torch.float64)
    even = torch.arange(0, DIM, 2)
    blocks[:, even, even] = blocks[:, even + 1, even + 1] = moduli * angles.cos()
    blocks[:, even + 1, even] = moduli * angles.sin()
    blocks[:, even, even + 1] = -moduli * angles.sin()
    return blocks


def _matrix(generator: Generator, kind: str, radius: float) -> Tensor:
    if kind == "symmetric":
        return symmetric_matrix(generator, _spectrum(generator, radius))
    if kind == "normal":
        core = _rotations(generator, radius)
    elif kind == "nonnormal":
        # a strictly upper triangular part moves no eigenvalue of a triangular core
        noise = normal(generator, BATCH, DIM, DIM).triu(1) / DIM**0.5
        core = torch.diag_embed(_spectrum(generator, radius)) + noise
    else:
        raise ValueError(f"kind must be symmetric, normal or nonnormal, got {kind!r}")
    basis = orthogonal(generator, BATCH, DIM)
    return basis @ core @ basis.mT


def contraction(generator: Generator, *, kind: str, radius: float, scale: float) -> ZooProblem:
    """Spectral radius ``radius``; the state, its start and the offset in units of ``scale``."""
    matrix = _matrix(generator, kind, radius)
    offset, z0 = (scale * normal(generator, BATCH, DIM) for _ in range(2))
    return affine_problem(matrix, offset, z0, SAAD, symmetric=kind == "symmetric")


def expanding(generator: Generator, *, low: float, outlier: float | None = None) -> ZooProblem:
    """Symmetric, eigenvalues in [low, 0.5] with low < -1, and one equal to ``outlier`` if given.

    Plain iteration diverges. Without an outlier ``I - A`` is positive definite and a short enough
    step converges; with an outlier above 1 it is indefinite and no step does.
    """
    dim = 20
    eigenvalues = uniform(generator, low, 0.5, BATCH, dim)
    eigenvalues[:, 0] = low
    if outlier is not None:
        eigenvalues[:, 1] = outlier
    matrix = symmetric_matrix(generator, eigenvalues)
    offset, z0 = normal(generator, BATCH, dim), normal(generator, BATCH, dim)
    # at a saddle the energy has no lower bound and is no merit function
    energy = affine_energy if outlier is None else None
    return affine_problem(matrix, offset, z0, WALKER_NI, energy=energy, converges_plain=False)


def one_hard(generator: Generator) -> ZooProblem:
    """Eigenvalues up to 0.2 in every sample but the last, up to 0.98 there."""
    eigenvalues = _spectrum(generator, 0.2)
    eigenvalues[-1] *= 0.98 / 0.2
    matrix = symmetric_matrix(generator, eigenvalues)
    offset, z0 = normal(generator, BATCH, DIM), normal(generator, BATCH, DIM)
    return affine_problem(matrix, offset, z0, SAAD)


def singular(generator: Generator) -> ZooProblem:
    """Eigenvalue exactly 1 with a consistent offset: a line of fixed points, met where z0 says.

    The reference is the limit of the plain iteration: z0 along the null space of ``I - A``, the
    least-norm solution across it.
    """
    basis = orthogonal(generator, BATCH, 20)
    eigenvalues = uniform(generator, -0.5, 0.8, BATCH, 20)
    eigenvalues[:, 0] = 1.0
    matrix = with_spectrum(basis, eigenvalues)
    z0, offset = normal(generator, BATCH, 20), normal(generator, BATCH, 20)
    null = basis[:, :, 0]
    offset = offset - (offset * null).sum(1, keepdim=True) * null

    def reference() -> Tensor:
        inside = torch.einsum("bik,bi->bk", basis, offset)[:, 1:] / (1 - eigenvalues[:, 1:])
        across = torch.einsum("bik,bk->bi", basis[:, :, 1:], inside)
        return across + (z0 * null).sum(1, keepdim=True) * null

    source = "C. D. Meyer, Matrix Analysis and Applied Linear Algebra (2000), section 7.10"
    return affine_problem(matrix, offset, z0, source, reference=reference, unique=False)


def _contractions() -> dict[str, Build]:
    builds: dict[str, Build] = {}
    for kind in ("symmetric", "normal", "nonnormal"):
        for radius in RADII:
            for scale in SCALES:
                suffix = "" if scale == 1.0 else f"_scale_{scale:g}"
                name = f"linear_{kind}_{radius}{suffix}"
                builds[name] = partial(contraction, kind=kind, radius=radius, scale=scale)
    return builds


BUILDS: dict[str, Build] = {
    **_contractions(),
    "linear_expanding": partial(expanding, low=-3.0),
    "linear_saddle": partial(expanding, low=-1.5, outlier=1.5),
    "linear_one_hard_sample": one_hard,
    "linear_singular": singular,
}
