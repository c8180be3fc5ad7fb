"""The task of masked images: masks, loss, measures, and a training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from implicit_attn.data import ImageData
from implicit_attn.data.masked.patchwork import hidden_patches, split_patches
from implicit_attn.models import HyperSET, MaskedImageModel
from implicit_attn.training import MaskedImages, Recipe, Training
from implicit_attn.training.masked.reconstruction import draw_masks

PIXELS = torch.rand(70, 2, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.zeros(70, dtype=torch.int64)
DATA = ImageData("noise", 1, PIXELS[:50], LABELS[:50], PIXELS[50:], LABELS[50:])


class Constant(nn.Module):
    """Predicts one grey value everywhere."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, images: Tensor, iterations: int = 1) -> Tensor:
        return torch.full_like(images, self.value / iterations)


def batch(task: MaskedImages, seed: int = 0) -> tuple[Tensor, Tensor]:
    return task.augmented(task.inputs, task.targets, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("masked", "most"), [(0.4, 6), (0.01, 1), (0.99, 15), (0.5, 8)])
def test_so_many_patches_are_hidden(masked: float, most: int) -> None:
    task = MaskedImages(DATA, 2, masked=masked, vary=False)
    assert task.patches == 16 and task.most == most
    inputs, targets = batch(task)
    assert hidden_patches(inputs, 2).sum(1).tolist() == [most] * 50
    assert task.terms(inputs, targets) == 50 * most
    assert torch.equal(targets, DATA.train_images)
    assert torch.equal(inputs[~inputs.isnan()], targets[~inputs.isnan()])
    assert torch.equal(batch(task)[0].isnan(), inputs.isnan())
    assert not torch.equal(batch(task, 1)[0].isnan(), inputs.isnan())


def test_the_number_of_hidden_patches_varies() -> None:
    task = MaskedImages(DATA, 2)
    counts = hidden_patches(batch(task)[0], 2).sum(1)
    assert counts.unique().tolist() == [1, 2, 3, 4, 5, 6]


def test_masks_are_uniform() -> None:
    hidden = draw_masks(torch.full((4000,), 3), 9, torch.Generator().manual_seed(0))
    assert hidden.sum(1).unique().tolist() == [3]
    spread = (1 / 3 * 2 / 3 / 4000) ** 0.5
    assert (hidden.double().mean(0) - 1 / 3).abs().max() < 4 * spread


def test_the_loss_is_that_of_hidden_patches() -> None:
    task = MaskedImages(DATA, 4, vary=True, masked=0.7)
    inputs, targets = batch(task)
    outputs = torch.randn(targets.shape, generator=torch.Generator().manual_seed(2))
    total = 0.0
    for shown, output, target in zip(inputs, outputs, targets, strict=True):
        for row in (0, 4):
            for column in (0, 4):
                part = (..., slice(row, row + 4), slice(column, column + 4))
                if shown[part].isnan().any():
                    total += (output[part] - target[part]).square().mean().item()
    assert task.loss(outputs, inputs, targets).item() == pytest.approx(total, rel=1e-5)
    wrong = torch.where(inputs.isnan(), outputs, torch.inf)
    assert task.loss(wrong, inputs, targets).item() == pytest.approx(total, rel=1e-5)


def test_the_gradient_is_of_hidden_pixels_alone() -> None:
    task = MaskedImages(DATA, 2)
    inputs, targets = batch(task)
    outputs = torch.zeros_like(targets, requires_grad=True)
    task.loss(outputs, inputs, targets).backward()
    assert outputs.grad is not None
    wanted = torch.where(inputs.isnan(), -2 * targets / 8, 0.0)
    assert torch.allclose(outputs.grad, wanted)


