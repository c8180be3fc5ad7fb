"""Attention whose weights are a function of each score alone: nothing is normalised over the tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from implicit_attn.energies.heads.heads_energy import HeadsEnergy
from implicit_attn.energies.heads.temperatures import Beta
from implicit_attn.energies.projected import SOFT_NORM, RMSNorm
from implicit_attn.energies.tokens import Pair, accumulation_dtype, sum_samples
from implicit_attn.kernels.arguments import rescaled
from solvers.core.checks import require_choice


class Score(NamedTuple):
    """A function F of a score, the weight ``w = 2 F'``, and ``w'``, entry by entry."""

    value: Callable[[Tensor], Tensor]
    weight: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


def _sigmoid_weight(scores: Tensor) -> Tensor:
    gate = scores.sigmoid()
    return gate - gate.square()


def _sigmoid_slope(scores: Tensor) -> Tensor:
    gate = scores.sigmoid()
    return gate * (1.0 - gate) * (1.0 - 2.0 * gate)


def _squared_weight(scores: Tensor) -> Tensor:
    gate = scores.sigmoid()
    return gate.square() * (1.0 - gate)


def _squared_slope(scores: Tensor) -> Tensor:
    gate = scores.sigmoid()
    return gate.square() * (1.0 - gate) * (2.0 - 3.0 * gate)


_SCORES = {
    "relu": Score(lambda s: F.relu(s).square() / 4.0, F.relu, lambda s: (s > 0).to(s.dtype)),
    "sigmoid": Score(lambda s: s.sigmoid() / 2.0, _sigmoid_weight, _sigmoid_slope),
    "sigmoid-squared": Score(lambda s: s.sigmoid().square() / 4.0, _squared_weight, _squared_slope),
}
SCORES = tuple(_SCORES)


def score_weights(score: str, scores: Tensor) -> Tensor:
    """The weights of attention, ``2 F'(S)`` for one of ``SCORES``, entry by entry."""
    return _SCORES[score].weight(scores)


class ScoreAttention(HeadsEnergy):
    """``E = beta^-1 sum_h sum_ij F(beta y_i.y_j)``, ``y = norm(W_h z)``, for a function F of a score.

    Gradient by y: ``w(S) Y`` with ``S = beta Y Y^T`` and the weights ``w = 2 F'``:

    - ``"relu"``: ``F(s) = relu(s)^2 / 4``, ``w = relu(s)``;
    - ``"sigmoid-squared"``: ``F(s) = sigma(s)^2 / 4``, ``w = sigma(s)^2 (1 - sigma(s))``;
    - ``"sigmoid"``: ``F(s) = sigma(s) / 2``, ``w = sigma(s) (1 - sigma(s))``, for which
      ``SigmoidAttention`` computes the same in strips.

    Dense: memory grows as N^2. Neither convex nor concave.

    Shapes and other arguments as for
    :class:`implicit_attn.energies.attention.HeadsEnergy`.

    Args:
        score: F, one of those names.

    Source: the forms are those of the code of Hu, Zou, Xu, "Hyper-SET"
    (https://arxiv.org/abs/2502.11646, table 18 for the sigmoid), with the sign and the factors that
    make each the gradient of this energy.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        score: str = "relu",
        head_dim: int | None = None,
        beta: Beta = None,
        learned_beta: bool = False,
        context_dim: int | None = None,
        bias: bool = False,
        norm: RMSNorm | None = SOFT_NORM,
        bound: float | None = None,
    ) -> None:
        super().__init__(
            dim, heads, head_dim=head_dim, beta=beta, learned_beta=learned_beta,
            context_dim=context_dim, bias=bias, norm=norm, bound=bound,
        )  # fmt: skip
        self.score = require_choice("score", score, SCORES)

    def potential_and_force(self, y: Tensor, mask: Tensor | None) -> Pair:
        features, beta, root = self._at_one(y)
        scores = (features @ features.mT) * beta
        values = self._function.value(scores.to(accumulation_dtype(scores.dtype)))
        if mask is not None:
            # F(0) may be another number than 0.
            values = values.masked_fill(~(mask[:, None, :, None] & mask[:, None, None, :]), 0.0)
        force = self._function.weight(scores) @ features
        if root is None:
            return sum_samples(values) / beta, force
        return sum_samples(values / root.square()), (force / root).to(y.dtype)

    def force_and_curvature(self, y: Tensor, v: Tensor, mask: Tensor | None) -> Pair:
        features, beta, root = self._at_one(y)
        moved = v if root is None else v.to(root.dtype)
        scores = (features @ features.mT) * beta
        weights, one_side = self._function.weight(scores), moved @ features.mT
        changes = self._function.slope(scores) * ((one_side + one_side.mT) * beta)
        force, curved = weights @ features, weights @ moved + changes @ features
        return force if root is None else (force / root).to(y.dtype), curved.to(y.dtype)

    @property
    def _function(self) -> Score:
        return _SCORES[self.score]

    def _at_one(self, y: Tensor) -> tuple[Tensor, float, Tensor | None]:
        """Features and a number for beta that give the scores, and ``beta^1/2`` where heads differ."""
        beta, root = self._temperature(y)
        return (y, beta, None) if root is None else (rescaled(y, root), beta, root)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, score={self.score}"
