r"""The map of belief propagation, whose fixed point the messages are.

With the fields ``x_i``, the message ``nu_{j -> i}(a)``, the logarithm of a weight of state a of site i::

    c_{j -> i}(b) = x_j(b) + sum_{k != i} nu_{k -> j}(b)                       cavity field
    u_{j -> i}(a) = log sum_b exp(J_ij(a, b) + c_{j -> i}(b))
    nu_{j -> i}   <- u_{j -> i} - its mean over a

The mean is that over the states that are left. It changes no probability, and keeps messages in a
linear space, so that extrapolations of a solver stay among them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from solvers.spins.belief.evidence import Evidence, where_left
from solvers.spins.belief.graph import Graph

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
