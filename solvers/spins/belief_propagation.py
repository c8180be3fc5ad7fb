r"""Belief propagation on coupled Potts sites, exact on trees, and decimation by it.

The graph holds pairs of sites as directed edges. With the fields ``x_i``, the message
``nu_{j -> i}(a)``, the logarithm of a weight of state a of site i, is::

    c_{j -> i}(b) = x_j(b) + sum_{k != i} nu_{k -> j}(b)                       cavity field
    u_{j -> i}(a) = log sum_b exp(J_ij(a, b) + c_{j -> i}(b))
    nu_{j -> i}   <- u_{j -> i} - its mean over a

The mean is that over the states that are left. It changes no probability, and keeps messages in a
linear space, so that extrapolations of a solver stay among them. With ``h_i = x_i + sum_k nu_{k -> i}``::

    p_i(a) ~ exp(h_i(a)),     p_ij(a, b) ~ exp(c_{i -> j}(a) + J_ij(a, b) + c_{j -> i}(b))

    log Z = sum_i (1 - n_i) log Z_i + sum_(ij) log Z_ij        n_i neighbours of i

where ``Z_i`` and ``Z_ij`` are the sums of these weights. log Z is stationary in the messages at a fixed
point, so that its derivatives are the partial ones: ``d log Z / dx_i = p_i``, ``d log Z / dJ_ij = p_ij``.

Couplings and fields of ``-inf`` forbid pairs and states. Which entries of the messages vanish for that
reason alone does not depend on the other numbers, and shrinks from step to step until nothing changes
(arc consistency). With these entries set aside, all that is left to solve is finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from solvers.adjoints.kinds import Adjoint, Implicit, read_adjoint
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
from solvers.core.solution import Solution, Status, Tolerance, apply_policy, check_on_failure
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
    """The 2E directed edges of E pairs, sorted by the site that they point to.

    Along each of them runs a message ``source -> target``, which weighs the states of the target.

    Attributes:
        sites: N.
        source, target: (2E,) sites.
        reverse: (2E,) the edge in the other direction.
        forward: (2E,) bool, True where ``target`` is the first site of the pair. The edges where it
            holds are the pairs, each once.
        place: (2E,) of its message among the packed ones, see :meth:`packed`.
        degree: of every site where all are alike, else None.
    """

    sites: int
    source: Tensor
    target: Tensor
    reverse: Tensor
    forward: Tensor
    place: Tensor
    degree: int | None

    @classmethod
    def of(cls, edges: Tensor, sites: int) -> Graph:
        """The pairs ``edges`` (E, 2)."""
        number = len(edges)
        target, source = edges.mT.reshape(-1), edges.flip(1).mT.reshape(-1)
        own = torch.arange(number, device=edges.device)
        place = torch.cat([2 * own, 2 * own + 1])
        order = torch.argsort(target * sites + source)
        moved = torch.argsort(order)  # where an edge has gone
        reverse = moved.roll(number)[order]  # the two halves are each other's reverse
        degrees = torch.bincount(target, minlength=sites)
        alike = number > 0 and bool((degrees == degrees[0]).all())
        degree = int(degrees[0]) if alike else None
        ordered = (source[order], target[order], reverse, order < number, place[order])
        return cls(sites, *ordered, degree)

    @property
    def number(self) -> int:
        """2E."""
        return len(self.source)

    def blocks(self, couplings: Tensor) -> Tensor:
        """``J`` (2E, d, d) of every edge, rows for the target, of couplings (E, d, d) of the pairs."""
        found = couplings[self.place // 2]
        return torch.where(self.forward[:, None, None], found, found.mT)

    def gather(self, messages: Tensor) -> Tensor:
        """Sums (B, N, d) over the messages (B, 2E, d) into every site."""
        batch, _, states = messages.shape
        if self.degree is not None:
            return messages.reshape(batch, self.sites, self.degree, states).sum(2)
        sums = messages.new_zeros(batch, self.sites, states)
        return sums.index_add(1, self.target, messages)

    def cavities(self, total: Tensor, messages: Tensor) -> Tensor:
        """Of every edge, ``total`` (B, N, d) at its source less what came back from its target."""
        return total.index_select(1, self.source) - messages.index_select(1, self.reverse)

    def packed_shape(self, batch: int, states: int) -> tuple[int, ...]:
        """(B, E, 2, d)."""
        return batch, self.number // 2, 2, states

    def packed(self, messages: Tensor) -> Tensor:
        """Messages (B, 2E, d) as users see them: ``[e, k]`` is the one into the site ``edges[e, k]``."""
        batch, _, states = messages.shape
        whole = torch.zeros_like(messages).index_copy(1, self.place, messages)
        return whole.view(self.packed_shape(batch, states))

    def unpacked(self, messages: Tensor) -> Tensor:
        """The inverse of :meth:`packed`."""
        return messages.flatten(1, 2).index_select(1, self.place)


@torch.no_grad()
def find_support(
    graph: Graph, allowed: Tensor, domain: Tensor, live: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The states that are left when no step of belief propagation rules out more, all bool.

    (B, N, d) of the sites; (B, 2E, d) of the targets, by the message of one edge; (B, 2E, d) of the
    sources, without what came back over the edge, and with an allowed partner at the other end.

    Args:
        allowed: (2E, d, d) bool, the pairs of states that are not forbidden.
        domain: (B, N, d) bool, the states that a site may take on its own.
        live: (B, 2E) bool, the edges over which messages run, or None for all.
    """
    batch, _, states = domain.shape
    open_pairs = allowed.float().mT  # (2E, d of the source, d of the target)
    partner = allowed.any(1)  # (2E, d): the state of the source has some partner
    dead = None if live is None else ~live.unsqueeze(2)
    messages = torch.ones(batch, graph.number, states, dtype=torch.bool, device=domain.device)
    while True:  # each step but the last rules out one state at least
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
    """The arguments of the map of messages; None where a restriction does not occur.

    Attributes:
        field: (B, N, d), finite, with the pull of clamped sites.
        live: (B, 2E) bool, edges between two sites that are neither clamped nor masked.
        states, messages, cavities: bool, see :func:`find_support`.
        bound: (B,) largest difference of two logarithms in a message, with hard constraints.
    """

    field: Tensor
    live: Tensor | None = None
    states: Tensor | None = None
    messages: Tensor | None = None
    cavities: Tensor | None = None
    bound: Tensor | None = None


