"""The bound on spectral norms: never exceeded, tight, differentiable, and used on CUDA devices."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from implicit_attn.energies import Couplings
from implicit_attn.regularization import SpectralNorm, apply_norm
from implicit_attn.spectral import SQUARINGS, gram_bound, spectral_norm
from solvers.core.cuda import forced


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sigma(matrix: Tensor) -> Tensor:
    return torch.linalg.svdvals(matrix)[0]


MATRICES = {
    "square": drawn(24, 24),
    "wide": drawn(7, 40),
    "tall": drawn(40, 7),
    "row": drawn(1, 9),
    "number": drawn(1, 1),
    "identity": torch.eye(32, dtype=torch.float64),
    "rotation": torch.linalg.qr(drawn(16, 16))[0],
    "one direction": drawn(12, 1) @ drawn(1, 12),
    "symmetric": drawn(12, 12) + drawn(12, 12).mT,
    "equal, both signs": torch.diag(torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)),
    "graded": torch.diag(torch.logspace(0, -12, 30, dtype=torch.float64)),
}


@pytest.mark.parametrize("name", MATRICES)
def test_the_bound_is_tight_and_never_exceeded(name: str) -> None:
    matrix = MATRICES[name] / MATRICES[name].abs().amax()
    true, rounding = sigma(matrix), 1e-13
    previous = torch.tensor(torch.inf, dtype=torch.float64)
    for squarings in range(SQUARINGS + 1):
        bound = gram_bound(matrix, squarings)
        assert true * (1 - rounding) <= bound <= previous * (1 + rounding)
        assert bound <= true * min(matrix.shape) ** (0.25 / 2**squarings) * (1 + rounding)
        previous = bound
    single = gram_bound(matrix.float()).double()
    assert abs(single / previous - 1) < 1e-5


@pytest.mark.parametrize("name", ["square", "wide", "tall", "number", "one direction"])
def test_derivatives(name: str) -> None:
    matrix = (MATRICES[name] / MATRICES[name].abs().amax()).requires_grad_()
    assert torch.autograd.gradcheck(gram_bound, matrix)
    assert torch.autograd.gradgradcheck(gram_bound, matrix)
    left, _, right = torch.linalg.svd(matrix.detach())
    gradient = torch.autograd.grad(gram_bound(matrix, 20), matrix)[0]
    torch.testing.assert_close(gradient, torch.outer(left[:, 0], right[0]))


def test_many_equal_singular_values_in_single_precision() -> None:
    """Powers of a large matrix of norm 1 with equal singular values are small."""
    matrix = torch.eye(1024, requires_grad=True)
    with forced():
        bound = gram_bound(matrix)
    assert 1.0 <= bound <= 1.001
    (gradient,) = torch.autograd.grad(bound, matrix)
    assert (gradient * matrix).sum().item() == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(
    ("size", "dtype"), [(0.0, torch.float64), (1e-42, torch.float32), (1e30, torch.float32)]
)
def test_the_same_function_on_both_devices(size: float, dtype: torch.dtype) -> None:
    weight = (drawn(9, 6) * size).to(dtype)
    found = []
    for cuda in (False, True):
        matrix = weight.clone().requires_grad_()
        with forced() if cuda else nullcontext():
            norm = spectral_norm(matrix, 0.5)
        found.append((norm.detach(), *torch.autograd.grad(norm, matrix)))
    for cpu, cuda in zip(*found, strict=True):
        torch.testing.assert_close(cuda, cpu, rtol=1e-4, atol=1e-6)
        assert cuda.isfinite().all()


def test_every_bounded_weight_of_the_package() -> None:
    torch.manual_seed(0)
    layer: Any = nn.Linear(5, 7).double()
    couplings: dict[bool, Any] = {
        tied: Couplings(4, 3, symmetric_sites=tied, scale=3.0, bound=0.8).double()
        for tied in (False, True)
    }
    exact = {tied: each.matrix.detach() for tied, each in couplings.items()}
    apply_norm(layer, "bound", target=0.3)
    with forced():
        assert sigma(layer.weight.detach()) <= 0.3 * (1 + 1e-12)
        for tied, each in couplings.items():
            matrix = each.matrix.detach()
            assert 0.8 * 0.998 <= sigma(matrix) <= 0.8 * (1 + 1e-12)
            torch.testing.assert_close(matrix, exact[tied], rtol=2e-3, atol=0)
        weight = drawn(6, 4)
        unit = SpectralNorm(0.9)(weight)
        assert 0.9 * 0.998 <= sigma(unit) <= 0.9 * (1 + 1e-12)
