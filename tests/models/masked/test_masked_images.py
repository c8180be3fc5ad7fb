"""The model of hidden patches, around every backbone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from implicit_attn.checkpoint import save_checkpoint
from implicit_attn.data.masked.patchwork import hide_patches, split_patches
from implicit_attn.models import BACKBONES, MaskedImageModel, build_model, load_model
from implicit_attn.models.masked.masked_images import grid_positions
from implicit_attn.models.registry import SOLVED

IMAGES = torch.rand(3, 2, 6, 6, generator=torch.Generator().manual_seed(0))
HIDDEN = torch.tensor([[1, 0, 0, 1, 0, 0, 0, 0, 1], [0] * 9, [1] * 8 + [0]]).bool()


class Echo(nn.Module):
    """A backbone that returns its tokens and remembers what it was asked for."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.dim, self.asked = dim, None

    def forward(self, x: Tensor, *, iterations: Any = None) -> Tensor:
        self.asked = iterations
        return x


def specification(name: str) -> dict[str, Any]:
    backbone: dict[str, Any] = {"name": name, "dim": 8, "heads": 2, "iterations": 3}
    if name == "hyperset":  # without it the untrained layer is the identity
        backbone["initial_step"] = 0.3
    return {
        "kind": "masked-images",
        "image_size": 6,
        "channels": 2,
        "patch": 2,
        "backbone": backbone,
    }


def made(name: str) -> Any:
    layer = {"on_failure": "ignore"} if name in SOLVED else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build_model(specification(name), layer=layer)


@pytest.mark.parametrize("name", sorted(BACKBONES))
def test_every_backbone_fills_hidden_patches(name: str) -> None:
    """A hidden pixel is NaN: had any of them a part in a product, its result would be none either."""
    model = made(name)
    shown = hide_patches(IMAGES, HIDDEN, 2)
    output = model(shown)
    assert output.shape == IMAGES.shape and bool(output.isfinite().all())
    output.square().mean().backward()
    given = [each.grad for each in model.parameters() if each.grad is not None]
    assert len(given) > 5 and all(bool(each.isfinite().all()) for each in given)
    assert model.mask_token.grad.abs().sum() > 0
    with torch.no_grad():
        filled = model.fill(shown)
        fewer = model(shown, iterations=1)
    assert torch.equal(filled[~shown.isnan()], IMAGES[~shown.isnan()])
    assert torch.allclose(filled[shown.isnan()], output.detach()[shown.isnan()], atol=1e-6)
    assert not torch.allclose(fewer, output.detach(), atol=1e-4)


def test_a_token_is_that_of_its_patch_or_the_mask_token() -> None:
    model = MaskedImageModel(Echo(), 6, 2, patch=2)
    x = model.tokens(hide_patches(IMAGES, HIDDEN, 2))
    visible = model.embed(IMAGES) + model.position
    hidden = (model.mask_token + model.position).expand_as(x)
    assert torch.equal(x[~HIDDEN], visible[~HIDDEN])
    assert torch.equal(x[HIDDEN], hidden[HIDDEN])
    pixels = split_patches(model(IMAGES), 2)
    assert torch.allclose(pixels, model.head(model.norm(visible)), atol=1e-6)


def test_a_prediction_depends_on_the_visible_patches() -> None:
    model, other = made("hyperset").double(), IMAGES.double()
    other[0, :, 2:4, 0:2] += 0.5  # patch 3, hidden in the first image
    shown, same = (hide_patches(each.double(), HIDDEN, 2) for each in (IMAGES, other))
    nn.init.normal_(model.backbone.layers[0].step_sizes.last.weight)
    assert torch.equal(model(shown), model(same))
    other[0, :, 2:4, 2:4] += 0.5  # patch 4, visible
    moved = (model(hide_patches(other, HIDDEN, 2)) - model(shown)).abs().amax((1, 2, 3))
    assert moved[0] > 1e-3 and moved[1:].max() == 0


def test_infinite_pixels_are_not_hidden() -> None:
    images = IMAGES.clone()
    images[0, 0, 0, 0] = torch.inf
    assert not MaskedImageModel(Echo(), 6, 2, patch=2)(images)[0].isfinite().all()


def test_positions_say_row_and_column() -> None:
    places = grid_positions(5, 12).view(5, 5, 12)
    assert torch.equal(places[..., :6], places[:, :1, :6].expand(5, 5, 6))
    assert torch.equal(places[..., 6:], places[:1, :, 6:].expand(5, 5, 6))
    apart = torch.cdist(places.view(25, 12), places.view(25, 12)) + 9 * torch.eye(25)
    assert apart.min() > 0.1
    constant = MaskedImageModel(Echo(), 6, 2, patch=2, positions="sinusoidal")
    assert torch.equal(constant.get_buffer("position"), grid_positions(3, 8))
    learned = MaskedImageModel(Echo(), 6, 2, patch=2)
    assert learned.get_parameter("position").shape == (9, 8)


def test_iterations_reach_the_backbone() -> None:
    backbone = Echo()
    model = MaskedImageModel(backbone, 6, 2, patch=2)
    model(IMAGES)
    assert backbone.asked is None
    model.fill(IMAGES, iterations=7)
    assert backbone.asked == 7


def test_a_checkpoint_is_read_again(tmp_path: Path) -> None:
    model = made("hyperset").eval()
    progress = {"settings": {"model": specification("hyperset")}, "history": []}
    save_checkpoint(tmp_path / "weights.safetensors", model, progress=progress)
    again, _ = load_model(tmp_path / "weights.safetensors")
    shown = hide_patches(IMAGES, HIDDEN, 2)
    with torch.no_grad():
        assert torch.equal(model(shown), again(shown))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"image_size": 7}, ValueError, "patch must divide image_size=7, got 2"),
        ({"channels": 0}, ValueError, "channels must be >= 1, got 0"),
        ({"positions": "none"}, ValueError, "positions must be"),
        ({"backbone": nn.Identity()}, TypeError, "backbone must be a module"),
        (
            {"backbone": Echo(6), "positions": "sinusoidal"},
            ValueError,
            "dim must be a multiple of 4 .* got 6",
        ),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], kind: Any, message: str) -> None:
    given = {"backbone": Echo(), "image_size": 6, "channels": 2, "patch": 2} | options
    with pytest.raises(kind, match=message):
        MaskedImageModel(**given)


def test_wrong_images_are_named() -> None:
    model = MaskedImageModel(Echo(), 6, 2, patch=2)
    with pytest.raises(ValueError, match=r"shape \(B, 2, 6, 6\), got \(3, 1, 6, 6\)"):
        model(IMAGES[:, :1])
