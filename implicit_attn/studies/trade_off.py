"""The trade-off study: a depth made of more layers, or of more iterations of fewer layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from implicit_attn.data import ImageData
from implicit_attn.models import build_model
from implicit_attn.studies.subjects import Pool, Subject
from implicit_attn.studies.tables import BLUE, GREEN, ORANGE, Advance, Study, Table, nothing
from implicit_attn.training import Recipe, Training
from solvers.core.checks import require_count


@dataclass(frozen=True)
class TradeOff(Study):
    """What :func:`train_trade_off` and :func:`read_trade_off` find.

    Attributes:
        table: rows with layers, iterations (of each layer), depth (their product), parameters, the
            measures, and of models trained here seed and seconds; fewest layers first.
    """

    table: Table
    printed = ("table",)
    size = (15, 4.6)

    def draw(self, figure: Any) -> None:
        """Three panels over (layers, iterations): accuracy, loss, parameters; points are seeds."""
        means = self.seed_means()
        pairs = [(row["layers"], row["iterations"]) for row in means]
        label = "mean of the seeds" if any(row["seeds"] > 1 for row in means) else "one seed"
        axes = figure.subplots(1, 3)
        for panel, key, factor, color in (
            (axes[0], "accuracy", 100, ORANGE),
            (axes[1], "loss", 1, BLUE),
        ):
            places = [pairs.index((row["layers"], row["iterations"])) for row in self.table]
            values = [factor * row[key] for row in self.table]
            panel.plot(places, values, "o", color=color, alpha=0.5)
            panel.plot([factor * row[key] for row in means], color=color, label=label)
            panel.legend(frameon=False)
        axes[0].set(ylabel="test accuracy, %", title="Accuracy at constant depth")
        axes[1].set(ylabel="test loss (cross-entropy)", title="Loss at constant depth")
        thousands = [row["parameters"] / 1000 for row in means]
        axes[2].bar_label(axes[2].bar(range(len(pairs)), thousands, color=GREEN), fmt="%.1f")
        axes[2].set(ylabel="parameters, thousands", title="Number of parameters")
        names = [f"{layers} x {iterations}" for layers, iterations in pairs]
        for panel in axes:
            panel.set_xticks(range(len(pairs)), names)
            panel.set_xlabel("layers x iterations of each")

    def seed_means(self) -> Table:
        """A row for each (layers, iterations): the mean over the seeds, fewest layers first."""
        groups: dict[tuple[int, int], Table] = {}
        for row in self.table:
            groups.setdefault((row["layers"], row["iterations"]), []).append(row)
        return [
            {
                **{key: rows[0][key] for key in ("layers", "iterations", "parameters")},
                "seeds": len(rows),
                **{key: sum(row[key] for row in rows) / len(rows) for key in ("accuracy", "loss")},
            }
            for _, rows in sorted(groups.items())
        ]


def layers_of_depth(depth: int) -> list[tuple[int, int]]:
    """All (layers, iterations) whose product is ``depth``, fewest layers first."""
    require_count("depth", depth)
    return [(layers, depth // layers) for layers in range(1, depth + 1) if depth % layers == 0]


def small_classifier(data: ImageData, dim: int = 32, patch: int = 2) -> dict[str, Any]:
    """Specification of a small Hyper-SET image classifier for ``data``, one layer."""
    _, channels, size, _ = data.train_images.shape
    backbone = {"name": "hyperset", "dim": dim, "heads": 2, "time_dim": 32, "initial_step": 0.1}
    shape = {"image_size": size, "channels": channels, "classes": data.classes, "patch": patch}
    return {"kind": "image-classifier", **shape, "readout": "tokens", "backbone": backbone}


def train_trade_off(
    data: ImageData,
    pairs: Sequence[tuple[int, int]],
    recipes: Iterable[Recipe],
    specification: Mapping[str, Any],
    folder: str | Path,
    *,
    advance: Advance = nothing,
) -> TradeOff:
    """Train the same model for each recipe and each (layers, iterations).

    Args:
        data: images.
        pairs: (layers, iterations) of each model.
        recipes: of the trainings, one a seed, which also initialises the weights.
        specification: for :func:`implicit_attn.models.build_model`, of an unrolled model.
        folder: where the checkpoints go, over those that an earlier call left there.
        advance: called with the name of each model before its training.

    Raises:
        NonFiniteLoss: the loss, its gradient or a parameter is NaN or infinite.
        Interrupted: after Ctrl-C; the next call begins anew.
    """
    table: Table = []
    for recipe in recipes:
        for layers, iterations in pairs:
            advance(f"{layers} layers x {iterations} iterations")
            backbone = {**specification["backbone"], "layers": layers, "iterations": iterations}
            wanted = {**specification, "backbone": backbone}
            torch.manual_seed(recipe.seed)
            model = build_model(wanted)
            path = Path(folder) / f"{layers}x{iterations}-seed{recipe.seed}.safetensors"
            training = Training(model, data, recipe, path, {"data": data.name, "model": wanted})
            # The checkpoint is a by-product of the table, which every call makes anew.
            training.run(overwrite=True)
            subject = Subject(model.eval(), data.test_images, data.test_labels, iterations)
            seconds = sum(row["seconds"] for row in training.history)
            table.append({**_row(subject), "seed": recipe.seed, "seconds": seconds})
    return TradeOff(sorted(table, key=lambda row: row["layers"]))


def read_trade_off(subjects: Iterable[Subject]) -> TradeOff:
    """Size and accuracy of unrolled models that are trained already; TypeError for another model."""
    return TradeOff(sorted(map(_row, subjects), key=lambda row: row["layers"]))


def _row(subject: Subject) -> dict[str, Any]:
    backbone = subject.require_recurrence()
    pool = Pool()
    with torch.no_grad():
        for inputs, targets in subject.parts():
            z = backbone(subject.model.tokens(inputs))
            pool.add(subject.measured(inputs, targets, z))
    layers = len(backbone.layers)
    return {
        "layers": layers,
        "iterations": backbone.iterations,
        "depth": layers * backbone.iterations,
        "parameters": sum(p.numel() for p in subject.model.parameters()),
        **pool.means(),
    }
