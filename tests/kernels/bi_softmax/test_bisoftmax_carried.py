"""The bi-softmax by carried normalisers: one sweep, its derivatives, and when it is the gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from cases.kernels import Allocations, difference
from implicit_attn.kernels import bisoftmax, carried_bisoftmax
from implicit_attn.kernels.bi_softmax import carried

HOLES = torch.tensor([[True, False, True, True], [False, False, False, False]])
LIMITS = {"bounded": 30.0, "unbounded": None}


def state(count: int, width: int = 8, batch: int = 2, error: float = 0.3) -> tuple[Tensor, Tensor]:
    """z (B, 2, N, p) and an lse that is off by ``error``."""
    generator = torch.Generator().manual_seed(count)
    z = torch.randn(batch, 2, count, width, generator=generator, dtype=torch.float64)
    _, lse = bisoftmax(z, 0.3, backend="reference")
    return z, lse + error * torch.randn(lse.shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("count", [1, 2, 17, 65, 129, 257, 400])
@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS.keys())
def test_blocks_are_the_definition(count: int, limit: float | None) -> None:
    z, lse = state(count)
    mask = torch.rand(2, count, generator=torch.Generator().manual_seed(1)) > 0.4
    for chosen in (None, mask):
        exact = carried_bisoftmax(z, lse, 0.3, mask=chosen, backend="reference")
        options: dict[str, Any] = {"mask": chosen, "limit": limit, "backend": "blocks"}
        found = carried_bisoftmax(z, lse, 0.3, **options)
        rough = carried_bisoftmax(z.float(), lse.float(), 0.3, **options)
        for ours, ours_rough, theirs in zip(found, rough, exact, strict=True):
            assert difference(ours, theirs) <= 1e-12
            assert difference(ours_rough, theirs) <= 1e-5


@pytest.mark.parametrize("backend", ["reference", "blocks"])
@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS.keys())
def test_the_true_lse_gives_the_gradient(backend: str, limit: float | None) -> None:
    z, lse = state(270, error=0.0)
    mask = torch.rand(2, 270, generator=torch.Generator().manual_seed(1)) > 0.4
    for chosen in (None, mask):
        gradient, lse = bisoftmax(z, 0.3, mask=chosen, backend="reference")
        found = carried_bisoftmax(z, lse, 0.3, mask=chosen, limit=limit, backend=backend)
        torch.testing.assert_close(found, (gradient, lse), rtol=1e-10, atol=1e-12)


def test_large_scores_need_no_row_maximum() -> None:
    """Scores up to several hundred, far beyond float32's exp, as long as L is near."""
    z, _ = state(270, width=64)
    z = (4.0 * z).float()
    exact, lse = bisoftmax(z.double(), 0.3, backend="reference")
    assert lse.max() > 200.0
    gradient, found = carried_bisoftmax(z, lse.float(), 0.3, backend="blocks")
    assert difference(gradient, exact) <= 1e-4 and difference(found, lse) <= 1e-6


@pytest.mark.parametrize("mask", [None, HOLES], ids=["full", "holes"])
@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS.keys())
def test_derivatives(mask: Tensor | None, limit: float | None) -> None:
    z, lse = (t.requires_grad_() for t in state(4, width=2))

    def by(backend: str) -> Any:
        return lambda z, lse: carried_bisoftmax(
            z, lse, 0.3, mask=mask, limit=limit, backend=backend
        )

    assert gradcheck(by("blocks"), (z, lse)) and gradcheck(by("reference"), (z, lse))
    if mask is None and limit is None:
        assert gradgradcheck(by("reference"), (z, lse))


def test_derivatives_in_strips() -> None:
    z, lse = (t.requires_grad_() for t in state(300))
    weights = state(300, error=1.0)
    for limit in LIMITS.values():
        results = []
        for backend in ("blocks", "reference"):
            found = carried_bisoftmax(z, lse, 0.3, limit=limit, backend=backend)
            results.append(torch.autograd.grad(found, (z, lse), weights))
        torch.testing.assert_close(*results, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("backend", ["auto", "reference", "blocks"])
def test_autocast_has_no_say(backend: str) -> None:
    z, lse = (t.float() for t in state(40))
    weights = [t.float() for t in state(40, error=1.0)]
    results = []
    for enabled in (True, False):
        given = z.clone().requires_grad_(), lse.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            found = carried_bisoftmax(*given, 0.3, backend=backend)
        first = torch.autograd.grad(found, given, weights, create_graph=backend != "blocks")
        results.append([*found, *first])
        if backend != "blocks":
            results[-1] += torch.autograd.grad(first, given, weights)
    for ours, exact in zip(*results, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, exact)


@pytest.mark.parametrize("backend", ["auto", "reference", "blocks"])
def test_nothing_to_attend(backend: str) -> None:
    z = torch.zeros(0, 2, 300, 4, requires_grad=True)
    lse = torch.zeros(0, 2, 300, requires_grad=True)
    found = carried_bisoftmax(z, lse, 0.3, backend=backend)
    pulled = torch.autograd.grad(found, (z, lse), found, create_graph=True)
    assert [t.shape for t in pulled] == [z.shape, lse.shape]


def test_registration() -> None:
    z, lse = (t.requires_grad_() for t in state(4, width=2))
    torch.library.opcheck(carried.carried_op, (z, lse, 0.3, HOLES, None))
    torch.library.opcheck(carried.carried_op, (z.detach(), lse.detach(), 0.3, None, 30.0))
    detached = tuple(t.detach() for t in (z, lse, lse, z, lse))
    torch.library.opcheck(carried.carried_pullback_op, (*detached, 0.3, HOLES, 30.0))


# Forward mode itself still scripts its decompositions.
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_cannot_be_done_raises() -> None:
    z, lse = (t.requires_grad_() for t in state(4, width=2))
    with pytest.raises(ValueError, match='got "triton"'):
        carried_bisoftmax(z, lse, 0.3, backend="triton")
    with pytest.raises(ValueError, match=r"lse must have the shape \(B, H, N\) = \(2, 2, 4\)"):
        carried_bisoftmax(z, lse[0], 0.3)
    value = carried_bisoftmax(z, lse, 0.3, backend="blocks")[0]
    (first,) = torch.autograd.grad(value.square().sum(), z, create_graph=True)
    with pytest.raises(NotImplementedError, match='use backend="reference" for more'):
        torch.autograd.grad(first.sum(), z)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(lse.detach(), lse.detach())
        with pytest.raises(NotImplementedError, match="forward-mode"):
            carried_bisoftmax(z.detach(), dual, 0.3, backend="blocks")


def test_no_matrix_of_all_pairs() -> None:
    z, lse = (t.float().requires_grad_() for t in state(1024, batch=1))
    with Allocations() as seen:
        found = carried_bisoftmax(z, lse, 0.3)
        torch.autograd.grad(found[0].sum() + found[1].sum(), (z, lse))
    assert seen.largest < 1024 * 1024
