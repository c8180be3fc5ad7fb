"""Simpler models for the same images: what an equilibrium must beat to be worth its solves."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from implicit_attn.data import ImageData
from implicit_attn.models import ImageClassifier
from implicit_attn.optional import require
from implicit_attn.studies.tables import Table
from implicit_attn.training import Recipe, Training, accuracy

LOGISTIC, IDENTITY, ENCODER = "logistic regression", "identity", "encoder layer"
TRAINED = {IDENTITY: "baseline-identity.safetensors", ENCODER: "baseline-encoder.safetensors"}


class IdentityBackbone(nn.Module):
    """No layer at all: tokens (B, N, d) as they are, for what embedding and readout do by themselves."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.iterations = dim, 1

    def forward(self, x: Tensor, *, iterations: int | None = None) -> Tensor:
        return x


class EncoderBackbone(nn.Module):
    """``nn.TransformerEncoderLayer`` with ReLU and its norms inside, ``layers`` one after the other.

    With as many hidden units it has as many parameters as an ``EquilibriumBlock``. Tokens (B, N, d).
    """

    def __init__(
        self, dim: int, heads: int, hidden: int, *, layers: int = 1, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.dim, self.iterations = dim, 1
        made = [
            nn.TransformerEncoderLayer(
                dim, heads, hidden, dropout, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        ]
        self.layers = nn.Sequential(*made)

    def forward(self, x: Tensor, *, iterations: int | None = None) -> Tensor:
        return self.layers(x)


def build_rival(name: str, backbone: Mapping[str, Any], classifier: Mapping[str, Any]) -> nn.Module:
    """The classifier around another backbone, with new random weights.

    Args:
        name: of ``TRAINED``.
        backbone: dim, heads, hidden, layers and dropout of ``EncoderBackbone``.
        classifier: the arguments of ``ImageClassifier`` but the backbone.
    """
    made = (
        IdentityBackbone(backbone["dim"]) if name == IDENTITY else EncoderBackbone(**dict(backbone))
    )
    return ImageClassifier(made, **dict(classifier))


def train_rivals(
    build: Callable[[str], nn.Module],
    data: ImageData,
    recipe: Recipe,
    folder: Path,
    settings: dict[str, Any],
    run: Callable[[Training], object],
) -> dict[str, tuple[nn.Module, float]]:
    """The rivals, trained by one recipe, and logistic regression on the pixels.

    Args:
        build: name -> a new model, for the names of ``TRAINED``.
        data, recipe: as of the model that they are compared with.
        folder: of their checkpoints, under the names of ``TRAINED``.
        settings: of the run, kept in the checkpoints.
        run: runs a training to its end, from its checkpoint where there is one.

    Returns:
        Name -> the trained model, images (B, C, H, W) -> logits, and the seconds of its training.
    """
    found = {LOGISTIC: logistic_regression(data)}
    for name, file in TRAINED.items():
        print(f"\n{name}, by the same recipe:", flush=True)
        training = Training(build(name), data, recipe, folder / file, settings)
        run(training)
        seconds = sum(row["seconds"] for row in training.history)
        found[name] = training.model, seconds
    return found


def logistic_regression(data: ImageData) -> tuple[nn.Module, float]:
    """scikit-learn's on the raw pixels, with its default penalty, as a linear map; and its seconds."""
    kind = require("sklearn.linear_model", extra="examples").LogisticRegression
    pixels, labels = data.train_images.flatten(1).cpu().numpy(), data.train_labels.cpu().numpy()
    start = time.perf_counter()
    fitted = kind(max_iter=2000).fit(pixels, labels)
    seconds = time.perf_counter() - start
    linear = nn.Linear(pixels.shape[1], data.classes)
    with torch.no_grad():
        # Two classes share one row, and a class without images has none.
        known = torch.as_tensor(fitted.classes_)
        weight, offset = torch.as_tensor(fitted.coef_), torch.as_tensor(fitted.intercept_)
        linear.weight.zero_()
        linear.bias.fill_(-1e9)
        if len(known) == 2:
            weight, offset = torch.cat([-weight, weight]) / 2, torch.cat([-offset, offset]) / 2
        linear.weight[known], linear.bias[known] = weight.float(), offset.float()
    return nn.Sequential(nn.Flatten(), linear), seconds


def comparison(
    models: Mapping[str, tuple[nn.Module, float]], images: Tensor, labels: Tensor
) -> Table:
    """Rows with model, accuracy (of ``images``), parameters and seconds, the least accurate first."""
    rows: Table = [
        {
            "model": name,
            "accuracy": accuracy(model, images, labels),
            "parameters": sum(p.numel() for p in model.parameters()),
            "seconds": seconds,
        }
        for name, (model, seconds) in models.items()
    ]
    return sorted(rows, key=lambda row: row["accuracy"])
