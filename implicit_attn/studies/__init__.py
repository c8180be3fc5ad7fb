"""Studies of trained models: functions that return plain tables, and plots of them."""

from __future__ import annotations

from implicit_attn.studies.convergence import solve_history
from implicit_attn.studies.extrapolation import accuracy_by_evaluations
from implicit_attn.studies.report import write_report
from implicit_attn.studies.tables import format_table, write_table

__all__ = [
    "accuracy_by_evaluations",
    "format_table",
    "solve_history",
    "write_report",
    "write_table",
]
