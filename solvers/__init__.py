"""Batched fixed points, linear systems and their derivatives for PyTorch.

Each sample of a batch is an independent problem with its own stopping time, status and cost. See
:func:`fixed_point` and :func:`solve_linear`.
"""

from __future__ import annotations

import logging

from solvers.lazy import lazy_names

DISTRIBUTION = "implicit-attn"  # implicit_attn recognises this package by it
__getattr__, __dir__, __all__ = lazy_names(__name__)

logging.getLogger(__name__).addHandler(logging.NullHandler())  # silent unless the user asks
