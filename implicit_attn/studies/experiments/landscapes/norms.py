"""How far one step of bare self-attention moves random tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch

from implicit_attn.studies.experiments.experiment import Advance
from implicit_attn.studies.tables import Table
from solvers.core.checks import require_count


def step_norms(
    dimensions: Sequence[int],
    scales: Sequence[float],
    *,
    tokens: int = 32,
    draws: int = 10,
    seed: int = 0,
    advance: Advance = lambda what: None,
) -> Table:
    r"""``|x - softmax(beta x x^T) x|_F`` for ``x`` (tokens, d) ~ N(0, I), ``beta = c / sqrt d``.

    Where it is small, every token attends to itself alone and the step does nothing. It is computed as
    ``sum_j w_ij (x_i - x_j)``: the difference as it stands loses its digits to rounding where it is
    below 1e-16 of x (1e-7 in float32).

    Args:
        dimensions: values of d, each >= 1.
        scales: values of c, each > 0.
        tokens, draws: rows of x; independent x at each point.
        seed: of the draws, the same x for every c.
        advance: called with the name of each dimension.

    Returns:
        A row for each (d, c): ``dimension``, ``scale``, ``norm`` (the median of the draws),
        ``smallest``, ``largest``, and ``expected``, the root mean square by :func:`large_dimension_rms`,
        NaN where that does not exist.

    Raises:
        ValueError: for a number below its bound.
    """
    require_count("tokens", tokens)
    require_count("draws", draws)
    generator = torch.Generator().manual_seed(seed)
    table: Table = []
    for dim in dimensions:
        advance(f"d = {require_count('dimensions', dim)}")
        x = torch.randn(draws, tokens, dim, generator=generator, dtype=torch.float64)
        overlaps = x @ x.mT
        for scale in scales:
            if not 0 < scale < math.inf:
                raise ValueError(f"scales must be > 0 and finite, got {scale}")
            weights = torch.softmax(scale / math.sqrt(dim) * overlaps, dim=-1)
            # x_i minus its weighted mean, without the digits that cancel where w_ii is nearly 1.
            weights.diagonal(dim1=-2, dim2=-1).zero_()
            moved = weights.sum(-1, keepdim=True) * x - weights @ x
            norms = moved.flatten(1).norm(dim=1).sort().values
            row = {"dimension": dim, "scale": scale, "norm": norms.median().item()}
            row |= {"smallest": norms[0].item(), "largest": norms[-1].item()}
            table.append(row | {"expected": large_dimension_rms(dim, scale, tokens)})
    return table


def large_dimension_rms(dim: int, scale: float, tokens: int) -> float:
    r"""The root mean square of that norm where the weights of other tokens are small.

    Then ``w_ij = exp(beta x_i.(x_j - x_i))``, and the mean of ``sum_i |sum_j w_ij (x_j - x_i)|^2`` is a
    sum of Gaussian integrals, over pairs (j = k) and over triples::

        N (N-1) d [ 2 (1 + 4 beta - 4 beta^2)^(-d/2 - 1)
                    + (N-2) (1 - beta)^2 (1 + 4 beta - 2 beta^2)^(-d/2 - 1) ],   beta = c / sqrt d

    It holds for large d. Single draws lie mostly below it, since few large weights make the mean.

    Returns:
        The root, or NaN where the integral over pairs does not exist, ``beta >= 1.2071``.
    """
    beta = scale / math.sqrt(dim)
    pairs, triples = 1 + 4 * beta - 4 * beta**2, 1 + 4 * beta - 2 * beta**2
    if pairs <= 0:
        return math.nan
    power = -dim / 2 - 1
    both = 2 * pairs**power + (tokens - 2) * (1 - beta) ** 2 * triples**power
    return math.sqrt(tokens * (tokens - 1) * dim * both)


def spaced_dimensions(count: int) -> list[int]:
    """``count`` different integers from 2 to 1024: powers of 2, then numbers between, widest gap first.

    Raises:
        ValueError: for fewer than 2, or more than there are.
    """
    if require_count("count", count, low=2) > 1023:
        raise ValueError(f"count must be at most 1023, got {count}")
    first = min(count, 10)
    found = [2 ** round(1 + 9 * k / (first - 1)) for k in range(first)]
    while len(found) < count:
        gaps = [(b / a, i) for i, (a, b) in enumerate(pairwise(found)) if b > a + 1]
        i = max(gaps)[1]
        low, high = found[i : i + 2]
        found.insert(i + 1, min(max(round(math.sqrt(low * high)), low + 1), high - 1))
    return found
