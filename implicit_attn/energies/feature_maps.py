"""Feature maps, entry by entry, with their first and second derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Mapped(NamedTuple):
    """``phi(y)``, ``phi'(y)`` and ``phi''(y)``, each like y; None stands for a slope of 1 or 0."""

    value: Tensor
    slope: Tensor | None
    bend: Tensor | None

    def push(self, v: Tensor) -> Tensor:
        """``phi'(y) v``, also the pullback of a cotangent."""
        return v if self.slope is None else self.slope * v

    def pull_back_curvature(self, force: Tensor, curved: Tensor, v: Tensor) -> Tensor:
        """The change of ``phi'(y) force`` as y moves along ``v`` and the force by ``curved``."""
        curved = self.push(curved)
        return curved if self.bend is None else curved + self.bend * v * force


def normal_density(y: Tensor) -> Tensor:
    """Density of N(0, 1)."""
    return torch.exp(-0.5 * y.square()) / math.sqrt(2.0 * math.pi)


def gelu_slope(y: Tensor) -> Tensor:
    """Derivative of the exact GELU."""
    return torch.special.ndtr(y) + y * normal_density(y)


def _identity(y: Tensor, bent: bool) -> Mapped:
    return Mapped(y, None, None)


def _relu(y: Tensor, bent: bool) -> Mapped:
    return Mapped(F.relu(y), (y > 0).to(y.dtype), None)


def _elu(y: Tensor, bent: bool) -> Mapped:
    slope = y.clamp_max(0.0).exp()
    bend = torch.where(y > 0, torch.zeros_like(y), slope) if bent else None
    # max(y, 0) + exp(min(y, 0)): elu(y) + 1 would round to 0 where y is far below 0.
    return Mapped(F.relu(y) + slope, slope, bend)


def _plain_elu(y: Tensor, bent: bool) -> Mapped:
    return _elu(y, bent)._replace(value=F.elu(y))


def _sigmoid(y: Tensor, bent: bool) -> Mapped:
    gate = y.sigmoid()
    slope = gate * (1.0 - gate)
    return Mapped(gate, slope, slope * (1.0 - 2.0 * gate) if bent else None)


def _tanh(y: Tensor, bent: bool) -> Mapped:
    value = y.tanh()
    slope = 1.0 - value.square()
    return Mapped(value, slope, -2.0 * value * slope if bent else None)


def _softplus(y: Tensor, bent: bool) -> Mapped:
    slope = y.sigmoid()
    return Mapped(F.softplus(y), slope, slope * (1.0 - slope) if bent else None)


def _silu(y: Tensor, bent: bool) -> Mapped:
    gate = y.sigmoid()
    spread = gate * (1.0 - gate)
    bend = spread * (2.0 + y * (1.0 - 2.0 * gate)) if bent else None
    return Mapped(F.silu(y), gate + y * spread, bend)


def _gelu(y: Tensor, bent: bool) -> Mapped:
    bend = normal_density(y) * (2.0 - y.square()) if bent else None
    return Mapped(F.gelu(y), gelu_slope(y), bend)


_MAPS: dict[str, Callable[[Tensor, bool], Mapped]] = {
    "identity": _identity,
    "relu": _relu,
    "elu": _elu,
    "plain-elu": _plain_elu,
    "sigmoid": _sigmoid,
    "tanh": _tanh,
    "softplus": _softplus,
    "silu": _silu,
    "gelu": _gelu,
}
FEATURE_MAPS = tuple(_MAPS)
NONLINEAR_MAPS = FEATURE_MAPS[1:]


def map_features(name: str, y: Tensor, *, bent: bool = True) -> Mapped:
    """The feature map of this name at ``y``, with its derivatives; without the second if not ``bent``.

    ``"identity"``: y; ``"relu"``: max(y, 0); ``"elu"``: elu(y) + 1, which is exp(y) for y < 0;
    ``"plain-elu"``: elu(y); ``"sigmoid"``, ``"tanh"``, ``"softplus"``, ``"silu"`` and the
    exact ``"gelu"`` as in ``torch.nn.functional``.
    """
    return _MAPS[name](y, bent)
