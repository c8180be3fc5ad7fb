"""Bi-softmax by blocks against the dense reference in float64: shapes, masks, norms, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cases.kernels import COUNTS, Allocations, difference
from implicit_attn.kernels import bisoftmax, bisoftmax_hvp
from implicit_attn.kernels.bi_softmax import reference
from implicit_attn.kernels.bi_softmax.strips import backend as strips

WIDTHS = (8, 16, 24, 64, 128)
# Who computes: scores bounded by norms, by nothing, or a causal mask; (limit, causal).
PATHS = {"bounded": (None, False), "unbounded": (1e9, False), "causal": (None, True)}


def states(
    batch: int, heads: int, count: int, width: int, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """z, v (B, H, N, p) and a cotangent of the lse (B, H, N), float32."""
    generator = torch.Generator().manual_seed(count * 1000 + width)
    z = scale * torch.randn(batch, heads, count, width, generator=generator)
    v = torch.randn(batch, heads, count, width, generator=generator)
    return z, v, torch.randn(batch, heads, count, generator=generator)


def masks(batch: int, count: int) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(count)
    holes = torch.rand(batch, count, generator=generator) > 0.4
    empty = holes.clone()
    empty[0] = False
    return {"none": None, "holes": holes, "empty": empty}


def rotated(index: int) -> list[tuple[str, tuple[float | None, bool]]]:
    """Every mask and every path once; over three indices in a row, every pair of them."""
    paths = list(PATHS.values())
    return [(mask, paths[(index + k) % 3]) for k, mask in enumerate(("none", "holes", "empty"))]


def check(
    z: Tensor, v: Tensor, a: Tensor, beta: float, limit: float | None, **options: Any
) -> tuple[float, float, float]:
    """Errors of gradient, lse and product, and that half the precision is not lost on the way."""
    options = {"mask": None, "causal": False} | options
    point = z.double().requires_grad_()
    exact, exact_lse = reference.bisoftmax(point, beta, **options)
    loss = (exact * v.double()).sum() + (exact_lse * a.double()).sum()
    (pullback,) = torch.autograd.grad(loss, point)
    gradient, lse = strips.bisoftmax_forward(z, beta, limit=limit, **options)
    products = [
        strips.bisoftmax_hvp(z, v, beta, limit=limit, lse=given, lse_cotangent=a, **options)
        for given in (None, lse)
    ]
    assert gradient.dtype == products[0].dtype == z.dtype
    worst = max(difference(product, pullback) for product in products)
    assert (lse.double() - exact_lse).abs().max() <= 1e-6 * (1.0 + exact_lse.abs().max())
    return difference(gradient, exact.detach()), difference(lse, exact_lse.detach()), worst


@pytest.mark.parametrize(("index", "count"), list(enumerate(COUNTS)))
def test_every_count(index: int, count: int) -> None:
    batch, heads, width = (1, 1, 8) if count == 1000 else (2, 3, 16)
    z, v, a = states(batch, heads, count, width)
    for mask, (limit, causal) in rotated(index):
        chosen = masks(batch, count)[mask]
        errors = check(z, v, a, width**-0.5, limit, mask=chosen, causal=causal)
        assert max(errors) <= 1e-5, (count, mask, causal, limit, errors)


@pytest.mark.parametrize(("index", "width"), list(enumerate(WIDTHS)))
def test_every_width(index: int, width: int) -> None:
    for count in (17, 129, 300) if width == 24 else (17, 129):
        z, v, a = states(2, 2, count, width)
        for mask, (limit, causal) in rotated(index + count):
            chosen = masks(2, count)[mask]
            errors = check(z, v, a, width**-0.5, limit, mask=chosen, causal=causal)
            assert max(errors) <= 1e-5, (count, mask, causal, limit, errors)


@pytest.mark.parametrize("scale", [1e-20, 1e-3, 3.0, 30.0])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_small_and_large_norms(scale: float, causal: bool) -> None:
    """Large scores carry float32's rounding of the scores themselves into any formula."""
    z, v, a = states(1, 2, 150, 16, scale)
    a = torch.zeros_like(a) if scale < 1e-10 else a
    dense = reference.bisoftmax(z, 0.25, causal=causal)
    exact = reference.bisoftmax(z.double(), 0.25, causal=causal)
    product = reference.bisoftmax_hvp(z, v, 0.25, causal=causal)
    exact_product = reference.bisoftmax_hvp(z.double(), v.double(), 0.25, causal=causal)
    gradient, lse, pullback = check(z, v, a, 0.25, None, causal=causal)
    assert gradient <= max(1e-5, 2 * difference(dense[0], exact[0]))
    assert lse <= max(1e-5, 2 * difference(dense[1], exact[1]))
    assert pullback <= max(1e-5, 4 * difference(product, exact_product))


