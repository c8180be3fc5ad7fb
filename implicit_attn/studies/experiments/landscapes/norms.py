"""How far one step of bare self-attention moves random tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

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

    Where it is small, every token attends to itself alone and the step does nothing. Float64: in
    float32 the norm is exactly 0 beyond d of about 600.

    Args:
        dimensions: values of d, each >= 1.
        scales: values of c, each > 0.
        tokens, draws: rows of x; independent x at each point.
        seed: of the draws, the same x for every c.
        advance: called with the name of each dimension.

    Returns:
        A row for each (d, c): ``dimension``, ``scale``, ``norm`` (the median of the draws),
        ``smallest`` and ``largest``.

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
            moved = x - torch.softmax(scale / math.sqrt(dim) * overlaps, dim=-1) @ x
            norms = moved.flatten(1).norm(dim=1).sort().values
            row = {"dimension": dim, "scale": scale, "norm": norms.median().item()}
            table.append(row | {"smallest": norms[0].item(), "largest": norms[-1].item()})
    return table
