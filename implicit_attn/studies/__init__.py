"""Studies of trained models: functions that return plain tables, and figures of them.

The command ``implicit-attn study`` runs them on checkpoints.
"""

from __future__ import annotations

from implicit_attn.studies import plots as plots
from implicit_attn.studies import plots_spins as plots_spins
from implicit_attn.studies.convergence import (
    jacobian_eigenvalues,
    solver_choices,
    solver_costs,
    solver_curves,
)
from implicit_attn.studies.evaluations import (
    accuracy_by_evaluations,
    evaluations_to_reach,
    returned_within,
    solve_history,
)
from implicit_attn.studies.extrapolation import (
    Extrapolation,
    accuracy_by_iterations,
    adaptive_stopping,
    extrapolate,
    stopping_times,
)
from implicit_attn.studies.paths import (
    path_independence,
    paths_of_layer,
    paths_of_recurrence,
    run_from,
)
from implicit_attn.studies.report import write_report
from implicit_attn.studies.spins.errors import error_against_coupling
from implicit_attn.studies.spins.free_energies import log_partition_errors
from implicit_attn.studies.spins.graphs import graph_potts
from implicit_attn.studies.spins.models import (
    SpinModel,
    exact_moments,
    random_ising,
    random_potts,
)
from implicit_attn.studies.subjects import HeldStep, Subject, open_subject
from implicit_attn.studies.tables import format_table, write_table
from implicit_attn.studies.token_geometry import average_angle, effective_rank, geometry
from implicit_attn.studies.trade_off import layers_of_depth, read_trade_off, train_trade_off

__all__ = [
    "Extrapolation",
    "HeldStep",
    "SpinModel",
    "Subject",
    "accuracy_by_evaluations",
    "accuracy_by_iterations",
    "adaptive_stopping",
    "average_angle",
    "effective_rank",
    "error_against_coupling",
    "evaluations_to_reach",
    "exact_moments",
    "extrapolate",
    "format_table",
    "geometry",
    "graph_potts",
    "jacobian_eigenvalues",
    "layers_of_depth",
    "log_partition_errors",
    "open_subject",
    "path_independence",
    "paths_of_layer",
    "paths_of_recurrence",
    "random_ising",
    "random_potts",
    "read_trade_off",
    "returned_within",
    "run_from",
    "solve_history",
    "solver_choices",
    "solver_costs",
    "solver_curves",
    "stopping_times",
    "train_trade_off",
    "write_report",
    "write_table",
]
