"""Gradient and Hessian-vector product of the bi-softmax attention energy."""

from __future__ import annotations

from implicit_attn.kernels.bisoftmax.reference import bisoftmax, bisoftmax_hvp

__all__ = ["bisoftmax", "bisoftmax_hvp"]
