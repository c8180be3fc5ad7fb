"""What every model owes: shapes, a gradient for each parameter, copies, samples that are independent."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn import models
from implicit_attn.models import BACKBONES, HyperSET, build_backbone
from solvers import Implicit, Tolerance

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
    "codes": (lambda: models.MaskedCodes(hyperset(), codes=7, side=2), (4, 4), 8, (4, 4, 7)),
    "sudoku": (lambda: models.SudokuModel(hyperset()), (4, 81), 10, (4, 81, 9)),
    "language": (
        lambda: models.LanguageModel(7, 8, 2, 2, 6, dropout=0.0, descent="momentum"),
        (4, 6), 7, (4, 6, 7),
    ),
    "equilibrium language": (
        lambda: models.EquilibriumLanguageModel(7, 8, 2, 6, dropout=0.0), (4, 6), 7, (4, 6, 7),
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
    found = model(x)
    assert found.shape == wanted and found.isfinite().all()
    weights = torch.randn(wanted, generator=generator, dtype=torch.float64)
    (found * weights).sum().backward()
    unused = [key for key, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert unused == UNUSED.get(name, [])
    fresh = make().double().eval()
    fresh.load_state_dict(model.state_dict())
    with torch.no_grad():
        for other in (copy.deepcopy(model), fresh):
            torch.testing.assert_close(other(x), found, rtol=0, atol=1e-12)
        torch.testing.assert_close(model(x[1:3]), found[1:3], rtol=1e-6, atol=1e-7)


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
