"""Kernels: tensors in, tensors out. No modules live here and no energies are imported."""

from __future__ import annotations

from implicit_attn.kernels.bisoftmax import (
    Choice,
    bisoftmax,
    bisoftmax_hvp,
    check_backend,
    explain,
)

__all__ = ["Choice", "bisoftmax", "bisoftmax_hvp", "check_backend", "explain"]
