"""Decimation: fix the surest site, solve again, until all sites have a state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from solvers.core.checks import (
    require_callable,
    require_count,
    require_instance,
    require_nonnegative,
    require_number,
)
from solvers.core.layout import take
from solvers.core.solution import Solution, Status
from solvers.spins.belief_propagation import read_clamped

# solve(rows, given, start) for the samples rows (n,): given values (n, N, d) and bools (n, N); start is
# the value of these samples' last solution, None at first.
Solve = Callable[[Tensor, tuple[Tensor, Tensor], Any], Solution]


class Decimation(NamedTuple):
    """What :func:`decimate` finds, of the best attempt at each sample.

    Attributes:
        states: (B, N) int64, the state of every site.
        mean: (B, N, d), the marginals when the attempt ended; fixed sites are one-hot.
        accepted: (B,) bool, ``accept`` took the states; without it, that no contradiction was met.
        status: (B,) int64, of the last solve: values of :class:`solvers.Status`.
        fixed: (B,) int64, sites that the attempt had fixed, those that were given left out.
        attempts: (B,) int64, how many there were.
        evaluations: (B,) int64, of all solves of all attempts.
    """

    states: Tensor
    mean: Tensor
    accepted: Tensor
    status: Tensor
    fixed: Tensor
    attempts: Tensor
    evaluations: Tensor


@torch.no_grad()
def decimate(
    solve: Solve,
    given: tuple[Tensor, Tensor],
    *,
    at_once: int = 1,
    certain: float | None = None,
    accept: Callable[[Tensor, Tensor], Tensor] | None = None,
    restarts: int = 0,
    noise: float = 0.0,
    generator: torch.Generator | None = None,
) -> Decimation:
    r"""States of coupled sites by decimation: fix the surest free site, solve for the others, and so on.

    With the marginals ``p_i(a)`` of a solve, the site i that is fixed, and its state a, are those of the
    largest ``log p_i(a) + noise g_ia``, where g is Gumbel noise: with 0 the most probable state of the surest
    site; with 1 a state drawn from the marginal of a site at random. An attempt ends when ``accept``
    takes the most probable states, when all sites are fixed, or at a contradiction
    (``Status.CONTRADICTORY``).

    Args:
        solve: ``solve(rows, given, start) -> Solution`` of the samples ``rows`` (n,) int64, with the pair
            ``given`` of values (n, N, d) and bools (n, N), as for :func:`solvers.belief_propagation` and
            :func:`solvers.adaptive_tap`. Its ``value`` must have ``mean`` (n, N, d), the marginals.
            ``start`` is the value of the last solution of these samples, for a warm start; None at the
            beginning of an attempt.
        given: values (B, N, d) and bools (B, N): the sites that are known to begin with.
        at_once: sites fixed in each round at least, >= 1.
        certain: in [0, 1], sites with a marginal at least as large are fixed together too, none but the
            most probable state without noise. None: no more than ``at_once``.
        accept: ``accept(rows, states) -> (n,) bool`` of the samples ``rows`` and their states (n, N).
        restarts: further attempts at samples that were not accepted, which need ``noise``.
        noise: of the further attempts, >= 0; the first has none.
        generator: of the noise, on the device of ``given``; None: the global one.

    Returns:
        A :class:`Decimation`. Of a sample that is never accepted, the attempt that fixed most sites.

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
    require_count("at_once", at_once)
    if certain is not None:
        require_number("certain", certain, low=0.0, high=1.0)
    require_count("restarts", restarts, low=0)
    require_nonnegative("noise", noise)
    if restarts > 0 and noise == 0:
        raise ValueError(
            "noise must be > 0 for restarts, which would repeat the first attempt, got 0"
        )
    require_instance("generator", generator, torch.Generator, "a torch.Generator", optional=True)
    values, clamped = _read(given)
    run = _Run(solve, accept, at_once, certain, generator)
    best = run.attempt(values, clamped, torch.arange(len(values), device=values.device), 0.0)
    for _ in range(restarts):
        rows = torch.nonzero(~best.accepted).flatten()
        if len(rows) == 0:
            break
        best = _better(best, run.attempt(values, clamped, rows, noise), rows)
    return best