class Sample(NamedTuple):
    """A model's evidence, what is known without solving, and where that is a contradiction.

    Attributes:
        evidence: for the messages; without any restriction in samples that are not consistent.
        free: (B, N) bool, sites that are neither clamped nor masked; None: all.
        energy: (B,) of the clamped sites, to be added to log Z.
        consistent: (B,) bool.
    """

    evidence: Evidence
    free: Tensor | None
    energy: Tensor
    consistent: Tensor


def where_left(values: Tensor, left: Tensor | None) -> Tensor:
    """``values`` where ``left``, -inf elsewhere."""
    return values if left is None else torch.where(left, values, -math.inf)


def gather_evidence(
    graph: Graph,
    blocks: Tensor,
    allowed: Tensor | None,
    field: Tensor,
    mask: Tensor | None,
    clamped: tuple[Tensor, Tensor] | None,
    bound: float | None,
) -> Sample:
    """The evidence of B samples: ``blocks`` (2E, d, d) are finite where ``allowed`` is False, ``field``
    (B, N, d) is -inf at forbidden states, ``clamped`` are values (B, N, d) and bools (B, N)."""
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
    evidence = Evidence(field, live)
    if not hard:
        return Sample(evidence, free, energy, consistent)
    if allowed is None:
        allowed = torch.ones_like(blocks, dtype=torch.bool)
    if free is not None:
        domain = domain | ~free.unsqueeze(2)
    support = find_support(graph, allowed, domain, live)
    consistent = consistent & support[0].any(2).all(1)
    # What is impossible is solved without constraints, which costs little, and not returned.
    states, messages, cavities = (left | ~consistent[:, None, None] for left in support)
    live = (
        consistent[:, None].expand(-1, graph.number) if live is None else live & consistent[:, None]
    )
    bounds = _bound(field, domain, blocks, allowed, bound)
    evidence = Evidence(field, live, states, messages, cavities, bounds)
    return Sample(evidence, free, energy, consistent)


