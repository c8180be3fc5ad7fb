"""What differs from sample to sample: fields, clamped and masked sites, the states that are left."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from solvers.spins.belief.graph import Graph
from solvers.spins.belief.support import find_support
from solvers.spins.inputs import zero_masked


class Evidence(NamedTuple):
    """The arguments of the map of messages; None where a restriction does not occur.

    Attributes:
        field: (B, N, d), finite, with the pull of clamped sites.
        live: (B, 2E) bool, edges between two sites that are neither clamped nor masked.
        states, messages, cavities: bool, see :class:`Support`.
        bound: (B,) largest difference of two logarithms in a message, with hard constraints.
    """

    field: Tensor
    live: Tensor | None = None
    states: Tensor | None = None
    messages: Tensor | None = None
    cavities: Tensor | None = None
    bound: Tensor | None = None


class Clamped(NamedTuple):
    """Sites that keep a value and are not masked: values (B, N, d), zero elsewhere, (B, N) bool."""

    values: Tensor
    where: Tensor


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
    clamped: Clamped | None,
    bound: float | None,
) -> Sample:
    """The evidence of B samples.

    Args:
        blocks: (2E, d, d), with finite numbers where ``allowed`` (2E, d, d) bool is False.
        field: (B, N, d), -inf at states that are forbidden.
        bound: as in :func:`solvers.belief_propagation`.
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
    evidence = Evidence(field, live)
    if not hard:
        return Sample(evidence, free, energy, consistent)
    if allowed is None:
        allowed = torch.ones_like(blocks, dtype=torch.bool)
    if free is not None:
        domain = domain | ~free.unsqueeze(2)
    support = find_support(graph, allowed, domain, live)
    consistent = consistent & support.consistent
    # What is impossible is solved without constraints, which costs little, and not returned.
    spare = ~consistent[:, None, None]
    evidence = evidence._replace(
        states=support.states | spare,
        messages=support.messages | spare,
        cavities=support.cavities | spare,
        bound=_bound(field, domain, blocks, allowed, bound),
    )
    if live is None:
        live = torch.ones(batch, graph.number, dtype=torch.bool, device=field.device)
    evidence = evidence._replace(live=live & consistent.unsqueeze(1))
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
