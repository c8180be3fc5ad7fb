"""Shipped models, built and loaded by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from implicit_attn.checkpoint import load_checkpoint
from implicit_attn.models.registry import load_model
from implicit_attn.models.spin_classifier import SpinClassifier
from implicit_attn.weights.registry import Pretrained, find_pretrained
from solvers import Tolerance

SPINS = "mnist-spins"  # whose file holds the arguments of its class and no specification


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
        of characters (B, L), int64, and returns logits (B, L, 81); the characters in their order are
        ``pretrained_models()["austen-language"].settings["alphabet"]``.

    Raises:
        ValueError: there is no such model, the message has the nearest names; or ``layer`` is given
            for one that solves nothing.
        ImportError: safetensors is not installed.
    """
    row = find_pretrained(name)
    with _float32_on_the_cpu():
        if name == SPINS:
            return _spins(row, layer)
        trained = _tolerance(row.settings) | dict(layer or {})
        model, _ = load_model(row.path, layer=trained or None)
    return model


@contextlib.contextmanager
def _float32_on_the_cpu() -> Iterator[None]:
    """Torch's defaults as the files were written with, whatever the user has set."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)


def _tolerance(settings: dict[str, Any]) -> dict[str, Any]:
    rtol = settings.get("rtol")
    return {} if rtol is None else {"tolerance": Tolerance(rtol=rtol)}


def _spins(row: Pretrained, layer: Mapping[str, Any] | None) -> nn.Module:
    settings = row.settings
    trained = {**_tolerance(settings), "max_steps": settings["max_steps"]}
    with torch.random.fork_rng(devices=[]):  # the weights that are drawn here are replaced
        model = SpinClassifier(
            dim=settings["dim"], bound=settings["bound"], layer={**trained, **(layer or {})}
        )
    load_checkpoint(row.path, model, restore_random=False)
    return model.eval()
