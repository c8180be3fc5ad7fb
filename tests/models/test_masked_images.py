"""The model of hidden patches, around every backbone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from implicit_attn.data.images import hide_patches, split_patches
from implicit_attn.models import BACKBONES, MaskedImageModel, build_model
from implicit_attn.models.masked_images import grid_positions

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


def made(name: str) -> Any:
    layer = {"on_failure": "ignore"} if BACKBONES[name].solves else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build_model(specification(name), layer=layer)


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


def specification(name: str) -> dict[str, Any]:
    backbone: dict[str, Any] = {"name": name, "dim": 8, "heads": 2, "iterations": 3}
    if name == "hyperset":  # without it the untrained layer is the identity
        backbone["initial_step"] = 0.3
    sizes = {"image_size": 6, "channels": 2, "patch": 2}
    return {"kind": "masked-images", **sizes, "backbone": backbone}
