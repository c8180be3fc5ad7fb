r"""Belief propagation on coupled Potts sites, which is exact on trees, and decimation.

The graph represents each pair of sites as two directed edges, and a message ``nu_{j -> i}(a)`` is the
logarithm of a weight of state a of site i (:func:`belief_propagation` has the formulas). The mean of a
message over the remaining states is subtracted. This changes no probability and keeps messages in a linear
space, which is closed under extrapolation. With ``h_i = x_i + sum_k nu_{k -> i}``::

    p_i(a) ~ exp(h_i(a)),     p_ij(a, b) ~ exp(c_{i -> j}(a) + J_ij(a, b) + c_{j -> i}(b))

    log Z = sum_i (1 - n_i) log Z_i + sum_(ij) log Z_ij        n_i neighbours of i

where ``Z_i`` and ``Z_ij`` are the sums of these weights. At a fixed point log Z is stationary in the
messages, so its derivatives are the partial ones: ``d log Z / dx_i = p_i``, ``d log Z / dJ_ij = p_ij``.

Couplings and fields of ``-inf`` forbid pairs and states. Arc consistency first determines the entries of
the messages that vanish for this reason, independently of the finite values. Without these entries the
remaining problem is finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from solvers.adjoint import Adjoint, read_adjoint
from solvers.core.checks import (
    require_callable,
    require_count,
    require_flag,
    require_instance,
    require_number,
    require_positive,
)
from solvers.core.layout import take
from solvers.core.modes import eager, without_autocast
from solvers.core.problem import Sharing
from solvers.core.solution import Solution, Status, apply_policy, check_on_failure
from solvers.core.tolerance import Tolerance
from solvers.fixed_points import fixed_point
from solvers.methods.steps import Forward
from solvers.spins.inputs import (
    as_wide,
    check_field,
    check_like_field,
    check_mask,
    check_values,
    read_given,
    read_start,
    stationary_value,
    usual_tolerance,
    zero_masked,
)


@dataclass(frozen=True)
class Graph:
    """The 2E directed edges of E pairs: number ``2e + k`` carries a message into the site ``edges[e, k]``.

    A message weighs the states of its target.

    Attributes:
        sites: N.
        source, target: (2E,) sites.
        order: (2E,) edges sorted by target, or None unless all sites have the same degree.
    """

    sites: int
    source: Tensor
    target: Tensor
    order: Tensor | None

    @classmethod
    def of(cls, edges: Tensor, sites: int) -> Graph:
        """Make the graph of the pairs ``edges`` (E, 2)."""
        target, source = edges.flatten(), edges.flip(1).flatten()
        degrees = torch.bincount(target, minlength=sites)
        alike = len(edges) > 0 and bool((degrees == degrees[0]).all())
        return cls(sites, source, target, torch.argsort(target) if alike else None)

    def gather(self, messages: Tensor) -> Tensor:
        """Sum the messages (B, 2E, d) into every site, (B, N, d)."""
        batch, _, states = messages.shape
        if self.order is not None:
            sorted_ = messages.index_select(1, self.order)
            return sorted_.view(batch, self.sites, -1, states).sum(2)
        sums = messages.new_zeros(batch, self.sites, states)
        return sums.index_add(1, self.target, messages)

    def reversed(self, messages: Tensor) -> Tensor:
        """Return the messages (B, 2E, d) of the edges in the other direction."""
        return self.packed(messages).flip(2).flatten(1, 2)

    def cavities(self, total: Tensor, messages: Tensor) -> Tensor:
        """Return ``total`` (B, N, d) at the source of every edge minus the message from its target."""
        return total.index_select(1, self.source) - self.reversed(messages)

    def packed(self, messages: Tensor) -> Tensor:
        """Return messages (B, E, 2, d), where ``[e, k]`` is the message into the site ``edges[e, k]``."""
        return messages.unflatten(1, (len(self.source) // 2, 2))


@torch.no_grad()
def find_support(
    graph: Graph, allowed: Tensor, domain: Tensor, live: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the states that remain after arc consistency, all bool.

    They are (B, N, d) for the sites, (B, 2E, d) for the targets given the message of one edge, and
    (B, 2E, d) for the sources without the message of the target, with an allowed partner at the target.

    Args:
        allowed: (2E, d, d) bool, pairs of states that are not forbidden.
        domain: (B, N, d) bool, states that a site may take on its own.
        live: (B, 2E) bool, edges that carry messages, or None for all.
    """
    batch, _, states = domain.shape
    open_pairs = allowed.float().mT  # (2E, d of the source, d of the target)
    partner = allowed.any(1)  # (2E, d): the state of the source has some partner
    dead = None if live is None else ~live.unsqueeze(2)
    messages = torch.ones(batch, len(graph.source), states, dtype=torch.bool, device=domain.device)
    while True:  # every step except the last rules out at least one state
        ruled_out = (~messages).float()
        total = graph.gather(ruled_out)
        cavities = graph.cavities(total, ruled_out) == 0  # no other neighbour rules them out
        cavities = cavities & domain.index_select(1, graph.source) & partner
        found = torch.bmm(cavities.float().transpose(0, 1), open_pairs).transpose(0, 1) > 0
        found = found if dead is None else found | dead
        if torch.equal(found, messages):
            break
        messages = found
    return domain & (total == 0), messages, cavities if dead is None else cavities | dead


