"""Query descent: attention as a unit step, the energy's fall, its limit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_attn import DEQ
from implicit_attn.energies import AttentionInput
from implicit_attn.updates import QueryDescent
from solvers import Implicit, Tolerance

DIM, HEADS, N, M = 6, 2, 4, 5
EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}
SOLVED: dict[str, Any] = {
    "tolerance": Tolerance(rtol=1e-13),
    "adjoint": Implicit(tolerance=Tolerance(rtol=1e-13)),
    "max_steps": 500,
    "on_failure": "raise",
}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("step_size", [1.0, 0.3])
def test_a_step_moves_towards_stock_attention(step_size: float) -> None:
    z, keys = draw(3, N, DIM), draw(3, M, DIM, seed=1)
    heads = [t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (z, keys)]
    attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[1])
    expected = torch.lerp(z, attended.transpose(1, 2).flatten(2), step_size)
    update = QueryDescent(DIM, HEADS, step_size=step_size)
    torch.testing.assert_close(update(z, keys), expected, **EXACT)
    torch.testing.assert_close(update(z, update.prepare(keys)), expected, **EXACT)
    moved, value, gradient = update.joint(z, keys)
    torch.testing.assert_close(moved, expected, **EXACT)
    torch.testing.assert_close(value, update.energy.each(z, keys).sum((1, 2)), **EXACT)
    torch.testing.assert_close(gradient, (z - expected) / step_size, **EXACT)


@pytest.mark.parametrize("beta", [0.1, 1.0, 20.0])
@pytest.mark.parametrize("step_size", [0.25, 1.0])
def test_frozen_keys_the_energy_of_each_query_falls(beta: float, step_size: float) -> None:
    update = QueryDescent(DIM, HEADS, beta=beta, step_size=step_size)
    z, keys = draw(8, N, DIM), draw(8, M, DIM, seed=1)
    states, energies = update.trajectory(z, keys, 20)
    assert states.shape == (21, *z.shape) and energies.shape == (21, 8, HEADS, N)
    assert torch.equal(states[0], z)
    assert (energies.diff(dim=0) <= 1e-13).all()
    assert (energies[-1] < energies[0]).all()


def test_a_layer_finds_the_limit_of_the_steps_with_its_gradients() -> None:
    update = QueryDescent(DIM, HEADS, beta=0.4)
    keys = draw(3, M, DIM, seed=1).requires_grad_()
    x, weights = AttentionInput(memory=keys), draw(3, N, DIM, seed=3)
    layer = DEQ(update, **SOLVED)
    z = layer(x, z0=draw(3, N, DIM))
    (found,) = torch.autograd.grad((z * weights).sum(), keys)
    states, _ = update.trajectory(draw(3, N, DIM), x, 300)
    (expected,) = torch.autograd.grad((states[-1] * weights).sum(), keys)
    torch.testing.assert_close(z, states[-1], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
