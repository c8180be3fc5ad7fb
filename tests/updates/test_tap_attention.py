"""Adaptive-TAP attention as an update that the layer takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import solvers
from implicit_attn import DEQ
from implicit_attn.updates import AdaptiveTAPAttention
from solvers import (
    AdaptiveTAP,
    GaussianSite,
    IsingSite,
    PottsSite,
    Site,
    SpinState,
    Status,
    Tolerance,
)

F64 = torch.float64


def make(
    sites: int,
    dim: int,
    site: Site | None = None,
    seed: int = 0,
    rtol: float = 1e-10,
    **options: Any,
) -> tuple[DEQ, AdaptiveTAPAttention, Tensor]:
    torch.manual_seed(seed)
    update = AdaptiveTAPAttention(sites, dim, site=site, **options).double()
    adjoint = solvers.Implicit(tolerance=Tolerance(rtol))
    layer = DEQ(
        update, solver=AdaptiveTAP(), tolerance=Tolerance(rtol), max_steps=100, adjoint=adjoint
    )
    return layer, update, torch.randn(4, sites, dim, dtype=F64)


@pytest.mark.parametrize(
    ("site", "dim"),
    [(None, 3), (PottsSite(), 3), (IsingSite(), 1), (GaussianSite(0.5 * torch.eye(2)), 2)],
    ids=["sphere", "potts", "ising", "gaussian"],
)
def test_the_layer_solves_what_the_function_solves(site: Site | None, dim: int) -> None:
    layer, update, x = make(5, dim, site)
    state = layer(x)
    assert isinstance(state, SpinState)
    assert layer.last is not None and layer.last.converged.all()
    weight = update.couplings.weight.detach()
    wanted = solvers.adaptive_tap(weight, x, site=update.site).value
    torch.testing.assert_close(state.mean, wanted.mean, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(
        state.cavity_variance, wanted.cavity_variance.contiguous(), rtol=1e-8, atol=1e-9
    )


def test_first_and_second_derivatives() -> None:
    layer, update, x = make(3, 2, PottsSite(), scale=2.0, rtol=1e-12)
    x = x[:2].requires_grad_()

    def solve(x: Tensor, _: Tensor) -> Tensor:  # the parameter is the layer's own
        state = layer(x)
        return state.mean.square().sum() + state.cavity_variance.sum()

    free = update.couplings.free
    assert gradcheck(solve, (x, free), fast_mode=True)
    assert gradgradcheck(solve, (x, free), fast_mode=True, atol=1e-4)


def test_masked_sites_influence_nobody() -> None:
    layer, update, x = make(5, 3, scale=2.0)
    mask = torch.tensor([[True, True, True, False, False]]).expand(4, 5)
    state = layer(x, mask)
    other = x.clone()
    other[:, 3:] += 5.0
    again = layer(other, mask)
    torch.testing.assert_close(again.mean[:, :3], state.mean[:, :3], rtol=1e-8, atol=1e-9)
    weight = update.couplings.weight[:3, :3]
    wanted = solvers.adaptive_tap(weight, x[:, :3], site=update.site).value
    torch.testing.assert_close(state.mean[:, :3], wanted.mean, rtol=1e-8, atol=1e-9)
    assert not torch.allclose(layer(x).mean[:, :3], state.mean[:, :3], atol=1e-3)


def test_the_free_energy_is_an_output_with_exact_gradients() -> None:
    layer, update, x = make(4, 3, PottsSite(), scale=2.0, rtol=1e-12)
    mask = torch.tensor([[True, True, True, False]] * 4)
    x.requires_grad_()
    state = layer(x, mask)
    log_z = update.log_partition(state, x, mask=mask)
    weight = update.couplings.weight.detach()
    options: dict[str, Any] = {"site": update.site, "mask": mask, "log_partition": True}
    wanted = solvers.adaptive_tap(weight, x, **options).value
    torch.testing.assert_close(log_z, wanted.log_partition, rtol=1e-8, atol=1e-9)
    slope, free = torch.autograd.grad(log_z.sum(), (x, update.couplings.free))
    torch.testing.assert_close(slope, wanted.mean, rtol=1e-8, atol=1e-9)
    with torch.no_grad():
        state = layer(x, mask)
    constant = update.log_partition(state, x, mask=mask)
    (again,) = torch.autograd.grad(constant.sum(), update.couplings.free)
    torch.testing.assert_close(again, free, rtol=1e-7, atol=1e-9)
    assert update.log_partition(layer(0 * x)).shape == (4,)


def test_too_strong_couplings_are_indefinite_and_finite() -> None:
    layer, update, x = make(4, 2, GaussianSite(torch.eye(2)))
    update.couplings.weight = 20 * update.couplings.weight.detach()
    solution = layer.solve(x, on_failure="ignore")
    assert (solution.status == Status.INDEFINITE).all()
    assert all(torch.isfinite(t).all() for t in solution.value)


@pytest.mark.parametrize("bound", [None, 0.5])
def test_couplings_that_are_not_finite_are_a_status(bound: float | None) -> None:
    layer, update, x = make(4, 2, bound=bound)
    with torch.no_grad():
        update.couplings.free[0] = torch.nan
    solution = layer.solve(x, on_failure="ignore")
    assert not solution.converged.any()
    assert torch.isinf(solution.residual).all()


UPDATE = AdaptiveTAPAttention(3, 2)
Z = SpinState(torch.zeros(1, 3, 2), torch.zeros(1, 3, 2, 2))
BAD: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: AdaptiveTAPAttention(3, 2, site="sphere"), TypeError, "site must be"),  # type: ignore[arg-type]
    (lambda: AdaptiveTAPAttention(0, 2), ValueError, "sites"),
    (lambda: UPDATE(Z.mean), TypeError, r"initial\(x\) returns; got Tensor"),
    (lambda: UPDATE(SpinState(Z.mean[:, :2], Z.cavity_variance)), ValueError, "3 sites"),
    (lambda: UPDATE(SpinState(Z.mean, Z.mean)), ValueError, "cavity_variance must have the shape"),
    (lambda: UPDATE(Z, torch.zeros(1, 3, 3)), ValueError, "x must have the shape"),
    (lambda: UPDATE.initial(torch.zeros(1, 4, 2)), ValueError, "3 sites"),
    (lambda: DEQ(UPDATE, init="zeros")(torch.zeros(1, 3, 2)), TypeError, "a SpinState"),
]


@pytest.mark.parametrize(("call", "error", "words"), BAD)
def test_errors_name_what_is_wrong(
    call: Callable[[], object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        call()
