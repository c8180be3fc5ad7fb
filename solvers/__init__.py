"""Batched fixed points, linear systems and their derivatives for PyTorch.

Every sample of a batch is a problem of its own, with its own stopping, status and cost. See
:func:`fixed_point` and :func:`solve_linear`.
"""

from __future__ import annotations

import logging

from solvers.lazy import lazy_names

DISTRIBUTION = "implicit-attn"  # by which implicit_attn knows this package from others of its name
__getattr__, __dir__, __all__ = lazy_names(__name__)

logging.getLogger(__name__).addHandler(logging.NullHandler())  # silent unless the user asks
