"""The Jacobian penalty against the dense Jacobian, and its derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchdeq.loss import jac_reg

import solvers
from implicit_attn import DEQ
from solvers import Implicit, jacobian_penalty


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


WEIGHT = 0.4 * drawn(3, 3)


def step(z: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(z.flip(1) @ WEIGHT) + x * z.square().mean((1, 2), keepdim=True)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def test_exact_and_estimated_size() -> None:
    z, x = drawn(2, 4, 3), 0.3 * drawn(2, 4, 3, seed=1)
    dense = solvers.jacobian(step, z, (x,))
    expected = dense.square().sum((1, 2)) / 12
    exact = jacobian_penalty(step, z, (x,), samples=None)
    torch.testing.assert_close(exact, expected, rtol=1e-12, atol=0)
    many = jacobian_penalty(step, z, (x,), samples=300, generator=generator())
    torch.testing.assert_close(many, expected, rtol=0.15, atol=0)
    assert not torch.equal(many, expected)
    one = [jacobian_penalty(step, z, (x,), generator=g) for g in (generator(), generator())]
    assert torch.equal(*one)
    point = z.clone().requires_grad_()
    torch.manual_seed(0)
    theirs = jac_reg(step(point, x), point, vecs=300)
    torch.testing.assert_close(theirs.detach(), expected.mean(), rtol=0.15, atol=0)


def test_masked_tokens_do_not_count() -> None:
    z, x = drawn(2, 4, 3), 0.3 * drawn(2, 4, 3, seed=1)
    mask = torch.tensor([[True, True, True, False], [True, True, True, True]])
    keep = mask[:, :, None].expand(2, 4, 3).flatten(1)
    dense = solvers.jacobian(step, z, (x,)) * keep[:, :, None] * keep[:, None, :]
    expected = dense.square().sum((1, 2)) / keep.sum(1)
    exact = jacobian_penalty(step, z, (x,), mask=mask, samples=None)
    torch.testing.assert_close(exact, expected, rtol=1e-12, atol=0)
    rough = jacobian_penalty(step, z, (x,), mask=mask, samples=500, generator=generator())
    torch.testing.assert_close(rough, expected, rtol=0.15, atol=0)


@pytest.mark.parametrize("samples", [None, 2])
def test_derivatives(samples: int | None) -> None:
    def penalty(z: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        def f(z: Tensor, x: Tensor) -> Tensor:
            return torch.tanh(z @ weight) * x

        return jacobian_penalty(f, z, (x,), samples=samples, generator=generator())

    given = [t.requires_grad_() for t in (drawn(2, 2, 3), drawn(2, 2, 3, seed=1), WEIGHT.clone())]
    assert torch.autograd.gradcheck(penalty, given)


class Cell(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, z: Tensor, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return torch.tanh(z @ self.weight) + x


EXACT: dict[str, Any] = {"tolerance": 1e-13, "adjoint": Implicit(tolerance=1e-13), "max_steps": 200}


@pytest.mark.parametrize("masked", [False, True])
def test_with_the_value_the_fixed_point_moves_along(masked: bool) -> None:
    """The whole derivative by the weights, central differences of solve and penalty; or at a fixed z."""
    x = drawn(1, 2, 3, seed=1)
    mask = torch.tensor([[True, False]]) if masked else None
    start = DEQ.from_update(Cell(WEIGHT), **EXACT)(x, mask).detach()

    def whole(weight: Tensor) -> Tensor:
        layer = DEQ.from_update(lambda z, x, mask: torch.tanh(z @ weight) + x, **EXACT)
        solution = layer.solve(x, mask)
        return layer.jacobian_penalty(solution.value, x, mask, samples=None)

    def held(weight: Tensor) -> Tensor:
        layer = DEQ.from_update(lambda z, x, mask: torch.tanh(z @ weight) + x, **EXACT)
        return layer.jacobian_penalty(start, x, mask, samples=None)

    weight = WEIGHT.clone().requires_grad_()
    assert torch.autograd.gradcheck(whole, (weight,), atol=1e-6)
    assert torch.autograd.gradcheck(held, (weight,))
    gradients = [torch.autograd.grad(f(weight).sum(), weight)[0] for f in (whole, held)]
    assert (gradients[0] - gradients[1]).abs().max() > 1e-3


def test_the_radius_of_a_layer_with_masked_tokens() -> None:
    """A masked token stays where it is, which is no eigenvalue 1 of what is solved."""
    layer = DEQ.from_update(lambda z, x, mask: torch.where(mask[..., None], 0.5 * z + x, z))
    x = drawn(2, 4, 3)
    mask = torch.tensor([[True, True, True, False], [True, True, True, True]])
    z = layer(x, mask)
    torch.testing.assert_close(layer.spectral_radius(z, x, mask), torch.full((2,), 0.5).double())
    torch.testing.assert_close(
        layer.jacobian_penalty(z, x, mask), torch.full((2,), 0.25, dtype=torch.float64)
    )


@pytest.mark.parametrize(("arguments", "error", "match"), [
    ({"samples": 0}, ValueError, "samples must be >= 1"),
    ({"samples": 1.5}, TypeError, "samples must be an integer"),
    ({"generator": 3}, TypeError, "generator must be a torch.Generator or None"),
    ({"mask": torch.ones(2, 5).bool()}, ValueError, "mask has 5 tokens"),
    ({"args": (torch.ones(3, 1),)}, ValueError, r"args\[0\] must be batched"),
    ({"z": torch.ones(2, 4, dtype=torch.int64)}, TypeError, "z must be of a floating dtype"),
    ({"f": lambda z, x: z.detach()}, ValueError, r"f\(z\) must depend on z through autograd"),
    ({"f": lambda z, x: z[:, :2]}, ValueError, "f must return a state like z"),
    ({"f": 3}, TypeError, "f must be callable"),
])  # fmt: skip
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    given: dict[str, Any] = {"f": step, "z": drawn(2, 4, 3), "args": (drawn(2, 4, 3),)} | arguments
    with pytest.raises(error, match=match):
        jacobian_penalty(given.pop("f"), given.pop("z"), given.pop("args"), **given)
