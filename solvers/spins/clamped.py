"""Clamped sites: they keep a given value and act on the free ones as a field does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from solvers.core.modes import without_autocast
from solvers.spins.inputs import as_matrix, as_wide, read_given, zero_masked
from solvers.spins.theories import CoupledSites


@dataclass(frozen=True)
class ClampedSites:
    """Values s (B, N, d) of clamped sites, zero elsewhere, and what they do to the others.

    With the field ``sum_j J_ij s_j`` on the free sites, and in log Z their own energy
    ``sum_i x_i.s_i + 1/2 sum_ij s_i^T J_ij s_j``.
    """

    values: Tensor
    clamped: Tensor  # (B, N) bool, not masked
    pull: Tensor  # (B, N, d)
    energy: Tensor  # (B,), at least float32

    @classmethod
    def of(cls, given: Any, model: CoupledSites) -> ClampedSites:
        """The clamped sites of ``model``."""
        values, clamped = read_given(given, model.field)
        if model.mask is not None:
            values, clamped = zero_masked(values, model.mask), clamped & model.mask
        with without_autocast(model.field.device.type):
            wide = as_wide(values)
            pull = (wide.flatten(1) @ as_matrix(model.couplings)).view_as(wide)
            energy = (wide * (as_wide(model.field) + pull / 2)).flatten(1).sum(1)
        return cls(values, clamped, pull.to(values.dtype), energy)

    def free(self, model: CoupledSites) -> CoupledSites:
        """The free sites alone, in the field of the clamped ones."""
        mask = ~self.clamped if model.mask is None else ~self.clamped & model.mask
        return replace(model, field=model.field + self.pull, mask=mask)

    def joined(self, marginals: Any, beta: float) -> Any:
        """Marginals of the free sites with those of the clamped ones, at an inverse temperature."""
        mean = torch.where(self.clamped.unsqueeze(-1), self.values, marginals.mean)
        log_z = marginals.log_partition
        log_z = None if log_z is None else log_z + beta * self.energy
        return marginals._replace(mean=mean, log_partition=log_z)