def test_rows_of_very_different_norms() -> None:
    z, v, a = states(1, 2, 270, 16)
    z = z * torch.logspace(-4, 0.5, 270).unsqueeze(-1)
    assert max(check(z, v, a, 0.25, None)) <= 1e-5


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float64, 1e-12), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)],
)
@pytest.mark.parametrize("count", [33, 290])
def test_dtypes(dtype: torch.dtype, bound: float, count: int) -> None:
    z, v, _ = (t.to(dtype) for t in states(1, 2, count, 16))
    for limit in (None, 1e9):
        gradient, lse = bisoftmax(z, 0.25, limit=limit, backend="blocks")
        product = bisoftmax_hvp(z, v, 0.25, limit=limit, lse=lse, backend="blocks")
        exact, exact_lse = reference.bisoftmax(z.double(), 0.25)
        assert gradient.dtype == product.dtype == dtype
        assert lse.dtype == torch.promote_types(dtype, torch.float32)
        assert difference(gradient, exact) <= bound
        assert difference(lse, exact_lse) <= min(bound, 1e-6)
        exact_product = reference.bisoftmax_hvp(z.double(), v.double(), 0.25)
        assert difference(product, exact_product) <= bound


@pytest.mark.parametrize("count", [65, 300])
def test_strides_do_not_matter(count: int) -> None:
    z, v, _ = states(2, 3, count, 8)
    strided = z.transpose(1, 2).contiguous().transpose(1, 2)
    for limit in (None, 1e9):
        for ours, theirs in zip(
            strips.bisoftmax_forward(strided, 0.3, None, False, limit),
            strips.bisoftmax_forward(z, 0.3, None, False, limit),
            strict=True,
        ):
            assert ours.is_contiguous() and torch.equal(ours, theirs)
        ours = strips.bisoftmax_hvp(strided, v.mT.contiguous().mT, 0.3, None, False, limit)
        assert torch.equal(ours, strips.bisoftmax_hvp(z, v, 0.3, None, False, limit))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("limit", [None, 1e9])
def test_hidden_tokens_are_never_read(causal: bool, limit: float | None) -> None:
    z, v, _ = states(2, 2, 290, 8)
    mask = masks(2, 290)["empty"]
    assert mask is not None
    hidden = ~mask[:, None, :, None]
    poisoned, poisoned_v = (t.masked_fill(hidden, float("nan")) for t in (z, v))
    gradient, lse = strips.bisoftmax_forward(z, 0.3, mask, causal, limit)
    other, other_lse = strips.bisoftmax_forward(poisoned, 0.3, mask, causal, limit)
    assert torch.equal(gradient, other) and torch.equal(lse, other_lse)
    assert not gradient.masked_select(hidden).any() and not lse.masked_select(hidden[..., 0]).any()
    product = strips.bisoftmax_hvp(poisoned, poisoned_v, 0.3, mask, causal, limit, lse)
    assert torch.isfinite(product).all() and not product.masked_select(hidden).any()


@pytest.mark.parametrize("backend", ["auto", "reference", "blocks"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", [(0, 2, 300, 4), (2, 0, 300, 4), (2, 2, 0, 4)])
def test_nothing_to_attend(backend: str, causal: bool, shape: tuple[int, ...]) -> None:
    z = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
    value, lse = bisoftmax(z, 0.3, causal=causal, backend=backend)
    (first,) = torch.autograd.grad((value, lse), z, (value, lse), create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), z)
    assert second.shape == shape and second.dtype == z.dtype and lse.dtype == torch.float32


def test_nan_is_passed_on() -> None:
    z, _, _ = states(1, 1, 300, 8)
    z[0, 0, 7, 3] = float("nan")
    for limit in (None, 20.0, 1e9):
        assert torch.isnan(strips.bisoftmax_forward(z, 0.3, None, False, limit)[0]).any()


@pytest.mark.parametrize("count", [65, 300])
def test_the_same_bits_every_time(count: int) -> None:
    z, v, _ = states(3, 2, count, 16)
    first = strips.bisoftmax_hvp(z, v, 0.25, None, False, None)
    assert torch.equal(first, strips.bisoftmax_hvp(z, v, 0.25, None, False, None))


@pytest.mark.parametrize("count", [512, 1024])
@pytest.mark.parametrize("path", PATHS)
def test_no_matrix_of_all_pairs(path: str, count: int) -> None:
    z, v, a = states(1, 1, count, 8)
    limit, causal = PATHS[path]
    with Allocations() as seen:
        _, lse = strips.bisoftmax_forward(z, 0.3, None, causal, limit)
        strips.bisoftmax_hvp(z, v, 0.3, None, causal, limit, lse, a)
        strips.hvp_pullback(z, v, v, 0.3, None, causal, a)
    assert seen.largest <= 128 * count * max(1, torch.get_num_threads())
    assert seen.largest < count * count
    with Allocations() as dense:
        reference.bisoftmax(z, 0.3, causal=causal)
    assert dense.largest >= count * count
