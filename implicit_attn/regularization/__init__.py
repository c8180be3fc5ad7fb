"""What keeps training of equilibrium layers stable: losses on the way, of the Jacobian, norms of weights."""

from __future__ import annotations

from implicit_attn.dropout import VariationalDropout, dropout_seeds
from implicit_attn.regularization.correction import correction_weights, fixed_point_correction
from implicit_attn.regularization.radii import SpectralRadii

__all__ = [
    "SpectralRadii",
    "VariationalDropout",
    "correction_weights",
    "dropout_seeds",
    "fixed_point_correction",
]
