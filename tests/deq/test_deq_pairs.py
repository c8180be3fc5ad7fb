"""Layers whose input holds a matrix of pairs for all samples, beside tensors with a row a sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cases.deq import EXACT
from implicit_attn import DEQ, Energy
from implicit_attn.energies import (
    AttentionInput,
    BiSoftmaxAttention,
    Quadratic,
    ReLUFeedForward,
    SoftmaxAttention,
)
from implicit_attn.energies.prepared import Prepared

B, N, M, DIM = 3, 3, 4, 4


class Seeing(Energy):
    """A user's energy that prepares nothing and looks at the whole input."""

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        weights = x.pairs.to(z.dtype) if x.pair_bias is None else x.pair_bias.tanh()
        return 0.05 * (z @ z.mT * weights).sum((1, 2))


def tokens(batch: int = B, keys: int = N) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, keys, DIM, generator=generator, dtype=torch.float64)


def zeros(x: AttentionInput) -> Tensor:
    assert x.tokens is not None
    return torch.zeros_like(x.tokens)


TERMS = {
    "a memory": lambda: ReLUFeedForward(DIM, 8),
    "heads": lambda: BiSoftmaxAttention(DIM, 2, bound=1.0),
    "a user's": Seeing,
}


@pytest.mark.parametrize("batch", [2, N])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", TERMS)
def test_a_matrix_of_pairs_is_one_for_each_sample(name: str, biased: bool, batch: int) -> None:
    """Also where there are as many samples as tokens, and finished ones leave the batch."""
    torch.manual_seed(0)
    attention = 0.2 * BiSoftmaxAttention(DIM, 2, bound=1.0)
    energy = (attention + 0.2 * TERMS[name]() + Quadratic().select("tokens")).double()
    matrix = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 1, 1]])
    part = {"pair_bias": matrix.double()} if biased else {"pairs": matrix > 0}
    x = AttentionInput(tokens(batch), **part)
    layer = DEQ(energy, init=zeros, **EXACT)
    found = layer(x)
    start = found.detach().clone()
    start[0] += 3.0
    again = layer.solve(x, z0=start)
    assert again.evaluations[1:].max() < again.evaluations[0]
    each = x._replace(**{name: t.expand(batch, N, N) for name, t in part.items()})
    torch.testing.assert_close(again.value, layer(each))
    torch.testing.assert_close(energy.grad(found, x if name != "a user's" else each), 0 * found)


def test_where_nothing_is_prepared_a_matrix_is_expanded_too() -> None:
    x = AttentionInput(tokens(), pairs=torch.ones(N, N) > 0)
    layer = DEQ(Seeing() + Quadratic().select("tokens"), init=zeros, **EXACT)
    each = x._replace(pairs=torch.ones(B, N, N) > 0)
    torch.testing.assert_close(layer(x), layer(each))


def test_the_mask_has_the_samples_of_the_memory() -> None:
    """The first tensor of the input is a matrix (N, M), whose rows are no samples."""
    torch.manual_seed(0)
    attention = 0.2 * SoftmaxAttention(DIM, 2, cross=True).double()
    pull, memory = tokens(2), tokens(2, M)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    pairs = torch.rand(N, M, generator=torch.Generator().manual_seed(0)) < 0.7
    layer = DEQ(attention + Quadratic().select("tokens"), init=zeros, **EXACT)
    x = AttentionInput(pull, pairs=pairs, memory=memory)
    found = layer(x, mask)
    each = x._replace(pairs=pairs.expand(2, N, M))
    torch.testing.assert_close(found, layer(each, mask))
    without = DEQ(attention, init=lambda x: x.memory[:, :N], max_steps=2, on_failure="ignore")
    x = AttentionInput(pairs=pairs, memory=memory)
    assert torch.equal(without(x, mask), without(x._replace(pairs=each.pairs), mask))
    with pytest.raises(ValueError, match=r"mask must be batched like x, 2 samples, got .*\(3, 3\)"):
        without(x, torch.ones(3, N) > 0)


def test_a_start_tells_the_samples_of_pairs_alone() -> None:
    torch.manual_seed(0)
    layer = DEQ(
        (0.2 * BiSoftmaxAttention(DIM, 2, bound=1.0)).double(), max_steps=3, on_failure="ignore"
    )
    pairs = torch.tensor([[True, True, False]] * N)
    z0 = tokens(2)
    found = layer.solve(AttentionInput(pairs=pairs), z0=z0).value
    each = layer.solve(AttentionInput(pairs=pairs.expand(2, N, N)), z0=z0).value
    assert torch.equal(found, each)


def test_what_ignores_the_input_holds_nothing_of_it_in_a_solve() -> None:
    x = AttentionInput(tokens(), pairs=torch.ones(B, N, N) > 0)
    ignoring = [ReLUFeedForward(DIM, 8), BiSoftmaxAttention(DIM, 2), SoftmaxAttention(DIM, 2)]
    assert [energy.held(tokens()) for energy in ignoring] == [None] * 3
    made = (BiSoftmaxAttention(DIM, 2) + ReLUFeedForward(DIM, 8)).prepare(x)
    assert isinstance(made, Prepared) and made.parts[1] is None
