"""Build backbones by name, and models from a JSON-compatible specification or a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from implicit_attn.block import DEQTransformer
from implicit_attn.checkpoint import load_checkpoint, read_progress
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
from solvers.core.checks import require_choice

MOST_LAYERS, LARGEST_NUMBER = 1000, 2**17  # limits of a specification that is read from a file
LEAST_ENTRY = 50  # minimum number of bytes of a tensor in the header of a file


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


def load_model(
    path: str | Path, *, layer: Mapping[str, Any] | None = None
) -> tuple[nn.Module, dict[str, Any]]:
    """Return the trained model of a checkpoint, in evaluation mode, and the checkpoint's ``progress``.

    ``progress["settings"]["model"]`` must be the specification from which the model was built. Torch's
    random state does not change.

    Args:
        path: file written by ``save_checkpoint``.
        layer: options of ``DEQ``; see :func:`build_model`.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if it is not a checkpoint, has no specification, or the weights do not match it.
    """
    settings = read_progress(path).get("settings", {})
    specification = settings.get("model") if isinstance(settings, Mapping) else settings
    if not isinstance(specification, Mapping):
        raise ValueError(
            f"{path} has no model specification: settings['model'] must be the dict passed to "
            f"build_model, got {specification!r}"
        )
    _check_specification(specification, Path(path))
    with torch.random.fork_rng(devices=[]):  # random weights are replaced below
        model = build_model(specification, layer=layer)
        progress = load_checkpoint(path, model)
    if isinstance(model, SymbolModel) and (alphabet := settings.get("alphabet")) is not None:
        if not len(set(alphabet)) == len(alphabet) == model.vocabulary:
            raise ValueError(
                f"{path} has an alphabet of {len(set(alphabet))} different characters among "
                f"{len(alphabet)}, its model expects {model.vocabulary}"
            )
        model.alphabet = alphabet
    return model.eval(), progress


def _check_specification(specification: Mapping[str, Any], path: Path) -> None:
    """Raise ValueError, before allocating memory, for an invalid or too large specification."""
    held = path.stat().st_size
    with damaged(path, "a specification of a model that can be built"):
        backbone = specification.get("backbone")
        layers = min(MOST_LAYERS, held // LEAST_ENTRY)
        for name, value in [*specification.items(), *(backbone or {}).items()]:
            most = layers if name == "layers" else LARGEST_NUMBER
            if isinstance(value, int) and abs(value) > most:
                raise ValueError(f"{path}: {name} is {value}, expected at most {most}")
        with torch.device("meta"):  # computes shapes without allocating memory
            parameters = list(build_model(specification).parameters())
    number = sum(each.numel() for each in parameters)
    if number > held:  # a parameter has at least one byte
        raise ValueError(
            f"{path}: the specified model has {number} parameters, which do not fit into the {held} "
            "bytes of the file"
        )
