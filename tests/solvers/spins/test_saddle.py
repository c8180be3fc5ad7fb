"""O(d) spins at their saddle point: identities, exact limits, gradients, honest statuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from cases.spin_models import fields, generator
from solvers import SolveError, SphericalSite, Status, Tolerance, adaptive_tap, spherical_saddle

F64 = torch.float64
TIGHT: dict[str, Any] = {"tolerance": 1e-13}


def scalar_couplings(
    sites: int, strength: float, seed: int = 0, batch: int | None = None
) -> Tensor:
    """Symmetric N(0, s^2 / N), zero diagonal; (N, N) or (batch, N, N)."""
    shape = (sites, sites) if batch is None else (batch, sites, sites)
    drawn = torch.randn(*shape, generator=generator(seed), dtype=F64).triu(1)
    return strength / math.sqrt(sites) * (drawn + drawn.mT)


def freed(raw: Tensor) -> Tensor:
    """Couplings from free entries."""
    return (raw + raw.mT) / 2 * (1 - torch.eye(raw.shape[-1], dtype=raw.dtype))


MODELS = pytest.mark.parametrize("per_site", [True, False])


@MODELS
@pytest.mark.parametrize(("strength", "size"), [(0.0, 0.0), (2.0, 0.0), (2.0, 1.0), (20.0, 30.0)])
def test_constraints_hold_and_phi_is_a_minimum(
    strength: float, size: float, per_site: bool
) -> None:
    k = scalar_couplings(6, strength, batch=3)
    x = fields(3, 6, 5, generator(1), size)
    solution = spherical_saddle(k, x, per_site=per_site)
    assert solution.converged.all() and (solution.residual <= 1e-10).all()
    lengths = solution.response.diagonal(dim1=1, dim2=2) + solution.mean.square().sum(2) / 5
    lengths = lengths if per_site else lengths.mean(1, keepdim=True)
    torch.testing.assert_close(lengths, torch.ones_like(lengths), rtol=0, atol=1e-9)
    matrix = torch.diag_embed(solution.multiplier.expand(3, 6)) - k
    assert (torch.linalg.eigvalsh(matrix) > 0).all()
    torch.testing.assert_close(matrix @ solution.response, torch.eye(6, dtype=F64).expand(3, 6, 6))
    torch.testing.assert_close(solution.response @ x, solution.mean)


def phi(multiplier: Tensor, k: Tensor, x: Tensor) -> Tensor:
    """The function as it is written, (B,)."""
    sites, dim = x.shape[1:]
    matrix = torch.diag_embed(multiplier.expand(len(x), sites)) - k
    size = multiplier.expand(len(x), sites).sum(1) - torch.logdet(matrix) - sites
    return dim / 2 * size + (x * torch.linalg.solve(matrix, x)).sum((1, 2)) / 2


@MODELS
def test_derivatives_of_the_free_energy_are_the_moments(per_site: bool) -> None:
    k = scalar_couplings(5, 0.8).requires_grad_()
    x = fields(2, 5, 4, generator(1), 1.0).requires_grad_()
    solution = spherical_saddle(k, x, per_site=per_site, **TIGHT)
    torch.testing.assert_close(solution.log_partition, phi(solution.multiplier, k, x))
    of_x, of_k = torch.autograd.grad(solution.log_partition.sum(), (x, k))
    torch.testing.assert_close(of_x, solution.mean, rtol=0, atol=1e-10)
    products = solution.mean @ solution.mean.mT + 4 * solution.response
    torch.testing.assert_close(2 * of_k, freed(products.sum(0)), rtol=0, atol=1e-10)


@MODELS
@pytest.mark.parametrize("batch", [None, 2])
def test_first_and_second_derivatives(batch: int | None, per_site: bool) -> None:
    raw = scalar_couplings(3, 1.0, batch=batch).requires_grad_()
    x = fields(2, 3, 2, generator(1), 1.0).requires_grad_()
    mask = torch.tensor([[True, True, True], [True, False, True]])

    def solve(raw: Tensor, x: Tensor) -> Tensor:
        found = spherical_saddle(freed(raw), x, per_site=per_site, mask=mask, **TIGHT)
        parts = (found.multiplier, found.mean, found.response, found.log_partition)
        return torch.stack([part.square().sum() for part in parts]).sum()

    assert gradcheck(solve, (raw, x), fast_mode=True)
    assert gradgradcheck(solve, (raw, x), fast_mode=True)


def test_it_is_adaptive_tap_up_to_the_inverse_dimension() -> None:
    k = scalar_couplings(6, 0.5)
    apart = []
    for dim in (10, 40):
        blocks = k[:, :, None, None] * torch.eye(dim, dtype=F64)
        x = fields(1, 6, dim, generator(1))
        site = SphericalSite(large_dimension=True)
        tap = adaptive_tap(
            blocks, x, site=site, adjoint=None, log_partition=True, tolerance=1e-6
        ).value
        saddle = spherical_saddle(k, x)
        apart.append(((tap.mean - saddle.mean).norm() / saddle.mean.norm()).item())
        error = (tap.log_partition - saddle.log_partition).abs() / saddle.log_partition
        assert (error < 0.03 / dim).all()
    assert apart[1] < 1e-3 and apart[1] < 0.5 * apart[0]


@MODELS
def test_each_sample_gets_what_it_gets_alone_and_masked_sites_are_not_there(per_site: bool) -> None:
    k = scalar_couplings(5, 1.0, batch=3)
    x = fields(3, 5, 4, generator(1), 1.0)
    x[1] *= 50.0
    mask = torch.tensor([[True] * 5, [True, False, True, True, False], [False] * 4 + [True]])
    together = spherical_saddle(k, x, mask=mask, per_site=per_site)
    assert together.converged.all()
    for row in range(3):
        kept = torch.nonzero(mask[row]).flatten()
        alone = spherical_saddle(k[row][kept][:, kept], x[row : row + 1, kept], per_site=per_site)
        multiplier = together.multiplier[row, kept] if per_site else together.multiplier[row]
        torch.testing.assert_close(multiplier, alone.multiplier[0], rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(together.mean[row, kept], alone.mean[0], rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(
            together.log_partition[row], alone.log_partition[0], rtol=1e-8, atol=1e-9
        )
        part = together.response[row][kept][:, kept]
        torch.testing.assert_close(part, alone.response[0], rtol=1e-8, atol=1e-9)
        assert not together.mean[row, ~mask[row]].any()
        assert not together.response[row, ~mask[row]].any()


def test_a_budget_is_kept_and_said() -> None:
    k, x = scalar_couplings(6, 2.0), fields(2, 6, 4, generator(1), 1.0)
    found = spherical_saddle(k, x, max_steps=2, on_failure="ignore")
    assert (found.status == Status.MAX_STEPS).all() and (found.evaluations == 2).all()
    assert (found.residual > 1e-10).all()
    with pytest.raises(SolveError, match=r"saddle point of O\(d\) spins"):
        spherical_saddle(k, x, max_steps=2, on_failure="raise")
    beyond = spherical_saddle(k, x, tolerance=Tolerance(0.0, 1e-30), on_failure="ignore")
    assert (beyond.status == Status.STALLED).all() and (beyond.residual < 1e-12).all()


K, X = torch.zeros(3, 3), torch.zeros(2, 3, 2)
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"couplings": K[:2]}, ValueError, "couplings must have one of the shapes"),
    ({"couplings": K + torch.eye(3)}, ValueError, "couplings must have a zero diagonal"),
    ({"couplings": torch.ones(3, 3).triu(1)}, ValueError, "couplings must be symmetric"),
]


@pytest.mark.parametrize(("change", "error", "words"), BAD)
def test_errors_name_what_is_wrong(
    change: dict[str, Any], error: type[Exception], words: str
) -> None:
    call: Any = spherical_saddle
    with pytest.raises(error, match=words):
        call(**({"couplings": K, "field": X} | change))
