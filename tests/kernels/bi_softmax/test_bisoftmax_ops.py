"""The bi-softmax operators: registration, derivatives of every order, compilation, transforms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from implicit_attn.kernels import bisoftmax, bisoftmax_hvp
from implicit_attn.kernels.bi_softmax import ops

BETA = 0.6
HOLES = torch.tensor([[True, False, True, True], [False, False, True, True]])
CASES = {
    "full": {},
    "causal": {"causal": True},
    "holes": {"mask": HOLES},
    "holes, causal": {"mask": HOLES, "causal": True},
    "unbounded": {"limit": 1e9},
}
each_case = pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())


def states(batch: int = 2, heads: int = 1, count: int = 4, width: int = 2) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    shape = (batch, heads, count, width)
    make = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)]
    a = torch.randn(shape[:3], generator=generator, dtype=torch.float64)
    return tuple(t.requires_grad_() for t in (*make, a))


def arguments(options: dict[str, Any]) -> tuple[Any, ...]:
    defaults = {"mask": None, "causal": False, "limit": None} | options
    return defaults["mask"], defaults["causal"], defaults["limit"]


@pytest.mark.parametrize("name", ["full", "holes, causal"])
def test_registration(name: str) -> None:
    options = CASES[name]
    z, v, a = states(heads=2)
    mask, causal, limit = arguments(options)
    forward = (z, BETA, mask, causal, limit, "blocks")
    torch.library.opcheck(ops.forward.operator, forward)
    lse = ops.forward(*forward)[1].detach()
    given = (z, v, BETA, mask, causal, limit, lse, a, "blocks")
    torch.library.opcheck(ops.hvp.operator, given)
    detached = (z.detach(), v.detach(), v.detach(), BETA, mask, causal, a.detach())
    torch.library.opcheck(ops.hvp_pullback.operator, detached)


@each_case
def test_derivatives(options: dict[str, Any]) -> None:
    """Of gradient and lse: once and twice, so the energy's up to the third order."""
    z, v, a = states()
    mask, causal, limit = arguments(options)

    def both(z: Tensor) -> Any:
        return bisoftmax(z, BETA, backend="blocks", **options)

    assert gradcheck(both, z)
    assert gradgradcheck(both, z)

    def product(z: Tensor, v: Tensor, a: Tensor | None = None) -> Tensor:
        return ops.hvp(z, v, BETA, mask, causal, limit, None, a, "blocks")

    assert gradcheck(product, (z, v, a))


@pytest.mark.parametrize("count", [40, 290])
def test_derivatives_in_strips(count: int) -> None:
    """All orders against the dense reference where there is more than one strip."""
    z, v, a = states(1, 2, count, 4)
    found = {}
    for backend in ("blocks", "reference"):
        gradient, lse = bisoftmax(z, 0.5, backend=backend)
        loss = (gradient * v).sum() + (lse * a).sum()
        (first,) = torch.autograd.grad(loss, z, create_graph=True)
        found[backend] = [first, *torch.autograd.grad((first * v.detach()).sum(), (z, v, a))]
    for ours, theirs in zip(found["blocks"], found["reference"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def test_the_product_is_linear_in_v_at_the_cost_of_a_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    z, v, _ = states()

    def forbidden(*args: Any) -> Any:
        raise AssertionError("the third derivative was computed")

    monkeypatch.setattr(ops, "hvp_pullback", forbidden)
    constant = z.detach()
    assert gradcheck(lambda v: bisoftmax_hvp(constant, v, BETA, backend="blocks"), v)


@pytest.mark.parametrize("output", [0, 1])
def test_a_third_derivative_raises_and_the_reference_has_it(output: int) -> None:
    z, _, _ = states()
    for backend in ("blocks", "reference"):
        value = bisoftmax(z, BETA, backend=backend)[output]
        for _ in range(2):
            (value,) = torch.autograd.grad(value.square().sum(), z, create_graph=True)
        if backend == "blocks":
            with pytest.raises(NotImplementedError, match='use backend="reference" for more'):
                torch.autograd.grad(value.square().sum(), z)
        else:
            assert torch.autograd.grad(value.square().sum(), z)[0].norm() > 0


# Forward mode itself still scripts its decompositions.
SCRIPTED = "ignore:.*torch.jit:DeprecationWarning"


@pytest.mark.filterwarnings(SCRIPTED)
def test_forward_mode_raises() -> None:
    z, v, _ = (t.detach() for t in states())
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(z, v)
        for call in (
            lambda: bisoftmax(dual, BETA, backend="blocks"),
            lambda: bisoftmax_hvp(dual, v, BETA, backend="blocks"),
            lambda: bisoftmax_hvp(z, dual, BETA, backend="blocks"),
        ):
            with pytest.raises(NotImplementedError, match="forward-mode differentiation"):
                call()
        tangent = forward_ad.unpack_dual(bisoftmax(dual, BETA)[0]).tangent
        product = forward_ad.unpack_dual(bisoftmax_hvp(z, dual, BETA)).tangent
    torch.testing.assert_close(tangent, bisoftmax_hvp(z, v, BETA))
    torch.testing.assert_close(product, bisoftmax_hvp(z, v, BETA))


@pytest.mark.filterwarnings(SCRIPTED)
def test_transforms() -> None:
    z, v, _ = (t.detach() for t in states())
    with pytest.raises(NotImplementedError, match=r"torch\.func\.grad, vjp and jvp do not"):
        torch.func.jvp(lambda z: bisoftmax(z, BETA, backend="blocks")[0], (z,), (v,))
    with pytest.raises(NotImplementedError, match=r"torch\.func\.grad, vjp and jvp do not"):
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


def test_whole_graph_compilation() -> None:
    def loss(z: Tensor) -> Tensor:
        gradient, lse = bisoftmax(z, BETA, mask=HOLES, backend="blocks")
        return (gradient.square().sum() + lse.sum()) * 2.0

    z, _, _ = states()
    expected = torch.autograd.grad(loss(z), z)[0]
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(z), z)[0], expected)
