"""Gradient, value and Hessian-vector product of the sigmoid attention energy."""

from __future__ import annotations

from implicit_attn.kernels.sigmoid.dispatch import (
    check_sigmoid_backend,
    explain_sigmoid,
    sigmoid_attention,
    sigmoid_attention_hvp,
)

__all__ = [
    "check_sigmoid_backend",
    "explain_sigmoid",
    "sigmoid_attention",
    "sigmoid_attention_hvp",
]
