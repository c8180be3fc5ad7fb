"""Query descent: attention as a unit step, the energy's fall, and the three readings of self-attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_attn import DEQ
from implicit_attn.energies import (
    AttentionInput,
    Hopfield,
    Quadratic,
    QueryEnergy,
)
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


def spread(z: Tensor) -> Tensor:
    """Root mean square distance of the tokens from their mean, of each sample."""
    return (z - z.mean(1, keepdim=True)).square().sum(-1).mean(1).sqrt()


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
    torch.testing.assert_close(value, update.energies(z, keys).sum((1, 2)), **EXACT)
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


def test_live_keys_collapse() -> None:
    """``z <- softmax(beta z z^T) z``: one point, exactly what stock attention repeated does."""
    update = QueryDescent(2, context="live")
    x = draw(4, 16, 2)
    z = x
    for _ in range(10):
        z = F.scaled_dot_product_attention(z, z, z)
    states, _ = update.trajectory(x, None, 10)
    torch.testing.assert_close(states[-1], z, **EXACT)
    assert (spread(states[-1]) < 1e-12).all()
    assert (spread(states[0]) > 1.0).all()
    assert not update.symmetric and not update.monitored


def test_any_energy_of_queries_is_descended() -> None:
    """Stored patterns in place of the keys, the same for every head."""
    patterns = draw(7, DIM // HEADS, seed=2)
    update = QueryDescent(DIM, HEADS, energy=Hopfield(patterns, beta=0.5), step_size=0.5)
    z = draw(3, N, DIM)
    queries = z.unflatten(-1, (HEADS, -1))
    expected = torch.lerp(queries, (0.5 * queries @ patterns.T).softmax(-1) @ patterns, 0.5)
    torch.testing.assert_close(update(z), expected.flatten(2), **EXACT)
    states, energies = update.trajectory(z, None, 5)
    assert (energies.diff(dim=0) <= 1e-13).all()
    ends, _ = update.trajectory(z, draw(3, M, DIM), 5)  # keys make no difference to it
    assert torch.equal(ends, states)


@pytest.mark.parametrize("given", [False, True])
def test_a_layer_finds_the_limit_of_the_steps_with_its_gradients(given: bool) -> None:
    energy = QueryEnergy(DIM // HEADS, beta=0.4) if given else None
    update = QueryDescent(DIM, HEADS, energy=energy, beta=None if given else 0.4)
    keys = draw(3, M, DIM, seed=1).requires_grad_()
    x, weights = AttentionInput(memory=keys), draw(3, N, DIM, seed=3)
    layer = DEQ(update, **SOLVED)
    z = layer(x, z0=draw(3, N, DIM))
    (found,) = torch.autograd.grad((z * weights).sum(), keys)
    states, _ = update.trajectory(draw(3, N, DIM), x, 300)
    (expected,) = torch.autograd.grad((states[-1] * weights).sum(), keys)
    torch.testing.assert_close(z, states[-1], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"energy": torch.nn.Identity()}, TypeError, "energy must be an Energy or None"),
        ({"energy": Quadratic(), "beta": 1.0}, ValueError, "beta belongs to the default energy"),
        ({"step_size": 0.0}, ValueError, "step_size must be"),
    ],
)
def test_errors(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        QueryDescent(DIM, **options)


def test_errors_of_inputs() -> None:
    z = draw(3, N, DIM)
    with pytest.raises(ValueError, match=r"live.*got one with memory"):
        QueryDescent(DIM, context="live")(z, AttentionInput(memory=z))
    with pytest.raises(ValueError, match=r"live.*got Tensor"):
        QueryDescent(DIM, context="live")(z, z)