def _pull(
    graph: Graph, blocks: Tensor, allowed: Tensor | None, values: Tensor
) -> tuple[Tensor, Tensor]:
    """``sum_j J_ij s_j`` (B, N, d), and the states that a clamped site rules out, (B, N, d) bool."""
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
    """(B,): by default what no message on a tree exceeds.

    It compares two sums of at most d^N weights, which differ by the ranges of all fields and blocks.
    """
    if bound is not None:
        return field.new_full((len(field),), bound)
    _, sites, states = field.shape
    fields = _range(field, domain, (2,)).sum(1)
    pairs = _range(blocks, allowed, (1, 2)).sum() / 2
    return sites * math.log(states) + fields + pairs


def _range(values: Tensor, left: Tensor, over: tuple[int, ...]) -> Tensor:
    """Largest less smallest of what is left; 0 where nothing is."""
    high = torch.where(left, values, -math.inf).amax(over)
    low = torch.where(left, values, math.inf).amin(over)
    return (high - low).clamp_min(0.0)


LOWEST = -1e30  # for -inf, in differences
# Logarithms of weights further apart than that are added one by one, not by matrix products.
WIDEST = {torch.float64: 600.0, torch.float32: 75.0}


@dataclass(frozen=True)
class Messages:
    """The map for a graph.

    Attributes:
        graph: of the sites.
        blocks: ``J`` (2E, d, d) with finite numbers at forbidden pairs.
        allowed: (2E, d, d) bool, False at forbidden pairs; None: there are none.
        weights: ``exp(J - shift)`` (2E, d, d), columns for targets, 0 at forbidden pairs, for products
            of matrices; None where these might underflow.
        shift: (2E, 1) the largest entry of each block.
    """

    graph: Graph
    blocks: Tensor
    allowed: Tensor | None
    weights: Tensor | None
    shift: Tensor

    @classmethod
    def of(cls, graph: Graph, blocks: Tensor, allowed: Tensor | None, bound: float) -> Messages:
        """``bound``: of the logarithms of a message, 0 without hard constraints."""
        finite = blocks.detach()
        high = where_left(finite, allowed).flatten(1).amax(1) if len(blocks) else blocks[:, 0, 0]
        low = finite if allowed is None else torch.where(allowed, finite, torch.inf)
        width = 0.0
        if len(blocks):
            spread = high - low.flatten(1).amin(1)
            width = float(torch.where(spread.isfinite(), spread, 0.0).max()) + bound
        high = torch.where(high.isfinite(), high, 0.0)
        weights = None
        if width <= WIDEST[blocks.dtype]:
            weights = where_left(blocks - high[:, None, None], allowed).exp().mT
        return cls(graph, blocks, allowed, weights, high[:, None])

    def cavity_fields(self, messages: Tensor, evidence: Evidence) -> Tensor:
        """``c`` (B, 2E, d), of the source of every edge."""
        return self.graph.cavities(evidence.field + self.graph.gather(messages), messages)

    def raw(self, cavities: Tensor, evidence: Evidence) -> tuple[Tensor, Tensor]:
        """``u`` (B, 2E, d) in two terms, the second (B, 2E, 1) or like it; where no state is left, low.

        For the messages the second is of no account where it is the same for all states.
        """
        left = where_left(cavities, evidence.cavities)
        # Taken off and added again: its derivative would cancel.
        top = left.detach().amax(2, keepdim=True)
        tiny = torch.finfo(left.dtype).tiny
        if self.weights is not None:
            sums = torch.bmm((left - top).exp().transpose(0, 1), self.weights).transpose(0, 1)
            return sums.clamp_min(tiny).log(), top + self.shift
        terms = where_left(self.blocks + left.unsqueeze(2), self.allowed)
        top = terms.detach().amax(3)
        low = ~top.isfinite()  # no state of the source goes with this one
        sums = (terms - top.masked_fill(low, 0.0).unsqueeze(3)).exp().sum(3)
        return sums.clamp_min(tiny).log(), top.masked_fill(low, LOWEST)

    def normalised(self, raw: Tensor, evidence: Evidence) -> Tensor:
        """``nu`` (B, 2E, d) of ``u``: 0 over edges that are not live and where no state is left."""
        left, live = evidence.messages, evidence.live
        if left is None:
            found = raw - raw.mean(2, keepdim=True)
            return found if live is None else torch.where(live.unsqueeze(2), found, 0.0)
        assert evidence.bound is not None
        # What is not left lies below the rest by itself.
        found = torch.maximum(raw - raw.amax(2, keepdim=True), -evidence.bound[:, None, None])
        found = torch.where(left, found, 0.0)
        mean = found.sum(2, keepdim=True) / left.sum(2, keepdim=True).clamp_min(1)
        return torch.where(left if live is None else left & live.unsqueeze(2), found - mean, 0.0)

    def __call__(self, messages: Tensor, evidence: Evidence) -> Tensor:
        """One parallel step, (B, 2E, d) -> (B, 2E, d)."""
        raw, top = self.raw(self.cavity_fields(messages, evidence), evidence)
        return self.normalised(raw if self.weights is not None else raw + top, evidence)


