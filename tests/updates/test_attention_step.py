"""The step of every token's own energy: against autograd, without rise, without leak."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import solvers
from cases.energies import relative_error
from implicit_attn import DEQ
from implicit_attn.energies import AttentionInput, RMSNorm, SoftmaxAttention
from implicit_attn.updates import AttentionStep

DIM, HEADS, TOKENS = 6, 2, 5
KINDS = ("inner", "elastic")


def make(seed: int = 0, **options: Any) -> AttentionStep:
    torch.manual_seed(seed)
    return AttentionStep(DIM, HEADS, **options).double()


def draw(seed: int = 1, tokens: int = TOKENS, width: int = DIM) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, tokens, width, generator=generator, dtype=torch.float64)


def own_energy(step: AttentionStep, z: Tensor, held: Tensor, i: int) -> Tensor:
    """F_i of one token i, (B,), head by head."""
    energy, total = step.energy, torch.zeros(len(z), dtype=torch.float64)
    width, beta = energy.width, float(energy.beta)
    keys = held[:, : i + 1] if step.causal else held
    for head in range(HEADS):
        rows = slice(head * width, (head + 1) * width)
        query, key = z[:, i] @ energy.query.weight[rows].mT, keys @ energy.key.weight[rows].mT
        if energy.energy == "inner":
            pair = -(key @ query.unsqueeze(-1)).squeeze(-1)
        else:
            pair = 0.5 * (query.unsqueeze(1) - key).square().sum(-1)
        total = total - torch.logsumexp(-beta * pair, 1) / beta
    return total


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_it_descends_every_tokens_own_energy_and_not_their_sum(kind: str, causal: bool) -> None:
    step = make(energy=kind, causal=causal, step_size=0.4, beta=0.8)
    z = draw()
    at, held = z.clone().requires_grad_(), z.clone()
    each = torch.stack([own_energy(step, at, held, i) for i in range(TOKENS)], 1)
    (gradient,) = torch.autograd.grad(each.sum(), at)
    assert relative_error(step(z), z - 0.4 * gradient) <= 1e-10
    together = SoftmaxAttention(DIM, HEADS, energy=kind, causal=causal, norm=None, beta=0.8)
    together = together.double()
    together.load_state_dict(step.energy.state_dict())
    assert relative_error(together.grad(z).detach(), gradient) > 0.1


def test_cross_attention_is_the_gradient_step_of_its_energy() -> None:
    step = make(cross=True, context_dim=4, step_size=0.4, norm=RMSNorm(1.0))
    z, x = draw(), draw(2, 7, 4)
    expected = z - 0.4 * step.energy.grad(z, x)
    assert relative_error(step(z, x).detach(), expected.detach()) <= 1e-14
    assert relative_error(step(z, step.prepare(x)).detach(), expected.detach()) <= 1e-14


@pytest.mark.parametrize("kind", KINDS)
def test_causal_steps_among_held_tokens(kind: str) -> None:
    """By autograd of the ``F_i`` among ``j <= i``; with h = z it is the step of self-attention."""
    step = make(energy=kind, causal=True, cross=True, step_size=0.4)
    z, held = draw(), draw(3)
    at = z.clone().requires_grad_()
    each = torch.stack([own_energy(step, at, held, i) for i in range(TOKENS)], 1)
    (gradient,) = torch.autograd.grad(each.sum(), at)
    mask = torch.tensor([[True, True, False, True, True]] * 2)
    alone = make(energy=kind, causal=True, step_size=0.4)
    with torch.no_grad():
        for given in (held, (held, None), AttentionInput(memory=held), step.prepare(held)):
            assert relative_error(step(z, given), z - 0.4 * gradient) <= 1e-10
        assert torch.equal(step(z, z), alone(z))
        found = step(z, (held, mask))
        assert relative_error(found[:, :2], step(z, held)[:, :2]) <= 1e-12
        shorter = step(z[:, mask[0]], held[:, mask[0]])
        assert relative_error(found[:, mask[0]], shorter) <= 1e-12
        pairs = ~torch.eye(TOKENS, dtype=torch.bool)  # the first token has no key then
        found = step(z, AttentionInput(memory=held, pairs=pairs))
        assert torch.equal(found[:, 0], z[:, 0]) and not torch.equal(found[:, 1], z[:, 1])
    layer = DEQ(step, solver=solvers.Forward(), max_steps=3, on_failure="ignore")
    again = layer.solve(held, z0=z).value
    for _ in range(2):  # the third evaluation measures the residual
        z = step(z, held)
    assert relative_error(again.detach(), z.detach()) <= 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_ten_causal_loops_leak_nothing(kind: str) -> None:
    step = make(energy=kind, causal=True, step_size=0.2)
    at = draw().requires_grad_()
    z: Tensor = at
    for _ in range(10):
        z = step(z)
    for i in range(TOKENS - 1):
        (gradient,) = torch.autograd.grad(z[:, i].square().sum(), at, retain_graph=True)
        assert (gradient[:, i + 1 :] == 0.0).all()
        assert (gradient[:, : i + 1] != 0.0).any()


@pytest.mark.parametrize("causal", [False, True])
def test_masked_tokens_stay_and_reach_nobody(causal: bool) -> None:
    step = make(energy="elastic", causal=causal)
    z, mask = draw(), torch.tensor([[True, False, True, True, False], [False] * 5])
    found = step(z, mask=mask)
    assert torch.equal(found[~mask], z[~mask])
    expected = step(z[:1, mask[0]])
    assert relative_error(found[:1, mask[0]], expected) <= 1e-13
    other = step(z.masked_fill(~mask[..., None], torch.nan), mask=mask)
    assert torch.equal(other[mask], found[mask])


def test_a_layer_of_it_solves_for_the_mean_shift() -> None:
    """A hot elastic energy among held tokens has one minimum, where the query is the keys' mean."""
    step = make(energy="elastic", cross=True, beta=0.05, step_size=0.3)
    with torch.no_grad():
        step.energy.query.weight.copy_(torch.eye(DIM))
        step.energy.key.weight.copy_(torch.eye(DIM))
    layer = DEQ(step, max_steps=200, tolerance=solvers.Tolerance(1e-12))
    x = draw(4).requires_grad_()
    z = layer(x)
    assert relative_error(step(z, x).detach(), z.detach()) <= 1e-10
    assert not step.symmetric and not step.monitored
    z.sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


def test_mistakes() -> None:
    step, z = make(cross=True), draw()
    mask = torch.ones(2, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"mask must have the shape \(B, N\) = \(2, 5\)"):
        step(z, (z, mask))
    with pytest.raises(ValueError, match="x must hold 2 samples like z, got 1"):
        step(z, step.prepare(z[:1]))
    causal = make(cross=True, causal=True)
    for given in (z[:, :3], causal.prepare(z[:, :3])):
        with pytest.raises(
            ValueError, match="x must hold the 5 tokens of z where causal=True, got 3"
        ):
            causal(z, given)
    with pytest.raises(ValueError, match="context_dim needs cross=True"):
        make(context_dim=3)
    with pytest.raises(ValueError, match="z must have 6 features"):
        make()(draw(width=5))
