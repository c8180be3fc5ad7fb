"""The step of every token's own energy: against autograd, without rise, without leak."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cases.energies import relative_error
from implicit_attn.energies import SoftmaxAttention
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
