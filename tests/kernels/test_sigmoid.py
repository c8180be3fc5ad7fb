"""Sigmoid attention by blocks against the dense reference in float64, and what layers see of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from cases.kernels import COUNTS, Allocations, difference
from implicit_attn.energies import ScoreAttention
from implicit_attn.kernels import explain_sigmoid, sigmoid, sigmoid_attention

BETA = 0.6
HOLES = torch.tensor([[True, False, True, True], [False, False, False, False]])


def states(batch: int, heads: int, count: int, width: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * count + width)
    shape = (batch, heads, count, width)
    return [scale * torch.randn(shape, generator=generator) for _ in range(3)]


def small() -> list[Tensor]:
    return [t.double().requires_grad_() for t in states(2, 2, 4, 2)]


def dense_product(z: Tensor, v: Tensor) -> Tensor:
    """The Hessian times ``v``, in float64."""
    point = z.double().requires_grad_()
    return torch.autograd.grad(sigmoid.dense(point, 0.25, None)[0], point, v.double())[0]


def check(tensors: list[Tensor], beta: float, mask: Tensor | None) -> None:
    """Gradient, value, product and its pullback against the dense formula and its autograd."""
    z, v, c = tensors
    wide_z, wide_v, wide_c = (t.double() for t in (z, v, c))
    point, along = wide_z.requires_grad_(), wide_v.requires_grad_()
    exact, exact_value = sigmoid.dense(point, beta, mask)
    (product,) = torch.autograd.grad(exact, point, along, create_graph=True)
    pullbacks = torch.autograd.grad(product, (point, along), wide_c)
    gradient, value = sigmoid.sigmoid_forward(z, beta, mask)
    ours = (
        gradient,
        value,
        sigmoid.sigmoid_hvp(z, v, beta, mask),
        *sigmoid.sigmoid_hvp_pullback(z, v, c, beta, mask),
    )
    theirs = (exact, exact_value, product, *pullbacks)
    for found, expected in zip(ours, theirs, strict=True):
        assert difference(found, expected.detach()) <= 1e-5
    assert gradient.dtype == z.dtype and value.dtype == torch.promote_types(z.dtype, torch.float32)


@pytest.mark.parametrize("count", COUNTS)
def test_every_count(count: int) -> None:
    batch, heads = (1, 1) if count == 1000 else (2, 3)
    mask = torch.rand(batch, count, generator=torch.Generator().manual_seed(count)) > 0.4
    mask[0, : count // 2] = True
    mask[-1] &= batch == 1
    for chosen in (None, mask) if count < 1000 else (mask,):
        check(states(batch, heads, count, 16), 0.25, chosen)


@pytest.mark.parametrize(("width", "scale"), [(8, 1.0), (24, 5.0), (64, 1.0), (128, 3.0)])
def test_every_width(width: int, scale: float) -> None:
    check(states(2, 2, 130, width, scale), width**-0.5, None)


def test_tiny_norms() -> None:
    """The second derivative of sigma, which vanishes there, is known to float32's rounding of 1."""
    z, v, _ = states(1, 2, 130, 16, 1e-10)
    exact, _ = sigmoid.dense(z.double(), 0.25, None)
    assert difference(sigmoid.sigmoid_forward(z, 0.25, None)[0], exact) <= 1e-5
    assert difference(sigmoid.sigmoid_hvp(z, v, 0.25, None), dense_product(z, v)) <= 1e-5


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)]
)
def test_dtypes(dtype: torch.dtype, bound: float) -> None:
    z, v, _ = (t.to(dtype) for t in states(2, 2, 290, 16))
    exact, exact_value = sigmoid.dense(z.double(), 0.25, None)
    point = z.requires_grad_()
    gradient, value = sigmoid_attention(point, 0.25)
    assert difference(gradient.detach(), exact.detach()) <= bound
    assert difference(value.detach(), exact_value.detach()) <= 1e-6
    (product,) = torch.autograd.grad(gradient, point, v)
    assert difference(product, dense_product(z.detach(), v)) <= bound


def test_hidden_tokens_are_never_read() -> None:
    z, v, c = states(2, 2, 290, 8)
    mask = torch.rand(2, 290, generator=torch.Generator().manual_seed(0)) > 0.4
    hidden = ~mask[:, None, :, None]
    bad, bad_v, bad_c = (t.masked_fill(hidden, float("nan")) for t in (z, v, c))
    for found, expected in (
        (sigmoid.sigmoid_forward(bad, 0.3, mask), sigmoid.sigmoid_forward(z, 0.3, mask)),
        ((sigmoid.sigmoid_hvp(bad, bad_v, 0.3, mask),), (sigmoid.sigmoid_hvp(z, v, 0.3, mask),)),
        (
            sigmoid.sigmoid_hvp_pullback(bad, bad_v, bad_c, 0.3, mask),
            sigmoid.sigmoid_hvp_pullback(z, v, c, 0.3, mask),
        ),
    ):
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)
            assert ours.dim() == 2 or not ours.masked_select(hidden).any()


