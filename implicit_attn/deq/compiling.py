"""Compiled layers."""

from __future__ import annotations

import solvers

TRACEABLE = (solvers.Anderson, solvers.Broyden, solvers.Forward, solvers.LBFGS)


def check_compilable(solver: solvers.Solver | None) -> None:
    """Raise ValueError for a solver whose steps cannot be traced."""
    if solver is not None and not solver.traceable:
        names = ", ".join(kind.__name__ for kind in TRACEABLE)
        raise ValueError(f"solver cannot be compiled: {solver!r}; those that can are {names}")
