"""The sub-commands about landscapes."""

from __future__ import annotations

import argparse
from functools import partial

import torch

from implicit_attn.command_line import seed_number, whole
from implicit_attn.studies.experiments.experiment import Advance, Experiment
from implicit_attn.studies.experiments.landscapes.figures import norms_figure
from implicit_attn.studies.experiments.landscapes.norms import step_norms
from implicit_attn.studies.tables import Result


def run_norm_map(options: argparse.Namespace, advance: Advance) -> Result:
    """how far one step of bare self-attention moves random tokens: dimension x scale"""
    exponents = torch.linspace(1, 10, options.dimensions, dtype=torch.float64)
    dimensions = sorted({round(value) for value in (2**exponents).tolist()})
    scales = torch.linspace(0.2, 2, options.scales, dtype=torch.float64).tolist()
    table = step_norms(dimensions, scales, draws=options.draws, seed=options.seed, advance=advance)
    return Result({"norms": table}, (), partial(norms_figure, table=table))


EXPERIMENTS = {
    "norm-map": Experiment(
        run_norm_map,
        "Bare self-attention: the norm of one step on 32 random tokens",
        (
            ("--dimensions", whole(2, 1000), 40, "values of d between 2 and 1024"),
            ("--scales", whole(2, 1000), 19, "values of c between 0.2 and 2"),
            ("--draws", whole(1, 1000), 10, "independent draws at each point"),
            ("--seed", seed_number, 0, "of the draws"),
        ),
        quick=("--dimensions", "3", "--scales", "3", "--draws", "2"),
    ),
}
