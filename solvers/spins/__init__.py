"""Coupled vector spins: mean-field theories, free energies, samples, and spins in time.

- ``adaptive_tap``: :func:`solvers.adaptive_tap`, means, covariances and response of coupled sites
- ``theories``: the maps of the theories, their fixed points, :class:`solvers.AdaptiveTAP`
- ``response``: the response ``chi``, the cavity variances, their derivatives
- ``free_energy``: the theories' log partition functions, :func:`solvers.tap_log_partition`
- ``sites``: the distributions of a single site; ``bingham``, ``bessel``: integrals on spheres and circles
- ``gibbs``: :func:`solvers.gibbs`, samples of coupled sites
- ``saddle``: :func:`solvers.spherical_saddle`, O(d) spins in many dimensions
- ``belief_propagation``: :func:`solvers.belief_propagation`; ``belief_messages``: its map
- ``decimation``: :func:`solvers.decimate`, fix the surest site and solve again
- ``kinetic``: :func:`solvers.kinetic_step` and the like, spins in time; ``kinetic_laws``: their sites
- ``inputs``: checks and forms of couplings, fields and masks
"""

from __future__ import annotations
