"""Stacks of equilibrium blocks as a backbone: what they compute, masks, budgets, mistakes, learning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import solvers
from implicit_attn import EquilibriumBlock
from implicit_attn.models import EquilibriumTransformer, ImageClassifier, build_backbone

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
    """One evaluation is spent at z = 0, whose output is the input; many give what no limit gives."""
    model, x = build(layers=2, layer=EXACT | {"on_failure": "ignore"}), tokens()
    assert torch.allclose(model(x, iterations=1), x)
    for count in (2, 3):
        model(x, iterations=count)
        assert [int(block.last.evaluations.max()) for block in model.blocks] == [count, count]
    few, whole = model(x, iterations=3), model(x)
    assert torch.allclose(model(x, iterations=200), whole)
    assert 1e-4 < (few - whole).norm() / (whole - x).norm() < 0.1
    assert model.iterations == 50 and [b.deq.max_steps for b in model.blocks] == [200, 200]
    assert EquilibriumTransformer(DIM, HEADS, iterations=7).blocks[0].deq.max_steps == 7


@pytest.mark.parametrize("iterations", [None, 200])
def test_masked_tokens_keep_their_input_and_influence_no_other(iterations: int | None) -> None:
    model, x = build(layers=2), tokens()
    mask = torch.ones(3, TOKENS, dtype=torch.bool)
    mask[0, 4:] = mask[2, :2] = False
    y = model(x, mask=mask, iterations=iterations)
    assert torch.equal(y[~mask], x[~mask])
    other = torch.where(mask.unsqueeze(-1), x, tokens(5))
    assert torch.allclose(model(other, mask=mask, iterations=iterations)[mask], y[mask])
    alone = model(x[:1, :4], iterations=iterations)
    assert torch.allclose(alone, y[:1, :4], atol=1e-7)


def test_gradients_through_a_stack() -> None:
    """Those of a stack whose solves are taken apart by autograd, at a tight tolerance."""
    x, weight = tokens(batch=1), tokens(2, batch=1)
    found = []
    for adjoint in (solvers.Implicit(tolerance=solvers.Tolerance(1e-9)), solvers.Unrolled()):
        model = build(layers=2, layer=EXACT | {"adjoint": adjoint})
        given = x.clone().requires_grad_()
        (model(given) * weight).sum().backward()
        found.append([given.grad, *(p.grad for p in model.parameters())])
    for implicit, unrolled in zip(*found, strict=True):
        assert torch.allclose(implicit, unrolled, rtol=1e-5, atol=1e-7)


def test_options_reach_the_blocks() -> None:
    model = build(hidden=5, state_dim=6, causal=True, curvature=(0.2, 0.3), activation="gelu")
    block = model.blocks[0]
    assert block.causal and block.curvature == (0.2, 0.3) and block.state_dim == 6
    x = tokens()
    later = x.clone()
    later[:, -1] += 1
    assert torch.allclose(model(x)[:, :-1], model(later)[:, :-1])
    limited = model(x, iterations=200)  # behind the output map, too
    assert torch.allclose(limited, model(x))
    assert build_backbone("equilibrium", DIM, HEADS, 5).blocks[0].energy.memory.weight.shape[0] == 5
    assert build_backbone("equilibrium", DIM, HEADS).blocks[0].energy.memory.weight.shape[0] == 24


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"layers": 0}, ValueError, "layers must be >= 1, got 0"),
    ({"iterations": 0}, ValueError, "iterations must be >= 1, got 0"),
    ({"attention": "cross"}, ValueError, 'attention must be "self" or None'),
    ({"attention": "softmax"}, ValueError, "attention must be one of"),
    ({"batch_first": False}, ValueError, "batch_first must be True in a backbone"),
    ({"order": "cyclic"}, TypeError, "order"),
    ({"layer": {"steps": 3}}, TypeError, "steps"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG, ids=[str(w[0]) for w in WRONG])
def test_mistakes(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EquilibriumTransformer(DIM, HEADS, **options)


def test_wrong_tokens() -> None:
    model = build()
    with pytest.raises(ValueError, match="EquilibriumTransformer"):
        model(tokens()[..., :5])
    with pytest.raises((TypeError, ValueError), match="mask"):
        model(tokens(), mask=torch.ones(3, TOKENS + 1, dtype=torch.bool))


def test_a_vision_transformer_learns() -> None:
    """Bars left or right, by the class token, in a few steps; one line makes the model."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (48,), generator=generator)
    x = 0.3 * torch.rand(48, 1, 8, 8, generator=generator)
    x[labels == 0, :, :, :3] += 0.5
    x[labels == 1, :, :, 5:] += 0.5
    torch.manual_seed(0)
    model = ImageClassifier(EquilibriumTransformer(16, 2, layers=2), 8, 1, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(30):
        loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (model(x).argmax(1) == labels).double().mean() >= 0.95
    with torch.no_grad():
        few, many = (model(x, iterations=k).argmax(1) for k in (8, 32))
    assert torch.equal(few, many)
