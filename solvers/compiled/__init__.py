"""Solves whose evaluations, products and algebra are compiled together, a few at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from solvers.lazy import lazy_names

if TYPE_CHECKING:
    from solvers.compiled import stages as stages
    from solvers.compiled import tracing as tracing
else:  # what traces imports torch's compiler, which takes seconds
    modules = {"solvers.compiled.stages": "", "solvers.compiled.tracing": ""}
    __getattr__, __dir__ = lazy_names(__name__, modules)
