"""Shipped models, built and loaded by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from implicit_attn.models.registry import load_model
from implicit_attn.weights.registry import find_pretrained
from solvers import Tolerance


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
        ImportError: safetensors is not installed.
    """
    row = find_pretrained(name)
    trained = {key: row.settings[key] for key in ("max_steps",) if key in row.settings}
    if row.settings.get("rtol") is not None:
        trained["tolerance"] = Tolerance(rtol=row.settings["rtol"])
    # Torch's defaults as the files were written with, whatever the user has set.
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            return load_model(row.path, layer=trained | dict(layer or {}) or None)[0]
    finally:
        torch.set_default_dtype(before)
