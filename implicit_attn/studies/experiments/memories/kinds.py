"""What kinds of fixed points a continuous memory has: single patterns, clusters, the average of all."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

import solvers
from implicit_attn.energies import Hopfield
from implicit_attn.studies.experiments.experiment import Advance
from implicit_attn.studies.tables import Table
from solvers.core.checks import require_count, require_nonnegative

RTOL, MAX_STEPS = 1e-10, 20_000


def clustered_patterns(
    clusters: int, members: int, dim: int, spread: float, generator: torch.Generator
) -> Tensor:
    """Unit vectors as centres, each plus ``spread`` times unit vectors, (clusters members, dim).

    One member a cluster with ``spread`` 0: random unit vectors.
    """
    centers = _unit_vectors(require_count("clusters", clusters), dim, generator)
    around = _unit_vectors(clusters * require_count("members", members), dim, generator)
    spread = require_nonnegative("spread", spread)
    return centers.repeat_interleave(members, dim=0) + spread * around


def _unit_vectors(count: int, dim: int, generator: torch.Generator) -> Tensor:
    drawn = torch.randn(count, dim, generator=generator, dtype=torch.float64)
    return drawn / drawn.norm(dim=1, keepdim=True)


def fixed_point_kinds(
    patterns: Tensor, betas: Sequence[float], *, advance: Advance = lambda what: None
) -> Table:
    """The fixed points of ``z <- X^T softmax(beta X z)`` that its patterns lead to.

    Each pattern is iterated by itself to a relative change of 1e-10. Its effective number of
    patterns is ``exp(entropy of softmax(beta X z))`` at the end: 1 for a single pattern, the size of
    a cluster for its average, M for the average of all.

    Args:
        patterns: X, (M, d) floating.
        betas: inverse temperatures, > 0.
        advance: called with the name of each beta.

    Returns:
        A row for each start and beta: ``beta``, ``start`` (its number), ``effective``, ``converged``,
        and ``steps``.

    Raises:
        ValueError: for a beta out of range.
    """
    table: Table = []
    for beta in betas:
        advance(f"beta = {beta:g}")
        memory = Hopfield(patterns, beta=beta)

        def update(z: Tensor, memory: Hopfield = memory) -> Tensor:
            return z - memory.grad(z)

        # Plain iteration alone keeps to the basin that a start lies in.
        solution = solvers.fixed_point(
            update,
            patterns,
            solver=solvers.Forward(),
            tolerance=solvers.Tolerance(rtol=RTOL, atol=RTOL),
            max_steps=MAX_STEPS,
            adjoint=None,
            on_failure="ignore",
        )
        share = (beta * solution.value @ patterns.mT).softmax(1)
        effective = torch.special.entr(share).sum(1).exp()
        columns = (effective, solution.converged, solution.steps)
        for start, row in enumerate(zip(*(each.tolist() for each in columns), strict=True)):
            values = dict(zip(("effective", "converged", "steps"), row, strict=True))
            table.append({"beta": beta, "start": start, **values})
    return table


def summary_of_kinds(table: Table, sizes: Sequence[int]) -> Table:
    """A row for each beta: least, median and largest effective number, and the share of the starts
    whose number lies within 5 % of each of ``sizes``."""
    found: Table = []
    for beta in dict.fromkeys(row["beta"] for row in table):
        rows = [row for row in table if row["beta"] == beta]
        numbers = torch.tensor([row["effective"] for row in rows], dtype=torch.float64)
        low, middle, high = numbers.min(), numbers.quantile(0.5), numbers.max()
        shares = {
            f"share at {size}": ((numbers / size).log().abs() <= math.log(1.05))
            .double()
            .mean()
            .item()
            for size in sizes
        }
        found.append(
            {"beta": beta, "least": low.item(), "median": middle.item(), "largest": high.item()}
            | shares
            | {"converged": sum(row["converged"] for row in rows) / len(rows)}
        )
    return found
