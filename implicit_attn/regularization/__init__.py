"""What keeps training of equilibrium layers stable: losses on the way, of the Jacobian, norms of weights."""

from __future__ import annotations

from implicit_attn.dropout import VariationalDropout, dropout_seeds
from implicit_attn.regularization.correction import (
    correction_weights,
    fixed_point_correction,
    states_at,
)
from implicit_attn.regularization.radii import SpectralRadii
from implicit_attn.regularization.weight_norms import (
    SpectralNorm,
    WeightNorm,
    apply_norm,
    remove_norm,
)

__all__ = [
    "SpectralNorm",
    "SpectralRadii",
    "VariationalDropout",
    "WeightNorm",
    "apply_norm",
    "correction_weights",
    "dropout_seeds",
    "fixed_point_correction",
    "remove_norm",
    "states_at",
]
