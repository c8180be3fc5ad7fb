"""Traced functions as graphs of operators: made, split by what they depend on, rewritten, compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from solvers.lazy import lazy_names

if TYPE_CHECKING:
    from solvers.compiled.graphs import stages as stages
    from solvers.compiled.graphs import tracing as tracing
else:  # what traces imports torch's compiler, which takes seconds
    modules = {"solvers.compiled.graphs.stages": "", "solvers.compiled.graphs.tracing": ""}
    __getattr__, __dir__ = lazy_names(__name__, modules)
