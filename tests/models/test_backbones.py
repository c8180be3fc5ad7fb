"""Every backbone, by name and by itself; models from a specification; sizes that documents state."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.deq import specification
from implicit_attn import models
from implicit_attn.models import (
    BACKBONES,
    EnergyTransformer,
    EquilibriumTransformer,
    HyperSET,
    HyperSETEquilibrium,
    ImageClassifier,
    SharedTransformer,
    SpinClassifier,
    SpinTransformer,
    build_backbone,
    build_model,
    load_model,
    read_settings,
    save_model,
)
from implicit_attn.models.images import grid_positions
from solvers import Implicit, Tolerance

# What every model owes: shapes, a gradient for each parameter, copies, samples that are independent.


TIGHT = Tolerance(rtol=1e-10)
LAYER: dict[str, Any] = {
    "tolerance": TIGHT, "max_steps": 500, "adjoint": Implicit(tolerance=TIGHT, max_steps=500),
}  # fmt: skip
LINES = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8]]
TOKENS, IMAGES = (4, 6, 8), (4, 1, 8, 8)


def backbone(name: str) -> nn.Module:
    layer: dict[str, Any] = {"layer": LAYER} if BACKBONES[name].solves else {"iterations": 2}
    return build_backbone(name, 8, 2, **layer)


def hyperset() -> HyperSET:
    return HyperSET(8, 2, 8, iterations=2, initial_step=0.3, time_dim=8)


# Name: the model, the shape of an input (of numbers, or of integers below the last one), of an output.
ROWS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int | None, tuple[int, ...]]] = {
    **{name: (lambda name=name: backbone(name), TOKENS, None, TOKENS) for name in BACKBONES},
    "images": (lambda: models.ImageClassifier(hyperset(), 8, 1, 5, patch=4), IMAGES, None, (4, 5)),
    "spins": (
        lambda: models.SpinClassifier(dim=4, hidden=8, widths=(4, 4, 4), layer=LAYER),
        (4, 1, 28, 28), None, (4, 10),
    ),
    "masked images": (lambda: models.MaskedImageModel(hyperset(), 8, 1), IMAGES, None, IMAGES),
    "sudoku": (lambda: models.SudokuModel(hyperset()), (4, 81), 10, (4, 81, 9)),
    "language": (
        lambda: models.LanguageModel(7, 8, 2, 2, 6, dropout=0.0, descent="momentum"),
        (4, 6), 7, (4, 6, 7),
    ),
    "equilibrium language": (
        lambda: models.EquilibriumLanguageModel(7, 8, 2, 6, dropout=0.0), (4, 6), 7, (4, 6, 7),
    ),
    "blocks language": (
        lambda: models.BlockLanguageModel(7, 8, 2, 2, 6, dropout=0.0), (4, 6), 7, (4, 6, 7),
    ),
    "boards": (
        lambda: models.BoardSolver(LINES, 9, 3, features=4, width=6, iterations=4),
        (4, 9), 4, (4, 9, 3),
    ),
    "energy attention": (lambda: models.EnergyAttention(8, heads=2, steps=2), TOKENS, None, TOKENS),
}  # fmt: skip


UNUSED = {"language": ["steps.0.numbers.beta"]}  # the momentum that the first step has not yet


@pytest.mark.parametrize("name", ROWS)
def test_shapes_gradients_copies_and_samples(name: str) -> None:
    make, shape, below, wanted = ROWS[name]
    torch.manual_seed(0)
    model = make().double().eval()
    with torch.no_grad():  # some layers begin at zero, and nothing would reach those before them
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    generator = torch.Generator().manual_seed(1)
    x: Tensor = torch.randn(shape, generator=generator, dtype=torch.float64)
    if below is not None:
        x = torch.randint(0, below, shape, generator=generator)
    if name == "masked images":
        x[:, :, :4, :4] = torch.nan
    found = answer = model(x)
    if name == "boards":  # other colours of a given cell are excluded
        found = found.masked_fill((x > 0).unsqueeze(-1) & found.isneginf(), 0.0)
    assert found.shape == wanted and found.isfinite().all()
    weights = torch.randn(wanted, generator=generator, dtype=torch.float64)
    (found * weights).sum().backward()
    unused = [key for key, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert unused == UNUSED.get(name, [])
    fresh = make().double().eval()
    fresh.load_state_dict(model.state_dict())
    with torch.no_grad():
        for other in (copy.deepcopy(model), fresh):
            torch.testing.assert_close(other(x), answer, rtol=0, atol=1e-12)
        torch.testing.assert_close(model(x[1:3]), answer[1:3], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", BACKBONES)
def test_a_classifier_learns_two_patterns(name: str) -> None:
    """Bars left or right, in a few steps; what solves converges on the way, or it would warn."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (48,), generator=generator)
    x = 0.3 * torch.rand(48, 1, 8, 8, generator=generator)
    x[labels == 0, :, :, :3] += 0.5
    x[labels == 1, :, :, 5:] += 0.5
    torch.manual_seed(0)
    few = {} if BACKBONES[name].solves else {"iterations": 3}
    model = models.ImageClassifier(build_backbone(name, 16, 2, **few), 8, 1, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (model(x).argmax(1) == labels).double().mean() >= 0.95


# The DEQ transformer takes masks as torch's layers do, and gives 0 at masked tokens: its own test.
@pytest.mark.parametrize("name", sorted({*BACKBONES} - {"hyperset", "deq-transformer"}))
def test_masked_tokens_keep_their_input_and_influence_none(name: str) -> None:
    torch.manual_seed(0)
    model, x = backbone(name).double(), torch.randn(TOKENS, dtype=torch.float64)
    mask = torch.ones(TOKENS[:2], dtype=torch.bool)
    mask[0, 4:] = mask[1, :2] = mask[2] = False
    z = model(x, mask=mask)
    assert torch.equal(z[~mask], x[~mask])
    torch.testing.assert_close(z[:1, :4], model(x[:1, :4]), rtol=1e-7, atol=1e-7)
    other = torch.where(mask.unsqueeze(-1), x, 3 * x + 1).requires_grad_()
    result = model(other, mask=mask)
    torch.testing.assert_close(result[mask], z[mask], rtol=1e-7, atol=1e-7)
    (gradient,) = torch.autograd.grad(result[mask].square().sum(), other)
    assert (gradient[~mask] == 0).all() and gradient.isfinite().all()


# Models from specifications, and back from checkpoints.


def test_round_trip(tmp_path: Path) -> None:
    """The rebuilt model has the same outputs, and survives JSON on the way."""
    wanted = json.loads(json.dumps(specification("hyperset-equilibrium", iterations=3)))
    layer = {"on_failure": "ignore"}  # three evaluations do not solve an equilibrium
    model = build_model(wanted, layer=layer)
    path = tmp_path / "weights.safetensors"
    settings = {"model": wanted, "data": "digits"}
    save_model(path, model, settings)
    again, kept = load_model(path, layer=layer)
    assert not again.training and kept == settings == read_settings(path)
    images = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(model.eval()(images), again(images))


@pytest.mark.parametrize("wrong", ["no settings", "another model"])
def test_files_that_do_not_say_how(wrong: str, tmp_path: Path) -> None:
    path, other = tmp_path / "weights.safetensors", torch.nn.Linear(2, 2)
    specified = {"model": specification("transformer", iterations=2)}
    save_model(path, other, {} if wrong == "no settings" else specified)
    with pytest.raises(ValueError, match=r"weights\.safetensors"):
        load_model(path)
    with pytest.raises(FileNotFoundError):
        load_model(tmp_path / "none.safetensors")


# The baselines against dense transcriptions of their papers' equations, in float64.


DIM, HEADS, WIDTH = 12, 3, 4


def transformer_step(layer: Any, x: Tensor) -> Tensor:
    """One sample (N, d), head by head."""
    y = layer.attention_norm(x)
    heads = []
    for head in range(HEADS):
        weights = layer.queries_keys_values.weight.view(3, HEADS, WIDTH, DIM)[:, head]
        query, key, value = (y @ weight.T for weight in weights)
        heads.append((query @ key.T / math.sqrt(WIDTH)).softmax(-1) @ value)
    x = x + torch.cat(heads, -1) @ layer.output.weight.T
    return x + (layer.feedforward_norm(x) @ layer.widen.weight.T).relu() @ layer.narrow.weight.T


def energy_transformer_step(layer: Any, x: Tensor) -> Tensor:
    """By autograd from the two energies of one sample (N, d), head by head."""
    g = (layer.gain * F.layer_norm(x, (DIM,)) + layer.shift).detach().requires_grad_()
    value = -0.5 * (g @ layer.feedforward.projection.weight.T).clamp_min(0.0).square().sum()
    beta = layer.attention.beta
    for head in range(HEADS):
        rows = slice(head * WIDTH, (head + 1) * WIDTH)
        q, k = (g @ side.weight[rows].T for side in (layer.attention.query, layer.attention.key))
        value = value - (beta * q @ k.T).exp().sum(-1).log().sum() / beta
    (gradient,) = torch.autograd.grad(value, g)
    return x - 0.1 * gradient


PAPERS: dict[str, tuple[Callable[..., Any], Callable[[Any, Tensor], Tensor]]] = {
    "transformer": (SharedTransformer, transformer_step),
    "energy-transformer": (EnergyTransformer, energy_transformer_step),
}


@pytest.mark.parametrize("name", PAPERS)
def test_the_step_is_its_papers(name: str) -> None:
    make, step = PAPERS[name]
    torch.manual_seed(2)
    model = make(DIM, HEADS, iterations=3).double()
    for parameter in model.parameters():
        if parameter.dim() < 2:  # gains and offsets away from one and zero
            nn.init.uniform_(parameter, 0.2, 0.9)
    x = torch.randn(3, 6, DIM, dtype=torch.float64)
    expected = torch.stack([step(model.layers[0], sample) for sample in x])
    result = model(x, iterations=1)
    assert (result - expected).abs().max() <= 1e-10
    assert not torch.allclose(result, x, atol=1e-2)


@pytest.mark.defect("D13")
def test_spins_on_mnist_have_the_stated_size() -> None:
    document = Path(__file__).resolve().parents[2] / "docs" / "models.md"
    size = sum(parameter.numel() for parameter in SpinClassifier().parameters())
    assert f"{size:,}" in document.read_text("utf-8")


# Mistakes, by what the error says.


BACKBONE = {"name": "transformer", "dim": 8, "heads": 2}
MISTAKES: list[tuple[Callable[[], object], str]] = [
    (lambda: build_model({"kind": "poem", "backbone": BACKBONE}), "poem"),
    (lambda: build_model({"kind": "sudoku"}), "backbone"),
    (lambda: build_model({"kind": "sudoku", "backbone": BACKBONE}, layer={}), "layer"),
    (lambda: build_backbone("spin-transformer", DIM, HEADS, 20), "argument"),
    (lambda: build_backbone("transformer", DIM, HEADS, momentum=0.9), "momentum"),
    (lambda: SharedTransformer(DIM, 5), "heads"),
    (lambda: EquilibriumTransformer(DIM, HEADS, order="cyclic"), "order"),
    (lambda: SpinTransformer(DIM, HEADS, layers=0), "layers"),
    (lambda: SpinTransformer(DIM, HEADS)(torch.zeros(2, 6, 5)), r"\bx\b"),
    (lambda: EquilibriumTransformer(DIM, HEADS)(torch.zeros(2, 6, 5)), "shape"),
    (lambda: HyperSETEquilibrium(DIM, HEADS, attention="softmax"), "attention"),
    (lambda: hyperset()(torch.zeros(6, 8)), r"\bz\b"),
    (lambda: ImageClassifier(hyperset(), 8, 1, 5, patch=3), "patch"),
    (lambda: grid_positions(3, 6), "dim"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), MISTAKES)
def test_mistakes(call: Callable[[], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()
