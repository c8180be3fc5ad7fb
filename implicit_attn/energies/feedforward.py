"""Feed-forward energies: functions of the overlaps of each token with learned memories."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.energies.context.memory_energy import MemoryEnergy
from implicit_attn.energies.linear.feature_maps import (
    NONLINEAR_MAPS,
    Mapped,
    gelu_slope,
    map_features,
    normal_density,
)
from implicit_attn.energies.projected import SOFT_NORM, RMSNorm
from implicit_attn.energies.tokens import Pair, accumulation_dtype, hide, sum_samples
from solvers.core.checks import require_choice


class ReLUFeedForward(MemoryEnergy):
    """``E = -1/2 sum_i sum_m g_im relu(y_im)^2``, ``y = norm(D^T z + U x + c)``, gates g of x or 1.

    Negative gradient by z, without norm, context and gates: ``D relu(D^T z)``, a feed-forward block with
    tied weights. Concave in z without norm, for any x.

    Shapes and arguments as for
    :class:`implicit_attn.energies.context.memory_energy.MemoryEnergy`.

    Example:
        >>> import torch
        >>> energy = ReLUFeedForward(64, 128)
        >>> z = torch.randn(2, 16, 64)
        >>> energy(z).shape, energy.grad(z).shape
        (torch.Size([2]), torch.Size([2, 16, 64]))

    Source: Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646, equation 11, with the full
    derivative of the norm.
    """

    concave_without_norm = True

    def token_value_and_force(self, y: Tensor, gates: Tensor | None = None) -> Pair:
        active = F.relu(y)
        wide = active.to(accumulation_dtype(active.dtype))
        squares = _gated(wide.square(), gates)
        return -0.5 * squares.sum(-1), -_gated(active, gates)

    def force(self, y: Tensor, mask: Tensor | None, gates: Tensor | None = None) -> Tensor:
        return -_gated(F.relu(y), gates)

    def value_and_force(
        self, raw: Tensor, mask: Tensor | None, gates: Tensor | None = None
    ) -> Pair:
        if self.norm is None:
            return super().value_and_force(raw, mask, gates)
        # relu(y / r) = relu(y) / r: with a = relu(y), the value is -a.(g a) / 2 r^2 and its gradient
        # (y a.(g a) / (M r^2) - g a) / r^2, two passes fewer than through y / r.
        active = F.relu(raw)
        square = self.norm.mean_square(raw)
        wide = active.to(square.dtype)
        share = _gated(wide.square(), gates).sum(-1, keepdim=True) / square
        along = (share / raw.shape[-1]).to(raw.dtype)
        active = _gated(active, gates)
        force = torch.addcmul(active, raw, along, value=-1.0) / -square.to(raw.dtype)
        return -0.5 * sum_samples(hide(share, mask)), force

    def force_and_curvature(
        self, y: Tensor, v: Tensor, mask: Tensor | None, gates: Tensor | None = None
    ) -> Pair:
        return -_gated(F.relu(y), gates), -_gated(v * (y > 0).to(v.dtype), gates)


class GELUFeedForward(MemoryEnergy):
    """``E = -1/2 sum_i sum_m g ( (y^2 - 1) Phi(y) + y phi(y) )``, ``y = norm(D^T z + U x + c)_im``.

    Phi and phi are the distribution function and the density of N(0, 1), g gates of x or 1. Each summand
    is an integral of the exact GELU, so the negative gradient by z, without norm, context and gates, is
    ``D gelu(D^T z)``. Not concave: GELU decreases below -0.75.

    Shapes and arguments as for
    :class:`implicit_attn.energies.context.memory_energy.MemoryEnergy`.
    """

    def token_value_and_force(self, y: Tensor, gates: Tensor | None = None) -> Pair:
        wide = y.to(accumulation_dtype(y.dtype))
        below = torch.special.ndtr(wide)
        integral = (wide.square() - 1.0) * below + wide * normal_density(wide)
        return -0.5 * _gated(integral, gates).sum(-1), -_gated(F.gelu(y), gates)

    def force(self, y: Tensor, mask: Tensor | None, gates: Tensor | None = None) -> Tensor:
        return -_gated(F.gelu(y), gates)

    def force_and_curvature(
        self, y: Tensor, v: Tensor, mask: Tensor | None, gates: Tensor | None = None
    ) -> Pair:
        return -_gated(F.gelu(y), gates), -_gated(v * gelu_slope(y), gates)


class SoftmaxFeedForward(MemoryEnergy):
    """``E = -sum_i log sum_m exp(y_im)``, ``y = norm(D^T z + U x + c)``.

    Negative gradient by z, without norm and context: ``D softmax(D^T z)``, retrieval from memories.
    Concave in z without norm, for any x. It takes no gates: with the weights ``g_m`` before the
    exponentials these would be hidden biases ``log g_m``.

    Shapes and arguments as for
    :class:`implicit_attn.energies.context.memory_energy.MemoryEnergy`.

    Source: Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646, table 18.
    """

    concave_without_norm = True
    takes_gates = False

    def token_value_and_force(self, y: Tensor, gates: Tensor | None = None) -> Pair:
        return -y.to(accumulation_dtype(y.dtype)).logsumexp(-1), -y.softmax(-1)

    def force(self, y: Tensor, mask: Tensor | None, gates: Tensor | None = None) -> Tensor:
        return -y.softmax(-1)

    def force_and_curvature(
        self, y: Tensor, v: Tensor, mask: Tensor | None, gates: Tensor | None = None
    ) -> Pair:
        share = y.softmax(-1)
        mean = (share * v).sum(-1, keepdim=True)
        return -share, share * (mean - v)


class GatedFeedForward(MemoryEnergy):
    """``E = -1/2 sum_i ( sum_m g_im phi(y_im) )^2``, ``y = norm(D^T z + U x + c)``, gates g of x or 1.

    Negative gradient by z, without norm, context and gates: ``D (s phi'(y))``, ``s = sum_m phi(y_m)``:
    every memory is gated by the sum of all. The sum runs over M memories, so weights of order 1/M keep
    the curvature of order 1. Concave in z with ReLU and without norm, for any x.

    Shapes and other arguments as for
    :class:`implicit_attn.energies.context.memory_energy.MemoryEnergy`.

    Args:
        activation: phi, ``"gelu"`` (exact), ``"relu"``, ``"sigmoid"`` (as published), ``"tanh"``,
            ``"softplus"``, ``"silu"``, ``"elu"`` (``elu(y) + 1``) or ``"plain-elu"``.

    Source: Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646, table 18.
    """

    def __init__(
        self,
        dim: int,
        memories: int,
        *,
        activation: str = "gelu",
        context_dim: int | None = None,
        gates: bool = False,
        bias: bool = False,
        norm: RMSNorm | None = SOFT_NORM,
        bound: float | None = None,
    ) -> None:
        super().__init__(
            dim, memories, context_dim=context_dim, gates=gates, bias=bias, norm=norm, bound=bound
        )
        self.activation = require_choice("activation", activation, NONLINEAR_MAPS)
        self.concave = norm is None and activation == "relu"

    def token_value_and_force(self, y: Tensor, gates: Tensor | None = None) -> Pair:
        mapped = map_features(self.activation, y, bent=False)
        total = self._total(mapped.value, gates)
        force = -total.to(y.dtype) * _slope(mapped, gates)
        return -0.5 * total.squeeze(-1).square(), force

    def force_and_curvature(
        self, y: Tensor, v: Tensor, mask: Tensor | None, gates: Tensor | None = None
    ) -> Pair:
        mapped = map_features(self.activation, y)
        total = self._total(mapped.value, gates).to(y.dtype)
        slope = _slope(mapped, gates)
        curved = -slope * (slope * v).sum(-1, keepdim=True)
        if mapped.bend is not None:
            curved = curved - total * _gated(mapped.bend, gates) * v
        return -total * slope, curved

    def _total(self, phi: Tensor, gates: Tensor | None) -> Tensor:
        return _gated(phi, gates).sum(-1, keepdim=True, dtype=accumulation_dtype(phi.dtype))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"


def _gated(units: Tensor, gates: Tensor | None) -> Tensor:
    return units if gates is None else units * gates


def _slope(mapped: Mapped, gates: Tensor | None) -> Tensor:
    assert mapped.slope is not None  # no map here is linear
    return _gated(mapped.slope, gates)
