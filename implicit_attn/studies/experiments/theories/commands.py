"""The sub-commands about mean-field theories."""

from __future__ import annotations

import argparse
from functools import partial

from implicit_attn.command_line import number, seed_number, whole
from implicit_attn.studies.experiments.experiment import Advance, Experiment
from implicit_attn.studies.experiments.theories.figures import free_energy_figure, mixing_figure
from implicit_attn.studies.experiments.theories.mixing import ALLOWED, gibbs_mixing
from implicit_attn.studies.spins.free_energies import log_partition_errors
from implicit_attn.studies.spins.models import MOST_CONFIGURATIONS, random_ising, random_potts
from implicit_attn.studies.tables import Result, Table


def run_free_energy(options: argparse.Namespace, advance: Advance) -> Result:
    """errors of log Z and of the means by three mean-field theories, against enumeration"""
    if options.states**options.potts > MOST_CONFIGURATIONS:
        raise ValueError(
            f"--potts: --states to its power must be at most {MOST_CONFIGURATIONS}, got "
            f"{options.states} and {options.potts}"
        )
    families = {
        f"Ising, N = {options.ising}": partial(random_ising, options.ising),
        f"Potts, {options.states} colours, N = {options.potts}": partial(
            random_potts, options.potts, options.states
        ),
    }
    tables: dict[str, Table] = {}
    for name, draw in families.items():
        tables[name] = []
        for strength in sorted(options.strengths):
            advance(f"{name}, s = {strength:g}")
            row = log_partition_errors(draw, [strength], options.models, seed=options.seed)
            tables[name] += row
    named = dict(zip(("ising", "potts"), tables.values(), strict=True))
    figure = partial(free_energy_figure, tables=tables)
    return Result(named, (), figure, f": medians and 10 to 90 % of {options.models} random models")


def run_gibbs_mixing(options: argparse.Namespace, advance: Advance) -> Result:
    """how many sweeps of Gibbs sampling the Potts models on graphs need"""
    table = gibbs_mixing(
        sites=options.sites,
        colours=options.colours,
        chains=options.chains,
        sweeps=options.sweeps,
        seed=options.seed,
        advance=advance,
    )
    return Result({"energy": table}, (), partial(mixing_figure, table=table, allowed=ALLOWED))


EXPERIMENTS = {
    "free-energy": Experiment(
        run_free_energy,
        "Mean-field free energies against enumeration",
        (
            ("--models", whole(1, 100_000), 16, "random models at every strength"),
            ("--ising", whole(1, 20), 8, "sites of the Ising models"),
            ("--potts", whole(1, 20), 5, "sites of the Potts models"),
            ("--states", whole(2, 1000), 3, "colours of a Potts site"),
            (
                "--strengths",
                number(0, 1e6, above=True),
                (0.25, 0.5, 1.0, 1.5, 2.0),
                "of the couplings, each > 0",
            ),
            ("--seed", seed_number, 0, "of the models"),
        ),
        quick=("--models", "2", "--ising", "3", "--potts", "2", "--strengths", "0.5", "1"),
    ),
    "gibbs-mixing": Experiment(
        run_gibbs_mixing,
        "Gibbs sampling of Potts models on graphs: energy against sweeps",
        (
            ("--sites", whole(9, 10_000), 20, "of the models"),
            ("--colours", whole(2, 1000), 10, "of a site"),
            ("--chains", whole(2, 10_000_000), 4000, "independent chains"),
            ("--sweeps", whole(2, 1_000_000), 512, "the last number of sweeps"),
            ("--seed", seed_number, 0, "of models and chains"),
        ),
        quick=("--sites", "9", "--colours", "3", "--chains", "50", "--sweeps", "4"),
    ),
}
