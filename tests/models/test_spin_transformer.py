"""Stacks of kinetic attention as a backbone: what they compute, masks, budgets, mistakes, learning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import solvers
from implicit_attn import DEQ
from implicit_attn.models import SpinTransformer

DIM, HEADS, TOKENS = 12, 3, 6
EXACT = {"tolerance": solvers.Tolerance(rtol=1e-11), "max_steps": 200}


def tokens(seed: int = 0, batch: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, TOKENS, DIM, generator=generator, dtype=torch.float64)


def build(**options: Any) -> Any:
    torch.manual_seed(1)
    options.setdefault("layer", EXACT)
    return SpinTransformer(DIM, HEADS, **options).double()


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("layers", [1, 3])
def test_modules_follow_each_other(layers: int, residual: bool) -> None:
    model, x = build(layers=layers, residual=residual), tokens()
    z = x
    for index, steady in enumerate(model.steady):
        assert isinstance(steady, DEQ)
        mean = steady(z)
        torch.testing.assert_close(steady.update(mean, z), mean, rtol=1e-8, atol=1e-8)
        z = z + model.outputs[index](mean) if residual else mean
    assert torch.equal(model(x), z) and len(model.steady) == layers
    weights = [steady.update.queries_keys.weight for steady in model.steady[:2]]
    assert layers == 1 or not torch.equal(*weights)


def test_iterations_limit_every_module() -> None:
    model = build(layers=2, layer={**EXACT, "on_failure": "ignore"}, iterations=9)
    model(tokens(), iterations=2)
    assert all(int(steady.last.steps.max()) <= 2 for steady in model.steady)
    assert SpinTransformer(DIM, HEADS, iterations=7).steady[0].max_steps == 7
    limited = SpinTransformer(DIM, HEADS, iterations=50, layer={"max_steps": 7})
    assert limited.iterations == 7 and limited.steady[1].max_steps == 7


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="layers"):
        SpinTransformer(DIM, HEADS, layers=0)
    with pytest.raises(TypeError, match="residual"):
        SpinTransformer(DIM, HEADS, residual=1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="layer must be a dict of options or None, got 'x'"):
        SpinTransformer(DIM, HEADS, layer="x")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="SpinTransformer"):
        build()(tokens()[..., :5])
