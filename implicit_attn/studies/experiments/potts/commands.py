"""The sub-commands about Potts models."""

from __future__ import annotations

from implicit_attn.studies.experiments.experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {}
