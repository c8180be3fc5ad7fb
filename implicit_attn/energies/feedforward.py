"""Feed-forward energies, which are functions of overlaps with hidden units, and the energy of Hyper-SET."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.energies.attention import (
    BiSoftmaxAttention,
    HeadsEnergy,
    LinearAttention,
    RowSoftmaxAttention,
    ScoreAttention,
)
from implicit_attn.energies.energy import AttentionContext, Evaluation, Quadratic, SummedEnergy
from implicit_attn.energies.heads import TokenEnergy, input_terms
from implicit_attn.energies.tokens import (
    FEATURE_MAPS,
    NONLINEAR_MAPS,
    SOFT_NORM,
    Mask,
    Projection,
    RMSNorm,
    accumulation_dtype,
    normal_density,
    visible_input,
)
from solvers.core.argument_names import hint_names
from solvers.core.checks import require_choice, require_flag

if TYPE_CHECKING:
    from typing_extensions import Unpack


class MemoryOptions(TypedDict, total=False):
    """Options shared by all subclasses of :class:`MemoryEnergy`, which documents them."""

    context_dim: int | None
    gates: bool
    bias: bool
    norm: RMSNorm | None
    bound: float | None


class MemoryEnergy(TokenEnergy):
    """Base class of sums over tokens of a function of ``y = norm(D^T z + U x + c)``, D the hidden units.

    ``projection.weight`` is ``D^T``, with one hidden unit per row; U and c are optional. With gates the
    term of hidden unit m is weighted by ``g_m(x) = 2 sigmoid(G x + g)_m``.

    Shapes: ``z`` (B, ..., d); ``x`` (B, ..., k) with the tokens of ``z``, ignored without
    ``context_dim``; ``mask`` (B, N) for ``z`` (B, N, ..., d). Masked tokens of x have no influence.

    Args:
        dim: features d of the tokens.
        memories: number M of hidden units.
        context_dim: features k of x, for hidden biases ``U x + c``; None to ignore x.
            ``context.weight`` is U (M, k), which needs no bound because it adds no curvature in z.
        gates: whether to weight the hidden units by gates from x, initially 1; needs ``context_dim``.
        bias: whether to train c (M,), initially zero; always True with ``context_dim``.
        norm: norm over the M hidden units of a token, ``RMSNorm(epsilon)`` or None.
        bound: bound on the spectral norm of ``D``, or None.
    """

    concave_without_norm = False
    takes_gates = True

    @hint_names
    def __init__(
        self,
        dim: int,
        memories: int,
        *,
        context_dim: int | None = None,
        gates: bool = False,
        bias: bool = False,
        norm: RMSNorm | None = SOFT_NORM,
        bound: float | None = None,
    ) -> None:
        super().__init__(dim, norm=norm)
        self.projection = Projection(dim, memories, bound)
        if require_flag("gates", gates) and not self.takes_gates:
            raise ValueError(f"gates must be False for a {type(self).__name__}, got True")
        if gates and context_dim is None:
            raise ValueError("gates=True needs a context, got context_dim=None")
        self.context_dim, self.gate = context_dim, None
        self.context, self.bias = input_terms(memories, context_dim, bias)
        if gates:  # initially 1, without drawing random numbers
            device = torch.empty(0).device  # the default device, which skip_init ignores
            self.gate = nn.utils.skip_init(nn.Linear, context_dim, memories, device=device)
            for parameter in self.gate.parameters():
                nn.init.zeros_(parameter)
        self.concave = self.concave_without_norm and norm is None

    def read(self, x: Any, mask: Mask) -> AttentionContext:
        """Compute ``U x + c`` and the gates, tensors (B, ..., M)."""
        if self.context is None:
            return AttentionContext(mask=mask)
        weight = self.context.weight
        x = visible_input(x, weight, mask, type(self).__name__)
        gates = None if self.gate is None else 2.0 * torch.sigmoid(self.gate(x))
        return AttentionContext(query=F.linear(x, weight, self.bias), gates=gates, mask=mask)

    def added(self, context: AttentionContext) -> Tensor | None:
        return self.bias if context.query is None else context.query


class ReLUFeedForward(MemoryEnergy):
    """``E = -1/2 sum_i sum_m g_im relu(y_im)^2``, ``y = norm(D^T z + U x + c)``, with gates g of x or 1.

    Without norm, context and gates the negative gradient is ``D relu(D^T z)``, a feed-forward block with
    tied weights. The energy without norm is concave in z for any x.

    Shapes and arguments are those of :class:`implicit_attn.energies.feedforward.MemoryEnergy`.

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

    def activate(self, y: Tensor, gates: Tensor | None, need_value: bool) -> Evaluation:
        active, value = F.relu(y), None
        if need_value:
            wide = active.to(accumulation_dtype(active.dtype))
            value = 0.5 * gated(wide.square(), gates).sum(-1)
        return value, active if gates is None else active * gates


class GELUFeedForward(MemoryEnergy):
    """``E = -1/2 sum_i sum_m g ( (y^2 - 1) Phi(y) + y phi(y) )``, ``y = norm(D^T z + U x + c)_im``.

    Phi and phi are the distribution function and the density of N(0, 1), g gates of x or 1. Each summand
    is an integral of the exact GELU, so without norm, context and gates the negative gradient is
    ``D gelu(D^T z)``. The energy is not concave, because GELU decreases below -0.75.

    Shapes and arguments are those of :class:`implicit_attn.energies.feedforward.MemoryEnergy`.
    """

    def activate(self, y: Tensor, gates: Tensor | None, need_value: bool) -> Evaluation:
        value = None
        if need_value:
            wide = y.to(accumulation_dtype(y.dtype))
            below = torch.special.ndtr(wide)
            integral = (wide.square() - 1.0) * below + wide * normal_density(wide)
            value = 0.5 * gated(integral, gates).sum(-1)
        return value, gated(F.gelu(y), gates)


