"""The trade-off study: a depth made of more layers, or of more iterations of fewer layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from implicit_attn.data import ImageData
from implicit_attn.models import build_model
from implicit_attn.studies.extrapolating import accuracy_by_iterations
from implicit_attn.studies.subjects import Subject
from implicit_attn.studies.tables import BLUE, GREEN, ORANGE, Study, Table
from implicit_attn.training import Recipe, Training
from solvers.core.checks import require_count


@dataclass(frozen=True)
class TradeOff(Study):
    """What :func:`trade_off` finds.

    Attributes:
        table: rows with layers, iterations (of each layer), parameters, accuracy, loss, seed and seconds
            of the training; fewest layers first.
    """

    table: Table
    printed = ("table",)
    size = (15, 4.6)

    def draw(self, figure: Any) -> None:
        """Three panels over (layers, iterations): accuracy, loss, parameters; points are seeds."""
        pairs = list(dict.fromkeys((row["layers"], row["iterations"]) for row in self.table))
        groups = [[row for row in self.table if row["layers"] == pair[0]] for pair in pairs]
        label = "mean of the seeds" if len(groups[0]) > 1 else "one seed"
        axes = figure.subplots(1, 3)
        for panel, key, factor, color in (
            (axes[0], "accuracy", 100, ORANGE),
            (axes[1], "loss", 1, BLUE),
        ):
            for place, rows in enumerate(groups):
                values = [factor * row[key] for row in rows]
                panel.plot([place] * len(rows), values, "o", color=color, alpha=0.5)
            means = [factor * sum(row[key] for row in rows) / len(rows) for rows in groups]
            panel.plot(means, color=color, label=label)
            panel.legend(frameon=False)
        axes[0].set(ylabel="test accuracy, %", title="Accuracy at constant depth")
        axes[1].set(ylabel="test loss (cross-entropy)", title="Loss at constant depth")
        thousands = [rows[0]["parameters"] / 1000 for rows in groups]
        axes[2].bar_label(axes[2].bar(range(len(pairs)), thousands, color=GREEN), fmt="%.1f")
        axes[2].set(ylabel="parameters, thousands", title="Number of parameters")
        for panel in axes:
            panel.set_xticks(range(len(pairs)), [f"{layers} x {count}" for layers, count in pairs])
            panel.set_xlabel("layers x iterations of each")


def layers_of_depth(depth: int, layers: Sequence[int] = ()) -> list[tuple[int, int]]:
    """All (layers, iterations) whose product is ``depth``, or those with these numbers of layers.

    Raises:
        ValueError: ``depth`` is below 1, or one of ``layers`` does not divide it.
    """
    chosen = layers or [k for k in range(1, require_count("depth", depth) + 1) if depth % k == 0]
    if any(depth % number for number in chosen):
        raise ValueError(f"layers must divide depth {depth}, got {tuple(layers)}")
    return [(number, depth // number) for number in sorted(set(chosen))]


def small_classifier(data: ImageData, dim: int = 32, patch: int = 2) -> dict[str, Any]:
    """Specification of a small Hyper-SET image classifier for ``data``, one layer."""
    _, channels, size, _ = data.train_images.shape
    backbone = {"name": "hyperset", "dim": dim, "heads": 2, "time_dim": 32, "initial_step": 0.1}
    shape = {"image_size": size, "channels": channels, "classes": data.classes, "patch": patch}
    return {"kind": "image-classifier", **shape, "readout": "tokens", "backbone": backbone}


def trade_off(
    data: ImageData,
    pairs: Sequence[tuple[int, int]],
    recipes: Sequence[Recipe],
    folder: str | Path,
    specification: Mapping[str, Any] | None = None,
) -> TradeOff:
    """Train the same model for each recipe and each (layers, iterations).

    Args:
        data: images.
        pairs: (layers, iterations) of each model, as :func:`layers_of_depth` gives them.
        recipes: of the trainings, one a seed, which also initialises the weights.
        folder: where the checkpoints go, over those that an earlier call left there.
        specification: of an unrolled model, for :func:`implicit_attn.models.build_model`; None:
            :func:`small_classifier`.

    Raises:
        NonFiniteLoss: the loss, its gradient or a parameter is NaN or infinite.
    """
    kind = specification or small_classifier(data)
    table: Table = []
    for recipe in recipes:
        for layers, iterations in pairs:
            backbone = {**kind["backbone"], "layers": layers, "iterations": iterations}
            wanted = {**kind, "backbone": backbone}
            torch.manual_seed(recipe.seed)
            model = build_model(wanted)
            path = Path(folder) / f"{layers}x{iterations}-seed{recipe.seed}.safetensors"
            training = Training(model, data, recipe, path, {"data": data.name, "model": wanted})
            # The checkpoint is a by-product of the table, which every call makes anew.
            training.run(overwrite=True)
            subject = Subject(model.eval(), data.test_images, data.test_labels, iterations)
            found = accuracy_by_iterations(subject, [iterations])[0]
            row = {"layers": layers, "iterations": iterations}
            row["parameters"] = sum(p.numel() for p in model.parameters())
            row |= {key: found[key] for key in ("accuracy", "loss")}
            seconds = sum(each["seconds"] for each in training.history)
            table.append(row | {"seed": recipe.seed, "seconds": seconds})
    return TradeOff(sorted(table, key=lambda row: row["layers"]))
