"""Gradient and Hessian-vector product of the bi-softmax attention energy."""

from __future__ import annotations

from implicit_attn.kernels.bi_softmax.dispatch import (
    bisoftmax,
    bisoftmax_hvp,
    check_backend,
    explain,
)

__all__ = ["bisoftmax", "bisoftmax_hvp", "check_backend", "explain"]
