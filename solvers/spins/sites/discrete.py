"""Sites with finitely many states: Ising and Potts."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from solvers.core.modes import without_autocast
from solvers.spins.inputs import as_wide
from solvers.spins.sites.site import Site


class IsingSite(Site):
    """``S = +1`` or ``-1`` with equal prior weights, d = 1::

        log Z = log cosh h + V / 2,   mean = tanh h,   covariance = 1 - tanh^2 h

    ``V`` drops out of the moments, since ``S^2 = 1``.

    Raises:
        ValueError: if the field has d != 1.
    """

    values: ClassVar[str] = "+1 or -1"

    def log_partition(self, field: Tensor, variance: Tensor) -> Tensor:
        _check_scalar(field)
        # log cosh h without overflow, smooth at 0.
        h = field[..., 0]
        log_cosh = F.softplus(2 * h) - h - math.log(2.0)
        return log_cosh + variance[..., 0, 0] / 2

    def mean(self, field: Tensor, variance: Tensor) -> Tensor:
        _check_scalar(field)
        return torch.tanh(field)

    def covariance(self, field: Tensor, variance: Tensor) -> Tensor:
        _check_scalar(field)
        # 4 sigma(2h) sigma(-2h) keeps its digits where tanh h is 1 to rounding.
        return (4 * torch.sigmoid(2 * field) * torch.sigmoid(-2 * field)).unsqueeze(-1)

    @torch.no_grad()
    def sample(
        self,
        field: Tensor,
        generator: torch.Generator | None = None,
        variance: Tensor | None = None,
    ) -> Tensor:
        """``+1`` with probability ``1 / (1 + exp(-2h))``; V drops out."""
        _check_scalar(field)
        up = torch.sigmoid(2 * as_wide(field))
        drawn = torch.rand(up.shape, generator=generator, dtype=up.dtype, device=up.device)
        return torch.where(drawn < up, 1.0, -1.0).to(field.dtype)

    def takes(self, states: Tensor) -> Tensor:
        """+1 or -1."""
        return (states.abs() == 1).all(-1)


class PottsSite(Site):
    """One of d states, one-hot, with equal prior weights::

        log Z = lse(h + diag(V)/2) - log d,   mean = softmax(h + diag(V)/2),
        covariance = diag(mean) - mean mean^T

    The covariance is singular along (1, ..., 1), as the components sum to 1; the solver needs no
    inverse of it (:mod:`solvers.spins.response`).
    """

    values: ClassVar[str] = "one-hot"

    def log_partition(self, field: Tensor, variance: Tensor) -> Tensor:
        return torch.logsumexp(_logits(field, variance), dim=-1) - math.log(field.shape[-1])

    def mean(self, field: Tensor, variance: Tensor) -> Tensor:
        return torch.softmax(_logits(field, variance), dim=-1)

    def moments(self, field: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.mean(field, variance)
        products = mean.unsqueeze(-1) * mean.unsqueeze(-2)
        unit = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
        outside = products * (1 - unit)
        # m_a (1 - m_a) as a sum over the other states: exact also where m_a is 1 to rounding.
        return mean, torch.diag_embed(outside.sum(-1)) - outside

    @torch.no_grad()
    def sample(
        self,
        field: Tensor,
        generator: torch.Generator | None = None,
        variance: Tensor | None = None,
    ) -> Tensor:
        """State a with probability ``softmax(h + diag(V)/2)_a``, one-hot."""
        with without_autocast(field.device.type):
            logits = as_wide(field)
            if variance is not None:
                logits = _logits(logits, as_wide(variance))
            states = draw_states(logits.movedim(-1, 0), generator)
        return F.one_hot(states, field.shape[-1]).to(field.dtype)

    def takes(self, states: Tensor) -> Tensor:
        """One-hot."""
        return ((states == 0) | (states == 1)).all(-1) & (states.sum(-1) == 1)


def draw_states(logits: Tensor, generator: torch.Generator | None) -> Tensor:
    """States (...) with probabilities ``softmax(logits)`` over dim 0 of (d, ...), by inversion.

    One uniform number a draw. The states lie along dim 0 so that every operation runs over the draws.
    """
    reached = (logits - logits.amax(0)).exp_().cumsum(0)
    drawn = torch.rand(
        logits.shape[1:], generator=generator, dtype=logits.dtype, device=logits.device
    )
    # "<=" and a last state that is not compared: a state without weight is never drawn.
    return (reached[:-1] <= drawn * reached[-1]).sum(0)


def _logits(field: Tensor, variance: Tensor) -> Tensor:
    return field + variance.diagonal(dim1=-2, dim2=-1) / 2


def _check_scalar(field: Tensor) -> None:
    if (dim := field.shape[-1]) != 1:
        raise ValueError(f"IsingSite takes spins of one component, d = 1, got d = {dim}")
