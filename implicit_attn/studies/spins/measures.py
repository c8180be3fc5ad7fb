"""Measures of learned couplings: errors, and how well they rank the true pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from implicit_attn.energies.spins import binary_size, check_couplings, zero_sum
from solvers.core.checks import require_count, require_instance


def contact_scores(couplings: Tensor) -> Tensor:
    """Strength of every pair, ``|J^_ij|_F`` in the zero-sum gauge, (N, N).

    Raises:
        TypeError, ValueError: as :func:`check_couplings`.
    """
    check_couplings(couplings)
    size = binary_size(couplings)
    return torch.linalg.matrix_norm(zero_sum(couplings / size)) * size


def coupling_error(couplings: Tensor, truth: Tensor) -> float:
    """``|J^ - J^_true|_F / |J^_true|_F`` in the zero-sum gauge.

    Args:
        couplings, truth: (N, N, d, d) each.

    Raises:
        TypeError, ValueError: another type or shape; NaN or infinity in one of them; a truth whose
            gauged couplings are 0.
    """
    check_couplings(couplings)
    check_couplings(truth, "truth")
    if couplings.shape != truth.shape:
        raise ValueError(
            f"couplings {tuple(couplings.shape)} and truth {tuple(truth.shape)} differ"
        )
    unit = binary_size(truth)
    true = zero_sum(truth.detach().double() / unit)  # a norm of many small numbers
    size = float(true.norm())
    if not size > 0:
        raise ValueError("truth must have couplings that are not 0 in the zero-sum gauge")
    return float((zero_sum(couplings.detach().to(true) / unit) - true).norm()) / size


def contact_precision(scores: Tensor, edges: Tensor, number: int | None = None) -> float:
    """Share of true pairs among those with the largest scores.

    Pairs with equal scores at the limit count by their mean, as if drawn at random among them.

    Args:
        scores: (N, N) symmetric; only i < j is looked at. See :func:`contact_scores`.
        edges: (N, N) bool, the true pairs, each in one direction or in both.
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
    for name, value in (("scores", scores), ("edges", edges)):
        require_instance(name, value, Tensor, "a tensor")
    shape = tuple(scores.shape)
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] < 2:
        raise ValueError(f"scores must be (N, N) with N >= 2, got {shape}")
    if not scores.is_floating_point() or not bool(scores.isfinite().all()):
        raise ValueError(f"scores must be finite floating numbers, got {scores.dtype}")
    if edges.dtype != torch.bool or edges.shape != scores.shape:
        raise ValueError(f"edges must be bool {shape}, got {edges.dtype} {tuple(edges.shape)}")
    rows, columns = torch.triu_indices(*shape, 1, device=scores.device)
    true = (edges | edges.T).to(scores.device)[rows, columns]
    if not bool(true.any()):
        raise ValueError("edges must have at least one true pair, got none")
    return scores.detach()[rows, columns], true
