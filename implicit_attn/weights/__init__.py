"""Trained weights that come with the package, by name."""

from __future__ import annotations

from implicit_attn.weights.files import weights_file, weights_path

__all__ = ["weights_file", "weights_path"]
