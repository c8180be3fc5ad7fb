"""Batched fixed points, linear systems and their derivatives for PyTorch.

Every sample of a batch is a problem of its own, with its own stopping, status and cost. See
:func:`fixed_point` and :func:`solve_linear`.
"""

from __future__ import annotations

from solvers.adaptive_tap import SpinMarginals, adaptive_tap
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
from solvers.sites import GaussianSite, IsingSite, PottsSite, Site, SphericalSite
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
from solvers.spins import SpinState, starting_state, tap_step
from solvers.tap_solver import AdaptiveTAP
from solvers.tolerance import Tolerance

__all__ = [
    "CG",
    "GMRES",
    "LBFGS",
    "MINRES",
    "AdaptiveTAP",
    "Adjoint",
    "AdjointReport",
    "Anderson",
    "Broyden",
    "Descent",
    "EnergyUpdate",
    "Forward",
    "GaussianSite",
    "GradientDescent",
    "Implicit",
    "IsingSite",
    "LinearSolver",
    "Newton",
    "OneStep",
    "Phantom",
    "PottsSite",
    "Progress",
    "Site",
    "Solution",
    "SolveError",
    "SolveWarning",
    "Solver",
    "Spectrum",
    "SpectrumError",
    "SphericalSite",
    "SpinMarginals",
    "SpinState",
    "Status",
    "Tolerance",
    "Trace",
    "Unrolled",
    "adaptive_tap",
    "extreme_eigenvalues",
    "fixed_point",
    "jacobian",
    "solve_linear",
    "spectral_radius",
    "spectrum",
    "starting_state",
    "tap_step",
]
