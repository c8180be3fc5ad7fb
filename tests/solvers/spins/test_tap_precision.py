"""Adaptive TAP under autocast, in half precision, without gradients, and where no model exists."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases.spin_models import couplings, fields, generator
from solvers import (
    GaussianSite,
    IsingSite,
    PottsSite,
    Site,
    SphericalSite,
    Status,
    Tolerance,
    adaptive_tap,
)

F64 = torch.float64
ALL: dict[str, Any] = {"response": True, "log_partition": True}
SITES = pytest.mark.parametrize(
    ("site", "dim"),
    [
        (IsingSite(), 1),
        (PottsSite(), 3),
        (SphericalSite(), 3),
        (GaussianSite(0.5 * torch.eye(3)), 3),
    ],
    ids=["ising", "potts", "sphere", "gaussian"],
)


def model(dim: int) -> tuple[Tensor, Tensor]:
    random = generator(0)
    return couplings(4, dim, 0.2, random), fields(3, 4, dim, random)


@SITES
@pytest.mark.parametrize("onsager", [True, False])
def test_autocast_leaves_every_result_in_single_precision(
    site: Site, dim: int, onsager: bool
) -> None:
    blocks, x = model(dim)
    wanted = adaptive_tap(blocks, x, site=site, onsager=onsager, **ALL).value
    with torch.autocast("cpu", dtype=torch.bfloat16):
        solution = adaptive_tap(blocks.float(), x.float(), site=site, onsager=onsager, **ALL)
    assert solution.converged.all()
    for got, exact in zip(solution.value, wanted, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-4)


@SITES
@pytest.mark.parametrize("onsager", [True, False])
def test_half_precision_gives_every_result(site: Site, dim: int, onsager: bool) -> None:
    blocks, x = (tensor.bfloat16() for tensor in model(dim))
    solution = adaptive_tap(blocks, x, site=site, onsager=onsager, **ALL)
    wanted = adaptive_tap(blocks.double(), x.double(), site=site, onsager=onsager, **ALL)
    assert solution.converged.all()
    kinds = [torch.bfloat16] * 4 + [torch.float32]  # log Z is a sum over sites
    for got, exact, dtype in zip(solution.value, wanted.value, kinds, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), exact, rtol=0.03, atol=0.03)


@SITES
@pytest.mark.parametrize("onsager", [True, False])
def test_no_adjoint_means_no_gradient_of_anything(site: Site, dim: int, onsager: bool) -> None:
    """The covariance at a fixed state would have a gradient, but half of the true one."""
    blocks, x = (tensor.requires_grad_() for tensor in model(dim))
    if isinstance(site, GaussianSite):
        site = GaussianSite(nn.Parameter(0.5 * torch.eye(3, dtype=F64)))
    value = adaptive_tap(blocks, x, site=site, adjoint=None, onsager=onsager, **ALL).value
    assert not any(tensor.requires_grad for tensor in value)


@pytest.mark.parametrize("mask", [None, torch.ones(3, 4, dtype=torch.bool)], ids=["shared", "each"])
def test_where_no_model_exists_the_starting_point_comes_back(mask: Tensor | None) -> None:
    random = generator(12)
    blocks = couplings(4, 2, 2.0, random)
    x = fields(3, 4, 2, random)
    solution = adaptive_tap(
        blocks, x, site=GaussianSite(torch.eye(2, dtype=F64)), mask=mask, on_failure="ignore"
    )
    assert (solution.status == Status.INDEFINITE).all()
    assert torch.isinf(solution.residual).all()
    assert not solution.value.mean.any()


@pytest.mark.parametrize("wrong", [0, False, 1e-6])
def test_a_tolerance_is_a_tolerance(wrong: object) -> None:
    blocks, x = model(3)
    with pytest.raises(TypeError, match="tolerance must be"):
        adaptive_tap(blocks, x, site=PottsSite(), tolerance=wrong)  # type: ignore[arg-type]
    assert adaptive_tap(blocks, x, site=PottsSite(), tolerance=Tolerance(1e-6)).converged.all()
