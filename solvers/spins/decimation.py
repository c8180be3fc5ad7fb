"""Decimation: fix the surest site, solve again, until all sites have a state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from solvers.core.checks import require_callable, require_instance, require_number
from solvers.core.layout import take
from solvers.core.solution import Solution, Status
from solvers.spins.belief_propagation import read_clamped

# solve(rows, given, start) for the samples rows (n,): given values (n, N, d) and bools (n, N); start is
# the value of these samples' last solution, None at first.
Solve = Callable[[Tensor, tuple[Tensor, Tensor], Any], Solution]


class Decimation(NamedTuple):
    """What :func:`decimate` finds.

    Attributes:
        states: (B, N) int64, the state of every site.
        mean: (B, N, d), the marginals of the last solve; fixed sites are one-hot.
        accepted: (B,) bool, ``accept`` took the states; without it, that no contradiction was met.
        status: (B,) int64, of the last solve: values of :class:`solvers.Status`.
        fixed: (B,) int64, sites that were fixed, those that were given left out.
        evaluations: (B,) int64, of all solves.
    """

    states: Tensor
    mean: Tensor
    accepted: Tensor
    status: Tensor
    fixed: Tensor
    evaluations: Tensor


@torch.no_grad()
def decimate(
    solve: Solve,
    given: tuple[Tensor, Tensor],
    *,
    certain: float | None = None,
    accept: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Decimation:
    r"""States of coupled sites by decimation: fix the surest free site, solve for the others, and so on.

    The surest site is that with the largest marginal; it gets its most probable state. A sample ends when
    ``accept`` takes its most probable states, when all its sites are fixed, or at a contradiction
    (``Status.CONTRADICTORY``).

    Args:
        solve: ``solve(rows, given, start) -> Solution`` of the samples ``rows`` (n,) int64, with the pair
            ``given`` of values (n, N, d) and bools (n, N), as for :func:`solvers.belief_propagation` and
            :func:`solvers.adaptive_tap`. Its ``value`` must have ``mean`` (n, N, d), the marginals.
            ``start`` is the value of the last solution of these samples, for a warm start; None at first.
        given: values (B, N, d) and bools (B, N): the sites that are known to begin with.
        certain: in [0, 1], sites with a marginal at least as large are fixed together. None: one at a time.
        accept: ``accept(rows, states) -> (n,) bool`` of the samples ``rows`` and their states (n, N).

    Raises:
        TypeError, ValueError: for arguments that do not fit, naming the argument.

    Example:
        >>> from solvers import belief_propagation
        >>> edges, repel = torch.tensor([[0, 1], [1, 2]]), -4.0 * torch.eye(2).expand(2, 2, 2)
        >>> x = torch.zeros(1, 3, 2)  # three sites in a chain, of two colours, that must differ
        >>> values = torch.nn.functional.one_hot(torch.zeros(1, 3, dtype=torch.int64), 2).float()
        >>> clamped = torch.tensor([[True, False, False]])  # the first has colour 0
        >>> def solve(rows, given, start):
        ...     options = {"edges": edges, "given": given, "start": start}
        ...     return belief_propagation(repel, x[rows], on_failure="ignore", **options)
        >>> decimate(solve, (values, clamped)).states  # (B, N)
        tensor([[0, 1, 0]])

    Source: Montanari, Ricci-Tersenghi and Semerjian (2007), "Solving constraint satisfaction problems
    through belief propagation-guided decimation", https://arxiv.org/abs/0709.1667.
    """
    require_callable("solve", solve)
    require_callable("accept", accept, optional=True)
    if certain is not None:
        require_number("certain", certain, low=0.0, high=1.0)
    values, clamped = _read(given)
    batch, sites, _ = values.shape
    counts = torch.zeros(batch, dtype=torch.long, device=values.device)
    found = Decimation(
        states=counts.new_zeros(batch, sites),
        mean=torch.zeros_like(values),
        accepted=counts.bool(),
        status=counts.clone(),
        fixed=counts.clone(),
        evaluations=counts.clone(),
    )
    rows = torch.arange(batch, device=values.device)  # of those that are still on the way
    known, start = clamped.sum(1), None
    while len(rows) > 0:
        solution = solve(rows, (values, clamped), start)
        mean = solution.value.mean.to(values.dtype)
        found.evaluations[rows] += solution.evaluations
        contradictory = solution.status == Status.CONTRADICTORY
        # At a contradiction the marginals before it, with what was fixed then, say more than none.
        found.mean[rows] = torch.where(contradictory[:, None, None], found.mean[rows], mean)
        whole = clamped.all(1)
        accepted = whole if accept is None else _accepts(accept, rows, mean.argmax(2))
        broken = contradictory | ~mean.flatten(1).isfinite().all(1)
        accepted = accepted & ~broken
        ended = broken | whole | accepted
        out = rows[ended]
        states = torch.where(clamped, values.argmax(2), found.mean[rows].argmax(2))
        found.states[out], found.accepted[out] = states[ended], accepted[ended]
        found.status[out], found.fixed[out] = (
            solution.status[ended],
            (clamped.sum(1) - known)[ended],
        )
        stay = torch.nonzero(~ended).flatten()
        start = take(solution.value, stay, len(rows))
        rows, known, mean = rows[stay], known[stay], mean[stay]
        values, clamped = _fix(mean, values[stay], clamped[stay], certain)
    return found


def _accepts(accept: Callable[[Tensor, Tensor], Tensor], rows: Tensor, states: Tensor) -> Tensor:
    found = accept(rows, states)
    right = isinstance(found, Tensor) and found.dtype == torch.bool
    if not right or found.shape != rows.shape:
        shown = (found.dtype, tuple(found.shape)) if isinstance(found, Tensor) else type(found)
        raise TypeError(f"accept must return bools of the shape ({len(rows)},), got {shown}")
    return found


def _fix(
    mean: Tensor, values: Tensor, clamped: Tensor, certain: float | None
) -> tuple[Tensor, Tensor]:
    """One-hot values at the surest free site, and at those that are ``certain``."""
    score, state = mean.max(2)
    surest = score.masked_fill(clamped, -1.0).argmax(1, keepdim=True)
    chosen = torch.zeros_like(clamped).scatter(1, surest, True)
    if certain is not None:
        chosen = chosen | (score >= certain)
    chosen = chosen & ~clamped
    states = F.one_hot(state, mean.shape[2]).to(values)
    return torch.where(chosen.unsqueeze(2), states, values), clamped | chosen


def _read(given: Any) -> tuple[Tensor, Tensor]:
    """Values (B, N, d), zero at free sites, and where they are clamped, (B, N) bool."""
    require_instance("given", given, tuple, "a pair (values, clamped) of tensors")
    values = given[0] if given else None
    if not isinstance(values, Tensor) or values.dim() != 3:
        shown = tuple(values.shape) if isinstance(values, Tensor) else type(values)
        raise ValueError(f"given must hold values of the shape (B, N, d) first, got {shown}")
    clamped = read_clamped(given, values, None)
    assert clamped is not None
    return clamped