SUM = 1e-3  # by which the probabilities of a clamped site may miss 1


def _check_model(couplings: Any, field: Any, edges: Any, mask: Any) -> None:
    """-inf is allowed. On a GPU this waits for the device once a solve."""
    _, sites, states = check_field(field)
    _check_edges(edges, sites, field.device)
    check_like_field("couplings", couplings, field, (len(edges), states, states))
    check_mask(mask, field)
    check_values(couplings, field, forbidding=True)


def _check_edges(edges: Any, sites: int, device: torch.device) -> None:
    """Pairs (E, 2) of different sites, each once."""
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
        raise ValueError(
            f"edges must be sites in 0 .. {sites - 1}, got {int(first.min())} .. {int(second.max())}"
        )
    if bool((first == second).any()):
        raise ValueError("edges must join two different sites, got a self-loop")
    if len((first * sites + second).unique()) < len(edges):
        raise ValueError("edges must contain each pair once, in one direction, got a duplicate")


def read_clamped(given: Any, field: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """``given`` as for :func:`solvers.belief_propagation`, without masked sites."""
    if given is None:
        return None
    values, where = read_given(given, field)
    seen = values.detach()[where]
    if bool((seen < 0).any()) or bool(((seen.sum(-1) - 1).abs() > SUM).any()):
        raise ValueError(
            "given must contain probabilities of the d states at the clamped sites, such as one-hot rows"
        )
    where = where if mask is None else where & mask
    return zero_masked(values, where), where


class Beliefs(NamedTuple):
    """What :func:`solvers.belief_propagation` finds.

    Attributes:
        mean: (B, N, d), the marginals ``p_i(a)``: means of one-hot spins.
        messages: the logarithms of the messages, (B, E, 2, d) with ``[e, k]`` the one into the site
            ``edges[e, k]``. Their mean over the states that hard constraints leave is 0, and 0 stands at
            the others.
        log_partition: (B,) ``log Z``, at least float32, or None where it was not asked for.
    """

    mean: Tensor
    messages: Tensor
    log_partition: Tensor | None = None


def marginals(
    step: Messages, messages: Tensor, sample: Sample, clamped: tuple[Tensor, Tensor] | None
) -> Tensor:
    """(B, N, d): of clamped sites their values, of masked ones and without consistency zero."""
    evidence = sample.evidence
    field = evidence.field + step.graph.gather(messages)
    own = zero_masked(torch.softmax(where_left(field, evidence.states), 2), sample.free)
    if clamped is not None:
        own = torch.where(clamped[1].unsqueeze(2), clamped[0], own)
    return torch.where(sample.consistent[:, None, None], own, 0.0)


def bethe_log_partition(
    step: Messages, messages: Tensor, evidence: Evidence, free: Tensor | None
) -> Tensor:
    """``log Z`` (B,) of the free sites."""
    graph = step.graph
    own = evidence.field + graph.gather(messages)
    sites = torch.logsumexp(where_left(own, evidence.states), 2)  # (B, N)
    cavities = step.cavity_fields(messages, evidence)
    raw, top = step.raw(cavities, evidence)
    raw = where_left(raw + top, evidence.messages)
    back = where_left(cavities, evidence.cavities).index_select(1, graph.reverse)
    pairs = (raw + back)[:, graph.forward]  # (B, E, d)
    if evidence.live is None:
        degrees = torch.bincount(graph.target, minlength=graph.sites).to(own.dtype)
        values = torch.logsumexp(pairs, 2)
    else:  # dead edges may have no state with a weight, whose gradient would be NaN
        here = evidence.live[:, graph.forward]
        degrees = graph.gather(evidence.live.unsqueeze(2).to(own.dtype)).squeeze(2)
        values = torch.logsumexp(torch.where(here.unsqueeze(2), pairs, 0.0), 2)
        values = torch.where(here, values, 0.0)
    return zero_masked((1 - degrees) * sites, free).sum(1) + values.sum(1)


_DEFAULT_ADJOINT = Implicit()


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
    adjoint: Adjoint | type[Adjoint] | str | None = _DEFAULT_ADJOINT,
    start: Beliefs | None = None,
    log_partition: bool = False,
    record: bool = False,
    on_failure: str = "warn",
) -> Solution:
    r"""Marginals and free energies of coupled Potts sites by belief propagation.

    For sites with d states, ``P(s) ~ exp(sum_i x_i(s_i) + sum_{i<j} J_ij(s_i, s_j))``, messages are
    sent along all edges at once until they no longer change::

        c_{j -> i}(b) = x_j(b) + sum_{k != i} nu_{k -> j}(b)
        nu_{j -> i}(a) = log sum_b exp(J_ij(a, b) + c_{j -> i}(b)) - (its mean over a)

    Then ``p_i(a) ~ exp(x_i(a) + sum_k nu_{k -> i}(a))``. That is exact where the sites that are neither
    clamped nor masked form a tree or several. With loops it is an approximation (a stationary point of
    the Bethe free energy), which need be neither unique nor stable. An Ising model is the case d = 2.

    Couplings and fields may be ``-inf``: such states and pairs of states are forbidden. What that rules
    out for certain is found first, for every sample; the messages weigh what is left, in logarithms.

    Args:
        couplings: ``J`` (E, d, d) of the pairs ``edges``, rows for the states of the first site. No NaN,
            no ``+inf``.
        field: ``x`` (B, N, d), dtype and device like ``couplings``.
        edges: (E, 2) int64, each pair once; of all pairs ``torch.triu_indices(N, N, 1).mT`` with couplings
            ``J[i, j]``, where ``i, j = edges.mT`` and ``J`` is (N, N, d, d).
        given: a pair of values (B, N, d) and of bools (B, N): where True, the site is clamped. It keeps
            its value, one-hot or probabilities s of its states, and acts on the others as a field
            ``sum_b J_ij(a, b) s_j(b)``. Free sites may hold any value, also NaN.
        mask: (B, N) bool, False for masked sites: they influence no other, their results are zero.
        damping: of the steps ``nu + damping (f(nu) - nu)``, in (0, 1]. With 1, trees are solved in as many
            steps as their longest path.
        tolerance: of the messages; None: rtol 1e-10 in float64, 1e-5 in float32, 1e-2 in half precision.
        max_steps: parallel steps per sample, an upper bound.
        bound: with hard constraints, messages may run away to certainty, at a rate that never meets a
            tolerance. Logarithms of one message differ by ``bound`` at most. None: what no message
            exceeds on a tree. Much smaller values, such as 30, make such solves faster.
        adjoint: as for :func:`solvers.fixed_point`; None: no gradients.
        start: an earlier result for the same graph, whose messages are where the solve starts, taken as
            constants. None: all states weigh the same.
        log_partition: return the Bethe approximation of ``log Z`` too, the logarithm of the plain sum
            over all states (that of :func:`solvers.adaptive_tap` is less by ``log d`` a free site, since
            the prior is normalised there). Clamped sites count with their energy alone. Its gradient is
            that of the model at the solution, the marginals of sites and pairs, at no adjoint solve.
        record: keep the trace of residuals.
        on_failure: "warn", "raise" or "ignore" about samples that did not converge.

    Returns:
        A :class:`Solution` whose ``value`` is a :class:`Beliefs`, without NaN; ``residual`` is that of
        the messages. ``Status.CONTRADICTORY``: what is given and what is forbidden leave no state to
        some site. Then there is no distribution: all marginals are zero and ``log Z`` is ``-inf``, the
        residual infinite. Contradictions that only a search would find are not detected; the sample
        then converges to meaningless beliefs, or to none.

    Raises:
        TypeError, ValueError: for arguments that do not fit, naming the argument.
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
    _check_model(couplings, field, edges, mask)
    check_on_failure(on_failure)
    require_number("damping", damping, low=0.0, high=1.0, closed=False)
    if bound is not None:
        require_positive("bound", bound)
    require_count("max_steps", max_steps)  # also where there is no edge and nothing to solve
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
        graph, blocks, allowed = _pairs(as_wide(couplings), edges, x.shape[1])
        clamped = read_clamped(given, x, mask)
        sample = gather_evidence(graph, blocks, allowed, x, mask, clamped, bound)
        evidence, widest = sample.evidence, sample.evidence.bound
        step = Messages.of(graph, blocks, allowed, 0.0 if widest is None else float(widest.max()))
        # As they are normalised, also where an earlier result knew less or more.
        first = where_left(_read_start(start, graph, x), evidence.messages)
        first = step.normalised(first, evidence)
        solve = fixed_point if graph.number else _nothing_to_solve
        solution = solve(step, first, (evidence,), **options)
        messages = solution.value
        mean = marginals(step, messages, sample, clamped)
        log_z = _log_partition(step, messages, sample) if log_partition else None
        packed = graph.packed(messages).to(field.dtype)
        solution.value = Beliefs(mean.to(field.dtype), packed, log_z)
    impossible = ~sample.consistent
    solution.status = torch.where(impossible, int(Status.CONTRADICTORY), solution.status)
    solution.residual = torch.where(impossible, math.inf, solution.residual)
    solution.residual_norm = torch.where(impossible, math.inf, solution.residual_norm)
    apply_policy(solution, on_failure, "belief propagation")
    return solution


def _pairs(couplings: Tensor, edges: Tensor, sites: int) -> tuple[Graph, Tensor, Tensor | None]:
    """The graph, ``J`` (2E, d, d) of every edge, finite, and the pairs of states (2E, d, d) bool that
    are allowed; None: all."""
    graph = Graph.of(edges, sites)
    blocks = graph.blocks(couplings)
    allowed = blocks.detach() > -math.inf
    if bool(allowed.all()):
        return graph, blocks, None
    return graph, torch.where(allowed, blocks, 0.0), allowed


def _read_start(start: Any, graph: Graph, field: Tensor) -> Tensor:
    """Messages (B, 2E, d) of an earlier result, or zeros."""
    batch, _, states = field.shape
    if start is None:
        return field.new_zeros(batch, graph.number, states)
    require_instance("start", start, Beliefs, "a solvers.Beliefs")
    shape = graph.packed_shape(batch, states)
    return graph.unpacked(read_start("start.messages", start.messages, shape, field))


def _log_partition(step: Messages, messages: Tensor, sample: Sample) -> Tensor:
    """(B,), -inf in samples that are not consistent."""

    def value_of(args: tuple[Evidence, Tensor | None], messages: Tensor) -> Tensor:
        return bethe_log_partition(step, messages, *args)

    value = stationary_value(value_of, (sample.evidence, sample.free), messages)
    return torch.where(sample.consistent, value + sample.energy, -math.inf)


def _nothing_to_solve(step: Messages, start: Tensor, args: Any, **options: Any) -> Solution:
    """Of sites without any edge."""
    zeros = start.new_zeros(len(start))
    counts = torch.zeros(len(start), dtype=torch.long, device=start.device)
    status = torch.full_like(counts, int(Status.CONVERGED))
    return Solution(start, status, zeros, zeros.clone(), counts, counts.clone())


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
        raise TypeError(f"accept must return a bool tensor of shape ({len(rows)},), got {shown}")
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
        raise ValueError(f"given must contain values of shape (B, N, d) first, got {shown}")
    clamped = read_clamped(given, values, None)
    assert clamped is not None
    return clamped
