"""The energy of Hyper-SET: attention and feed-forward part together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from implicit_attn.energies.attention import (
    BiSoftmaxAttention,
    HeadsEnergy,
    LinearAttention,
    RowSoftmaxAttention,
    ScoreAttention,
)
from implicit_attn.energies.energy import Quadratic, SummedEnergy
from implicit_attn.energies.feedforward import (
    GatedFeedForward,
    GELUFeedForward,
    MemoryEnergy,
    ReLUFeedForward,
    SoftmaxFeedForward,
)
from implicit_attn.energies.projected import NONLINEAR_MAPS, SOFT_NORM, RMSNorm
from solvers.core.checks import require_choice, require_flag

ATTENTIONS: dict[str, Callable[..., HeadsEnergy]] = {
    "bisoftmax": BiSoftmaxAttention,
    "sigmoid": ScoreAttention,
    "linear": LinearAttention,
    "softmax": RowSoftmaxAttention,
    "relu": partial(ScoreAttention, score="relu"),
    "sigmoid-squared": partial(ScoreAttention, score="sigmoid-squared"),
    **{f"linear-{name}": partial(LinearAttention, feature_map=name) for name in NONLINEAR_MAPS},
}
FEEDFORWARDS: dict[str, Callable[..., MemoryEnergy]] = {
    "relu": ReLUFeedForward,
    "softmax": SoftmaxFeedForward,
    "gated": GatedFeedForward,
    "gelu": GELUFeedForward,
    **{
        f"gated-{name}": partial(GatedFeedForward, activation=name)
        for name in NONLINEAR_MAPS
        if name != "gelu"  # which "gated" has
    },
}


def build_attention(name: str, dim: int, heads: int, **options: Any) -> HeadsEnergy:
    """The attention energy of this name, one of ``ATTENTIONS``."""
    return ATTENTIONS[require_choice("attention", name, ATTENTIONS)](dim, heads, **options)


def build_feedforward(name: str, dim: int, memories: int, **options: Any) -> MemoryEnergy:
    """The feed-forward energy of this name, one of ``FEEDFORWARDS``."""
    return FEEDFORWARDS[require_choice("feedforward", name, FEEDFORWARDS)](dim, memories, **options)


class HyperSETEnergy(SummedEnergy):
    """``E = a E_attention(z) + b E_feedforward(z) + 1/2 |z - x|^2``, whose minimum is the layer's output.

    The two energies are those along which ``HyperSETLayer`` steps, here with the full derivative of the
    norm. So that a minimum exists that a solver finds, also after training, the norm has an epsilon of
    order 1, and the spectral norms of W and D and the weights ``0 < a, b < maximum`` are bounded.

    Where the energy sees x in the last term alone, its minimum is a proximal operator of x, close to the
    identity. With ``context=True`` memories and heads see x, too, ``y = norm(D^T z + U x + c)``.

    Args:
        dim: features d of a token.
        heads: attention heads.
        memories: columns M of D.
        attention: a name of ``ATTENTIONS`` but "softmax": "bisoftmax", "sigmoid", "relu",
            "sigmoid-squared", "linear" or "linear-NAME" with a feature map of ``LinearAttention``.
        feedforward: a name of ``FEEDFORWARDS``: "relu", "softmax", "gelu", "gated" (by GELU) or
            "gated-NAME" with another activation of ``GatedFeedForward``.
        head_dim: width p of a head; None: ``dim / heads``.
        norm: of the projections, ``RMSNorm(epsilon)`` or None.
        bound: bound on the spectral norms of W and D, or None.
        weight: initial a and b.
        maximum: bound on a and b, or None.
        context: let the memories and the heads see x, in what is added to their features.

    Shapes: ``z`` and ``x`` (B, N, d), ``mask`` (B, N) bool.

    Source: Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646, equations 3 to 8.
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
        context: bool = False,
    ) -> None:
        super().__init__()
        if attention == "softmax":
            energies = tuple(name for name in ATTENTIONS if name != "softmax")
            raise ValueError(f"attention must descend an energy of all tokens, one of {energies}")
        options: dict[str, Any] = {"norm": norm, "bound": bound}
        options["context_dim"] = dim if require_flag("context", context) else None
        attends = build_attention(attention, dim, heads, head_dim=head_dim, **options)
        recalls = build_feedforward(feedforward, dim, memories, **options)
        self.attention = attends.weighted(weight, maximum)
        self.feedforward = recalls.weighted(weight, maximum)
        self.quadratic = Quadratic()

    def summands(self) -> Iterable[Any]:
        return self.quadratic, self.attention, self.feedforward
