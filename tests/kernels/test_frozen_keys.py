"""Attention among frozen keys through stock operators against the dense formula in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from cases.kernels import Allocations, difference
from implicit_attn.energies import SoftmaxAttention
from implicit_attn.kernels import explain_frozen_keys, frozen_key_attention

HOLES = torch.tensor([[True, False, True], [False, False, False]])


def state(queries: int, keys: int, width: int = 8, batch: int = 2) -> list[Tensor]:
    """Queries, keys, and cotangents of both results."""
    generator = torch.Generator().manual_seed(queries + keys)
    shapes = [(batch, 2, n, width) for n in (queries, keys, queries)] + [(batch, 2, queries)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (17, 130), (130, 17), (300, 257)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_flash_is_the_dense_formula(
    queries: int, keys: int, masked: bool, dtype: torch.dtype, bound: float
) -> None:
    query, key, by_mean, by_lse = state(queries, keys)
    mask = torch.rand(2, keys, generator=torch.Generator().manual_seed(0)) > 0.4
    mask[0] = False
    results = []
    for backend, kind in (("flash", dtype), ("reference", torch.float64)):
        q, k, g, a = (t.to(kind).requires_grad_() for t in (query, key, by_mean, by_lse))
        found = frozen_key_attention(q, k, 0.3, mask=mask if masked else None, backend=backend)
        loss = (found[0] * g).sum() + (found[1] * a).sum()
        results.append([*found, *torch.autograd.grad(loss, (q, k), retain_graph=True)])
        results[-1] += torch.autograd.grad(found[0], q, g)
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == dtype and difference(ours, theirs.detach()) <= bound


def along_tokens(tensor: Tensor) -> Tensor:
    return tensor.mT.contiguous().mT


def shared(tensor: Tensor) -> Tensor:
    return tensor[..., :1].expand(tensor.shape)


@pytest.mark.parametrize("layout", [along_tokens, shared])
@pytest.mark.parametrize("strided", ["query", "key", "both"])
def test_strides_do_not_matter(layout: Callable[[Tensor], Tensor], strided: str) -> None:
    query, key, g, _ = state(130, 130)
    query = query if strided == "key" else layout(query)
    key = key if strided == "query" else layout(key)
    results = []
    for backend in ("flash", "reference"):
        q, k = (t.detach().requires_grad_() for t in (query, key))
        assert (q.stride(), k.stride()) == (query.stride(), key.stride())
        mean, lse = frozen_key_attention(q, k, 0.3, backend=backend)
        once = torch.autograd.grad(mean, (q, k), g, retain_graph=True)
        first = torch.autograd.grad(mean, (q, k), g, create_graph=True)
        second = torch.autograd.grad(first[0], (q, k), g)
        results.append([mean, lse, *once, *first, *second])
    for ours, exact in zip(*results, strict=True):
        assert difference(ours.detach(), exact.detach()) <= 1e-12


@pytest.mark.parametrize("changed", ["query", "key"])
@pytest.mark.parametrize("frozen", [False, True])
def test_what_changed_since_is_noticed(changed: str, frozen: bool) -> None:
    query, key, g, _ = state(130, 130)
    query.requires_grad_()
    key.requires_grad_(not frozen)
    mean, _ = frozen_key_attention(query, key, 0.3, backend="flash")
    for by in (query,) if frozen else (query, key):
        torch.autograd.grad(mean, by, g, retain_graph=True)
    (query if changed == "query" else key).detach().mul_(3)
    for by in (query,) if frozen else (query, key):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(mean, by, g, retain_graph=True)


@pytest.mark.parametrize("backend", ["reference", "flash"])
def test_autocast_has_no_say(backend: str) -> None:
    query, key, g, a = (t.float() for t in state(150, 150))
    results = []
    for enabled in (True, False):
        q, k = query.clone().requires_grad_(), key.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            found = frozen_key_attention(q, k, 0.3, backend=backend)
        first = torch.autograd.grad(found, (q, k), (g, a), create_graph=True)
        # What the graph of the first derivative is made of is chosen where it is taken.
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled and backend == "flash"):
            again = torch.autograd.grad(found, (q, k), (g, a), create_graph=True)
        second = torch.autograd.grad(again, (q, k), (g, g))
        results.append([*found, *first, *again, *second])
    for ours, exact in zip(*results, strict=True):
        assert ours.dtype == torch.float32
        assert difference(ours.detach(), exact.detach().double()) <= 1e-6


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 200, 200), (2, 0, 9), (2, 9, 0)])
def test_nothing_to_attend(batch: int, queries: int, keys: int, masked: bool) -> None:
    tensors = state(queries, keys, batch=batch)
    query, key = (t.requires_grad_() for t in tensors[:2])
    mask = torch.ones(batch, keys, dtype=torch.bool) if masked else None
    results = []
    for backend in ("flash", "auto"):
        found = frozen_key_attention(query, key, 0.3, mask=mask, backend=backend)
        first = torch.autograd.grad(found[0], (query, key), tensors[2], create_graph=True)
        second = torch.autograd.grad(first[0].sum(), (query, key), allow_unused=True)
        assert [t.shape for t in first] == [query.shape, key.shape]
        assert not any(t is not None and t.any() for t in (found[0], *first, *second))
        results.append(found)
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("backend", ["auto", "flash"])
def test_the_default_device_has_no_say(backend: str) -> None:
    query, key, _, _ = state(150, 130)
    exact = frozen_key_attention(query, key, 0.3, mask=torch.ones(2, 130) > 0, backend=backend)
    with torch.device("meta"):
        mask = torch.ones(2, 130, device="cpu") > 0
        found = frozen_key_attention(query, key, 0.3, mask=mask, backend=backend)
    torch.testing.assert_close(found, exact, rtol=0, atol=0)


@pytest.mark.parametrize("mask", [None, HOLES], ids=["full", "holes"])
def test_derivatives(mask: Tensor | None) -> None:
    query, key = (t.requires_grad_() for t in state(3, 3, width=2)[:2])

    def flash(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return frozen_key_attention(query, key, 0.6, mask=mask, backend="flash")

    assert gradcheck(flash, (query, key)) and gradgradcheck(flash, (query, key))
    frozen = key.detach()
    assert gradcheck(lambda q: flash(q, frozen), query)


def test_half_precision_is_accumulated_in_float32() -> None:
    query, key, g, _ = state(80, 90)
    exact = frozen_key_attention(query.requires_grad_(), key, 0.3, backend="reference")
    (pullback,) = torch.autograd.grad(exact[0], query, g)
    rough = query.detach().bfloat16().requires_grad_()
    mean, lse = frozen_key_attention(rough, key.bfloat16(), 0.3, backend="flash")
    assert mean.dtype == torch.bfloat16 and lse.dtype == torch.float32
    (ours,) = torch.autograd.grad(mean, rough, g.bfloat16())
    for found, expected in ((mean, exact[0]), (lse, exact[1]), (ours, pullback)):
        assert difference(found.detach(), expected.detach()) <= 1e-2


def test_no_matrix_of_all_pairs() -> None:
    query, key, g, a = (t.float() for t in state(1024, 1024, batch=1))
    query.requires_grad_()
    key.requires_grad_()
    with Allocations() as seen:
        mean, lse = frozen_key_attention(query, key, 0.3)
        torch.autograd.grad((mean, lse), (query, key), (g, a))
    assert seen.largest < 1024 * 1024


# Forward mode itself still scripts its decompositions.
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_choice_and_errors() -> None:
    query, key = state(127, 129)[:2]
    assert explain_frozen_keys(query, key, 0.3).backend == "reference"
    longer = state(128, 128)
    assert explain_frozen_keys(longer[0], longer[1], 0.3).backend == "flash"
    calls = [
        (lambda: frozen_key_attention(query, key, 0.3, backend="triton"), "backend must be one of"),
        (lambda: frozen_key_attention(query, key[:1], 0.3), r"shapes \(B, H, N, p\) and"),
        (lambda: frozen_key_attention(query, key, 0.0), "beta must be > 0, got 0.0"),
        (
            lambda: frozen_key_attention(query, key, 1.0, mask=HOLES),
            r"mask must be a bool tensor \(B, M\) = \(2, 129\)",
        ),
        (lambda: SoftmaxAttention(8, 2, backend="flash"), "needs cross=True"),
        (lambda: SoftmaxAttention(8, 2, cross=True, backend="stock"), "backend must be one of"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="query and key must be of one floating dtype"):
        frozen_key_attention(query, key.float(), 0.3)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(query, query)
        assert forward_ad.unpack_dual(frozen_key_attention(dual, key, 0.3)[0]).tangent is not None
        with pytest.raises(NotImplementedError, match="forward-mode"):
            frozen_key_attention(dual, key, 0.3, backend="flash")
