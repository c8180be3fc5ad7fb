"""The two energies of the hyperspherical energy transformer, by name, and their sum as one energy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.energies.attention import (
    BiSoftmaxAttention,
    HeadsEnergy,
    LinearAttention,
    SigmoidAttention,
)
from implicit_attn.energies.energy import Energy
from implicit_attn.energies.feedforward import (
    GatedFeedForward,
    GELUFeedForward,
    MemoryEnergy,
    ReLUFeedForward,
    SoftmaxFeedForward,
)
from implicit_attn.energies.norms import SOFT_NORM, RMSNorm
from implicit_attn.energies.simple import Quadratic


class RowSoftmaxAttention(BiSoftmaxAttention):
    """Softmax attention with one projection: each token descends its own term, the others held.

    The energy, its gradient and its Hessian are those of ``BiSoftmaxAttention``. Only ``force``, and
    with it ``straight_gradient``, is another: ``P Y``, the gradient of ``beta^-1 lse_j(beta y_i.k_j)``
    by ``y_i`` with the keys ``k = y`` held constant, which is half of ``(P + P^T) Y``. Such a step
    descends no energy of all tokens (Hyper-SET, arXiv 2502.11646; D'Amico and Negri on tokens that
    descend their own terms).

    Shapes and arguments as for ``BiSoftmaxAttention``; not causal.
    """

    def force(self, y: Tensor, mask: Tensor | None) -> Tensor:
        pairs = None
        if mask is not None:
            # A token that does not count is a row of zeros that meets itself alone: never NaN.
            pairs = (mask[:, :, None] & mask[:, None, :])[:, None]
            pairs = pairs | torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
        return F.scaled_dot_product_attention(y, y, y, attn_mask=pairs, scale=self.beta)


ATTENTIONS: dict[str, Callable[..., HeadsEnergy]] = {
    "bisoftmax": BiSoftmaxAttention,
    "sigmoid": SigmoidAttention,
    "linear": LinearAttention,
    "softmax": RowSoftmaxAttention,
}
FEEDFORWARDS: dict[str, Callable[..., MemoryEnergy]] = {
    "relu": ReLUFeedForward,
    "softmax": SoftmaxFeedForward,
    "gated": GatedFeedForward,
    "gelu": GELUFeedForward,
}


def build_attention(name: str, dim: int, heads: int, **options: Any) -> HeadsEnergy:
    """The attention energy of this name, one of ``ATTENTIONS``."""
    if name not in ATTENTIONS:
        raise ValueError(f"attention must be one of {tuple(ATTENTIONS)}, got {name!r}")
    return ATTENTIONS[name](dim, heads, **options)


def build_feedforward(name: str, dim: int, memories: int, **options: Any) -> MemoryEnergy:
    """The feed-forward energy of this name, one of ``FEEDFORWARDS``."""
    if name not in FEEDFORWARDS:
        raise ValueError(f"feedforward must be one of {tuple(FEEDFORWARDS)}, got {name!r}")
    return FEEDFORWARDS[name](dim, memories, **options)


class HyperSETEnergy(Energy):
    """``E = a E_attention(z) + b E_feedforward(z) + 1/2 |z - x|^2``, a layer whose minimum is solved for.

    The energies are those that ``HyperSETLayer`` steps along, here with the whole derivative of the
    norm, so that descent is guaranteed and the Jacobian symmetric. For a minimum that a solver finds
    and training keeps, the norm is soft, the spectral norms of W and D and the learned weights
    ``0 < a, b < maximum`` are bounded, and the last term pulls towards the input.

    Args:
        dim: features d of a token.
        heads: attention heads.
        memories: columns M of D.
        attention: "bisoftmax", "sigmoid" or "linear".
        feedforward: "relu", "softmax", "gated" or "gelu".
        head_dim: width p of a head; None: ``dim / heads``.
        norm: of the projections, ``RMSNorm(epsilon)`` or None.
        bound: bound on the spectral norms of W and D, or None.
        weight: a and b to start from.
        maximum: bound on a and b, or None.

    Shapes: ``z`` and ``x`` (B, N, d), ``mask`` (B, N) bool.

    Source: Hu, Zou, Xu, "Hyper-SET" (arXiv 2502.11646), equations 3 to 8, with a soft norm.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        memories: int,
        *,
        attention: str = "bisoftmax",
        feedforward: str = "relu",
        head_dim: int | None = None,
        norm: RMSNorm | None = SOFT_NORM,
        bound: float | None = 2.0,
        weight: float = 0.5,
        maximum: float | None = 2.0,
    ) -> None:
        super().__init__()
        if attention == "softmax":
            raise ValueError(
                "attention must descend an energy of all tokens, one of ('bisoftmax', 'sigmoid', "
                f"'linear'), got {attention!r}"
            )
        options: dict[str, Any] = {"norm": norm, "bound": bound}
        attends = build_attention(attention, dim, heads, head_dim=head_dim, **options)
        recalls = build_feedforward(feedforward, dim, memories, **options)
        self.attention = attends.weighted(weight, maximum)
        self.feedforward = recalls.weighted(weight, maximum)
        self.quadratic = Quadratic()

    def forward(self, z: Tensor, x: Tensor | None = None, *, mask: Tensor | None = None) -> Tensor:
        inner = self.attention(z, x, mask=mask) + self.feedforward(z, x, mask=mask)
        return inner + self.quadratic(z, x, mask=mask)

    def value_and_grad(
        self, z: Tensor, x: Tensor | None = None, *, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        value, gradient = self.quadratic.value_and_grad(z, x, mask=mask)
        for term in (self.attention, self.feedforward):
            part, slope = term.energy.value_and_grad(z, x, mask=mask)
            factor = term.factor()
            value = torch.addcmul(value, part, factor.to(part.dtype))
            gradient = torch.addcmul(gradient, slope, factor.to(slope.dtype))
        return value, gradient

    def hvp(
        self, z: Tensor, v: Tensor, x: Tensor | None = None, *, mask: Tensor | None = None
    ) -> Tensor:
        inner = self.attention.hvp(z, v, x, mask=mask) + self.feedforward.hvp(z, v, x, mask=mask)
        return inner + self.quadratic.hvp(z, v, x, mask=mask)
