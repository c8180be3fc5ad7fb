"""Trained gains of the norms in Hyper-SET's step, which make it a gradient step of no energy."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.energies.attention import (
    BiSoftmaxAttention,
    HeadsEnergy,
    LinearAttention,
    RowSoftmaxAttention,
    SigmoidAttention,
)
from implicit_attn.energies.context.memory_energy import MemoryEnergy
from implicit_attn.energies.heads.score_attention import ScoreAttention, score_weights
from implicit_attn.energies.linear.feature_maps import map_features
from implicit_attn.energies.projected import merge_heads, split_heads
from implicit_attn.energies.tokens import hide
from implicit_attn.kernels import bisoftmax
from solvers.core.checks import require_choice

GAINS = ("none", "shared", "separate")


class NormGains(nn.Module):
    r"""The two directions of Hyper-SET's step with trained gains after the RMS norms ::

        attention:     sum_h W_h F(q, k, v),   q, k, v = g_q * u, g_k * u, g_v * u,   u = RMSNorm(W_h^T X)
        feed-forward:  -D phi(g * RMSNorm(D^T X))

    With ``beta`` the inverse temperature and ``S = beta Q K^T``, F is ``(softmax(S, rows) + softmax(S,
    columns)) V`` for bi-softmax attention, the first of the two for "softmax", ``w(S) V`` for attention
    with the weights w of a score, and ``phi'(Q) * beta phi(V) (phi(Q)^T phi(K))`` for linear attention
    with the feature map phi. For the ReLU energy the feed-forward phi is relu, and so on.

    The official code has these gains. A step along such directions descends nothing: the gains of
    queries, keys and values differ, and the derivative of the norm is dropped. The energies that are
    monitored along the way are those without gains, in the official code and here.

    Args:
        kind: "separate": gains of queries, keys and values of their own, as the official models of
            images have; "shared": one for all three, as those of Sudoku and masked images.
        width: features p of a head; the gains of all heads are the same.
        memories: M.
        epsilon: of the norms; None: the machine epsilon of the dtype, as official.

    Source: Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646, its official code.
    """

    def __init__(
        self, kind: str, width: int, memories: int, *, epsilon: float | None = None
    ) -> None:
        super().__init__()
        self.kind = require_choice("gains", kind, GAINS[1:])
        self.query = nn.RMSNorm(width, eps=epsilon)
        separate = kind == "separate"
        self.key = nn.RMSNorm(width, eps=epsilon) if separate else None
        self.value = nn.RMSNorm(width, eps=epsilon) if separate else None
        self.memory = nn.RMSNorm(memories, eps=epsilon)

    def attention_direction(
        self, energy: HeadsEnergy, z: Tensor, mask: Tensor | None, weight: Tensor | None
    ) -> Tensor:
        """The direction whose negative attention takes, like ``z``; 0 at masked tokens."""
        weight = energy.weight if weight is None else weight
        raw = split_heads(F.linear(hide(z, mask), weight), energy.heads)
        query = self.query(raw)
        key = query if self.key is None else self.key(raw)
        value = query if self.value is None else self.value(raw)
        force = mix(energy, query, key, value, mask)
        return hide(merge_heads(force) @ weight, mask).to(z.dtype)

    def feedforward_direction(
        self, energy: MemoryEnergy, z: Tensor, mask: Tensor | None, weight: Tensor | None
    ) -> Tensor:
        """The direction whose negative the feed-forward part takes, like ``z``."""
        weight = energy.weight if weight is None else weight
        force = energy.force(self.memory(F.linear(hide(z, mask), weight)), mask)
        return hide(force @ weight, mask).to(z.dtype)


def mix(
    energy: HeadsEnergy, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Tensor:
    """F of the formula above, (B, heads, N, p), for the kind of attention that ``energy`` has."""
    beta = energy.beta
    assert not isinstance(beta, Tensor)  # Hyper-SET trains no temperatures
    if isinstance(energy, RowSoftmaxAttention):
        return _masked_scores(beta, query, key, mask).softmax(-1) @ value
    if isinstance(energy, BiSoftmaxAttention):
        if key is query and value is query:
            return bisoftmax(query, beta, mask=mask)[0]
        scores = _masked_scores(beta, query, key, mask)
        return (scores.softmax(-1) + scores.softmax(-2)) @ value
    if isinstance(energy, LinearAttention):
        return _linear(energy, query, key, value, mask)
    assert isinstance(energy, (SigmoidAttention, ScoreAttention))
    score = energy.score if isinstance(energy, ScoreAttention) else "sigmoid"
    return score_weights(score, beta * (query @ key.mT)) @ value


def _masked_scores(beta: float, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """Scores, the least number where a token is masked: finite, so that empty rows are no NaN."""
    scores = beta * (query @ key.mT)
    if mask is None:
        return scores
    pairs = mask[:, None, :, None] & mask[:, None, None, :]
    return scores.masked_fill(~pairs, torch.finfo(scores.dtype).min)


def _linear(
    energy: LinearAttention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Tensor:
    mapped = map_features(energy.feature_map, query, bent=False)
    keys, values = (map_features(energy.feature_map, y, bent=False).value for y in (key, value))
    if mask is not None:  # phi(0) may be another number than 0
        keys = keys.masked_fill(~mask[:, None, :, None], 0.0)
    return mapped.push(values @ (mapped.value.mT @ keys) * energy.beta)
