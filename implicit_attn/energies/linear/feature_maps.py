"""Feature maps of linear attention with their first two derivatives, entry by entry."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.energies.attention import FEATURE_MAPS
from solvers.core.checks import require_choice

POSITIVE_MAPS = (
    "elu",
)  # without a zero within the range of exp, so that a sum of their features has a logarithm


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


def check_feature_map(name: str, *, positive: bool = False) -> str:
    """``name`` where it is a feature map, a positive one if that is asked for."""
    return require_choice("feature_map", name, POSITIVE_MAPS if positive else FEATURE_MAPS)


def map_features(name: str, y: Tensor) -> Mapped:
    """``"identity"``: y; ``"relu"``: max(y, 0); ``"elu"``: elu(y) + 1, which is exp(y) for y < 0."""
    if name == "identity":
        return Mapped(y, None, None)
    if name == "relu":
        return Mapped(F.relu(y), (y > 0).to(y.dtype), None)
    slope = y.clamp_max(0.0).exp()
    # max(y, 0) + exp(min(y, 0)): elu(y) + 1 would round to 0 where y is far below 0.
    return Mapped(F.relu(y) + slope, slope, torch.where(y > 0, torch.zeros_like(y), slope))