class SoftmaxFeedForward(MemoryEnergy):
    """``E = -sum_i log sum_m exp(y_im)``, ``y = norm(D^T z + U x + c)``.

    Without norm and context the negative gradient is ``D softmax(D^T z)``, retrieval from memories.
    The energy without norm is concave in z for any x. It does not support gates, because weights ``g_m``
    of the exponentials are equivalent to hidden biases ``log g_m``.

    Shapes and arguments are those of :class:`implicit_attn.energies.feedforward.MemoryEnergy`.

    Source: Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646, table 18.
    """

    concave_without_norm = True
    takes_gates = False

    def activate(self, y: Tensor, gates: Tensor | None, need_value: bool) -> Evaluation:
        wide = y.to(accumulation_dtype(y.dtype))
        return wide.logsumexp(-1) if need_value else None, y.softmax(-1)


class GatedFeedForward(MemoryEnergy):
    """``E = -1/2 sum_i ( sum_m g_im phi(y_im) )^2``, ``y = norm(D^T z + U x + c)``, gates g of x or 1.

    Without norm, context and gates the negative gradient is ``D (s phi'(y))`` with ``s = sum_m phi(y_m)``,
    so each hidden unit is gated by the sum of all. The sum runs over M units, so weights of order 1/M keep
    the curvature of order 1. With ReLU and without norm the energy is concave in z for any x.

    Shapes and other arguments are those of :class:`implicit_attn.energies.feedforward.MemoryEnergy`.

    Args:
        activation: phi, ``"gelu"`` (exact), ``"relu"``, ``"sigmoid"`` (as published), ``"tanh"``,
            ``"softplus"``, ``"silu"``, ``"elu"`` (``elu(y) + 1``) or ``"plain-elu"``.

    Source: Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646, table 18.
    """

    def __init__(
        self, dim: int, memories: int, *, activation: str = "gelu", **shared: Unpack[MemoryOptions]
    ) -> None:
        super().__init__(dim, memories, **shared)
        self.activation = require_choice("activation", activation, NONLINEAR_MAPS)
        self.concave = self.norm is None and activation == "relu"

    def activate(self, y: Tensor, gates: Tensor | None, need_value: bool) -> Evaluation:
        phi, slope = FEATURE_MAPS[self.activation](y)
        assert slope is not None  # all feature maps here are nonlinear
        total = gated(phi, gates).sum(-1, keepdim=True, dtype=accumulation_dtype(phi.dtype))
        value = 0.5 * total.squeeze(-1).square() if need_value else None
        return value, total.to(y.dtype) * gated(slope, gates)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"


def gated(units: Tensor, gates: Tensor | None) -> Tensor:
    """Multiply hidden units by their gates."""
    return units if gates is None else units * gates


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
        if name != "gelu"  # named "gated"
    },
}


def build_attention(name: str, dim: int, heads: int, **options: Any) -> HeadsEnergy:
    """Return the attention energy of this name, one of ``ATTENTIONS``."""
    return ATTENTIONS[require_choice("attention", name, ATTENTIONS)](dim, heads, **options)


def build_feedforward(name: str, dim: int, memories: int, **options: Any) -> MemoryEnergy:
    """Return the feed-forward energy of this name, one of ``FEEDFORWARDS``."""
    return FEEDFORWARDS[require_choice("feedforward", name, FEEDFORWARDS)](dim, memories, **options)


class HyperSETEnergy(SummedEnergy):
    """Energy of Hyper-SET, ``E = a E_attention(z) + b E_feedforward(z) + 1/2 |z - x|^2``.

    The first two energies are those of ``HyperSETLayer``, here with the full derivative of the norm. For
    a minimum to exist and to be computable throughout training, the norm has an epsilon of order 1, and
    the spectral norms of W and D and the weights ``0 < a, b < maximum`` are bounded.

    If the energy depends on x only in the last term, its minimum is a proximal operator of x, close to the
    identity. With ``context=True`` memories and heads depend on x, too, ``y = norm(D^T z + U x + c)``.

    Args:
        dim: features d of a token.
        heads: number of attention heads.
        memories: number M of columns of D.
        attention: a name of ``ATTENTIONS`` except "softmax": "bisoftmax", "sigmoid", "relu",
            "sigmoid-squared", "linear" or "linear-NAME" with a feature map of ``LinearAttention``.
        feedforward: a name of ``FEEDFORWARDS``: "relu", "softmax", "gelu", "gated" (by GELU) or
            "gated-NAME" with another activation of ``GatedFeedForward``.
        head_dim: width p of a head; None for ``dim / heads``.
        norm: norm of the projections, ``RMSNorm(epsilon)`` or None.
        bound: bound on the spectral norms of W and D, or None.
        weight: initial a and b.
        maximum: bound on a and b, or None.
        context: whether the features of memories and heads depend on x.

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
            raise ValueError(f"attention must have an energy, one of {energies}, got 'softmax'")
        options: dict[str, Any] = {"norm": norm, "bound": bound}
        options["context_dim"] = dim if require_flag("context", context) else None
        attends = build_attention(attention, dim, heads, head_dim=head_dim, **options)
        recalls = build_feedforward(feedforward, dim, memories, **options)
        self.attention = attends.weighted(weight, maximum)
        self.feedforward = recalls.weighted(weight, maximum)
        self.quadratic = Quadratic()

    def summands(self) -> Iterable[Any]:
        return self.quadratic, self.attention, self.feedforward
