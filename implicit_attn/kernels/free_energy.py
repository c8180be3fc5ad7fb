"""The Helmholtz free energy of queries among keys, with both its derivatives, in dense operations.

With scores ``S = beta Q K^T + bias``, for the elastic form ``beta (Q K^T - |k_j|^2 / 2) + bias``, rows
``L_i = log sum_j exp S_ij`` over the allowed pairs and ``P_ij = exp(S_ij - L_i)`` it is
``F = -beta^-1 sum_i L_i``, plus ``1/2 |q_i|^2`` of each query that has a key in the elastic form, which
completes ``-beta^-1 log sum_j exp(-beta |q_i - k_j|^2 / 2 + bias_ij)``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.special import xlogy

from implicit_attn.kernels.arguments import wide_dtype, within_exponent, without_autocast
from implicit_attn.kernels.pairs import Pairs, softmax_over_pairs
from solvers.core.checks import require_positive

Pair = tuple[Tensor, Tensor]


class Attended(NamedTuple):
    """Weights P (B, H, N, M) and L (B, H, N), float32 or wider, and which queries have a key."""

    weights: Tensor
    lse: Tensor
    attends: Tensor | None  # (B or 1, H or 1, N) bool; None: all

    def only(self, query: Tensor) -> Tensor:
        """``query`` (B, H, N, p) with zeros where there is no key."""
        return (
            query if self.attends is None else query.masked_fill(~self.attends.unsqueeze(-1), 0.0)
        )


@without_autocast
def attend(
    query: Tensor,
    key: Tensor,
    beta: float | Tensor,
    *,
    elastic: bool = False,
    pairs: Pairs | None = None,
    limit: float | None = None,
) -> Attended:
    """The softmax of the queries among the keys.

    Args:
        query, key: (B, H, N, p) and (B, H, M, p), floating.
        beta: a number, or one a head, (H, 1, 1).
        elastic: the scores are those of distances.
        pairs: which pairs there are, and their biases; None: all, without.
        limit: the caller's bound on every ``|S_ij|`` where there is no bias; up to 60 it saves the
            search for each row's maximum.
    """
    wide = wide_dtype(query)
    scores = (query.to(wide) @ key.to(wide).mT) * beta
    if elastic:
        scores = scores - (0.5 * beta) * key.to(wide).square().sum(-1).unsqueeze(-2)
    bounded = within_exponent(limit)
    if pairs is not None:
        return Attended(*softmax_over_pairs(scores, pairs, bounded))
    if bounded:
        exponentials = scores.exp()
        total = exponentials.sum(-1, keepdim=True)
        return Attended(exponentials / total, total.log().squeeze(-1), None)
    lse = scores.logsumexp(-1)
    return Attended((scores - lse.unsqueeze(-1)).exp(), lse, None)


def forces(query: Tensor, key: Tensor, attended: Attended, *, elastic: bool = False) -> Pair:
    """``dF/dQ = -P K`` and ``dF/dK = -P^T Q``; elastic ``Q - P K`` and ``diag(1^T P) K - P^T Q``."""
    weights = attended.weights.to(query.dtype)
    by_query, by_key = -(weights @ key), -(weights.mT @ query)
    if elastic:
        by_query = by_query + attended.only(query)
        by_key = by_key + weights.sum(-2).unsqueeze(-1) * key
    return by_query, by_key


@without_autocast
def query_curvature(
    query: Tensor,
    key: Tensor,
    moved: Tensor,
    beta: float | Tensor,
    attended: Attended,
    *,
    elastic: bool = False,
) -> Pair:
    """``dF/dQ``, and its change ``-W K`` as the queries move along ``moved`` among keys that stay.

    ``W`` is the tangent of P, as for ``curvatures``; elastic ``+ Q`` and ``+ dQ``.
    """
    dtype, wide = query.dtype, wide_dtype(query)
    weights = attended.weights
    force = -(weights.to(dtype) @ key)
    key, moved = key.to(wide), moved.to(wide)
    tangent = (moved @ key.mT) * beta
    curved = -((weights * (tangent - (weights * tangent).sum(-1, keepdim=True))) @ key)
    if elastic:
        force, curved = force + attended.only(query), curved + attended.only(moved)
    return force, curved.to(dtype)


@without_autocast
def curvatures(
    query: Tensor,
    key: Tensor,
    moved: Pair,
    beta: float | Tensor,
    attended: Attended,
    *,
    elastic: bool = False,
) -> Pair:
    """The change of both ``forces`` as queries and keys move along ``moved``, like query and key.

    With the tangent T of the scores and ``W = P * (T - sum_j P_ij T_ij)``, the tangent of P: these are
    ``-(W K + P dK)`` and ``-(W^T Q + P^T dQ)``; elastic ``+ dQ`` and ``+ diag(1^T W) K + diag(1^T P) dK``.
    """
    dtype, wide = query.dtype, wide_dtype(query)
    query, key, by_query, by_key = (t.to(wide) for t in (query, key, *moved))
    weights = attended.weights
    tangent = (by_query @ key.mT + query @ by_key.mT) * beta
    if elastic:
        tangent = tangent - ((key * by_key).sum(-1) * _flat(beta)).unsqueeze(-2)
    tilted = weights * (tangent - (weights * tangent).sum(-1, keepdim=True))
    of_query = -(tilted @ key + weights @ by_key)
    of_key = -(tilted.mT @ query + weights.mT @ by_query)
    if elastic:
        of_query = of_query + attended.only(by_query)
        of_key = of_key + tilted.sum(-2).unsqueeze(-1) * key
        of_key = of_key + weights.sum(-2).unsqueeze(-1) * by_key
    return of_query.to(dtype), of_key.to(dtype)


def _flat(beta: float | Tensor) -> float | Tensor:
    """``beta`` for numbers (B, H, M)."""
    return beta.squeeze(-1) if isinstance(beta, Tensor) else beta


def helmholtz_free_energy(weights: Tensor, energies: Tensor, temperature: float | Tensor) -> Tensor:
    """The free energy of attention weights, ``F(P) = sum_j P_j E_j + T sum_j P_j log P_j``.

    It is strictly convex in P on the simplex. Its minimum is ``F* = -T log sum_j exp(-E_j / T)``, at
    ``P* = softmax(-E / T)``, and ``F(P) - F* = T KL(P || P*)`` for every P.

    Args:
        weights: P, (..., M), >= 0, of which each row sums to 1; ``0 log 0 = 0``.
        energies: E, (..., M), finite.
        temperature: T > 0, a number or a tensor that broadcasts to (...).

    Returns:
        F, (...).

    Raises:
        ValueError: the shapes do not broadcast, or the temperature is a number that is not > 0.

    Source: Ren, Ouyang, Tang, Liu, "Transformers as Intrinsic Optimizers",
    https://arxiv.org/abs/2511.00907, lemma 1.
    """
    if weights.shape[-1:] != energies.shape[-1:]:
        raise ValueError(
            f"energies must have as many entries as weights, {tuple(weights.shape)}, got "
            f"{tuple(energies.shape)}"
        )
    rows = _broadcast("energies", energies.shape[:-1], weights.shape[:-1])
    if isinstance(temperature, Tensor):
        _broadcast("temperature", temperature.shape, rows)
    else:
        require_positive("temperature", temperature)
    return (weights * energies).sum(-1) + temperature * xlogy(weights, weights).sum(-1)


def _broadcast(name: str, shape: torch.Size, rows: torch.Size) -> torch.Size:
    try:
        return torch.broadcast_shapes(shape, rows)
    except RuntimeError as error:
        raise ValueError(
            f"{name} must broadcast to the rows of weights and energies, {tuple(rows)}, got "
            f"{tuple(shape)} rows"
        ) from error
