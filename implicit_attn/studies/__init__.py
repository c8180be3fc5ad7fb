"""What one does to one's own trained model, each in one call that gives tables and their figure.

``convergence``, ``extrapolation``, ``paths`` and ``geometry`` take a ``DEQ`` with its input, a model that
calls one, or a name of shipped weights. The command ``implicit-attn study`` runs them.
"""

from __future__ import annotations

from implicit_attn.studies.converging import (
    Convergence,
    convergence,
    jacobian_eigenvalues,
    solver_choices,
)
from implicit_attn.studies.enumeration import SpinModel, exact_moments, random_ising, random_potts
from implicit_attn.studies.extrapolating import (
    Extrapolation,
    accuracy_by_evaluations,
    accuracy_by_iterations,
    adaptive_stopping,
    extrapolation,
)
from implicit_attn.studies.path_ends import Paths, paths
from implicit_attn.studies.reports import Report, report
from implicit_attn.studies.subjects import HeldStep, Subject, open_subject
from implicit_attn.studies.tables import Study, format_table, write_table
from implicit_attn.studies.token_geometry import Geometry, average_angle, effective_rank, geometry
from implicit_attn.studies.trade_off import (
    TradeOff,
    layers_of_depth,
    read_trade_off,
    train_trade_off,
)

__all__ = [
    "Convergence",
    "Extrapolation",
    "Geometry",
    "HeldStep",
    "Paths",
    "Report",
    "SpinModel",
    "Study",
    "Subject",
    "TradeOff",
    "accuracy_by_evaluations",
    "accuracy_by_iterations",
    "adaptive_stopping",
    "average_angle",
    "convergence",
    "effective_rank",
    "exact_moments",
    "extrapolation",
    "format_table",
    "geometry",
    "jacobian_eigenvalues",
    "layers_of_depth",
    "open_subject",
    "paths",
    "random_ising",
    "random_potts",
    "read_trade_off",
    "report",
    "solver_choices",
    "train_trade_off",
    "write_table",
]
