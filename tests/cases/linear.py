"""Batches of matrices with known spectra, and products that count."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from solvers.core.solution import Solution


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


def true_residual(matrix: Tensor, right: Tensor, solution: Solution) -> Tensor:
    """``|b - A x| / |b|`` in float64, (B,)."""
    matrix, right, value = matrix.double(), right.double(), solution.value.double()
    return (right - multiply(value, matrix)).norm(dim=1) / right.norm(dim=1)


class Counting:
    """``multiply`` with (matrix, number of the sample) as args; counts products per sample."""

    def __init__(self, batch: int) -> None:
        self.products = torch.zeros(batch, dtype=torch.int64)
        self.rows: list[int] = []

    def __call__(self, vectors: Tensor, matrix: Tensor, sample: Tensor) -> Tensor:
        self.products[sample] += 1
        self.rows.append(vectors.shape[0])
        return multiply(vectors, matrix)
