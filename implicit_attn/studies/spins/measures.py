"""Measures of learned couplings: the zero-sum gauge, errors, and how well they rank the true pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from solvers.core.checks import require_count


def zero_sum(couplings: Tensor) -> Tensor:
    """Couplings in the zero-sum gauge, both directions averaged, (N, N, d, d).

    Within each block ``J^ = J - mean_a J - mean_b J + mean_ab J``, then ``(J^_ij + J^_ji^T) / 2``. What
    is dropped depends on one of the two colours alone and only moves fields, so models that differ in
    it are the same. Blocks ``J_ii`` are set to 0.

    Args:
        couplings: J (N, N, d, d), floating.

    Raises:
        TypeError, ValueError: another type or shape.

    Source: Ekeberg et al. (2013), https://arxiv.org/abs/1211.1281.
    """
    _check(couplings)
    centred = couplings - couplings.mean(2, keepdim=True)
    centred = centred - centred.mean(3, keepdim=True)
    both = 0.5 * (centred + centred.permute(1, 0, 3, 2))
    own = torch.eye(len(both), dtype=torch.bool, device=both.device)
    return both.masked_fill(own[..., None, None], 0.0)


def contact_scores(couplings: Tensor) -> Tensor:
    """Strength of every pair, ``|J^_ij|_F`` in the zero-sum gauge, (N, N)."""
    return torch.linalg.matrix_norm(zero_sum(couplings))


def coupling_error(couplings: Tensor, truth: Tensor) -> float:
    """``|J^ - J^_true|_F / |J^_true|_F`` in the zero-sum gauge.

    Args:
        couplings, truth: (N, N, d, d) each.

    Raises:
        TypeError, ValueError: another type or shape; a truth whose gauged couplings are 0.
    """
    _check(couplings)
    _check(truth, "truth")
    if couplings.shape != truth.shape:
        raise ValueError(
            f"couplings {tuple(couplings.shape)} and truth {tuple(truth.shape)} differ"
        )
    true = zero_sum(truth.detach().double())  # a norm of many small numbers
    size = float(true.norm())
    if not size > 0:
        raise ValueError("truth must have couplings that are not 0 in the zero-sum gauge")
    return float((zero_sum(couplings.detach().to(true)) - true).norm()) / size


def contact_precision(scores: Tensor, edges: Tensor, number: int | None = None) -> float:
    """Share of true pairs among those with the largest scores.

    Pairs with equal scores at the limit count by their mean, as if drawn at random among them.

    Args:
        scores: (N, N) symmetric; only i < j is looked at. See :func:`contact_scores`.
        edges: (N, N) bool, the true pairs.
        number: of pairs that are looked at; None: as many as there are true ones.

    Raises:
        TypeError, ValueError: another type or shape; no true pair; ``number`` out of range.
    """
    values, true = _pairs(scores, edges)
    most = len(values)
    number = int(true.sum()) if number is None else require_count("number", number)
    if number > most:
        raise ValueError(f"number must be <= {most}, the number of pairs, got {number}")
    limit = values.sort(descending=True).values[number - 1]
    above, at = values > limit, values == limit
    left = number - int(above.sum())
    return (float(true[above].sum()) + left * float(true[at].double().mean())) / number


def roc_auc(scores: Tensor, edges: Tensor) -> float:
    """Area under the ROC curve: the chance that a true pair scores above a false one.

    Ties count one half. Arguments and errors are those of :func:`contact_precision`; there must be a
    pair that is not true, too.
    """
    false_share, true_share = roc_curve(scores, edges)
    return float(torch.trapezoid(true_share, false_share))


def roc_curve(scores: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    """Shares of the false and of the true pairs with a score of at least t, from (0, 0) to (1, 1).

    Two tensors (K + 1,), float64, one entry for each of the K different scores t, falling.
    """
    values, true = _pairs(scores, edges)
    if bool(true.all()):
        raise ValueError("edges must leave at least one pair out, got all pairs")
    kinds, which = values.unique(return_inverse=True)
    counts = []
    for chosen in (~true, true):
        count = torch.zeros(len(kinds), dtype=torch.float64, device=values.device)
        count = count.index_add(0, which, chosen.double()).flip(0).cumsum(0)
        counts.append(torch.cat([count.new_zeros(1), count / count[-1]]))
    return counts[0], counts[1]


def _pairs(scores: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    """The scores and the truth of the pairs i < j."""
    shape = tuple(scores.shape)
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] < 2:
        raise ValueError(f"scores must be (N, N) with N >= 2, got {shape}")
    if not scores.is_floating_point() or not bool(scores.isfinite().all()):
        raise ValueError(f"scores must be finite floating numbers, got {scores.dtype}")
    if edges.dtype != torch.bool or edges.shape != scores.shape:
        raise ValueError(f"edges must be bool {shape}, got {edges.dtype} {tuple(edges.shape)}")
    rows, columns = torch.triu_indices(*shape, 1, device=scores.device)
    true = edges.to(scores.device)[rows, columns]
    if not bool(true.any()):
        raise ValueError("edges must have at least one true pair, got none")
    return scores.detach()[rows, columns], true


def _check(couplings: Tensor, name: str = "couplings") -> None:
    if not isinstance(couplings, Tensor) or not couplings.is_floating_point():
        kind = couplings.dtype if isinstance(couplings, Tensor) else type(couplings).__name__
        raise TypeError(f"{name} must be a floating tensor (N, N, d, d), got {kind}")
    shape = tuple(couplings.shape)
    if len(shape) != 4 or shape[0] != shape[1] or shape[2] != shape[3]:
        raise ValueError(f"{name} must have the shape (N, N, d, d), got {shape}")