@dataclass(frozen=True)
class _Run:
    """The options of a call."""

    solve: Solve
    accept: Callable[[Tensor, Tensor], Tensor] | None
    at_once: int
    certain: float | None
    generator: torch.Generator | None

    def attempt(self, values: Tensor, clamped: Tensor, rows: Tensor, noise: float) -> Decimation:
        """One attempt at the samples ``rows`` (n,) of all."""
        number = len(rows)
        found = _empty(values, number)
        here = torch.arange(number, device=rows.device)  # of those that are still on the way
        values, clamped = values[rows], clamped[rows]
        known, start = clamped.sum(1), None
        while len(here) > 0:
            solution = self.solve(rows[here], (values, clamped), start)
            mean = solution.value.mean.to(values.dtype)
            found.evaluations[here] += solution.evaluations
            ended, accepted = self._ended(rows[here], mean, solution, clamped)
            whole = solution.status != Status.CONTRADICTORY
            # At a contradiction the marginals before it, with what was fixed then, say more than none.
            found.mean[here] = torch.where(whole[:, None, None], mean, found.mean[here])
            out = here[ended]
            found.states[out] = torch.where(
                clamped[ended], values[ended].argmax(2), found.mean[out].argmax(2)
            )
            found.accepted[out], found.status[out] = accepted[ended], solution.status[ended]
            found.fixed[out] = (clamped.sum(1) - known[here])[ended]
            stay = torch.nonzero(~ended).flatten()
            start = take(solution.value, stay, len(here))
            here, values, clamped, mean = here[stay], values[stay], clamped[stay], mean[stay]
            if len(here) > 0:
                values, clamped = self._fix(mean, values, clamped, noise)
        return found

    def _ended(
        self, rows: Tensor, mean: Tensor, solution: Solution, clamped: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Which samples are done, and which of them are accepted, (n,) bool both."""
        broken = (solution.status == Status.CONTRADICTORY) | ~mean.flatten(1).isfinite().all(1)
        whole = clamped.all(1)
        accepted = whole if self.accept is None else self._accepts(rows, mean.argmax(2))
        accepted = accepted & ~broken
        return broken | whole | accepted, accepted

    def _accepts(self, rows: Tensor, states: Tensor) -> Tensor:
        assert self.accept is not None
        found = self.accept(rows, states)
        right = isinstance(found, Tensor) and found.dtype == torch.bool
        if not right or found.shape != rows.shape:
            shown = (found.dtype, tuple(found.shape)) if isinstance(found, Tensor) else type(found)
            raise TypeError(f"accept must return bools of the shape ({len(rows)},), got {shown}")
        return found

    def _fix(
        self, mean: Tensor, values: Tensor, clamped: Tensor, noise: float
    ) -> tuple[Tensor, Tensor]:
        """One-hot values at the surest free sites."""
        scores = mean.clamp_min(torch.finfo(mean.dtype).tiny).log()
        if noise > 0:
            drawn = torch.rand(
                scores.shape, generator=self.generator, dtype=torch.float64, device=scores.device
            )
            gumbel = -(-drawn.clamp(1e-300, 1 - 1e-16).log()).log()
            scores = torch.where(mean > 0, scores + noise * gumbel.to(scores), -torch.inf)
        score, state = scores.max(2)
        # A site without probabilities, a masked one, comes last; were it never fixed, there were no end.
        score = score.clamp_min(torch.finfo(score.dtype).min).masked_fill(clamped, -torch.inf)
        number = min(self.at_once, score.shape[1])
        chosen = torch.zeros_like(clamped).scatter(1, score.topk(number, 1).indices, True)
        chosen = chosen & ~clamped
        if self.certain is not None:
            sure = (mean.amax(2) >= self.certain) & ~clamped
            state = torch.where(sure, mean.argmax(2), state)
            chosen = chosen | sure
        states = F.one_hot(state, mean.shape[2]).to(values)
        return torch.where(chosen.unsqueeze(2), states, values), clamped | chosen


def _empty(values: Tensor, number: int) -> Decimation:
    _, sites, states = values.shape
    counts = torch.zeros(number, dtype=torch.long, device=values.device)
    return Decimation(
        states=counts.new_zeros(number, sites),
        mean=values.new_zeros(number, sites, states),
        accepted=counts.bool(),
        status=counts.clone(),
        fixed=counts.clone(),
        attempts=counts + 1,
        evaluations=counts.clone(),
    )


def _better(best: Decimation, new: Decimation, rows: Tensor) -> Decimation:
    """``best`` with what is better in a ``new`` attempt at ``rows``; counts add up."""
    before = Decimation(*(part[rows] for part in best))
    better = new.accepted | (new.fixed > before.fixed)

    def chosen(old: Tensor, found: Tensor) -> Tensor:
        return torch.where(better.view(-1, *[1] * (old.dim() - 1)), found, old)

    merged = Decimation(*(chosen(a, b) for a, b in zip(before, new, strict=True)))._replace(
        attempts=before.attempts + 1, evaluations=before.evaluations + new.evaluations
    )
    return Decimation(
        *(part.index_copy(0, rows, value) for part, value in zip(best, merged, strict=True))
    )


def _read(given: Any) -> tuple[Tensor, Tensor]:
    """Values (B, N, d), zero at free sites, and where they are clamped, (B, N) bool."""
    require_instance("given", given, tuple, "a pair (values, clamped) of tensors")
    values = given[0] if given else None
    if not isinstance(values, Tensor) or values.dim() != 3:
        shown = tuple(values.shape) if isinstance(values, Tensor) else type(values)
        raise ValueError(f"given must hold values of the shape (B, N, d) first, got {shown}")
    clamped = read_clamped(given, values, None)
    assert clamped is not None
    return clamped.values, clamped.where