class Evidence(NamedTuple):
    """What B samples know before any message; None if a restriction does not occur.

    Samples that are not consistent have no restriction; their results are discarded.

    Attributes:
        field: (B, N, d), finite, including the influence of clamped sites.
        energy: (B,) contribution of the clamped sites to log Z.
        consistent: (B,) bool.
        free: (B, N) bool, sites that are neither clamped nor masked.
        live: (B, 2E) bool, edges between two free sites.
        states, messages, cavities: bool, see :func:`find_support`.
        bound: (B,) largest difference of two logarithms in a message under hard constraints.
    """

    field: Tensor
    energy: Tensor
    consistent: Tensor
    free: Tensor | None = None
    live: Tensor | None = None
    states: Tensor | None = None
    messages: Tensor | None = None
    cavities: Tensor | None = None
    bound: Tensor | None = None


def where_left(values: Tensor, left: Tensor | None) -> Tensor:
    """Return ``values`` where ``left`` is True and -inf elsewhere."""
    return values if left is None else torch.where(left, values, -math.inf)


def gather_evidence(
    graph: Graph,
    blocks: Tensor,
    allowed: Tensor | None,
    field: Tensor,
    mask: Tensor | None,
    clamped: tuple[Tensor, Tensor] | None,
    bound: float | None,
) -> Evidence:
    """Return the evidence of B samples.

    ``blocks`` (2E, d, d) are finite where ``allowed`` is False, ``field`` (B, N, d) is -inf at forbidden
    states, ``clamped`` contains values (B, N, d) and bools (B, N).
    """
    batch = len(field)
    possible = field.detach() > -math.inf
    hard = allowed is not None or not bool(possible.all())
    field = torch.where(possible, field, 0.0) if hard else field
    domain, energy = possible, field.new_zeros(batch)
    consistent = torch.ones(batch, dtype=torch.bool, device=field.device)
    free = mask
    if clamped is not None:
        values, here = clamped
        pull, ruled_out = _pull(graph, blocks, allowed, values)
        energy = (values * (field + pull / 2)).flatten(1).sum(1)
        consistent = ~((values.detach() > 0) & (ruled_out | ~possible)).flatten(1).any(1)
        free = ~here if mask is None else ~here & mask
        field, domain = field + pull, possible & ~ruled_out
    live = None
    if free is not None:
        field = zero_masked(field, free)
        live = free.index_select(1, graph.source) & free.index_select(1, graph.target)
    if not hard:
        return Evidence(field, energy, consistent, free, live)
    if allowed is None:
        allowed = torch.ones_like(blocks, dtype=torch.bool)
    if free is not None:
        domain = domain | ~free.unsqueeze(2)
    support = find_support(graph, allowed, domain, live)
    consistent = consistent & support[0].any(2).all(1)
    states, messages, cavities = (left | ~consistent[:, None, None] for left in support)
    every = consistent[:, None].expand(-1, len(graph.source))
    live = every if live is None else live & every
    bounds = _bound(field, domain, blocks, allowed, bound)
    return Evidence(field, energy, consistent, free, live, states, messages, cavities, bounds)


