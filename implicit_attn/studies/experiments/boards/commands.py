"""The sub-commands about Sudoku as a Potts model."""

from __future__ import annotations

from implicit_attn.studies.experiments.experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {}
