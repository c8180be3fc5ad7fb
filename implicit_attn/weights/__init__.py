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

__all__ = ["Pretrained", "load_pretrained", "pretrained_models", "weights_file", "weights_path"]

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Pretrained:
    """A trained model that comes with the package.

    Attributes:
        name: argument of :func:`load_pretrained`.
        title: description of the model.
        data: training data.
        parameters: number of parameters.
        measured: measured result, as in ``docs/models.md``.
        command: training command.
    """

    name: str
    title: str
    data: str
    parameters: int
    measured: str
    command: str

    @property
    def path(self) -> Path:
        """File of the weights."""
        return FOLDER / f"{self.name}.safetensors"


@functools.cache
def pretrained_models() -> Mapping[str, Pretrained]:
    """Return the shipped models by name, read-only."""
    rows = json.loads((FOLDER / "models.json").read_text("utf-8"))
    return MappingProxyType({name: Pretrained(name, **row) for name, row in rows.items()})


def weights_path(name: str) -> Path:
    """Return the file of the shipped weights ``name``, such as ``"mnist-hyperset"``.

    Raises:
        ValueError: if there are no such weights; the message suggests similar names.
    """
    known = pretrained_models()
    if name not in known:
        plain = str(name).lower().replace("_", "-").removesuffix(".safetensors")
        near = ", ".join(difflib.get_close_matches(plain, known, cutoff=0.5) or known)
        raise ValueError(f"name must be that of a shipped model, got {name!r}; nearest: {near}")
    return known[name].path


def weights_file(text: str | Path) -> Path:
    """Return the path of a file, or of shipped weights if there is no such file."""
    path = Path(text)
    return path if path.is_file() else weights_path(str(text))


def load_pretrained(name: str, *, layer: Mapping[str, Any] | None = None) -> nn.Module:
    """Load a trained model that comes with the package, in evaluation mode, in float32 on the CPU.

    It does not change torch's random state and ignores torch's default dtype and device.

    Args:
        name: one of :func:`pretrained_models`, such as ``"mnist-hyperset"``.
        layer: options of :class:`~implicit_attn.DEQ`, for models that contain one. The default
            tolerance and maximum number of evaluations are those of the training.

    Returns:
        The model. Image classifiers map pixels in [0, 1], (B, 1, 8, 8) for the digits and
        (B, 1, 28, 28) for MNIST, to logits (B, 10); board solvers puzzles (B, 81), int64, 0 = unknown, to
        logits (B, 81, 9); language models indices of ``model.alphabet``, (B, L), to logits (B, L, 81).

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