def _pull(
    graph: Graph, blocks: Tensor, allowed: Tensor | None, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Return ``sum_j J_ij s_j`` (B, N, d) and the states that clamped sites rule out, (B, N, d) bool."""
    of_source = values.index_select(1, graph.source).transpose(0, 1)  # (2E, B, d)
    pull = graph.gather(torch.bmm(of_source, blocks.mT).transpose(0, 1))
    if allowed is None:
        return pull, torch.zeros_like(pull, dtype=torch.bool)
    hits = torch.bmm((of_source.detach() > 0).float(), (~allowed).float().mT)
    return pull, graph.gather(hits.transpose(0, 1)) > 0


@torch.no_grad()
def _bound(
    field: Tensor, domain: Tensor, blocks: Tensor, allowed: Tensor, bound: float | None
) -> Tensor:
    """Return the bound (B,), by default one that no message on a tree exceeds.

    A message compares two sums of at most d^N weights, which differ by the ranges of all fields and blocks.
    """
    if bound is not None:
        return field.new_full((len(field),), bound)
    _, sites, states = field.shape
    fields = _range(field, domain, (2,)).sum(1)
    pairs = _range(blocks, allowed, (1, 2)).sum() / 2
    return sites * math.log(states) + fields + pairs


def _range(values: Tensor, left: Tensor | None, over: tuple[int, ...]) -> Tensor:
    """Return the largest minus the smallest remaining value, 0 if none remains."""
    high, low = where_left(values, left).amax(over), -where_left(-values, left).amax(over)
    return (high - low).clamp_min(0.0)


LOWEST = -1e30  # replaces -inf in differences
# Logarithms of weights further apart than this are summed by logsumexp instead of matrix products.
WIDEST = {torch.float64: 600.0, torch.float32: 75.0}


@dataclass(frozen=True)
class Messages:
    """The message map of a graph.

    Attributes:
        graph: graph of the sites.
        blocks: ``J`` (2E, d, d) with finite values at forbidden pairs.
        allowed: (2E, d, d) bool, False at forbidden pairs; None if there are none.
        weights: ``exp(J - shift)`` (2E, d, d), columns for targets, 0 at forbidden pairs, for matrix
            products; None if these might underflow.
        shift: (2E, 1) largest entry of each block.
    """

    graph: Graph
    blocks: Tensor
    allowed: Tensor | None
    weights: Tensor | None
    shift: Tensor

    @classmethod
    def of(cls, graph: Graph, blocks: Tensor, allowed: Tensor | None, bound: float) -> Messages:
        """Make the map; ``bound`` limits the logarithms of a message, 0 without hard constraints."""
        finite = blocks.detach()
        spread = _range(finite, allowed, (1, 2))
        width = bound + (float(spread.max()) if len(blocks) else 0.0)
        high = where_left(finite, allowed).amax((1, 2))
        high = torch.where(high.isfinite(), high, 0.0)
        weights = None
        if width <= WIDEST[blocks.dtype]:
            weights = where_left(blocks - high[:, None, None], allowed).exp().mT
        return cls(graph, blocks, allowed, weights, high[:, None])

    def cavity_fields(self, messages: Tensor, evidence: Evidence) -> Tensor:
        """Return ``c`` (B, 2E, d) of the source of every edge."""
        return self.graph.cavities(evidence.field + self.graph.gather(messages), messages)

    def raw(self, cavities: Tensor, evidence: Evidence) -> Tensor:
        """Return ``u`` (B, 2E, d), with low entries where no state remains."""
        left = where_left(cavities, evidence.cavities)
        # The maximum is subtracted and added again, so its derivative cancels.
        top = left.detach().amax(2, keepdim=True)
        tiny = torch.finfo(left.dtype).tiny
        if self.weights is not None:
            sums = torch.bmm((left - top).exp().transpose(0, 1), self.weights).transpose(0, 1)
            return sums.clamp_min(tiny).log() + top + self.shift
        terms = where_left(self.blocks + left.unsqueeze(2), self.allowed)
        top = terms.detach().amax(3)
        low = ~top.isfinite()  # no state of the source is compatible with this one
        sums = (terms - top.masked_fill(low, 0.0).unsqueeze(3)).exp().sum(3)
        return sums.clamp_min(tiny).log() + top.masked_fill(low, LOWEST)

    def normalised(self, raw: Tensor, evidence: Evidence) -> Tensor:
        """Return ``nu`` (B, 2E, d) from ``u``: 0 at edges that are not live and without a state."""
        left, live = evidence.messages, evidence.live
        if left is None:
            found = raw - raw.mean(2, keepdim=True)
            return found if live is None else torch.where(live.unsqueeze(2), found, 0.0)
        assert evidence.bound is not None
        # Entries of excluded states lie below the others already.
        found = torch.maximum(raw - raw.amax(2, keepdim=True), -evidence.bound[:, None, None])
        found = torch.where(left, found, 0.0)
        mean = found.sum(2, keepdim=True) / left.sum(2, keepdim=True).clamp_min(1)
        return torch.where(left if live is None else left & live.unsqueeze(2), found - mean, 0.0)

    def with_blocks(
        self, messages: Tensor, evidence: Evidence, blocks: Tensor, weights: Tensor | None
    ) -> Tensor:
        """Make one parallel step with these blocks and weights."""
        return replace(self, blocks=blocks, weights=weights)(messages, evidence)

    def __call__(self, messages: Tensor, evidence: Evidence) -> Tensor:
        """Make one parallel step, (B, 2E, d) -> (B, 2E, d)."""
        return self.normalised(self.raw(self.cavity_fields(messages, evidence), evidence), evidence)


SUM = 1e-3  # tolerance of the sum of a clamped site's probabilities


def _check_edges(edges: Any, sites: int, device: torch.device) -> None:
    """Check that ``edges`` (E, 2) are distinct pairs of different sites."""
    if not isinstance(edges, Tensor) or edges.dtype != torch.int64 or edges.device != device:
        what = (edges.dtype, edges.device) if isinstance(edges, Tensor) else type(edges)
        raise TypeError(
            f"edges must be an int64 tensor (E, 2) on {device} like field, got {what}; for all pairs use "
            "torch.triu_indices(N, N, 1).mT and couplings J[i, j] (E, d, d) with i, j = edges.mT"
        )
    if edges.dim() != 2 or edges.shape[1] != 2:
        raise ValueError(f"edges must have the shape (E, 2), got {tuple(edges.shape)}")
    first, second = edges.amin(1), edges.amax(1)
    if bool(((first < 0) | (second >= sites)).any()):
        got = f"{int(first.min())} .. {int(second.max())}"
        raise ValueError(f"edges must be sites in 0 .. {sites - 1}, got {got}")
    loops = torch.nonzero(first == second).flatten().tolist()
    if loops:
        raise ValueError(
            f"edges must join two different sites, got self-loops at edges {loops[:10]}"
        )
    if len((first * sites + second).unique()) < len(edges):
        raise ValueError("edges must contain each pair once, in one direction, got a duplicate")


def read_clamped(given: Any, field: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return ``given`` of :func:`solvers.belief_propagation` without masked sites."""
    values, where = read_given(given, field)
    seen = values.detach()[where]
    if bool((seen < 0).any()) or bool(((seen.sum(-1) - 1).abs() > SUM).any()):
        raise ValueError(
            "given must contain probabilities of the d states at the clamped sites, such as one-hot rows"
        )
    where = where if mask is None else where & mask
    return zero_masked(values, where), where


class Beliefs(NamedTuple):
    """Result of :func:`solvers.belief_propagation`.

    Attributes:
        mean: (B, N, d), marginals ``p_i(a)``, the means of one-hot spins.
        messages: (B, E, 2, d), logarithms of the messages, ``[e, k]`` into the site ``edges[e, k]``. Their
            mean over the states that the hard constraints allow is 0, and they are 0 at the others.
        log_partition: (B,) ``log Z``, at least float32, or None without ``log_partition=True``.
    """

    mean: Tensor
    messages: Tensor
    log_partition: Tensor | None = None


def marginals(
    step: Messages, messages: Tensor, evidence: Evidence, clamped: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Return marginals (B, N, d): values at clamped sites, zero at masked sites and without consistency."""
    field = evidence.field + step.graph.gather(messages)
    own = zero_masked(torch.softmax(where_left(field, evidence.states), 2), evidence.free)
    if clamped is not None:
        own = torch.where(clamped[1].unsqueeze(2), clamped[0], own)
    return torch.where(evidence.consistent[:, None, None], own, 0.0)


def bethe_log_partition(step: Messages, evidence: Evidence, messages: Tensor) -> Tensor:
    """Return ``log Z`` (B,), ``-inf`` without consistency."""
    graph = step.graph
    own = evidence.field + graph.gather(messages)
    sites = torch.logsumexp(where_left(own, evidence.states), 2)  # (B, N)
    cavities = step.cavity_fields(messages, evidence)
    raw = where_left(step.raw(cavities, evidence), evidence.messages)
    back = graph.reversed(where_left(cavities, evidence.cavities))
    pairs = (raw + back)[:, ::2]  # (B, E, d)
    if evidence.live is None:
        degrees = torch.bincount(graph.target, minlength=graph.sites).to(own.dtype)
        values = torch.logsumexp(pairs, 2)
    else:  # dead edges may have no state with a weight, whose gradient would be NaN
        here = evidence.live[:, ::2]
        degrees = graph.gather(evidence.live.unsqueeze(2).to(own.dtype)).squeeze(2)
        values = torch.logsumexp(torch.where(here.unsqueeze(2), pairs, 0.0), 2)
        values = torch.where(here, values, 0.0)
    log_z = zero_masked((1 - degrees) * sites, evidence.free).sum(1) + values.sum(1)
    return torch.where(evidence.consistent, log_z + evidence.energy, -math.inf)


@eager
def belief_propagation(
    couplings: Tensor,
    field: Tensor,
    *,
    edges: Tensor,
    given: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    damping: float = 0.5,
    tolerance: Tolerance | float | None = None,
    max_steps: int = 500,
    bound: float | None = None,
    adjoint: Adjoint | type[Adjoint] | str | None = "implicit",
    start: Beliefs | None = None,
    log_partition: bool = False,
    record: bool = False,
    on_failure: str = "warn",
) -> Solution:
    r"""Compute marginals and free energies of coupled Potts sites by belief propagation.

    For sites with d states, ``P(s) ~ exp(sum_i x_i(s_i) + sum_{i<j} J_ij(s_i, s_j))``, messages along
    all edges are updated in parallel until they converge::

        c_{j -> i}(b) = x_j(b) + sum_{k != i} nu_{k -> j}(b)
        nu_{j -> i}(a) = log sum_b exp(J_ij(a, b) + c_{j -> i}(b)) - (its mean over a)

    Then ``p_i(a) ~ exp(x_i(a) + sum_k nu_{k -> i}(a))``. This is exact if the sites that are neither
    clamped nor masked form a forest. With loops it is an approximation (a stationary point of the
    Bethe free energy), which may be neither unique nor stable. An Ising model is the case d = 2.

    Couplings and fields of ``-inf`` forbid states and pairs of states. Arc consistency first excludes all
    states that these constraints rule out directly; the messages weigh the others, in logarithms.

    Args:
        couplings: ``J`` (E, d, d) of the pairs ``edges``, rows for the states of the first site, without
            NaN and ``+inf``.
        field: ``x`` (B, N, d) with the dtype and device of ``couplings``.
        edges: (E, 2) int64, each pair once. For all pairs, use ``torch.triu_indices(N, N, 1).mT`` with
            couplings ``J[i, j]``, where ``i, j = edges.mT`` and ``J`` is (N, N, d, d).
        given: pair of values (B, N, d) and bools (B, N), True for clamped sites. A clamped site keeps
            its value, one-hot or probabilities s of its states, and acts on the others as a field
            ``sum_b J_ij(a, b) s_j(b)``. Values of free sites are ignored, even NaN.
        mask: (B, N) bool, False for masked sites, which do not influence others and have zero results.
        damping: damping of the steps ``nu + damping (f(nu) - nu)``, in (0, 1]. With 1, a tree takes as many
            steps as its longest path.
        tolerance: tolerance of the messages; None for rtol 1e-10 in float64, 1e-5 in float32 and 1e-2 in
            half precision.
        max_steps: maximum number of parallel steps per sample.
        bound: largest difference of the logarithms of a message. Under hard constraints these may grow
            without bound and never meet a tolerance. None for a bound that no message on a tree
            exceeds. Much smaller values, such as 30, make such solves faster.
        adjoint: adjoint of :func:`solvers.fixed_point`; None for no gradients.
        start: earlier result for the same graph, whose messages start the solve and are treated as
            constants. None for uniform messages.
        log_partition: whether to return the Bethe approximation of ``log Z``, the logarithm of the sum
            over all states. (The value of :func:`solvers.adaptive_tap` is lower by ``log d`` per free site,
            because its prior is normalised.) Clamped sites contribute their energy. Its gradients at the
            solution are the marginals of sites and pairs and need no adjoint solve.
        record: whether to keep the trace of residuals.
        on_failure: "warn", "raise" or "ignore" samples that did not converge.

    Returns:
        A :class:`Solution` whose ``value`` is a :class:`Beliefs` without NaN; ``residual`` is that of
        the messages. ``Status.CONTRADICTORY`` means that the given values and constraints exclude all
        states of a site. Then all marginals are zero, ``log Z`` is ``-inf`` and the residual infinite.
        Contradictions that only a search would find are not detected; such a sample converges to
        meaningless beliefs or does not converge.

    Raises:
        TypeError, ValueError: if an argument is invalid.
        SolveError: if ``on_failure="raise"`` and a sample did not converge.

    Example:
        >>> chain = torch.tensor([[0, 1], [1, 2]])
        >>> repel = -2.0 * torch.eye(3).expand(2, 3, 3)
        >>> solution = belief_propagation(repel, torch.randn(4, 3, 3), edges=chain)
        >>> solution.value.mean.shape
        torch.Size([4, 3, 3])

    Source: Pearl (1988), "Probabilistic Reasoning in Intelligent Systems",
    https://doi.org/10.1016/C2009-0-27609-4; Yedidia, Freeman and Weiss (2005), "Constructing
    free-energy approximations and generalized belief propagation algorithms",
    https://doi.org/10.1109/TIT.2005.850085, for the free energy.
    """
    require_flag("log_partition", log_partition)
    _, sites, states = check_field(field)
    _check_edges(edges, sites, field.device)
    check_like_field("couplings", couplings, field, (len(edges), states, states))
    check_mask(mask, field)
    check_values(couplings, field, forbidding=True)
    check_on_failure(on_failure)
    require_number("damping", damping, low=0.0, high=1.0, closed=False)
    if bound is not None:
        require_positive("bound", bound)
    require_count("max_steps", max_steps)  # also if there is no edge
    adjoint = read_adjoint(adjoint)
    options = {
        "solver": Forward(damping=damping),
        "tolerance": usual_tolerance(tolerance, field.dtype),
        "max_steps": max_steps,
        "adjoint": adjoint,
        "record": record,
        "on_failure": "ignore",
    }
    tracked = adjoint is not None and torch.is_grad_enabled()
    with torch.set_grad_enabled(tracked), without_autocast(field.device.type):
        x = as_wide(field)
        graph = Graph.of(edges, sites)
        wide = as_wide(couplings)
        blocks = torch.stack([wide, wide.mT], 1).flatten(0, 1)  # (2E, d, d), rows for the target
        allowed: Tensor | None = blocks.detach() > -math.inf
        if bool(allowed.all()):
            allowed = None
        else:
            blocks = torch.where(allowed, blocks, 0.0)
        clamped = None if given is None else read_clamped(given, x, mask)
        evidence = gather_evidence(graph, blocks, allowed, x, mask, clamped, bound)
        widest = 0.0 if evidence.bound is None else float(evidence.bound.max())
        step = Messages.of(graph, blocks, allowed, widest)
        first = x.new_zeros(len(x), len(graph.source), states)
        if start is not None:
            require_instance("start", start, Beliefs, "a solvers.Beliefs")
            shape = (len(x), len(edges), 2, states)
            first = read_start("start.messages", start.messages, shape, x).flatten(1, 2)
        # Messages are normalised again, because the constraints of the earlier result may differ.
        first = step.normalised(where_left(first, evidence.messages), evidence)
        solve = fixed_point if len(edges) else _nothing_to_solve
        shared = Sharing(step.with_blocks, step.blocks, step.weights)
        solution = solve(shared, first, (evidence,), **options)
        messages = solution.value
        mean = marginals(step, messages, evidence, clamped).to(field.dtype)
        log_z = None
        if log_partition:
            log_z = stationary_value(partial(bethe_log_partition, step), evidence, messages)
        solution.value = Beliefs(mean, graph.packed(messages).to(field.dtype), log_z)
    impossible = ~evidence.consistent
    solution.status = torch.where(impossible, int(Status.CONTRADICTORY), solution.status)
    solution.residual = torch.where(impossible, math.inf, solution.residual)
    solution.residual_norm = torch.where(impossible, math.inf, solution.residual_norm)
    apply_policy(solution, on_failure, "belief propagation")
    return solution


def _nothing_to_solve(step: Sharing, start: Tensor, args: Any, **options: Any) -> Solution:
    """Return the solution for sites without any edge."""
    zeros = start.new_zeros(len(start))
    counts = torch.zeros(len(start), dtype=torch.long, device=start.device)
    status = torch.full_like(counts, int(Status.CONVERGED))
    return Solution(start, status, zeros, zeros.clone(), counts, counts.clone())


# solve(rows, given, start) solves the samples rows (n,) for given values (n, N, d) and bools (n, N);
# start is the value of their previous solution, or None.
Solve = Callable[[Tensor, tuple[Tensor, Tensor], Any], Solution]


class Decimation(NamedTuple):
    """Result of :func:`decimate`.

    Attributes:
        states: (B, N) int64, state of every site.
        mean: (B, N, d), marginals of the last solve; fixed sites are one-hot.
        accepted: (B,) bool, whether ``accept`` returned True; without it, whether no contradiction occurred.
        status: (B,) int64, values of :class:`solvers.Status` of the last solve.
        fixed: (B,) int64, number of sites fixed in addition to the given ones.
        evaluations: (B,) int64, evaluations of all solves.
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
    r"""Determine states of coupled sites by decimation, which alternates solving and fixing a site.

    Each step fixes the free site with the largest marginal to its most probable state and solves for the
    others. A sample ends when ``accept`` returns True for its most probable states, when all its sites
    are fixed, or at a contradiction (``Status.CONTRADICTORY``).

    Args:
        solve: ``solve(rows, given, start) -> Solution`` for the samples ``rows`` (n,) int64, with the pair
            ``given`` of values (n, N, d) and bools (n, N) of :func:`solvers.belief_propagation` and
            :func:`solvers.adaptive_tap`. Its ``value.mean`` must be the marginals (n, N, d).
            ``start`` is the value of the previous solution of these samples, or None.
        given: values (B, N, d) and bools (B, N) of the sites known initially.
        certain: marginal in [0, 1] from which sites are fixed together; None fixes one site at a time.
        accept: ``accept(rows, states) -> (n,) bool`` for the samples ``rows`` and their states (n, N).

    Raises:
        TypeError, ValueError: if an argument is invalid.

    Example:
        >>> from solvers import belief_propagation
        >>> edges, repel = torch.tensor([[0, 1], [1, 2]]), -4.0 * torch.eye(2).expand(2, 2, 2)
        >>> x = torch.zeros(1, 3, 2)  # a chain of three sites whose two colours must alternate
        >>> values = torch.nn.functional.one_hot(torch.zeros(1, 3, dtype=torch.int64), 2).float()
        >>> clamped = torch.tensor([[True, False, False]])  # the first site has colour 0
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
    values = given[0] if isinstance(given, tuple) and given else None
    if not isinstance(values, Tensor) or values.dim() != 3:
        raise TypeError(f"given must be tensors (B, N, d) and (B, N), got {type(given)}")
    values, clamped = read_clamped(given, values, None)
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
    rows = torch.arange(batch, device=values.device)  # samples that are still running
    known, start = clamped.sum(1), None
    while len(rows) > 0:
        solution = solve(rows, (values, clamped), start)
        mean = solution.value.mean.to(values.dtype)
        found.evaluations[rows] += solution.evaluations
        contradictory = solution.status == Status.CONTRADICTORY
        # At a contradiction the previous marginals, with the sites fixed since, are kept.
        found.mean[rows] = torch.where(contradictory[:, None, None], found.mean[rows], mean)
        whole = clamped.all(1)
        accepted = whole if accept is None else _accepts(accept, rows, mean.argmax(2))
        broken = contradictory | ~mean.flatten(1).isfinite().all(1)
        accepted = accepted & ~broken
        ended = broken | whole | accepted
        out = rows[ended]
        states = torch.where(clamped, values.argmax(2), found.mean[rows].argmax(2))
        found.states[out], found.accepted[out] = states[ended], accepted[ended]
        found.status[out] = solution.status[ended]
        found.fixed[out] = (clamped.sum(1) - known)[ended]
        stay = torch.nonzero(~ended).flatten()
        start = take(solution.value, stay, len(rows))
        rows, known, mean = rows[stay], known[stay], mean[stay]
        values, clamped = _fix(mean, values[stay], clamped[stay], certain)
    return found


def _accepts(accept: Callable[[Tensor, Tensor], Tensor], rows: Tensor, states: Tensor) -> Tensor:
    accepted: Any = accept(rows, states)
    is_bool = isinstance(accepted, Tensor) and accepted.dtype == torch.bool
    if not is_bool or accepted.shape != rows.shape:
        wanted = f"a bool tensor of shape ({len(rows)},)"
        raise TypeError(f"accept must return {wanted}, got {accepted!r}")
    return accepted


def _fix(
    mean: Tensor, values: Tensor, clamped: Tensor, certain: float | None
) -> tuple[Tensor, Tensor]:
    """Fix the free site with the largest marginal and those that are ``certain`` to one-hot values."""
    score, state = mean.max(2)
    surest = score.masked_fill(clamped, -1.0).argmax(1, keepdim=True)
    chosen = torch.zeros_like(clamped).scatter(1, surest, True)
    if certain is not None:
        chosen = chosen | (score >= certain)
    chosen = chosen & ~clamped
    states = F.one_hot(state, mean.shape[2]).to(values)
    return torch.where(chosen.unsqueeze(2), states, values), clamped | chosen
