"""Stacks of equilibrium blocks as a backbone: what they compute, masks, budgets, mistakes, learning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import solvers
from implicit_attn import EquilibriumBlock
from implicit_attn.models import EquilibriumTransformer

DIM, HEADS, TOKENS = 12, 3, 6
EXACT = {"tolerance": solvers.Tolerance(rtol=1e-9), "max_steps": 200}


def tokens(seed: int = 0, batch: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, TOKENS, DIM, generator=generator, dtype=torch.float64)


def build(**options: Any) -> Any:
    torch.manual_seed(1)
    options.setdefault("layer", EXACT)
    return EquilibriumTransformer(DIM, HEADS, **options).double()


@pytest.mark.parametrize("layers", [1, 3])
def test_blocks_follow_each_other(layers: int) -> None:
    """The same as an nn.Sequential of the blocks, which have weights of their own."""
    model, x = build(layers=layers), tokens()
    assert all(isinstance(block, EquilibriumBlock) for block in model.blocks)
    assert len(model.blocks) == layers
    y = model(x)
    assert y.shape == x.shape and torch.equal(y, nn.Sequential(*model.blocks)(x))
    for block in model.blocks:
        assert bool(block.last.converged.all())
    first = [block.energy.attention.query.weight for block in model.blocks[:2]]
    assert layers == 1 or not torch.equal(*first)


def test_the_state_solves_each_blocks_equation() -> None:
    """y - x is the minimiser of the first block's energy: its gradient there is zero."""
    model, x = build(layers=1), tokens()
    z = (model(x) - x).detach()
    normed = model.blocks[0].arguments(x)[1]
    gradient = model.blocks[0].energy.grad(z, normed)
    assert gradient.norm() <= 1e-7 * z.norm()


def test_iterations_limit_every_block() -> None:
    """One evaluation is spent at the start, the answer of the hidden units; many give what no limit
    gives."""
    model, x = build(layers=2, layer=EXACT | {"on_failure": "ignore"}), tokens()
    started = x
    for block in model.blocks:
        memory, given = block.energy.memory, block.arguments(started)[1].tokens
        started = started - memory.grad(torch.zeros_like(x), given)
    assert torch.allclose(model(x, iterations=1), started)
    for count in (2, 3):
        model(x, iterations=count)
        assert [int(block.last.evaluations.max()) for block in model.blocks] == [count, count]
    few, whole = model(x, iterations=3), model(x)
    assert torch.allclose(model(x, iterations=200), whole)
    assert 1e-4 < (few - whole).norm() / (whole - x).norm() < 0.1
    assert model.iterations == 50 and [b.deq.max_steps for b in model.blocks] == [200, 200]
    assert EquilibriumTransformer(DIM, HEADS, iterations=7).blocks[0].deq.max_steps == 7


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"attention": "cross"}, ValueError, 'attention must be "self" or None'),
    ({"batch_first": False}, ValueError, "batch_first must be True in a backbone"),
    ({"order": "cyclic"}, TypeError, "order"),
    ({"layer": {"steps": 3}}, TypeError, "steps"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG, ids=[str(w[0]) for w in WRONG])
def test_mistakes(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EquilibriumTransformer(DIM, HEADS, **options)
