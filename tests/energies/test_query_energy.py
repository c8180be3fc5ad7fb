"""The energy of queries among keys: its formula, single queries, heads one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from implicit_attn.energies import AttentionInput, Quadratic, QueryEnergy, SoftmaxAttention

BATCH, HEADS, WIDTH, N, M = 2, 3, 2, 4, 5
DIM = HEADS * WIDTH
EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


def state_and_keys() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(BATCH, N + M, DIM, generator=generator, dtype=torch.float64)
    return numbers[:, :N], numbers[:, N:]


def inputs() -> dict[str, AttentionInput]:
    generator = torch.Generator().manual_seed(1)
    _, keys = state_and_keys()
    seen = torch.rand(BATCH, M, generator=generator) < 0.6
    seen[0] = False  # a sample without any key
    pairs = torch.rand(BATCH, HEADS, N, M, generator=generator) < 0.5
    bias = torch.randn(BATCH, HEADS, N, M, generator=generator, dtype=torch.float64)
    return {
        "all": AttentionInput(memory=keys),
        "masked": AttentionInput(memory=keys, memory_mask=seen),
        "one pattern": AttentionInput(memory=keys, pairs=pairs[0, 0]),
        "pattern a sample": AttentionInput(memory=keys, pairs=pairs[:, 0], memory_mask=seen),
        "biased": AttentionInput(memory=keys, pairs=pairs, pair_bias=bias),
    }


def by_loop(z: Tensor, x: AttentionInput, beta: float) -> Tensor:
    """The energy of each query (B, H, N), one after the other."""
    assert x.memory is not None
    found = torch.zeros(BATCH, HEADS, N, dtype=torch.float64)
    for b in range(BATCH):
        for h in range(HEADS):
            part = slice(h * WIDTH, (h + 1) * WIDTH)
            for i in range(N):
                query, allowed = z[b, i, part], torch.ones(M, dtype=torch.bool)
                scores = beta * x.memory[b, :, part] @ query
                if x.memory_mask is not None:
                    allowed = allowed & x.memory_mask[b]
                if x.pairs is not None:
                    sizes = (BATCH, HEADS, N, M)
                    pairs = x.pairs[:, None] if x.pairs.dim() == 3 else x.pairs
                    allowed = allowed & pairs.expand(sizes)[b, h, i]
                if x.pair_bias is not None:
                    scores = scores + x.pair_bias[b, h, i]
                lse = scores[allowed].logsumexp(0) if allowed.any() else query.new_zeros(())
                found[b, h, i] = 0.5 * query @ query - lse / beta
    return found


@pytest.mark.parametrize("name", inputs())
def test_formula(name: str) -> None:
    """Against a loop and its automatic gradient."""
    x = inputs()[name]
    z = state_and_keys()[0].requires_grad_()
    expected = by_loop(z, x, 0.7)
    (gradient,) = torch.autograd.grad(expected.sum(), z)
    energy = QueryEnergy(DIM, HEADS, beta=0.7)
    value, found = energy.value_and_grad(z, x)
    torch.testing.assert_close(value, expected.sum((1, 2)), **EXACT)
    torch.testing.assert_close(found, gradient, **EXACT)
    torch.testing.assert_close(energy.each(z, x), expected, **EXACT)


def test_softmax_attention_is_such_an_energy() -> None:
    """With identities for its weights, and the quadratic at 0."""
    z, keys = state_and_keys()
    attention = SoftmaxAttention(DIM, HEADS, cross=True, norm=None, beta=0.7).double()
    torch.nn.init.eye_(attention.query.weight)
    torch.nn.init.eye_(attention.key.weight)
    x = AttentionInput(tokens=torch.zeros_like(z), memory=keys)
    energy = attention + Quadratic().select("tokens")
    expected = QueryEnergy(DIM, HEADS, beta=0.7).value_and_grad(z, x)
    for found, right in zip(energy.value_and_grad(z, x), expected, strict=True):
        torch.testing.assert_close(found, right, **EXACT)


def test_a_temperature_for_each_head_is_that_head_alone() -> None:
    z, keys = state_and_keys()
    betas = (0.3, 1.0, 2.5)
    parts = [
        QueryEnergy(WIDTH, beta=beta).each(z_h.contiguous(), k_h.contiguous())
        for beta, z_h, k_h in zip(betas, z.split(WIDTH, -1), keys.split(WIDTH, -1), strict=True)
    ]
    energy = QueryEnergy(DIM, HEADS, beta=betas).double()
    torch.testing.assert_close(energy.each(z, keys), torch.cat(parts, 1), **EXACT)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (None, TypeError, r"QueryEnergy: x must be a tensor \(B, M, 6\)"),
        (torch.zeros(2, M, 5).double(), ValueError, r"x must have the shape \(B, M, 6\), got"),
        (torch.zeros(2, M, DIM), TypeError, r"x must be of torch.float64 on cpu like z"),
        (AttentionInput(), TypeError, r"got NoneType"),
        (
            AttentionInput(
                memory=torch.zeros(2, M, DIM).double(), pairs=torch.ones(2, 3, 3, 3).bool()
            ),
            ValueError,
            r"pairs must have the shape \(4, 5\)",
        ),
    ],
)
def test_errors_of_inputs(x: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        QueryEnergy(DIM, HEADS)(state_and_keys()[0], x)


def test_errors_of_arguments() -> None:
    with pytest.raises(ValueError, match="heads"):
        QueryEnergy(DIM, 4)
