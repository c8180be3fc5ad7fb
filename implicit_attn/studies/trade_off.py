"""The trade-off study: a depth made of more layers, or of more iterations of fewer layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from implicit_attn.data import ImageData
from implicit_attn.models import build_model
from implicit_attn.studies.subjects import Pool, Subject
from implicit_attn.studies.tables import Table
from implicit_attn.training import Recipe, Training
from solvers.core.checks import require_count


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
    recipe: Recipe,
    specification: Mapping[str, Any],
    folder: str | Path,
    *,
    advance: Callable[[str], object] | None = None,
) -> Table:
    """Train the same model once for each (layers, iterations), by the same recipe.

    Args:
        data: images.
        pairs: (layers, iterations) of each model.
        recipe: of the training; its seed also initialises the weights.
        specification: for :func:`implicit_attn.models.build_model`, of an unrolled model.
        folder: where the checkpoints go, over those that an earlier call left there.
        advance: called with the name of each model before its training.

    Returns:
        Rows as of :func:`read_trade_off`, with seed and seconds (of training) besides.

    Raises:
        NotClaimed: another run is writing there, or the folder cannot be written.
        NonFiniteLoss: the loss, its gradient or a parameter is NaN or infinite.
        Interrupted: after Ctrl-C; the next call begins anew.
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
        # The checkpoint is a by-product of the table, which every call makes anew.
        training.run(overwrite=True)
        subject = Subject(
            path.stem, "", model.eval(), data.test_images, data.test_labels, iterations
        )
        seconds = sum(row["seconds"] for row in training.history)
        table.append({**trade_off_row(subject), "seed": recipe.seed, "seconds": seconds})
    return table


def trade_off_row(subject: Subject) -> dict[str, Any]:
    """Layers, iterations, depth (their product), parameters and the measures of an unrolled model."""
    backbone = subject.require_recurrence()
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
    """Size and accuracy of trained, unrolled models, fewest layers first.

    Rows have layers, iterations (of each layer), depth (their product), parameters (their number),
    and the columns of ``subject.measure``.
    """
    return sorted((trade_off_row(s) for s in subjects), key=lambda row: row["layers"])
