"""The fixed points of the mean-field theories: naive, second order, adaptive TAP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from solvers.core.modes import without_autocast
from solvers.core.solution import Solution
from solvers.fixed_points import fixed_point
from solvers.spins.inputs import as_matrix, as_wide, zero_masked
from solvers.spins.maps import (
    SpinState,
    cavity_field,
    no_variance,
    second_order_step,
    starting_state,
    tap_step,
)
from solvers.spins.response import differentiable_response, is_definite, times_blocks
from solvers.spins.sites.site import Site


@dataclass(frozen=True)
class CoupledSites:
    """Coupled sites in their fields, and the options of :func:`solvers.fixed_point`."""

    couplings: Tensor
    field: Tensor
    site: Site
    mask: Tensor | None
    options: dict[str, Any]

    def at(self, beta: float) -> CoupledSites:
        """The same at another inverse temperature, which scales couplings and fields."""
        if beta == 1:
            return self
        return replace(self, couplings=beta * self.couplings, field=beta * self.field)

    def solve(self, order: str, start: SpinState | None) -> Solution:
        """The solution of a theory as a :class:`SpinState`; ``start`` None for its own start."""
        if order == "naive":
            return self._naive(start)
        if order == "second":
            first = SpinState(torch.zeros_like(self.field), no_variance(self.field).clone())
            return self._joint(second_order_step, first if start is None else start)
        if self.site.field_dependent or self.mask is not None:
            return self._joint(tap_step, self._definite(start))
        return self._shared(start)

    def _fixed_point(self, step: Callable[..., Any], start: Any) -> Solution:
        return fixed_point(step, start, (self.field, self.mask), mask=self.mask, **self.options)

    def _joint(self, one_step: Callable[..., SpinState], start: SpinState) -> Solution:
        """The joint fixed point of means and variances."""

        def step(state: SpinState, field: Tensor, mask: Tensor | None) -> SpinState:
            return one_step(state, field, self.couplings, self.site, mask)

        return self._fixed_point(step, start)

    def _naive(self, start: SpinState | None) -> Solution:
        """The fixed point of the means at V = 0: mean field without Onsager term."""

        def step(mean: Tensor, field: Tensor, mask: Tensor | None) -> Tensor:
            with without_autocast(mean.device.type):
                m, x, j = as_wide(mean), as_wide(field), as_matrix(self.couplings)
                h = cavity_field(m, None, x, j, mask)
                return self.site.mean(h, no_variance(m)).to(mean.dtype)

        mean = torch.zeros_like(self.field) if start is None else start.mean
        solution = self._fixed_point(step, mean)
        solution.value = SpinState(solution.value, no_variance(mean))
        return solution

    def _shared(self, start: SpinState | None) -> Solution:
        """Cavity variances once for all samples, then the means, which depend on them linearly."""
        alone = replace(self, field=self.field.new_zeros(1, *self.field.shape[1:]))
        first_start = None if start is None else SpinState(*(t[:1] for t in start))
        first = alone._joint(tap_step, alone._definite(first_start))
        variance = first.value.cavity_variance
        exists = bool(torch.isfinite(first.residual).all())
        with torch.no_grad(), without_autocast(self.field.device.type):
            wide = as_wide(variance)
            covariance = self.site.covariance(as_wide(alone.field), wide)
            newton = _newton_matrix(covariance, wide, as_matrix(self.couplings))

        def step(mean: Tensor, field: Tensor, mask: None) -> Tensor:
            if not exists:  # stay at the starting point
                return 0.0 * (mean + field)
            with without_autocast(mean.device.type):
                m, x, j = as_wide(mean), as_wide(field), as_matrix(self.couplings)
                v = as_wide(variance)
                residual = self.site.mean(cavity_field(m, v, x, j, mask), v) - m
                return (m + (residual.flatten(1) @ newton).view_as(m)).to(mean.dtype)

        mean = torch.zeros_like(self.field) if start is None or not exists else start.mean
        solution = self._fixed_point(step, mean)
        solution.status = torch.where(first.converged, solution.status, first.status)
        solution.residual = torch.maximum(solution.residual, first.residual)
        solution.residual_norm = torch.maximum(solution.residual_norm, first.residual_norm)
        solution.steps = solution.steps + first.steps
        solution.evaluations = solution.evaluations + first.evaluations
        solution.value = SpinState(solution.value, variance)
        return solution

    def _definite(self, start: SpinState | None) -> SpinState:
        """``start``, but the usual one in samples where its ``chi`` is not positive definite."""
        if start is None:
            return starting_state(self.field, self.couplings, self.site, self.mask)
        with torch.no_grad(), without_autocast(self.field.device.type):
            mean, variance = (as_wide(t) for t in start)
            matrix = as_matrix(self.couplings)
            h = cavity_field(mean, variance, as_wide(self.field), matrix, self.mask)
            covariance = self.site.covariance(h, variance).expand_as(variance)
            definite = is_definite(zero_masked(covariance, self.mask), variance, matrix)
        if bool(definite.all()):
            return start
        usual = starting_state(self.field, self.couplings, self.site, self.mask)
        chosen = (
            torch.where(definite.view(-1, *[1] * (warm.dim() - 1)), warm, cold)
            for warm, cold in zip(start, usual, strict=True)
        )
        return SpinState(*chosen)


def _newton_matrix(covariance: Tensor, variance: Tensor, matrix: Tensor) -> Tensor:
    """``F = C^-1 chi`` of a single sample (n, n), the unit matrix where chi is not positive definite."""
    unit = torch.eye(matrix.shape[0], dtype=matrix.dtype, device=matrix.device)
    if not bool(is_definite(covariance, variance, matrix)):
        return unit
    amputated, _ = differentiable_response(covariance, variance, matrix)
    return unit + times_blocks(amputated, covariance)[0]
