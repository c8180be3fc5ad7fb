"""Layers against iterations: the same depth made of more or of fewer shared parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from implicit_attn.data import ImageData
from implicit_attn.models import build_model
from implicit_attn.studies.measures import Pool
from implicit_attn.studies.subjects import Subject
from implicit_attn.studies.tables import Table
from implicit_attn.training import Recipe, Training


def layers_of_depth(depth: int) -> list[tuple[int, int]]:
    """All (layers, iterations) whose product is ``depth``, fewest layers first."""
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise ValueError(f"depth must be an integer >= 1, got {depth!r}")
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
    recipe: Recipe,
    specification: Mapping[str, Any],
    folder: str | Path,
    *,
    advance: Callable[[str], object] | None = None,
) -> Table:
    """Train the same model once for each (layers, iterations), by the same recipe.

    Args:
        data: images.
        pairs: layers and iterations of each.
        recipe: of the training; its seed draws the weights too.
        specification: of a model as :func:`implicit_attn.models.build_model` takes it, whose
            backbone has ``layers`` and ``iterations``.
        folder: where the checkpoints go.
        advance: called with what is about to be trained.

    Returns:
        Rows as of :func:`trade_off_row`, with seconds of training.
    """
    table: Table = []
    for layers, iterations in pairs:
        if advance is not None:
            advance(f"{layers} layers x {iterations} iterations")
        backbone = {**specification["backbone"], "layers": layers, "iterations": iterations}
        wanted = {**specification, "backbone": backbone}
        torch.manual_seed(recipe.seed)
        model = build_model(wanted)
        path = Path(folder) / f"{layers}x{iterations}-seed{recipe.seed}.safetensors"
        training = Training(model, data, recipe, path, {"data": data.name, "model": wanted})
        training.run()
        subject = Subject(
            path.stem, "", model.eval(), data.test_images, data.test_labels, iterations
        )
        seconds = sum(row["seconds"] for row in training.history)
        table.append({**trade_off_row(subject), "seed": recipe.seed, "seconds": seconds})
    return table


def trade_off_row(subject: Subject) -> dict[str, Any]:
    """Layers, iterations, depth, parameters and the measures of one unrolled model.

    Raises:
        TypeError: the model is not unrolled.
    """
    backbone = subject.recurrence
    if backbone is None:
        raise TypeError(f"subject must be an unrolled model, got {type(subject.model)}")
    pool = Pool()
    with torch.no_grad():
        for inputs, targets in subject.parts():
            outputs = subject.classify(backbone(subject.tokens(inputs)))
            pool.add(subject.measure(outputs, inputs, targets))
    layers = len(backbone.layers)
    return {
        "layers": layers,
        "iterations": backbone.iterations,
        "depth": layers * backbone.iterations,
        "parameters": sum(p.numel() for p in subject.model.parameters()),
        **pool.means(),
    }


def read_trade_off(subjects: Iterable[Subject]) -> Table:
    """The same rows for models that are trained already, fewest layers first."""
    return sorted((trade_off_row(s) for s in subjects), key=lambda row: row["layers"])
