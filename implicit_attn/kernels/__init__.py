"""Kernels: tensors in, tensors out. No modules live here and no energies are imported."""

from __future__ import annotations

from implicit_attn.kernels.arguments import Choice
from implicit_attn.kernels.bi_softmax.dispatch import (
    bisoftmax,
    bisoftmax_hvp,
    check_backend,
    explain,
)
from implicit_attn.kernels.frozen_keys import (
    check_frozen_key_backend,
    explain_frozen_keys,
    frozen_key_attention,
)
from implicit_attn.kernels.sigmoid.dispatch import (
    check_sigmoid_backend,
    explain_sigmoid,
    sigmoid_attention,
    sigmoid_attention_hvp,
)

__all__ = [
    "Choice",
    "bisoftmax",
    "bisoftmax_hvp",
    "check_backend",
    "check_frozen_key_backend",
    "check_sigmoid_backend",
    "explain",
    "explain_frozen_keys",
    "explain_sigmoid",
    "frozen_key_attention",
    "sigmoid_attention",
    "sigmoid_attention_hvp",
]
