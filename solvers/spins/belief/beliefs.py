r"""Marginals, pair marginals and the free energy of messages.

With the sums ``h_i = x_i + sum_k nu_{k -> i}`` and the cavity fields ``c`` of both ends of a pair::

    p_i(a) ~ exp(h_i(a)),     p_ij(a, b) ~ exp(c_{i -> j}(a) + J_ij(a, b) + c_{j -> i}(b))

    log Z = sum_i (1 - n_i) log Z_i + sum_(ij) log Z_ij        n_i neighbours of i

where ``Z_i`` and ``Z_ij`` are the sums of these weights. log Z is stationary in the messages at a fixed
point, so that its derivatives are the partial ones: ``d log Z / dx_i = p_i``, ``d log Z / dJ_ij = p_ij``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from solvers.core.layout import Layout
from solvers.spins.belief.evidence import Clamped, Evidence, Sample, where_left
from solvers.spins.belief.messages import Messages
from solvers.spins.inputs import zero_masked


class Beliefs(NamedTuple):
    """What :func:`solvers.belief_propagation` finds.

    Attributes:
        mean: (B, N, d), the marginals ``p_i(a)``: means of one-hot spins.
        messages: the logarithms of the messages, (B, N, N, d) with ``[i, j]`` the one from j into i,
            or (B, E, 2, d) with ``[e, k]`` the one into the site ``edges[e, k]``. Their mean over the
            states that hard constraints leave is 0, and 0 stands at the others.
        pairs: ``p_ij``, (B, N, N, d, d) with ``diag(p_i)`` for i = j, or (B, E, d, d) of listed pairs,
            or None where they were not asked for.
        log_partition: (B,) ``log Z``, at least float32, or None where it was not asked for.
    """

    mean: Tensor
    messages: Tensor
    pairs: Tensor | None = None
    log_partition: Tensor | None = None


def marginals(step: Messages, messages: Tensor, sample: Sample, clamped: Clamped | None) -> Tensor:
    """(B, N, d): of clamped sites their values, of masked ones and without consistency zero."""
    evidence = sample.evidence
    field = evidence.field + step.graph.gather(messages)
    own = zero_masked(torch.softmax(where_left(field, evidence.states), 2), sample.free)
    if clamped is not None:
        own = torch.where(clamped.where.unsqueeze(2), clamped.values, own)
    return torch.where(sample.consistent[:, None, None], own, 0.0)


def pair_marginals(step: Messages, messages: Tensor, evidence: Evidence, mean: Tensor) -> Tensor:
    """(B, N, N, d, d), or (B, E, d, d) of listed pairs."""
    graph = step.graph
    batch, _, states = mean.shape
    cavities = where_left(step.cavity_fields(messages, evidence), evidence.cavities)
    index = torch.nonzero(graph.forward).flatten()
    first, second = graph.target[index], graph.source[index]
    of_first, of_second = cavities[:, graph.reverse[index]], cavities[:, index]
    weights = of_first.unsqueeze(3) + step.blocks[index] + of_second.unsqueeze(2)
    weights = where_left(weights, None if step.allowed is None else step.allowed[index])
    here = None if evidence.live is None else evidence.live[:, index, None, None]
    if here is not None:
        weights = torch.where(here, weights, 0.0)
    found = torch.softmax(weights.flatten(2), 2).view(batch, len(index), states, states)
    if here is not None:  # with a clamped site the pair is independent
        apart = mean[:, first].unsqueeze(3) * mean[:, second].unsqueeze(2)
        found = torch.where(here, found, apart)
    if graph.listed:
        return torch.zeros_like(found).index_copy(1, graph.place[index] // 2, found)
    # Pairs without couplings are independent.
    whole = (mean[:, :, None, :, None] * mean[:, None, :, None, :]).flatten(1, 2)
    whole = whole.index_copy(1, graph.place[index], found)
    whole = whole.index_copy(1, graph.place[graph.reverse[index]], found.mT)
    own = torch.arange(graph.sites, device=mean.device) * (graph.sites + 1)
    whole = whole.index_copy(1, own, torch.diag_embed(mean))
    return whole.view(batch, graph.sites, graph.sites, states, states)


@dataclass
class BetheFreeEnergy:
    """``log Z`` of the free sites as a function of the messages, to be recorded."""

    args: tuple[Evidence, Tensor | None]
    step: Messages
    layout: Layout | None = None

    def masked_map(self, z: Tensor) -> Tensor:
        """From the messages as a matrix (B, D)."""
        assert self.layout is not None
        return self(self.layout.tree(z))

    def __call__(self, messages: Tensor) -> Tensor:
        evidence, free = self.args
        graph = self.step.graph
        own = evidence.field + graph.gather(messages)
        sites = torch.logsumexp(where_left(own, evidence.states), 2)  # (B, N)
        cavities = self.step.cavity_fields(messages, evidence)
        raw, top = self.step.raw(cavities, evidence)
        raw = where_left(raw + top, evidence.messages)
        back = where_left(cavities, evidence.cavities).index_select(1, graph.reverse)
        pairs = (raw + back)[:, graph.forward]  # (B, E, d)
        degrees = torch.bincount(graph.target, minlength=graph.sites).to(own.dtype)
        here = None if evidence.live is None else evidence.live[:, graph.forward]
        if evidence.live is not None and here is not None:
            # Dead edges may have no state with a weight, whose gradient would be NaN.
            pairs = torch.where(here.unsqueeze(2), pairs, 0.0)
            degrees = graph.gather(evidence.live.unsqueeze(2).to(own.dtype)).squeeze(2)
        values = torch.logsumexp(pairs, 2)
        if here is not None:
            values = torch.where(here, values, 0.0)
        return zero_masked((1 - degrees) * sites, free).sum(1) + values.sum(1)
