"""Spins in time: parallel dynamics with any couplings, symmetric or not, and its mean-field closures.

- ``couplings``: checks, and the products of couplings with means and covariances
- ``laws``: single sites as functions of their mean, and averaged over Gaussian noise in their field
- ``spheres``: the same for spheres
- ``maps``: the closures, one evaluation each
- ``step``: :func:`solvers.kinetic_step`, :func:`solvers.kinetic_trajectory`, :func:`solvers.steady_state`
- ``simulation``: :func:`solvers.glauber`, the dynamics themselves, by Monte Carlo
"""

from __future__ import annotations
