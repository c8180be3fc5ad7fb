"""Bi-softmax: the dense formula against its definition, and the operators of the other backends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from cases.kernels import states as problem
from implicit_attn.kernels import bisoftmax, bisoftmax_hvp
from implicit_attn.kernels.bi_softmax import ops

BETA = 0.6


def pairs(mask: Tensor | None, causal: bool, count: int) -> Tensor:
    """``m_ij`` (B or 1, 1, N, N)."""
    allowed = torch.ones(1, 1, count, count, dtype=torch.bool)
    if causal:
        allowed = allowed.tril()
    if mask is not None:
        allowed = allowed & mask[:, None, :, None] & mask[:, None, None, :]
    return allowed


def definition(z: Tensor, beta: float, mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """Energy (B,) and lse (B, H, N), by a sum of exponentials over the allowed pairs."""
    allowed = pairs(mask, causal, z.shape[2])
    scores = beta * torch.einsum("bhip,bhjp->bhij", z, z)
    total = torch.where(allowed, scores.exp(), 0.0).sum(-1)
    lse = torch.where(total > 0, total, 1.0).log()
    return lse.sum((1, 2)) / beta, lse


def states(heads: int = 3, count: int = 5, width: int = 4) -> tuple[Tensor, Tensor]:
    z, v, _ = problem(2, heads, count, width)
    return z.double(), v.double()


MASKS = {
    "none": None,
    "holes": torch.tensor([[True, False, True, True, False], [False, True, True, True, True]]),
    "empty": torch.tensor([[False] * 5, [True, True, False, True, True]]),
}
each_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
each_order = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@each_mask
@each_order
@pytest.mark.parametrize("limit", [None, 40.0, 1e4])
def test_against_autograd(mask: Tensor | None, causal: bool, limit: float | None) -> None:
    z, v = states()
    point = z.clone().requires_grad_()
    energy, lse = definition(point, BETA, mask, causal)
    (gradient,) = torch.autograd.grad(energy.sum(), point, create_graph=True)
    (product,) = torch.autograd.grad(gradient, point, v)
    ours, our_lse = bisoftmax(z, BETA, mask=mask, causal=causal, limit=limit)
    torch.testing.assert_close(our_lse, lse.detach(), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(ours, gradient.detach(), rtol=1e-11, atol=1e-12)
    for saved in (None, our_lse):
        ours = bisoftmax_hvp(z, v, BETA, mask=mask, causal=causal, lse=saved)
        torch.testing.assert_close(ours, product, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("limit", [None, 1e5])
def test_large_scores(limit: float | None) -> None:
    """A row maximum is taken unless the caller vouches for a moderate bound."""
    z, _ = states()
    gradient, lse = bisoftmax(30 * z.float(), 1.0, limit=limit)
    reference, expected = bisoftmax(30 * z, 1.0)
    assert torch.isfinite(gradient).all() and lse.max() > 500
    torch.testing.assert_close(lse.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient.double(), reference, rtol=1e-3, atol=1e-3)


each_backend = pytest.mark.parametrize("backend", ["reference", "blocks", "auto"])


@each_backend
@pytest.mark.parametrize(("limit", "kind"), [(None, torch.float32), (40.0, torch.bfloat16)])
def test_autocast_changes_no_result(backend: str, limit: float | None, kind: torch.dtype) -> None:
    z, v = (t.to(kind) for t in states(count=33))
    results = []
    for enabled in (True, False):
        point = z.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            gradient, lse = bisoftmax(point, BETA, limit=limit, backend=backend)
            product = bisoftmax_hvp(point, v, BETA, limit=limit, backend=backend)
            constant = point.detach()
            given = bisoftmax_hvp(constant, v, BETA, lse=lse.detach(), backend=backend)
        loss = (gradient * v).sum() + lse.sum()
        (first,) = torch.autograd.grad(loss, point, create_graph=True)
        (second,) = torch.autograd.grad((first * v).sum() + (product * v).sum(), point)
        results.append([lse, gradient, product, given, first, second])
    assert [t.dtype for t in results[0]] == [torch.float32, *[kind] * 5]
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact)


@each_backend
@pytest.mark.parametrize(("mask", "causal"), [(None, False), (MASKS["empty"], True)])
def test_derivatives_do_not_treat_a_given_lse_as_constant(
    backend: str, mask: Tensor | None, causal: bool
) -> None:
    """Derivatives of the product by z are total, whoever computed the lse and with what graph."""
    z, v = (t.requires_grad_() for t in states())
    direction = torch.roll(v.detach(), 1)
    results = []
    for given in (None, "constant", "recorded"):
        _, lse = bisoftmax(z, BETA, mask=mask, causal=causal, backend=backend)
        lse = {None: None, "constant": lse.detach(), "recorded": lse}[given]
        chosen = backend if given else "reference"
        product = bisoftmax_hvp(z, v, BETA, mask=mask, causal=causal, lse=lse, backend=chosen)
        results.append((product, *torch.autograd.grad(product, (z, v), direction)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(results[2], results[0], rtol=1e-10, atol=1e-12)


HOLES = torch.tensor([[True, False, True, True], [False, False, True, True]])
EMPTY = torch.tensor([[False] * 4, [True, True, False, True]])
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "holes, causal": {"mask": HOLES, "causal": True},
    "empty": {"mask": EMPTY},
    "bounded, empty": {"limit": 40.0, "mask": EMPTY},
    "unbounded": {"limit": 1e9},
}
each_case = pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())


def recorded(heads: int = 1) -> tuple[Tensor, ...]:
    z, v = states(heads=heads, count=4, width=2)
    return tuple(t.requires_grad_() for t in (z, v, v.sum(-1)))


def arguments(options: dict[str, Any]) -> tuple[Any, ...]:
    return options.get("mask"), options.get("causal", False), options.get("limit")


@pytest.mark.parametrize("name", ["full", "holes, causal"])
def test_registration(name: str) -> None:
    options = CASES[name]
    z, v, a = recorded(heads=2)
    mask, causal, limit = arguments(options)
    forward = (z, BETA, mask, causal, limit, "blocks")
    torch.library.opcheck(ops.forward.operator, forward)
    lse = ops.forward(*forward)[1].detach()
    given = (z, v, BETA, mask, causal, limit, lse, a, "blocks")
    torch.library.opcheck(ops.hvp.operator, given)
    detached = (z.detach(), v.detach(), v.detach(), BETA, mask, causal, a.detach())
    torch.library.opcheck(ops.hvp_pullback.operator, detached)


@each_case
@pytest.mark.parametrize("backend", ["reference", "blocks"])
def test_derivatives(backend: str, options: dict[str, Any]) -> None:
    """Of gradient and lse: once and twice, so the energy's up to the third order; of the product once."""
    z, v, a = recorded()

    def both(z: Tensor) -> Any:
        return bisoftmax(z, BETA, backend=backend, **options)

    assert gradcheck(both, z)
    assert gradgradcheck(both, z)
    if backend == "reference":
        assert gradcheck(lambda z, v: bisoftmax_hvp(z, v, BETA, backend=backend, **options), (z, v))
    else:  # with a cotangent of the lse
        rest = (*arguments(options), None)
        assert gradcheck(lambda z, v, a: ops.hvp(z, v, BETA, *rest, a, backend), (z, v, a))


