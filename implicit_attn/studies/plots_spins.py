"""The name under which :mod:`implicit_attn.studies.figures.spins` was published."""

from __future__ import annotations

from implicit_attn.studies.figures.spins import mean_field_report, spin_report

__all__ = ["mean_field_report", "spin_report"]
