"""Trained weights that come with the package, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from implicit_attn.weights.registry import (
    Pretrained,
    find_pretrained,
    pretrained_models,
    weights_file,
    weights_path,
)
from solvers.lazy import lazy_names

if TYPE_CHECKING:
    from implicit_attn.weights.loading import load_pretrained
else:
    __getattr__, __dir__ = lazy_names(
        __name__, {"implicit_attn.weights.loading": "load_pretrained"}
    )

__all__ = [
    "Pretrained",
    "find_pretrained",
    "load_pretrained",
    "pretrained_models",
    "weights_file",
    "weights_path",
]
