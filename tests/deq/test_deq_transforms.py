"""The layer under ``torch.func``: gradients of weights and of each sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jacrev, vmap

from cases.deq import LAYERS, make, tokens
from implicit_attn import DEQ
from implicit_attn.energies import BiSoftmaxAttention, FunctionEnergy, Quadratic
from solvers import Implicit, Tolerance

pytestmark = pytest.mark.defect("D5")
TIGHT: dict[str, Any] = {
    "tolerance": Tolerance(rtol=1e-11),
    "adjoint": Implicit(tolerance=Tolerance(rtol=1e-11)),
    "max_steps": 300,
}


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", [*LAYERS, "bounded", "by autograd"])
def test_gradients_by_transforms_are_those_of_backward(name: str) -> None:
    torch.manual_seed(0)
    x = tokens(batch=3)
    if name == "bounded":
        energy = BiSoftmaxAttention(x.shape[-1], 2, bound=0.5) + Quadratic()
        layer = DEQ(energy, **TIGHT).double()
    elif name == "by autograd":
        wave = FunctionEnergy(lambda z, x: (0.5 * (z - x).square() + z.cos() / 3).flatten(1).sum(1))
        layer = DEQ(wave, **TIGHT)
    else:
        layer = make(name, **TIGHT)
    weights = {key: p.detach().clone() for key, p in layer.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(layer, weights, x).pow(2).sum()

    leaf = x.clone().requires_grad_()
    expected = torch.autograd.grad(layer(leaf).pow(2).sum(), [leaf, *layer.parameters()])
    last = layer.last
    close(grad(loss, 1)(weights, x), expected[0])
    for one, other in zip(grad(loss)(weights, x).values(), expected[1:], strict=True):
        close(one, other)

    def alone(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        return loss(weights, row[None])

    each = vmap(grad(alone), in_dims=(None, 0))(weights, x)
    for one, other in zip(each.values(), expected[1:], strict=True):
        close(one.sum(0), other)
    assert layer.last is last


def test_jacobian_with_a_mask() -> None:
    layer = make("gradient", **TIGHT)
    x = tokens(batch=2)
    mask = torch.ones(x.shape[:2], dtype=torch.bool)
    mask[1, -1] = False
    found = jacrev(lambda x: layer(x, mask))(x)
    close(found, torch.autograd.functional.jacobian(lambda x: layer(x, mask), x))  # type: ignore[arg-type]