def test_standardised_patches() -> None:
    """Their error does not see the scale of a patch; of the right standardised pixels it is 0."""
    task = MaskedImages(DATA, 2, normalise=True)
    inputs, targets = batch(task)
    patches = split_patches(targets, 2)
    mean, deviation = patches.mean(-1, keepdim=True), patches.std(-1, correction=0, keepdim=True)
    zero = task.errors(torch.zeros_like(targets), inputs, targets)
    assert zero[zero > 0].tolist() == pytest.approx([1.0] * int((zero > 0).sum()), abs=1e-3)
    wanted = (split_patches(targets, 2) - mean) / deviation
    outputs = wanted.view(50, 4, 4, 2, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(50, 2, 8, 8)
    assert task.loss(outputs, inputs, targets).item() < 1e-6
    assert torch.allclose(task.to_pixels(outputs, targets), targets, atol=1e-5)
    assert set(task.evaluate(Constant(0.0), 0, 1)) == {"test_loss"}


def test_measures_on_fixed_masks() -> None:
    task = MaskedImages(DATA, 2, batch=6)
    inputs, targets = task.test_images()
    again, _ = MaskedImages(DATA, 2, vary=False, test=7).test_images()
    assert torch.equal(hidden_patches(inputs, 2).sum(1), torch.full((20,), 6))
    assert again.shape[0] == 7
    hidden = inputs.isnan()
    each = (targets - 0.5).square().where(hidden, 0.0).sum((1, 2, 3)) / hidden.sum((1, 2, 3))
    found = task.evaluate(Constant(0.5), 0, 1)
    loss, number = found["test_loss"]
    assert number == 20 * 6 and loss / number == pytest.approx(each.mean().item(), rel=1e-6)
    decibels, images = found["test_psnr"]
    wanted = (-10 * each.double().log10()).mean().item()
    assert images == 20 and decibels / images == pytest.approx(wanted, rel=1e-6)
    parts = [task.evaluate(Constant(0.5), rank, 23) for rank in range(23)]  # 3 have no image
    for name in found:
        total = [sum(part[name][place] for part in parts) for place in (0, 1)]
        assert total == pytest.approx(list(found[name]), rel=1e-6)
    assert task.evaluate(Constant(1.0), 0, 1, iterations=2) == found


def test_a_perfect_image_has_a_finite_psnr() -> None:
    task = MaskedImages(DATA, 2)
    inputs, targets = task.test_images()
    found = task.measures(targets, inputs, targets)
    assert found["test_loss"][0] == 0 and found["test_psnr"][0] == pytest.approx(100 * 20)


def test_augmented_images_are_the_targets() -> None:
    task = MaskedImages(DATA, 2, augment=lambda images, _: images.flip(3))
    inputs, targets = batch(task)
    assert torch.equal(targets, DATA.train_images.flip(3))
    assert torch.equal(inputs[~inputs.isnan()], targets[~inputs.isnan()])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"masked": 0.0}, r"masked must lie in \(0, 1\), got 0\.0"),
        ({"masked": math.nan}, r"masked must lie in \(0, 1\), got nan"),
        ({"patch": 3}, "patch must divide .* got 3"),
        ({"patch": 8}, "patch must leave 2 patches at least .* got 8"),
        ({"test": 0}, "test must be >= 1, got 0"),
        ({"batch": 0}, "batch must be >= 1, got 0"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"patch": 2} | options
    with pytest.raises(ValueError, match=message):
        MaskedImages(DATA, **given)


def test_a_training_learns_what_hidden_patches_hold(tmp_path: Path) -> None:
    """Two kinds of image, black and white: one visible patch tells the hidden ones."""
    bright = (torch.arange(96) % 2).float().view(-1, 1, 1, 1).expand(-1, 1, 4, 4).contiguous()
    labels = torch.zeros(96, dtype=torch.int64)
    data = ImageData("two", 1, bright[:64], labels[:64], bright[64:], labels[64:])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        backbone = HyperSET(16, 2, 16, iterations=2, initial_step=0.1, time_dim=8)
        model = MaskedImageModel(backbone, 4, 1, patch=2)
        recipe = Recipe(epochs=40, batch=16, rate=0.02, iterations=(1, 3))
        task = MaskedImages(data, 2, masked=0.5)
        training = Training(model, task, recipe, tmp_path / "checkpoint.safetensors")
        before = training.evaluate()["test_loss"]
        training.run()
    after = training.history[-1]
    assert before > 0.2  # the best constant has 0.25
    assert after["test_loss"] < 0.02 and after["test_psnr"] > 17
