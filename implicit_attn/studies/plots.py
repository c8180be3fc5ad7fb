"""The name under which :mod:`implicit_attn.studies.figures.training` was published."""

from __future__ import annotations

from implicit_attn.studies.figures.training import training_report

__all__ = ["training_report"]