@pytest.mark.parametrize("output", [0, 1])
def test_a_third_derivative_raises_and_the_reference_has_it(output: int) -> None:
    z, _, _ = recorded()
    for backend in ("blocks", "reference"):
        value = bisoftmax(z, BETA, backend=backend)[output]
        for _ in range(2):
            (value,) = torch.autograd.grad(value.square().sum(), z, create_graph=True)
        if backend == "blocks":
            with pytest.raises(NotImplementedError, match="backend"):
                torch.autograd.grad(value.square().sum(), z)
        else:
            assert torch.autograd.grad(value.square().sum(), z)[0].norm() > 0


# Forward mode itself still scripts its decompositions.
SCRIPTED = "ignore:.*torch.jit:DeprecationWarning"


@pytest.mark.filterwarnings(SCRIPTED)
def test_transforms() -> None:
    z, v, _ = (t.detach() for t in recorded())
    with pytest.raises(NotImplementedError, match="vjp"):
        torch.func.jvp(lambda z: bisoftmax(z, BETA, backend="blocks")[0], (z,), (v,))
    with pytest.raises(NotImplementedError, match="vjp"):
        torch.func.grad(lambda z: bisoftmax(z, BETA, backend="blocks")[1].sum())(z)
    tangent = torch.func.jvp(lambda z: bisoftmax(z, BETA)[0], (z,), (v,))[1]
    torch.testing.assert_close(tangent, bisoftmax_hvp(z, v, BETA))
    stack = torch.stack((z, v, z + v))
    mapped = torch.vmap(lambda z: bisoftmax(z, BETA, mask=HOLES, backend="blocks"))(stack)
    single = [bisoftmax(t, BETA, mask=HOLES, backend="blocks") for t in stack]
    for ours, theirs in zip(mapped, zip(*single, strict=True), strict=True):
        torch.testing.assert_close(ours, torch.stack(theirs))
    mapped = torch.vmap(lambda v: bisoftmax_hvp(z, v, BETA, backend="blocks"), 1, 1)(
        stack.movedim(0, 1)
    )
    torch.testing.assert_close(mapped[:, 1], bisoftmax_hvp(z, v, BETA))
