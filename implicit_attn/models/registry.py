"""Backbones by name; models from a specification, a dict that JSON can hold, or from a file of weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from implicit_attn.block import DEQTransformer
from implicit_attn.data.files import damaged
from implicit_attn.models.backbones import (
    EnergyTransformer,
    EquilibriumTransformer,
    HyperSET,
    HyperSETEquilibrium,
    SharedTransformer,
    SpinTransformer,
)
from implicit_attn.models.boards import BoardSolver, SudokuModel
from implicit_attn.models.images import ImageClassifier, MaskedImageModel
from implicit_attn.models.language import (
    BlockLanguageModel,
    EquilibriumLanguageModel,
    LanguageModel,
    SymbolModel,
)
from implicit_attn.models.restoration import ImageRestorer
from implicit_attn.models.spins import SpinClassifier
from implicit_attn.optional import require
from solvers.core.checks import require_choice


class Model(NamedTuple):
    """A backbone or a whole model.

    Attributes:
        make: the class.
        solves: whether it contains a ``DEQ``, so that ``layer`` may contain its options.
        width: whether a backbone has a ``width``.
    """

    make: Callable[..., nn.Module]
    solves: bool = False
    width: bool = True


BACKBONES: dict[str, Model] = {
    "hyperset": Model(HyperSET),
    "hyperset-equilibrium": Model(HyperSETEquilibrium, True),
    "equilibrium": Model(EquilibriumTransformer, True),
    "transformer": Model(SharedTransformer),
    "deq-transformer": Model(DEQTransformer),
    "energy-transformer": Model(EnergyTransformer),
    "spin-transformer": Model(SpinTransformer, True, width=False),
}
AROUND: dict[str, Callable[..., nn.Module]] = {  # around a backbone
    "image-classifier": ImageClassifier,
    "masked-images": MaskedImageModel,
    "sudoku": SudokuModel,
}
WHOLE: dict[str, Model] = {
    "language-model": Model(LanguageModel),
    "equilibrium-language-model": Model(EquilibriumLanguageModel, True),
    "block-language-model": Model(BlockLanguageModel, True),
    "board-solver": Model(BoardSolver, True),
    "image-restorer": Model(ImageRestorer, True),
    "spin-classifier": Model(SpinClassifier, True),
}


def build_backbone(
    name: str, dim: int, heads: int, width: int | None = None, **options: Any
) -> Any:
    """Build a backbone of ``BACKBONES``, a map of tokens (B, N, d) -> (B, N, d).

    Args:
        name: a key of ``BACKBONES``, for example "hyperset".
        dim, heads: features d of a token, number of attention heads.
        width: number of memories of Hyper-SET (None for d) and of the Energy Transformer (None for 4 d), or
            of hidden units of the equilibrium blocks (None for 2 d) and of the transformer (None for 4 d);
            the spin transformer has no width.
        options: further arguments of that backbone, for example ``iterations``.

    Raises:
        ValueError: if the name is unknown.
        TypeError: if the backbone does not have an option, or no width.
    """
    make = BACKBONES[require_choice("name", name, BACKBONES)].make
    return make(dim, heads, **options) if width is None else make(dim, heads, width, **options)


def build_model(
    specification: Mapping[str, Any], *, layer: Mapping[str, Any] | None = None
) -> nn.Module:
    """Build a model from a specification, with new random weights.

    Args:
        specification: dict with ``kind``, a key of ``AROUND`` or ``WHOLE``; the arguments of that model
            (``image_size``, ``channels``, ...); and for ``AROUND`` the arguments of
            :func:`build_backbone` as a dict ``backbone``.
        layer: options of ``DEQ`` for models and backbones that contain one. They are not part of the
            specification because they do not change weights.

    Raises:
        ValueError: if ``kind`` or ``backbone`` is missing or unknown, or ``layer`` is passed to a model
            without a DEQ layer. Errors of the model and the backbone propagate.
    """
    settings = dict(specification)
    kind = require_choice("kind", settings.pop("kind", None), sorted({*AROUND, *WHOLE}))
    given: Any = settings.get("backbone") if kind in AROUND else settings
    if not isinstance(given, Mapping):
        raise ValueError(f"backbone must be a dict of its name and options, got {given!r}")
    name = require_choice("name", given.get("name"), BACKBONES) if kind in AROUND else kind
    if layer is not None:
        if not (BACKBONES | WHOLE)[name].solves:
            raise ValueError(f"layer must be None for {name!r}, which has no solver, got {layer}")
        given = {**given, "layer": dict(layer)}
    if kind in WHOLE:
        return WHOLE[kind].make(**given)
    return AROUND[kind](**settings | {"backbone": build_backbone(**given)})


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
