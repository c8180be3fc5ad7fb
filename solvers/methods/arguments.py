"""Solvers as people name them: an instance, a class, or its name."""

from __future__ import annotations

from typing import Any

from solvers.core.checks import require_kind
from solvers.core.solver import Solver
from solvers.methods.anderson import Anderson
from solvers.methods.broyden import Broyden
from solvers.methods.forward import Forward
from solvers.methods.gradient import GradientDescent
from solvers.methods.lbfgs import LBFGS
from solvers.methods.newton import Newton

KINDS = (Anderson, Broyden, Forward, GradientDescent, LBFGS, Newton)


def read_solver(value: Any, *, name: str = "solver") -> Solver | None:
    """A :class:`solvers.Solver` with its defaults where its class or name is given; None stays None."""
    return require_kind(name, value, Solver, KINDS, optional=True)
