"""Kernels: tensors in, tensors out. No modules live here and no energies are imported."""

from __future__ import annotations

from implicit_attn.kernels.bisoftmax import bisoftmax, bisoftmax_hvp

__all__ = ["bisoftmax", "bisoftmax_hvp"]
