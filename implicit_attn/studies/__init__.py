"""Studies of a trained layer, each one call that returns tables and plots them.

``convergence``, ``extrapolation``, ``paths`` and ``geometry`` take a ``DEQ`` with its input, a model that
calls one, or a name of shipped weights. ``examples/studies.py`` runs them.
"""

from __future__ import annotations

from solvers.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
