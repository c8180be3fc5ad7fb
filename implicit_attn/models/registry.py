"""Models from a specification, a dict that JSON can hold, or from a checkpoint that has one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from implicit_attn.checkpoint import load_checkpoint, read_progress
from implicit_attn.models.backbones import EQUILIBRIUM, build_backbone
from implicit_attn.models.image_classifier import ImageClassifier
from implicit_attn.models.sudoku import SudokuModel
from solvers.core.checks import require_choice

KINDS: dict[str, Callable[..., nn.Module]] = {
    "image-classifier": ImageClassifier,
    "sudoku": SudokuModel,
}


def build_model(
    specification: Mapping[str, Any], *, layer: Mapping[str, Any] | None = None
) -> nn.Module:
    """A model from a specification, with new random weights.

    Args:
        specification: ``kind``, one of ``KINDS``; ``backbone``, the arguments of
            :func:`build_backbone` with ``name`` among them; and the arguments of that kind of model
            (``image_size``, ``channels``, ``classes``, ``patch``, ...).
        layer: how an equilibrium is solved for, options of ``DEQ``; for that backbone only. It is
            no part of the specification because it changes no weight.

    Raises:
        ValueError: ``kind`` or ``backbone`` is missing or unknown, or ``layer`` is given for a
            backbone that solves nothing. Errors of the model and the backbone pass through.
        TypeError: an argument that the model or the backbone does not have.
    """
    settings = {name: value for name, value in specification.items() if name != "kind"}
    kind = require_choice("kind", specification.get("kind"), KINDS)
    backbone = settings.pop("backbone", None)
    if not isinstance(backbone, Mapping) or "name" not in backbone:
        raise ValueError(f"backbone must be a dict with 'name' in it, got {backbone!r}")
    options: dict[str, Any] = dict(backbone)
    if layer is not None:
        if backbone["name"] != EQUILIBRIUM:
            raise ValueError(
                f"layer must be None for the backbone {backbone['name']!r}, got {layer}"
            )
        options["layer"] = dict(layer)
    return KINDS[kind](build_backbone(**options), **settings)


def load_model(
    path: str | Path, *, layer: Mapping[str, Any] | None = None
) -> tuple[nn.Module, dict[str, Any]]:
    """The trained model of a checkpoint, in evaluation mode, and the checkpoint's ``progress``.

    The checkpoint's settings must hold the specification from which the model was built, under
    ``progress["settings"]["model"]``. Torch's random state stays as it is.

    Args:
        path: written by ``save_checkpoint``.
        layer: as for :func:`build_model`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no checkpoint, it holds no specification, or the weights do not fit it.
    """
    specification = read_progress(path).get("settings", {}).get("model")
    if not isinstance(specification, Mapping):
        raise ValueError(
            f"{path} does not say how its model is built: settings['model'] must be the dict that "
            f"build_model took, got {specification!r}"
        )
    with torch.random.fork_rng(devices=[]):  # the weights that are drawn here are replaced
        model = build_model(specification, layer=layer)
    progress = load_checkpoint(path, model, restore_random=False)
    return model.eval(), progress
