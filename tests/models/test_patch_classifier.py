"""The patch classifier: shapes, parameters, mistakes, and that it learns."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from implicit_attn.models import PatchClassifier


def images(batch: int = 3, channels: int = 1, size: int = 8) -> Tensor:
    return torch.rand(batch, channels, size, size, generator=torch.Generator().manual_seed(0))


def build(*position: Any, **options: Any) -> PatchClassifier:
    torch.manual_seed(0)
    return PatchClassifier(*position, **options)


CASES: list[dict[str, Any]] = [
    {"image_size": 8, "channels": 1, "classes": 10},
    {"image_size": 8, "channels": 1, "classes": 10, "readout": "class"},
    {"image_size": 12, "channels": 3, "classes": 5, "patch": 4, "dim": 24, "heads": 3},
    {"image_size": 6, "channels": 2, "classes": 2, "patch": 1, "dim": 8, "heads": 1, "memories": 7},
    {"image_size": 4, "channels": 1, "classes": 3, "patch": 4, "dim": 8, "heads": 2},
    {"image_size": 8, "channels": 3, "classes": 4, "stem": "conv", "dim": 24, "heads": 2},
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['image_size']}-{c['classes']}")
def test_number_of_parameters(case: dict[str, Any]) -> None:
    """By hand: embedding, positions, class token, two energies with weights, norm, head."""
    patch, dim = case.get("patch", 2), case.get("dim", 64)
    memories, classes = case.get("memories", 128), case["classes"]
    tokens = (case["image_size"] // patch) ** 2
    pixels = case["channels"] * patch**2
    stem = pixels * dim + dim
    if case.get("stem", "conv") == "conv":  # 3 x 3, a place per pixel, then the patches
        width = max(dim // 2, 8)
        stem = (9 * case["channels"] + 1) * width + (width * patch**2 + 1) * dim
        stem += width * case["image_size"] ** 2
    own_token = case.get("readout") == "class"
    read = dim if own_token else tokens * dim
    expected = (
        stem
        + tokens * dim
        + (dim if own_token else 0)
        + dim * dim + 1
        + memories * dim + 1
        + 2 * dim
        + read * classes + classes
    )  # fmt: skip
    assert sum(p.numel() for p in build(**case).parameters()) == expected


def test_class_token_is_read_alone() -> None:
    model = build(8, 1, 10, readout="class", dim=16, heads=2)
    z = torch.randn(2, 17, 16, generator=torch.Generator().manual_seed(0))
    other = z.clone()
    other[:, 1:] += 1.0
    assert torch.equal(model.classify(z), model.classify(other))
    with_tokens = build(8, 1, 10, dim=16, heads=2)
    assert not torch.equal(with_tokens.classify(z[:, 1:]), with_tokens.classify(other[:, 1:]))


@pytest.mark.parametrize("bound", [0.5, 2.0])
def test_weights_stay_bounded(bound: float) -> None:
    """However far training pushes, spectral norms and weights of the terms keep their bounds."""
    model = build(8, 1, 10, dim=16, heads=2, bound=bound, maximum=0.7)
    with torch.no_grad():
        for parameter in model.layer.parameters():
            parameter.mul_(50.0).add_(20.0)
    energy: Any = model.layer.update.energy
    for term in list(energy.terms)[:2]:
        weight = term.energy.projection.weight.detach()
        assert torch.linalg.matrix_norm(weight, ord=2) <= bound * (1 + 1e-5)
        assert 0 < term.factor().item() <= 0.7
    solution = model.layer.solve(model.tokens(images()), max_steps=200)
    assert bool(solution.converged.all()), solution.summary()


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"patch": 3}, ValueError, "patch must divide image_size=8, got 3"),
    ({"patch": 0}, ValueError, "patch"),
    ({"stem": "mlp"}, ValueError, "stem must be one of ('patch', 'conv'), got 'mlp'"),
    ({"readout": "mean"}, ValueError, "readout must be one of ('tokens', 'class'), got 'mean'"),
    ({"heads": 5}, ValueError, "heads must divide dim=64"),
    ({"bound": 0.0}, ValueError, "bound must be finite and > 0, got 0.0"),
    ({"maximum": 0.1}, ValueError, "initial must be below maximum=0.1"),
    ({"classes": 0}, ValueError, "classes"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD, ids=[str(b[0]) for b in BAD])
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        build(**{"image_size": 8, "channels": 1, "classes": 10} | options)
