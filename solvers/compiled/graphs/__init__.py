"""Traced functions as graphs of operators: made, split by what they depend on, rewritten, compiled.

Its modules are imported when they are asked for: what traces imports torch's compiler, which takes seconds.
"""

from __future__ import annotations

from solvers.lazy import lazy_names

__getattr__ = lazy_names(__name__)[0]
