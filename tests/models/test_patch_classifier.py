"""The patch classifier: shapes, parameters, mistakes, and that it learns."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.models import PatchClassifier
from solvers import Anderson, Tolerance


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
def test_shapes(case: dict[str, Any]) -> None:
    model = build(**case)
    x = images(3, case["channels"], case["image_size"])
    tokens = (case["image_size"] // case.get("patch", 2)) ** 2
    extra = case.get("readout") == "class"
    embedded = model.tokens(x)
    assert embedded.shape == (3, tokens + extra, case.get("dim", 64))
    assert model.layer(embedded).shape == embedded.shape
    assert model(x).shape == (3, case["classes"])
    assert model.layer.last is not None
    assert bool(model.layer.last.converged.all())


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


@pytest.mark.parametrize("readout", ["tokens", "class"])
def test_every_parameter_learns(readout: str) -> None:
    model = build(8, 1, 10, readout=readout, dim=16, heads=2, memories=20)
    F.cross_entropy(model(images()), torch.tensor([1, 4, 9])).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_patches_are_those_of_the_image() -> None:
    """Token k holds patch k, row by row: embedding the identity gives the pixels back."""
    model = build(4, 1, 2, patch=2, dim=4, heads=1, stem="patch")
    embed = model.embed
    assert isinstance(embed, torch.nn.Conv2d)
    assert embed.bias is not None
    with torch.no_grad():
        embed.weight.copy_(torch.eye(4).view(4, 1, 2, 2))
        embed.bias.zero_()
        model.position.zero_()
    x = torch.arange(16.0).reshape(1, 1, 4, 4)
    expected = torch.tensor([[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]])
    assert torch.equal(model.tokens(x)[0], expected.float())


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


def test_layer_options_arrive() -> None:
    options = {"solver": Anderson(), "tolerance": Tolerance(rtol=1e-2), "max_steps": 17}
    model = build(8, 1, 10, layer=options)
    assert model.layer.solver == Anderson()
    assert model.layer.tolerance == Tolerance(rtol=1e-2)
    assert model.layer.max_steps == 17
    assert len(options) == 3
    with pytest.raises(TypeError, match="max_itr"):
        build(8, 1, 10, layer={"max_itr": 3})


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"patch": 3}, ValueError, "patch must divide image_size=8, got 3"),
    ({"patch": 16}, ValueError, "patch must divide image_size=8, got 16"),
    ({"patch": 0}, ValueError, "patch"),
    ({"patch": -2}, ValueError, "patch"),
    ({"stem": "mlp"}, ValueError, "stem must be one of ('patch', 'conv'), got 'mlp'"),
    ({"readout": "mean"}, ValueError, "readout must be one of ('tokens', 'class'), got 'mean'"),
    ({"heads": 5}, ValueError, "heads must divide dim=64"),
    ({"heads": 0}, ValueError, "heads must be >= 1, got 0"),
    ({"dim": 0}, ValueError, "dim must be >= 1, got 0"),
    ({"memories": 0}, ValueError, "got 0"),
    ({"bound": 0.0}, ValueError, "bound must be finite and > 0, got 0.0"),
    ({"maximum": 0.1}, ValueError, "initial must be below maximum=0.1"),
    ({"classes": 0}, ValueError, "classes"),
    ({"channels": 0}, ValueError, "channels"),
    ({"image_size": 0}, ValueError, "image_size"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD, ids=[str(b[0]) for b in BAD])
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        build(**{"image_size": 8, "channels": 1, "classes": 10} | options)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.rand(3, 8, 8), r"images must have shape \(B, 1, 8, 8\), got \(3, 8, 8\)"),
        (torch.rand(3, 2, 8, 8), r"images.*\(3, 2, 8, 8\)"),
        (torch.rand(3, 1, 10, 10), r"images.*\(3, 1, 10, 10\)"),
        (torch.rand(3, 1, 9, 9), r"images.*\(3, 1, 9, 9\)"),
        (torch.rand(0, 1, 8, 8), "at least one|images"),
    ],
    ids=["no-channel", "channels", "larger", "one-pixel-larger", "empty"],
)
def test_bad_images(x: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(8, 1, 10)(x)


def test_learns_two_patterns() -> None:
    """Bars left or right: a few steps are enough, every sample converges on the way."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (64,), generator=generator)
    x = 0.3 * torch.rand(64, 1, 8, 8, generator=generator)
    x[labels == 0, :, :, :3] += 0.5
    x[labels == 1, :, :, 5:] += 0.5
    model = build(8, 1, 2, patch=4, dim=16, heads=2, memories=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(40):
        loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert model.layer.last is not None and bool(model.layer.last.converged.all())
    assert (model(x).argmax(1) == labels).double().mean() >= 0.95


def test_copies_and_modes() -> None:
    model = build(8, 1, 10)
    assert torch.equal(model.eval()(images()), model.train()(images()))
    assert torch.equal(copy.deepcopy(model)(images()), model(images()))
    other = PatchClassifier(8, 1, 10)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(images()), model(images()))
