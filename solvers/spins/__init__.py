"""Coupled vector spins: mean-field theories, free energies, samples, and spins in time.

- ``adaptive_tap``: :func:`solvers.adaptive_tap`, means, covariances and response of coupled sites
- ``belief``: :func:`solvers.belief_propagation` and :func:`solvers.decimate`
- ``clamped``: sites that keep a given value
- ``free_energy``: :func:`solvers.tap_log_partition`, the theories' log partition functions
- ``gibbs``: :func:`solvers.gibbs`, samples of coupled sites
- ``inputs``: checks and forms of couplings, fields and masks
- ``kinetic``: :func:`solvers.kinetic_step` and the like, spins that change in time
- ``maps``: the mean-field maps that are solved, and where a solve starts
- ``response``: the response ``chi``, the cavity variances, their derivatives
- ``saddle``: :func:`solvers.spherical_saddle`, O(d) spins in many dimensions
- ``theories``: the fixed points of the naive, second-order and adaptive theories
- ``solver``: :class:`solvers.AdaptiveTAP`, damped Anderson acceleration
- ``sites``: the distributions of a single site
- ``stationary``: values of functionals that are stationary in a state
"""

from __future__ import annotations
