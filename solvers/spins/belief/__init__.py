"""Belief propagation for coupled Potts sites, and decimation.

- ``graph``: pairs of sites as directed edges, dense or from a list
- ``support``: which states hard constraints leave, and whether they contradict each other
- ``evidence``: what differs from sample to sample: fields, clamped and masked sites, states left
- ``messages``: the map whose fixed point is solved
- ``beliefs``: marginals, pair marginals and the Bethe free energy of messages
- ``propagation``: :func:`solvers.belief_propagation`
- ``decimation``: :func:`solvers.decimate`, fix the surest site and solve again
"""

from __future__ import annotations
