"""What hard constraints leave: the states of positive probability, found before any message is sent.

Couplings and fields of ``-inf`` forbid pairs and states. Which entries of the messages vanish for that
reason alone does not depend on the other numbers, and shrinks from step to step of belief propagation
until nothing changes (arc consistency). With these entries set aside, all that is left to solve is
finite.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from solvers.core.device import Watch
from solvers.spins.belief.graph import Graph


class Support(NamedTuple):
    """States that are left, all bool.

    Attributes:
        states: (B, N, d) of the sites.
        messages: (B, 2E, d) of the targets, by the message of one edge.
        cavities: (B, 2E, d) of the sources, without what came back over the edge, and with an
            allowed partner at the other end.
        consistent: (B,) every site has a state left.
    """

    states: Tensor
    messages: Tensor
    cavities: Tensor
    consistent: Tensor


@torch.no_grad()
def find_support(graph: Graph, allowed: Tensor, domain: Tensor, live: Tensor | None) -> Support:
    """The states that are left when no step of belief propagation rules out more.

    Args:
        graph: of the sites.
        allowed: (2E, d, d) bool, the pairs of states that are not forbidden.
        domain: (B, N, d) bool, the states that a site may take on its own.
        live: (B, 2E) bool, the edges over which messages run, or None for all.
    """
    batch, _, states = domain.shape
    open_pairs = allowed.float().mT  # (2E, d of the source, d of the target)
    partner = allowed.any(1)  # (2E, d): the state of the source has some partner
    dead = None if live is None else ~live.unsqueeze(2)
    messages = torch.ones(batch, graph.number, states, dtype=torch.bool, device=domain.device)
    watch = Watch(domain.device)
    for _ in range(messages[0].numel() + 1):  # each step but the last rules out one state at least
        cavities = _cavities(graph, domain, messages) & partner
        product = torch.bmm(cavities.float().transpose(0, 1), open_pairs).transpose(0, 1) > 0
        found = product if dead is None else product | dead
        # Asked for without waiting for a GPU, which may then make a few steps too many.
        changed = watch((found != messages).any().view(1))
        messages = found
        if changed is not None and not bool(changed.any()):
            break
    left = domain & (graph.gather((~messages).float()) == 0)
    cavities = _cavities(graph, domain, messages) & partner
    if dead is not None:
        cavities = cavities | dead
    return Support(left, messages, cavities, left.any(2).all(1))


def _cavities(graph: Graph, domain: Tensor, messages: Tensor) -> Tensor:
    """States (B, 2E, d) of the sources that no other neighbour rules out."""
    ruled_out = (~messages).float()
    others = graph.cavities(graph.gather(ruled_out), ruled_out) == 0
    return others & domain.index_select(1, graph.source)
