"""The map of belief propagation, whose fixed point the messages are, and what it works on.

The graph holds pairs of sites as directed edges. The support is what hard constraints leave. The
evidence is what differs from sample to sample. With the fields ``x_i``, the message
``nu_{j -> i}(a)``, the logarithm of a weight of state a of site i, is::

    c_{j -> i}(b) = x_j(b) + sum_{k != i} nu_{k -> j}(b)                       cavity field
    u_{j -> i}(a) = log sum_b exp(J_ij(a, b) + c_{j -> i}(b))
    nu_{j -> i}   <- u_{j -> i} - its mean over a

The mean is that over the states that are left. It changes no probability, and keeps messages in a
linear space, so that extrapolations of a solver stay among them.

Couplings and fields of ``-inf`` forbid pairs and states. Which entries of the messages vanish for that
reason alone does not depend on the other numbers, and shrinks from step to step until nothing changes
(arc consistency). With these entries set aside, all that is left to solve is finite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from solvers.spins.inputs import zero_masked


@dataclass(frozen=True)
class Graph:
    """The 2E directed edges of E pairs, sorted by the site that they point to.

    Along each of them runs a message ``source -> target``, which weighs the states of the target.

    Attributes:
        sites: N.
        source, target: (2E,) sites.
        reverse: (2E,) the edge in the other direction.
        forward: (2E,) bool, True where ``target`` is the first site of the pair, of an unlisted one
            the lower. The edges where it holds are the pairs, each once.
        place: (2E,) of its message among the packed ones, see :meth:`packed`.
        listed: the pairs came as a list.
        degree: of every site where all are alike, else None.
    """

    sites: int
    source: Tensor
    target: Tensor
    reverse: Tensor
    forward: Tensor
    place: Tensor
    listed: bool
    degree: int | None

    @classmethod
    def of(cls, edges: Tensor, sites: int, listed: bool) -> Graph:
        """The pairs ``edges`` (E, 2)."""
        number = len(edges)
        target, source = edges.mT.reshape(-1), edges.flip(1).mT.reshape(-1)
        own = torch.arange(number, device=edges.device)
        place = torch.cat([2 * own, 2 * own + 1]) if listed else target * sites + source
        order = torch.argsort(target * sites + source)
        moved = torch.argsort(order)  # where an edge has gone
        reverse = moved.roll(number)[order]  # the two halves are each other's reverse
        degrees = torch.bincount(target, minlength=sites)
        alike = number > 0 and bool((degrees == degrees[0]).all())
        degree = int(degrees[0]) if alike else None
        ordered = (source[order], target[order], reverse, order < number, place[order])
        return cls(sites, *ordered, listed, degree)

    @property
    def number(self) -> int:
        """2E."""
        return len(self.source)

    def blocks(self, couplings: Tensor) -> Tensor:
        """``J`` (2E, d, d) of every edge, rows for the target and columns for the source.

        ``couplings`` are (N, N, d, d), or (E, d, d) of listed pairs with rows for the first site.
        """
        if not self.listed:
            return couplings.flatten(0, 1)[self.place]
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
        """(B, N, N, d), or (B, E, 2, d) of listed pairs."""
        first = (self.number // 2, 2) if self.listed else (self.sites, self.sites)
        return (batch, *first, states)

    def packed(self, messages: Tensor) -> Tensor:
        """Messages (B, 2E, d) as users see them, of :meth:`packed_shape`.

        ``[i, j]`` is the message from j into i, ``[e, k]`` the one into the site ``edges[e, k]``.
        """
        batch, _, states = messages.shape
        shape = self.packed_shape(batch, states)
        whole = messages.new_zeros(batch, shape[1] * shape[2], states)
        return whole.index_copy(1, self.place, messages).view(shape)

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
