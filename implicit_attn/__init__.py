"""Implicit attention: layers whose output is the fixed point of an energy descent or mean-field update.

The core names stand in ``__init__.pyi``; all others are in the sub-packages.
"""

from __future__ import annotations

import logging

import implicit_attn.shadow  # noqa: F401 - before all that takes something out of solvers
from solvers.lazy import lazy_names

__version__ = "0.2.0"
__getattr__, __dir__, __all__ = lazy_names(__name__)

logging.getLogger(__name__).addHandler(logging.NullHandler())  # silent unless the user asks
