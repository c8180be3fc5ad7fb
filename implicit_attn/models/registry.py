"""Backbones by name; models from a specification, a dict that JSON can hold, or a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from implicit_attn.checkpoint import load_checkpoint, read_progress
from implicit_attn.data.unpacking import damaged
from implicit_attn.energies.hyperset_energy import ATTENTIONS, FEEDFORWARDS
from implicit_attn.models.boards.board_solver import BoardSolver
from implicit_attn.models.crate import CRATE
from implicit_attn.models.energy_transformer import EnergyTransformer
from implicit_attn.models.equilibrium_transformer import EquilibriumTransformer
from implicit_attn.models.hyperset import HyperSET, HyperSETEquilibrium
from implicit_attn.models.image_classifier import ImageClassifier
from implicit_attn.models.language.equilibrium import EquilibriumLanguageModel
from implicit_attn.models.language.language_model import LanguageModel
from implicit_attn.models.masked.masked_images import MaskedImageModel
from implicit_attn.models.official.masked_codes import MaskedCodes
from implicit_attn.models.recurrent import ORDERS
from implicit_attn.models.spins.spin_transformer import SpinTransformer
from implicit_attn.models.sudoku import SudokuModel
from implicit_attn.models.transformer import SharedTransformer
from implicit_attn.updates.official.descent import DESCENTS
from implicit_attn.updates.official.gains import GAINS
from implicit_attn.updates.official.networks import STEP_NETWORKS
from implicit_attn.updates.step_sizes import STEP_SIZES
from solvers.core.checks import require_choice

MOST_LAYERS, LARGEST_NUMBER = 1000, 2**17  # in a specification that is read from a file
LEAST_ENTRY = 50  # bytes that a tensor takes in the header of a file
EQUILIBRIUM, BLOCKS, SPINS = "hyperset-equilibrium", "equilibrium", "spin-transformer"
SOLVED = (EQUILIBRIUM, BLOCKS, SPINS)  # backbones that solve, and so take options of a DEQ
EQUILIBRIUM_LANGUAGE, BOARDS = "equilibrium-language-model", "board-solver"
# Backbones without a feed-forward part, and what they have in its place.
WITHOUT_WIDTH = {"crate": "whose dictionary is d x d", SPINS: "which has no hidden units"}
BACKBONES: dict[str, Callable[..., nn.Module]] = {
    "hyperset": HyperSET,
    EQUILIBRIUM: HyperSETEquilibrium,
    BLOCKS: EquilibriumTransformer,
    "transformer": SharedTransformer,
    "energy-transformer": EnergyTransformer,
    "crate": CRATE,
    SPINS: SpinTransformer,
}
# What some options of a backbone may be; not every backbone takes each, or each of its values.
CHOICES: dict[str, tuple[str, ...]] = {
    "attention": tuple(ATTENTIONS),
    "feedforward": tuple(FEEDFORWARDS),
    "step_size": tuple(STEP_SIZES),
    "order": ORDERS,
    "gains": GAINS,
    "step_network": STEP_NETWORKS,
    "descent": DESCENTS,
}
KINDS: dict[str, Callable[..., nn.Module]] = {
    "image-classifier": ImageClassifier,
    "masked-images": MaskedImageModel,
    "sudoku": SudokuModel,
    "masked-codes": MaskedCodes,
}
# Kinds without a backbone.
WHOLE: dict[str, Callable[..., nn.Module]] = {
    "language-model": LanguageModel,
    EQUILIBRIUM_LANGUAGE: EquilibriumLanguageModel,
    BOARDS: BoardSolver,
}


def build_backbone(
    name: str, dim: int, heads: int, width: int | None = None, **options: Any
) -> Any:
    """A backbone of ``BACKBONES``: tokens (B, N, d) -> (B, N, d).

    Args:
        name: "hyperset", "hyperset-equilibrium", "equilibrium", "transformer",
            "energy-transformer", "crate" or "spin-transformer".
        dim, heads: features d of a token, attention heads.
        width: memories of Hyper-SET (None: d) and of the Energy Transformer (None: 4 d), hidden
            units of the equilibrium blocks (None: 2 d) and of the transformer (None: 4 d); CRATE
            and the spin transformer have none.
        options: further arguments of that backbone, ``iterations`` for example.

    Raises:
        ValueError: for an unknown name, or a width for a backbone that has none.
        TypeError: for an option that the backbone does not have.
    """
    if require_choice("name", name, BACKBONES) in WITHOUT_WIDTH:
        if width is not None:
            raise ValueError(f"width must be None for {name!r}, {WITHOUT_WIDTH[name]}, got {width}")
        return BACKBONES[name](dim, heads, **options)
    if name.startswith("hyperset"):
        width = dim if width is None else width
    return BACKBONES[name](dim, heads, width, **options)


def build_model(
    specification: Mapping[str, Any], *, layer: Mapping[str, Any] | None = None
) -> nn.Module:
    """A model from a specification, with new random weights.

    Args:
        specification: ``kind``, one of ``KINDS``; ``backbone``, the arguments of
            :func:`build_backbone` with ``name`` among them; and the arguments of that kind of model
            (``image_size``, ``channels``, ``classes``, ``patch``, ...). The kinds of ``WHOLE``,
            language models and the board solver, have no backbone.
        layer: how equilibria are solved for, options of ``DEQ``; for the backbones of ``SOLVED``
            only. It is no part of the specification because it changes no weight.

    Raises:
        ValueError: ``kind`` or ``backbone`` is missing or unknown, or ``layer`` is given for a
            backbone that solves nothing. Errors of the model and the backbone pass through.
    """
    settings = dict(specification)
    kind = require_choice("kind", settings.pop("kind", None), (*KINDS, *WHOLE))
    if kind in WHOLE:
        if layer is not None:
            if kind not in (EQUILIBRIUM_LANGUAGE, BOARDS):
                raise ValueError(f"layer must be None for the kind {kind!r}, got {layer}")
            settings["layer"] = dict(layer)
        return WHOLE[kind](**settings)
    backbone = settings.pop("backbone", None)
    if not isinstance(backbone, Mapping) or "name" not in backbone:
        raise ValueError(f"backbone must be a dict with 'name' in it, got {backbone!r}")
    options: dict[str, Any] = dict(backbone)
    if layer is not None:
        if backbone["name"] not in SOLVED:
            name = backbone["name"]
            raise ValueError(f"layer must be None for the backbone {name!r}, got {layer}")
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
    settings = read_progress(path).get("settings", {})
    specification = settings.get("model") if isinstance(settings, Mapping) else settings
    if not isinstance(specification, Mapping):
        raise ValueError(
            f"{path} does not say how its model is built: settings['model'] must be the dict that "
            f"build_model took, got {specification!r}"
        )
    _check_specification(specification, Path(path))
    with torch.random.fork_rng(devices=[]):  # the weights that are drawn here are replaced
        model = build_model(specification, layer=layer)
    progress = load_checkpoint(path, model, restore_random=False)
    return model.eval(), progress


def _check_specification(specification: Mapping[str, Any], path: Path) -> None:
    """Refuse, before any memory is taken, what names no model or one that the file cannot hold."""
    held = path.stat().st_size
    with damaged(path, "a specification of a model that can be built"):
        backbone = specification.get("backbone")
        layers = min(MOST_LAYERS, held // LEAST_ENTRY)
        for name, value in [*specification.items(), *(backbone or {}).items()]:
            most = layers if name == "layers" else LARGEST_NUMBER
            if isinstance(value, int) and abs(value) > most:
                raise ValueError(f"{path}: {name} is {value}, expected at most {most}")
        with torch.device("meta"):  # shapes without memory
            parameters = list(build_model(specification).parameters())
    number = sum(each.numel() for each in parameters)
    if number > held:  # each is at least a byte
        raise ValueError(
            f"{path}: its specification is of a model of {number} parameters, which do not fit into "
            f"the {held} bytes of the file"
        )
