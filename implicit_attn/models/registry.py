"""Backbones by name; models from a specification, a dict that JSON can hold, or from a file of weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from implicit_attn.block import DEQTransformer
from implicit_attn.data.files import damaged
from implicit_attn.models.backbones import (
    CRATE,
    EnergyTransformer,
    EquilibriumTransformer,
    HyperSET,
    HyperSETEquilibrium,
    SharedTransformer,
    SpinTransformer,
)
from implicit_attn.models.boards import BoardSolver, SudokuModel
from implicit_attn.models.images import ImageClassifier, MaskedCodes, MaskedImageModel
from implicit_attn.models.language import EquilibriumLanguageModel, LanguageModel, SymbolModel
from implicit_attn.models.restoration import ImageRestorer
from implicit_attn.models.spins import SpinClassifier
from implicit_attn.optional import require
from solvers.core.checks import require_choice


@dataclass(frozen=True)
class Model:
    """A row of ``MODELS``.

    Attributes:
        make: the class.
        role: "backbone" for maps of tokens (B, N, d) -> (B, N, d), "around" a backbone, or "whole".
        solves: whether it contains a ``DEQ``, so that ``layer`` may contain its options.
        width: reason why a backbone has no ``width``, or None.
    """

    make: Callable[..., nn.Module]
    role: str
    solves: bool = False
    width: str | None = None


MODELS: dict[str, Model] = {
    "hyperset": Model(HyperSET, "backbone"),
    "hyperset-equilibrium": Model(HyperSETEquilibrium, "backbone", True),
    "equilibrium": Model(EquilibriumTransformer, "backbone", True),
    "transformer": Model(SharedTransformer, "backbone"),
    "deq-transformer": Model(DEQTransformer, "backbone"),
    "energy-transformer": Model(EnergyTransformer, "backbone"),
    "crate": Model(CRATE, "backbone", width="its dictionary is d x d"),
    "spin-transformer": Model(SpinTransformer, "backbone", True, "it has no hidden units"),
    "image-classifier": Model(ImageClassifier, "around"),
    "masked-images": Model(MaskedImageModel, "around"),
    "sudoku": Model(SudokuModel, "around"),
    "masked-codes": Model(MaskedCodes, "around"),
    "language-model": Model(LanguageModel, "whole"),
    "equilibrium-language-model": Model(EquilibriumLanguageModel, "whole", True),
    "board-solver": Model(BoardSolver, "whole", True),
    "image-restorer": Model(ImageRestorer, "whole", True),
    "spin-classifier": Model(SpinClassifier, "whole", True),
}
BACKBONES = {name: row for name, row in MODELS.items() if row.role == "backbone"}


def build_backbone(
    name: str, dim: int, heads: int, width: int | None = None, **options: Any
) -> Any:
    """Build a backbone of ``BACKBONES``, a map of tokens (B, N, d) -> (B, N, d).

    Args:
        name: a key of ``BACKBONES``, for example "hyperset".
        dim, heads: features d of a token, number of attention heads.
        width: number of memories of Hyper-SET (None for d) and of the Energy Transformer (None for 4 d), or
            of hidden units of the equilibrium blocks (None for 2 d) and of the transformer (None for 4 d);
            CRATE and the spin transformer have no width.
        options: further arguments of that backbone, for example ``iterations``.

    Raises:
        ValueError: if the name is unknown, or a width is passed to a backbone without one.
        TypeError: if the backbone does not have an option.
    """
    row = BACKBONES[require_choice("name", name, BACKBONES)]
    if width is None:
        return row.make(dim, heads, **options)
    if row.width is not None:
        raise ValueError(f"width must be None for {name!r} ({row.width}), got {width}")
    return row.make(dim, heads, width, **options)


def build_model(
    specification: Mapping[str, Any], *, layer: Mapping[str, Any] | None = None
) -> nn.Module:
    """Build a model from a specification, with new random weights.

    Args:
        specification: dict with ``kind``, a key of ``MODELS`` that is not a backbone; the arguments of
            that model (``image_size``, ``channels``, ...); and, if it has a ``backbone``, the arguments
            of :func:`build_backbone` as a dict.
        layer: options of ``DEQ`` for models and backbones that contain one. They are not part of the
            specification because they do not change weights.

    Raises:
        ValueError: if ``kind`` or ``backbone`` is missing or unknown, or ``layer`` is passed to a model
            without a DEQ layer. Errors of the model and the backbone propagate.
    """
    settings = dict(specification)
    kind = require_choice("kind", settings.pop("kind", None), sorted(MODELS.keys() - BACKBONES))
    row = MODELS[kind]
    if row.role == "whole":
        return row.make(**settings | _layer_option(kind, layer))
    backbone = settings.pop("backbone", None)
    if not isinstance(backbone, Mapping) or "name" not in backbone:
        raise ValueError(f"backbone must be a dict with 'name' in it, got {backbone!r}")
    name = require_choice("name", backbone["name"], BACKBONES)
    return row.make(build_backbone(**{**backbone, **_layer_option(name, layer)}), **settings)


def _layer_option(name: str, layer: Mapping[str, Any] | None) -> dict[str, Any]:
    if layer is None:
        return {}
    if not MODELS[name].solves:
        raise ValueError(f"layer must be None for {name!r}, which has no solver, got {layer}")
    return {"layer": dict(layer)}


def save_model(path: str | Path, model: nn.Module, settings: Mapping[str, Any]) -> None:
    """Write the weights of a model as safetensors, with its settings in the header of the file.

    Args:
        path: of the file; its folder is made.
        model: its state dict is written.
        settings: values that JSON can hold. ``settings["model"]`` is the specification that
            :func:`build_model` took, and ``settings["alphabet"]`` that of a language model.
    """
    tensors = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    metadata = {"settings": json.dumps(dict(settings))}
    require("safetensors.torch", extra=None).save_file(tensors, str(path), metadata)


def read_settings(path: str | Path) -> dict[str, Any]:
    """The settings in the header of a file of :func:`save_model`."""
    with (
        damaged(path, "a file of implicit_attn.models.save_model"),
        require("safetensors", extra=None).safe_open(str(path), framework="pt") as file,
    ):
        return json.loads((file.metadata() or {})["settings"])


def load_model(
    path: str | Path, *, layer: Mapping[str, Any] | None = None
) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model in a file of :func:`save_model`, in evaluation mode, and its settings.

    Torch's random state does not change.

    Args:
        path: file written by :func:`save_model`.
        layer: options of ``DEQ``; see :func:`build_model`.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if it is damaged or does not match its settings.
    """
    settings = read_settings(path)
    if not isinstance(settings.get("model"), Mapping):
        raise ValueError(f"{path} must say how its model is built, got the settings {settings}")
    with torch.random.fork_rng(devices=[]):  # the weights that are drawn here are replaced
        model = build_model(settings["model"], layer=layer)
    with damaged(path, "the weights of the model in its settings"):
        model.load_state_dict(require("safetensors.torch", extra=None).load_file(str(path)))
    if isinstance(model, SymbolModel):
        model.alphabet = settings.get("alphabet")
    return model.eval(), settings
