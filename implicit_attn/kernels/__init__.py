"""Kernels: tensors in, tensors out. No modules live here and no energies are imported."""

from __future__ import annotations

from implicit_attn.kernels.arguments import Choice
from implicit_attn.kernels.bi_softmax.dispatch import (
    bisoftmax,
    bisoftmax_hvp,
    check_backend,
    explain,
)
from implicit_attn.kernels.covariance import covariance_product
from implicit_attn.kernels.free_energy import helmholtz_free_energy
from implicit_attn.kernels.frozen_keys import (
    check_frozen_key_backend,
    explain_frozen_keys,
    frozen_key_attention,
)
from implicit_attn.kernels.running import running_products, running_states, running_sums
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
    "covariance_product",
    "explain",
    "explain_frozen_keys",
    "explain_sigmoid",
    "frozen_key_attention",
    "helmholtz_free_energy",
    "running_products",
    "running_states",
    "running_sums",
    "sigmoid_attention",
    "sigmoid_attention_hvp",
]