@pytest.mark.parametrize("mask", [None, HOLES], ids=["full", "holes"])
def test_derivatives(mask: Tensor | None) -> None:
    z, v, _ = small()

    def both(z: Tensor) -> Any:
        return sigmoid_attention(z, BETA, mask=mask, backend="blocks")

    def product(z: Tensor, v: Tensor) -> Tensor:
        return sigmoid.hvp(z, v, BETA, mask)

    assert gradcheck(both, z) and gradgradcheck(both, z) and gradcheck(product, (z, v))
    constant = z.detach()
    assert gradcheck(lambda v: product(constant, v), v)


@pytest.mark.parametrize("backend", ["auto", "reference", "blocks"])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_autocast_has_no_say(backend: str, kind: torch.dtype) -> None:
    z, v, c = (t.to(kind) for t in states(2, 2, 40, 8))
    results = []
    for enabled in (True, False):
        point = z.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            gradient, value = sigmoid_attention(point, 0.3, backend=backend)
        loss = (gradient * c).sum() + value.sum()
        (first,) = torch.autograd.grad(loss, point, create_graph=True)
        (second,) = torch.autograd.grad((gradient * c).sum(), point, create_graph=True)
        (second,) = torch.autograd.grad(second, point, v)
        results.append([value, gradient, first, second])
    assert [t.dtype for t in results[0]] == [torch.float32, *[kind] * 3]
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact)


@pytest.mark.parametrize("backend", ["auto", "reference", "blocks"])
@pytest.mark.parametrize("shape", [(0, 2, 300, 4), (2, 2, 0, 4)])
def test_nothing_to_attend(backend: str, shape: tuple[int, ...]) -> None:
    z = torch.zeros(shape, requires_grad=True)
    gradient, value = sigmoid_attention(z, 0.3, backend=backend)
    for _ in range(2):
        (gradient,) = torch.autograd.grad(gradient.sum(), z, create_graph=True)
    assert gradient.shape == shape and value.shape == shape[:2] and not value.any()


def test_registration() -> None:
    z, v, c = small()
    torch.library.opcheck(sigmoid.forward.operator, (z, BETA, HOLES))
    torch.library.opcheck(sigmoid.hvp.operator, (z, v, BETA, HOLES))
    detached = (z.detach(), v.detach(), c.detach(), BETA, HOLES)
    torch.library.opcheck(sigmoid.hvp_pullback.operator, detached)
    stack = torch.stack((z.detach(), v.detach()))
    mapped = torch.vmap(lambda z: sigmoid_attention(z, BETA, backend="blocks"))(stack)
    single = [sigmoid_attention(t, BETA) for t in stack]
    for ours, theirs in zip(mapped, zip(*single, strict=True), strict=True):
        torch.testing.assert_close(ours, torch.stack(theirs))


# Forward mode itself still scripts its decompositions.
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_blocks_cannot_do_raises() -> None:
    z, v, _ = small()
    value = sigmoid_attention(z, BETA, backend="blocks")[0]
    for _ in range(2):
        (value,) = torch.autograd.grad(value.square().sum(), z, create_graph=True)
    with pytest.raises(NotImplementedError, match='use backend="reference" for more'):
        torch.autograd.grad(value.square().sum(), z)
    z, v = z.detach(), v.detach()
    with pytest.raises(NotImplementedError, match=r"torch\.func\.grad, vjp and jvp do not"):
        torch.func.jvp(lambda z: sigmoid_attention(z, BETA, backend="blocks")[0], (z,), (v,))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(z, v)
        with pytest.raises(NotImplementedError, match="that of the gradient for the product"):
            sigmoid_attention(dual, BETA, backend="blocks")
        tangent = forward_ad.unpack_dual(sigmoid_attention(dual, BETA)[0]).tangent
    torch.testing.assert_close(tangent, sigmoid.hvp(z, v, BETA, None))


@pytest.mark.parametrize(
    ("heads", "count", "backend"),
    [(2, 1, "reference"), (2, 256, "reference"), (2, 257, "blocks"), (12, 256, "blocks")],
)
def test_automatic_choice(heads: int, count: int, backend: str) -> None:
    choice = explain_sigmoid(torch.empty(1, heads, count, 4), 0.3)
    assert choice.backend == backend
    assert f"{heads} matrices of {count} x {count} pairs" in choice.reason


def test_input_is_checked() -> None:
    z = small()[0]
    for call in (
        lambda: sigmoid_attention(z, BETA, backend="triton"),
        lambda: ScoreAttention(8, heads=2, backend="triton"),
    ):
        with pytest.raises(ValueError, match=r"backend must be one of .* got 'triton'"):
            call()
    with pytest.raises(ValueError, match=r"beta must be > 0, got -1"):
        sigmoid_attention(z, -1)


def test_no_matrix_of_all_pairs() -> None:
    count = 1024
    z, v, c = states(1, 1, count, 8)
    with Allocations() as seen:
        sigmoid.sigmoid_forward(z, 0.3, None)
        sigmoid.sigmoid_hvp(z, v, 0.3, None)
        sigmoid.sigmoid_hvp_pullback(z, v, c, 0.3, None)
    assert seen.largest <= 128 * count * max(1, torch.get_num_threads()) < count * count
    with Allocations() as dense:
        sigmoid.dense(z, 0.3, None)
    assert dense.largest >= count * count
