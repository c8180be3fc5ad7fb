"""Batched fixed points, linear systems and their derivatives for PyTorch.

Every sample of a batch is a problem of its own, with its own stopping, status and cost. See
:func:`fixed_point` and :func:`solve_linear`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from solvers.adjoints.kinds import Adjoint, Implicit, OneStep, Phantom, Unrolled
from solvers.core.problem import Descent, EnergyUpdate
from solvers.core.rows import Progress
from solvers.core.solution import AdjointReport, Solution, SolveError, SolveWarning, Status, Trace
from solvers.core.solver import Solver
from solvers.core.tolerance import Tolerance
from solvers.fixed_points import fixed_point
from solvers.krylov.cg import CG
from solvers.krylov.gmres import GMRES
from solvers.krylov.minres import MINRES
from solvers.krylov.solve import LinearSolver, solve_linear
from solvers.lazy import lazy_names
from solvers.methods.anderson import Anderson
from solvers.methods.broyden import Broyden
from solvers.methods.forward import Forward
from solvers.methods.gradient import GradientDescent
from solvers.methods.lbfgs import LBFGS
from solvers.methods.newton import Newton

if TYPE_CHECKING:
    from solvers.eigen.penalty import jacobian_penalty
    from solvers.eigen.spectrum import (
        Spectrum,
        SpectrumError,
        extreme_eigenvalues,
        jacobian,
        spectral_radius,
        spectrum,
    )
    from solvers.spins.adaptive_tap import SpinMarginals, adaptive_tap
    from solvers.spins.belief.beliefs import Beliefs
    from solvers.spins.belief.decimation import Decimation, decimate
    from solvers.spins.belief.propagation import belief_propagation
    from solvers.spins.free_energy import tap_log_partition
    from solvers.spins.gibbs import gibbs
    from solvers.spins.kinetic.maps import kinetic_map
    from solvers.spins.kinetic.simulation import GlauberRun, glauber
    from solvers.spins.kinetic.step import kinetic_step, kinetic_trajectory, steady_state
    from solvers.spins.maps import SpinState, starting_state, tap_step
    from solvers.spins.saddle import SaddleSolution, spherical_saddle
    from solvers.spins.sites import (
        GaussianSite,
        IsingSite,
        PottsSite,
        Site,
        SphericalSite,
        TorusSite,
    )
    from solvers.spins.solver import AdaptiveTAP
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "solvers.eigen.penalty": "jacobian_penalty",
            "solvers.eigen.spectrum": (
                "Spectrum SpectrumError extreme_eigenvalues jacobian spectral_radius spectrum"
            ),
            "solvers.spins.adaptive_tap": "SpinMarginals adaptive_tap",
            "solvers.spins.belief.beliefs": "Beliefs",
            "solvers.spins.belief.decimation": "Decimation decimate",
            "solvers.spins.belief.propagation": "belief_propagation",
            "solvers.spins.free_energy": "tap_log_partition",
            "solvers.spins.gibbs": "gibbs",
            "solvers.spins.kinetic.maps": "kinetic_map",
            "solvers.spins.kinetic.simulation": "GlauberRun glauber",
            "solvers.spins.kinetic.step": "kinetic_step kinetic_trajectory steady_state",
            "solvers.spins.maps": "SpinState starting_state tap_step",
            "solvers.spins.saddle": "SaddleSolution spherical_saddle",
            "solvers.spins.sites": "GaussianSite IsingSite PottsSite Site SphericalSite TorusSite",
            "solvers.spins.solver": "AdaptiveTAP",
        },
    )

logging.getLogger(__name__).addHandler(logging.NullHandler())  # silent unless the user asks

DISTRIBUTION = "implicit-attn"  # by which implicit_attn knows this package from others of its name

__all__ = [
    "CG",
    "GMRES",
    "LBFGS",
    "MINRES",
    "AdaptiveTAP",
    "Adjoint",
    "AdjointReport",
    "Anderson",
    "Beliefs",
    "Broyden",
    "Decimation",
    "Descent",
    "EnergyUpdate",
    "Forward",
    "GaussianSite",
    "GlauberRun",
    "GradientDescent",
    "Implicit",
    "IsingSite",
    "LinearSolver",
    "Newton",
    "OneStep",
    "Phantom",
    "PottsSite",
    "Progress",
    "SaddleSolution",
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
    "TorusSite",
    "Trace",
    "Unrolled",
    "adaptive_tap",
    "belief_propagation",
    "decimate",
    "extreme_eigenvalues",
    "fixed_point",
    "gibbs",
    "glauber",
    "jacobian",
    "jacobian_penalty",
    "kinetic_map",
    "kinetic_step",
    "kinetic_trajectory",
    "solve_linear",
    "spectral_radius",
    "spectrum",
    "spherical_saddle",
    "starting_state",
    "steady_state",
    "tap_log_partition",
    "tap_step",
]
