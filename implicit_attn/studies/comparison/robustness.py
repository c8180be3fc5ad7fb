"""Accuracy of several models on the same noisy and occluded images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from implicit_attn.studies.tables import Table
from solvers.core.checks import require_count

BATCH = 256
Harm = Callable[[Tensor, float, torch.Generator], Tensor]


def add_noise(images: Tensor, deviation: float, generator: torch.Generator) -> Tensor:
    """``images`` (B, C, H, W) in [0, 1] with Gaussian noise, cut to [0, 1] again."""
    noise = torch.randn(images.shape, generator=generator).to(images)
    return (images + deviation * noise).clamp(0.0, 1.0)


def occlude(images: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """``images`` (B, C, H, W) with a square of 0 somewhere, ``share`` of the height and width."""
    batch, _, height, width = images.shape
    rows, columns = (
        _covered(batch, length, round(share * length), generator) for length in (height, width)
    )
    hidden = (rows[:, :, None] & columns[:, None, :]).unsqueeze(1)
    return images.masked_fill(hidden.to(images.device), 0.0)


def _covered(batch: int, length: int, size: int, generator: torch.Generator) -> Tensor:
    """(B, length) bool: ``size`` neighbours in each row, from a random place on."""
    first = torch.randint(length - size + 1, (batch, 1), generator=generator)
    place = torch.arange(length)
    return (place >= first) & (place < first + size)


HARMS: dict[str, tuple[Harm, tuple[float, ...]]] = {
    "noise": (add_noise, (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)),
    "occlusion": (occlude, (0.0, 0.125, 0.25, 0.375, 0.5)),
}


def robustness(
    models: Mapping[str, nn.Module],
    images: Tensor,
    labels: Tensor,
    *,
    harms: Mapping[str, tuple[Harm, Sequence[float]]] = HARMS,
    draws: int = 3,
    seed: int = 0,
) -> Table:
    """Accuracy of each model on images harmed in the same ways.

    Args:
        models: by name; images (B, C, H, W) -> logits (B, classes), put into evaluation mode.
        images, labels: (N, C, H, W) in [0, 1], and (N,) int64.
        harms: by name, ``harm(images, strength, generator)`` and its strengths.
        draws: random harms of every image that are averaged.
        seed: of these draws, which are the same for all models.

    Returns:
        Rows with harm, strength, model, accuracy.
    """
    require_count("draws", draws)
    table: Table = []
    for name, (harm, strengths) in harms.items():
        for strength in strengths:
            generator = torch.Generator().manual_seed(seed)
            # Without any harm all draws would be the same.
            number = draws if strength > 0 else 1
            made = torch.cat([harm(images, strength, generator) for _ in range(number)])
            for model, module in models.items():
                right = predictions(module, made) == labels.repeat(number)
                row = {"harm": name, "strength": strength, "model": model}
                table.append({**row, "accuracy": right.double().mean().item()})
    return table


def predictions(model: nn.Module, images: Tensor) -> Tensor:
    """The class of each image, (N,) int64, in evaluation mode."""
    model.eval()
    with torch.no_grad():
        return torch.cat([model(part).argmax(1) for part in images.split(BATCH)])
