"""Adaptive TAP mean-field theory of coupled vector spins.

- ``adaptive_tap``: :func:`solvers.adaptive_tap`, means, covariances and response of coupled sites
- ``gibbs``: :func:`solvers.gibbs`, samples of coupled sites
- ``inputs``: checks and forms of couplings, fields and masks
- ``maps``: the mean-field maps that are solved, and where a solve starts
- ``response``: the response ``chi``, the cavity variances, their derivatives
- ``solver``: :class:`solvers.AdaptiveTAP`, damped Anderson acceleration
- ``sites``: the distributions of a single site
"""

from __future__ import annotations
