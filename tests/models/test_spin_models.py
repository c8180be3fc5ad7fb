"""Spin models: a transformer of steady states, a classifier of digits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import solvers
from implicit_attn import DEQ
from implicit_attn.models import SpinClassifier, SpinTransformer
from solvers import Tolerance

# Stacks of kinetic attention as a backbone: what they compute, masks, budgets, mistakes, learning.


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


# The spin classifier: shapes, parameters, what the class token can know, mistakes.


def images(batch: int = 3, channels: int = 1) -> Tensor:
    return torch.rand(batch, channels, 28, 28, generator=torch.Generator().manual_seed(0))


def classifier(**options: Any) -> SpinClassifier:
    torch.manual_seed(0)
    return SpinClassifier(**options)


def test_number_of_parameters() -> None:
    """By hand; within the 27,000 of the published model, couplings counted once per symmetry."""
    stem = 9 * 16 + 9 * 16 * 24 + 9 * 24 * 24 + 9 * 24 * 10 + 10 + 2 * (16 + 24 + 24)
    couplings = 17 * 16 // 2 * 100
    correction = 10 * 40 + 40 + 40 * 10 + 10
    readout = 2 * 10 + 10 * 10 + 10
    model = classifier()
    expected = stem + couplings + correction + readout + 16 * 10 + 10
    assert sum(p.numel() for p in model.parameters()) == expected == 25_832


def test_the_class_token_learns_of_the_image_through_the_couplings_alone() -> None:
    model = classifier().eval()
    first, second = images(2)
    both = torch.stack([first, second])
    assert torch.equal(model.tokens(both)[0, 0], model.tokens(both)[1, 0])
    assert not torch.allclose(model(both)[0], model(both)[1], atol=1e-4)
    couplings = model.attention.couplings
    with torch.no_grad():
        cut = couplings.weight.clone()
        cut[0, 1:] = cut[1:, 0] = 0.0
        couplings.weight = cut
        assert torch.allclose(model(both)[0], model(both)[1], atol=1e-6)


def test_couplings_stay_bounded() -> None:
    """However far training pushes J, its spectral norm keeps its bound and the solve converges."""
    model = classifier(
        bound=0.8, layer={"tolerance": Tolerance(rtol=1e-4), "max_steps": 100}
    ).eval()
    with torch.no_grad():
        model.attention.couplings.free.mul_(100.0)
        norm = torch.linalg.matrix_norm(model.attention.couplings.matrix, ord=2)
    assert norm <= 0.8 * (1 + 1e-5)
    solution = model.layer.solve(model.tokens(images()))
    assert bool(solution.converged.all()), solution.summary()
