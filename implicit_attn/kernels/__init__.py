"""Kernels: functions of tensors, without modules or energies."""

from __future__ import annotations

from implicit_attn.kernels.arguments import Choice
from implicit_attn.kernels.dispatch import (
    bisoftmax,
    bisoftmax_hvp,
    check_backend,
    explain,
    explain_frozen_keys,
    frozen_key_attention,
)
from implicit_attn.kernels.reference import covariance_product

__all__ = [
    "Choice",
    "bisoftmax",
    "bisoftmax_hvp",
    "check_backend",
    "covariance_product",
    "explain",
    "explain_frozen_keys",
    "frozen_key_attention",
]
