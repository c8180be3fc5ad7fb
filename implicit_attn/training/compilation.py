"""Compiled training steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def compile_step(model: nn.Module, backend: Any = "inductor") -> nn.Module:
    """The model with what it repeats compiled once, or compiled whole where nothing is repeated.

    A layer with ``context`` and ``advance`` (of ``implicit_attn.models.RecurrentBackbone``) has its
    ``advance`` replaced by a compiled one, so that any number of iterations shares one graph.

    Args:
        model: any module.
        backend: of ``torch.compile``.

    Returns:
        ``model`` itself, changed, or a compiled wrapper around it.
    """
    repeated: list[Any] = [
        module
        for module in model.modules()
        if callable(getattr(module, "advance", None)) and callable(getattr(module, "context", None))
    ]
    for layer in repeated:
        layer.advance = torch.compile(layer.advance, backend=backend)
    return model if repeated else torch.compile(model, backend=backend)  # type: ignore[return-value]
