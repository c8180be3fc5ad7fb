"""Restricted Boltzmann machines with their hidden units summed out, and the laws of these units."""

from __future__ import annotations

from implicit_attn.energies.effective.laws import (
    PRIORS,
    BinaryPrior,
    ConstantPrior,
    ExponentialPrior,
    IsingPrior,
    LaplacePrior,
    NormalPrior,
    OneHotPrior,
    PoissonPrior,
)
from implicit_attn.energies.effective.prior import HiddenPrior, ScalarPrior
from implicit_attn.energies.effective.rbm import EffectiveRBM

__all__ = [
    "PRIORS",
    "BinaryPrior",
    "ConstantPrior",
    "EffectiveRBM",
    "ExponentialPrior",
    "HiddenPrior",
    "IsingPrior",
    "LaplacePrior",
    "NormalPrior",
    "OneHotPrior",
    "PoissonPrior",
    "ScalarPrior",
]
