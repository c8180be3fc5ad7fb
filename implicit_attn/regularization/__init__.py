"""What keeps training of equilibrium layers stable: losses on the way, of the Jacobian, norms of weights."""

from __future__ import annotations

from solvers.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
