"""Feed-forward energies: functions of the overlaps of each token with learned memories."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.energies.projected import SOFT_NORM, Projection, RMSNorm, TokenEnergy
from implicit_attn.energies.tokens import Pair, accumulation_dtype, sum_samples
from solvers.core.checks import require_choice


class MemoryEnergy(TokenEnergy):
    """A sum over tokens of a function of ``y = norm(D^T z)``, ``D`` the memories.

    ``projection.weight`` holds ``D^T``, one memory a row.

    Shapes: ``z`` (B, ..., d); ``x`` is ignored; ``mask`` (B, N) for ``z`` (B, N, ..., d).

    Args:
        dim: features d of the tokens.
        memories: number M of memories.
        norm: norm over the M overlaps of a token, ``RMSNorm(epsilon)`` or None.
        bound: bound on the spectral norm of ``D``, or None.
    """

    concave_without_norm = False

    def __init__(
        self,
        dim: int,
        memories: int,
        *,
        norm: RMSNorm | None = SOFT_NORM,
        bound: float | None = None,
    ) -> None:
        super().__init__(dim, norm=norm)
        self.projection = Projection(dim, memories, bound)
        self.concave = self.concave_without_norm and norm is None


class ReLUFeedForward(MemoryEnergy):
    """``E = -1/2 sum_i sum_m relu(y_im)^2``, ``y = norm(D^T z)``.

    Negative gradient by z, without norm: ``D relu(D^T z)``, a feed-forward block with tied weights.
    Concave in z without norm.

    Shapes and arguments as for
    :class:`implicit_attn.energies.feedforward.MemoryEnergy`.

    Source: Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646, equation 11, with the full
    derivative of the norm.
    """

    concave_without_norm = True

    def token_value_and_force(self, y: Tensor) -> Pair:
        active = F.relu(y)
        wide = active.to(accumulation_dtype(active.dtype))
        return -0.5 * wide.square().sum(-1), -active

    def force(self, y: Tensor, mask: Tensor | None) -> Tensor:
        return -F.relu(y)

    def value_and_force(self, raw: Tensor, mask: Tensor | None) -> Pair:
        if self.norm is None:
            return super().value_and_force(raw, mask)
        # relu(y / r) = relu(y) / r: with a = relu(y), the value is -|a|^2 / 2 r^2 and its gradient
        # (y |a|^2 / (M r^2) - a) / r^2, two passes fewer than through y / r. Masked tokens are rows
        # of zeros, which add nothing.
        active = F.relu(raw)
        square = self.norm.mean_square(raw)
        wide = active.to(square.dtype)
        share = wide.square().sum(-1, keepdim=True) / square
        along = (share / raw.shape[-1]).to(raw.dtype)
        force = torch.addcmul(active, raw, along, value=-1.0) / -square.to(raw.dtype)
        return -0.5 * sum_samples(share), force

    def force_and_curvature(self, y: Tensor, v: Tensor, mask: Tensor | None) -> Pair:
        return -F.relu(y), -v * (y > 0).to(v.dtype)


class GELUFeedForward(MemoryEnergy):
    """``E = -1/2 sum_i sum_m ( (y^2 - 1) Phi(y) + y phi(y) )``, ``y = norm(D^T z)_im``.

    Phi and phi are the distribution function and the density of N(0, 1). Each summand is an integral of
    the exact GELU, so the negative gradient by z, without norm, is ``D gelu(D^T z)``. Not concave:
    GELU decreases below -0.75.

    Shapes and arguments as for
    :class:`implicit_attn.energies.feedforward.MemoryEnergy`.
    """

    def token_value_and_force(self, y: Tensor) -> Pair:
        wide = y.to(accumulation_dtype(y.dtype))
        below = torch.special.ndtr(wide)
        integral = (wide.square() - 1.0) * below + wide * _normal_density(wide)
        return -0.5 * integral.sum(-1), -F.gelu(y)

    def force(self, y: Tensor, mask: Tensor | None) -> Tensor:
        return -F.gelu(y)

    def force_and_curvature(self, y: Tensor, v: Tensor, mask: Tensor | None) -> Pair:
        return -F.gelu(y), -v * _gelu_slope(y)


class SoftmaxFeedForward(MemoryEnergy):
    """``E = -sum_i log sum_m exp(y_im)``, ``y = norm(D^T z)``.

    Negative gradient by z, without norm: ``D softmax(D^T z)``, retrieval from memories. Concave in z
    without norm.

    Shapes and arguments as for
    :class:`implicit_attn.energies.feedforward.MemoryEnergy`.

    Source: Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646, table 18.
    """

    concave_without_norm = True

    def token_value_and_force(self, y: Tensor) -> Pair:
        return -y.to(accumulation_dtype(y.dtype)).logsumexp(-1), -y.softmax(-1)

    def force(self, y: Tensor, mask: Tensor | None) -> Tensor:
        return -y.softmax(-1)

    def force_and_curvature(self, y: Tensor, v: Tensor, mask: Tensor | None) -> Pair:
        share = y.softmax(-1)
        mean = (share * v).sum(-1, keepdim=True)
        return -share, share * (mean - v)


class GatedFeedForward(MemoryEnergy):
    """``E = -1/2 sum_i ( sum_m phi(y_im) )^2``, ``y = norm(D^T z)``.

    Negative gradient by z, without norm: ``D (s phi'(y))``, ``s = sum_m phi(y_m)``: every memory is
    gated by the sum of all. The sum runs over M memories, so weights of order 1/M keep the curvature
    of order 1. Concave in z with ReLU and without norm.

    Shapes and other arguments as for
    :class:`implicit_attn.energies.feedforward.MemoryEnergy`.

    Args:
        activation: phi, ``"gelu"`` (exact) or ``"relu"``.

    Source: Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646, table 18.
    """

    def __init__(
        self,
        dim: int,
        memories: int,
        *,
        activation: str = "gelu",
        norm: RMSNorm | None = SOFT_NORM,
        bound: float | None = None,
    ) -> None:
        super().__init__(dim, memories, norm=norm, bound=bound)
        self.activation = require_choice("activation", activation, ("gelu", "relu"))
        self.concave = norm is None and activation == "relu"

    def token_value_and_force(self, y: Tensor) -> Pair:
        total = self._total(y)
        force = -total.to(y.dtype) * self._slope(y)
        return -0.5 * total.squeeze(-1).square(), force

    def force_and_curvature(self, y: Tensor, v: Tensor, mask: Tensor | None) -> Pair:
        total = self._total(y).to(y.dtype)
        slope = self._slope(y)
        curved = -slope * (slope * v).sum(-1, keepdim=True)
        if self.activation == "gelu":
            curved = curved - total * _normal_density(y) * (2.0 - y.square()) * v
        return -total * slope, curved

    def _total(self, y: Tensor) -> Tensor:
        phi = F.gelu(y) if self.activation == "gelu" else F.relu(y)
        return phi.sum(-1, keepdim=True, dtype=accumulation_dtype(y.dtype))

    def _slope(self, y: Tensor) -> Tensor:
        return _gelu_slope(y) if self.activation == "gelu" else (y > 0).to(y.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"


def _normal_density(y: Tensor) -> Tensor:
    return torch.exp(-0.5 * y.square()) / math.sqrt(2.0 * math.pi)


def _gelu_slope(y: Tensor) -> Tensor:
    return torch.special.ndtr(y) + y * _normal_density(y)
