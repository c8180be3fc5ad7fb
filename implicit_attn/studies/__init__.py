"""What one does to one's own trained model, each in one call that gives tables and their figure.

``convergence``, ``extrapolation``, ``paths`` and ``geometry`` take a ``DEQ`` with its input, a model that
calls one, or a name of shipped weights. ``examples/study_*.py`` run them.
"""

from __future__ import annotations

from solvers.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
