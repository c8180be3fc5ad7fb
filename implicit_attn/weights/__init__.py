"""The shipped models by name; ``models.json`` says what they are, what they reach and what trained them."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from solvers import Tolerance

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Pretrained:
    """A trained model that comes with the package.

    Attributes:
        name: by which :func:`load_pretrained` takes it.
        title: the model in words.
        data: what it was trained on.
        parameters: their number.
        measured: what it reaches, as ``docs/results.md`` reports it.
        command: what trained it.
    """

    name: str
    title: str
    data: str
    parameters: int
    measured: str
    command: str

    @property
    def path(self) -> Path:
        """The file of the weights."""
        return FOLDER / f"{self.name}.safetensors"


@functools.cache
def pretrained_models() -> Mapping[str, Pretrained]:
    """The shipped models by name, read-only: :class:`Pretrained` with title, data, measures, command."""
    rows = json.loads((FOLDER / "models.json").read_text("utf-8"))
    return MappingProxyType({name: Pretrained(name, **row) for name, row in rows.items()})


def weights_path(name: str) -> Path:
    """The file of the shipped weights ``name``, ``"mnist-hyperset"`` for example.

    Raises:
        ValueError: there are none of that name; the message has the nearest ones.
    """
    known = pretrained_models()
    if name not in known:
        plain = str(name).lower().replace("_", "-").removesuffix(".safetensors")
        near = ", ".join(difflib.get_close_matches(plain, known, cutoff=0.5) or known)
        raise ValueError(f"name must be that of a shipped model, got {name!r}; nearest: {near}")
    return known[name].path


def weights_file(text: str | Path) -> Path:
    """A file, or the name of shipped weights where no such file is."""
    path = Path(text)
    return path if path.is_file() else weights_path(str(text))


def load_pretrained(name: str, *, layer: Mapping[str, Any] | None = None) -> nn.Module:
    """A trained model that comes with the package, in evaluation mode, in float32 on the CPU.

    Torch's random state stays as it is; its default dtype and device are not asked.

    Args:
        name: one of :func:`pretrained_models`, ``"mnist-hyperset"`` for example.
        layer: how an equilibrium is solved for, options of :class:`~implicit_attn.DEQ`; for the
            models that solve one (``"digits-hyperset-equilibrium"``, ``"mnist-spins"`` and the board
            solvers). Where they do not say so, tolerance and budget are those of the training.

    Returns:
        The model. Image classifiers take pixels in [0, 1], (B, 1, 8, 8) for the digits and
        (B, 1, 28, 28) for MNIST, and return logits (B, 10). Board solvers take puzzles (B, 81), int64,
        0 = unknown, and return logits (B, 81, 9) of the digits 1 .. 9. The language model takes numbers
        of characters (B, L), int64, and returns logits (B, L, 81); its characters in their order are
        ``model.alphabet``, and ``model.generate("It was ", 40)`` continues a text.

    Raises:
        ValueError: there is no such model, the message has the nearest names; or ``layer`` is given
            for one that solves nothing.
    """
    from implicit_attn.models.registry import load_model, read_settings  # takes half a second

    path = weights_path(name)
    settings = read_settings(path)
    trained = {key: settings[key] for key in ("max_steps",) if key in settings}
    if settings.get("rtol") is not None:
        trained["tolerance"] = Tolerance(rtol=settings["rtol"])
    # Torch's defaults as the files were written with, whatever the user has set.
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            return load_model(path, layer=trained | dict(layer or {}) or None)[0]
    finally:
        torch.set_default_dtype(before)
