"""Batched fixed points, linear systems and their derivatives for PyTorch.

Each sample of a batch is an independent problem with its own stopping time, status and cost. See
:func:`fixed_point` and :func:`solve_linear`.
"""

from __future__ import annotations

from solvers.adjoint import Adjoint as Adjoint
from solvers.adjoint import Implicit as Implicit
from solvers.adjoint import OneStep as OneStep
from solvers.adjoint import Phantom as Phantom
from solvers.adjoint import Unrolled as Unrolled
from solvers.checking import UpdateReport as UpdateReport
from solvers.checking import check_update as check_update
from solvers.core.exports import define_all
from solvers.core.loop import Solver as Solver
from solvers.core.problem import Descent as Descent
from solvers.core.problem import EnergyUpdate as EnergyUpdate
from solvers.core.rows import Progress as Progress
from solvers.core.solution import AdjointReport as AdjointReport
from solvers.core.solution import Solution as Solution
from solvers.core.solution import SolveError as SolveError
from solvers.core.solution import SolveWarning as SolveWarning
from solvers.core.solution import Status as Status
from solvers.core.solution import Trace as Trace
from solvers.core.tolerance import Tolerance as Tolerance
from solvers.eigen import Spectrum as Spectrum
from solvers.eigen import SpectrumError as SpectrumError
from solvers.eigen import extreme_eigenvalues as extreme_eigenvalues
from solvers.eigen import jacobian as jacobian
from solvers.eigen import jacobian_penalty as jacobian_penalty
from solvers.eigen import spectral_radius as spectral_radius
from solvers.eigen import spectrum as spectrum
from solvers.fixed_points import fixed_point as fixed_point
from solvers.fixed_points import root as root
from solvers.krylov import CG as CG
from solvers.krylov import GMRES as GMRES
from solvers.krylov import MINRES as MINRES
from solvers.krylov import LinearSolver as LinearSolver
from solvers.linear import solve_linear as solve_linear
from solvers.methods.anderson import Anderson as Anderson
from solvers.methods.broyden import Broyden as Broyden
from solvers.methods.lbfgs import LBFGS as LBFGS
from solvers.methods.newton import Newton as Newton
from solvers.methods.steps import Forward as Forward
from solvers.methods.steps import GradientDescent as GradientDescent
from solvers.queues import solve_queue as solve_queue
from solvers.spins.adaptive_tap import AdaptiveTAP as AdaptiveTAP
from solvers.spins.adaptive_tap import SpinMarginals as SpinMarginals
from solvers.spins.adaptive_tap import SpinState as SpinState
from solvers.spins.adaptive_tap import adaptive_tap as adaptive_tap
from solvers.spins.adaptive_tap import starting_state as starting_state
from solvers.spins.adaptive_tap import tap_log_partition as tap_log_partition
from solvers.spins.adaptive_tap import tap_step as tap_step
from solvers.spins.belief_propagation import Beliefs as Beliefs
from solvers.spins.belief_propagation import Decimation as Decimation
from solvers.spins.belief_propagation import belief_propagation as belief_propagation
from solvers.spins.belief_propagation import decimate as decimate
from solvers.spins.gibbs import gibbs as gibbs
from solvers.spins.kinetic import GlauberRun as GlauberRun
from solvers.spins.kinetic import glauber as glauber
from solvers.spins.kinetic import kinetic_map as kinetic_map
from solvers.spins.kinetic import kinetic_step as kinetic_step
from solvers.spins.kinetic import kinetic_trajectory as kinetic_trajectory
from solvers.spins.kinetic import steady_state as steady_state
from solvers.spins.saddle import SaddlePoint as SaddlePoint
from solvers.spins.saddle import spherical_saddle as spherical_saddle
from solvers.spins.sites import GaussianSite as GaussianSite
from solvers.spins.sites import IsingSite as IsingSite
from solvers.spins.sites import PottsSite as PottsSite
from solvers.spins.sites import Site as Site
from solvers.spins.sites import SphericalSite as SphericalSite
from solvers.spins.sites import TorusSite as TorusSite

define_all(vars())
DISTRIBUTION = "implicit-attn"  # implicit_attn recognises this package by it
