"""Batched fixed points, linear systems and their derivatives for PyTorch.

Every sample of a batch is a problem of its own, with its own stopping, status and cost. See
:func:`fixed_point` and :func:`solve_linear`.
"""

from __future__ import annotations

from solvers.adjoint import Adjoint, Implicit, OneStep, Phantom, Unrolled
from solvers.anderson import Anderson
from solvers.broyden import Broyden
from solvers.cg import CG
from solvers.fixed_point import fixed_point
from solvers.forward import Forward
from solvers.gmres import GMRES
from solvers.gradient import GradientDescent
from solvers.lbfgs import LBFGS
from solvers.linear import LinearSolver, solve_linear
from solvers.minres import MINRES
from solvers.newton import Newton
from solvers.problem import Descent, EnergyUpdate
from solvers.rows import Progress
from solvers.solution import AdjointReport, Solution, SolveError, SolveWarning, Status, Trace
from solvers.solver import Solver
from solvers.spectrum import (
    Spectrum,
    SpectrumError,
    extreme_eigenvalues,
    jacobian,
    spectral_radius,
    spectrum,
)
from solvers.tolerance import Tolerance

__all__ = [
    "CG",
    "GMRES",
    "LBFGS",
    "MINRES",
    "Adjoint",
    "AdjointReport",
    "Anderson",
    "Broyden",
    "Descent",
    "EnergyUpdate",
    "Forward",
    "GradientDescent",
    "Implicit",
    "LinearSolver",
    "Newton",
    "OneStep",
    "Phantom",
    "Progress",
    "Solution",
    "SolveError",
    "SolveWarning",
    "Solver",
    "Spectrum",
    "SpectrumError",
    "Status",
    "Tolerance",
    "Trace",
    "Unrolled",
    "extreme_eigenvalues",
    "fixed_point",
    "jacobian",
    "solve_linear",
    "spectral_radius",
    "spectrum",
]
