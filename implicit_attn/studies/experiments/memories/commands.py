"""The sub-commands about associative memories."""

from __future__ import annotations

from implicit_attn.studies.experiments.experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {}
