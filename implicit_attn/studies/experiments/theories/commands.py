"""The sub-commands about mean-field theories."""

from __future__ import annotations

import argparse
from functools import partial

import torch

from implicit_attn.command_line import number, seed_number, whole
from implicit_attn.studies.experiments.experiment import Advance, Experiment
from implicit_attn.studies.experiments.theories.figures import (
    free_energy_figure,
    mixing_figure,
    saddle_figure,
)
from implicit_attn.studies.experiments.theories.mixing import ALLOWED, gibbs_mixing
from implicit_attn.studies.experiments.theories.saddle import SaddleModel, curves, plane, sweep
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
    named: dict[str, Table] = dict(zip(("ising", "potts"), tables.values(), strict=True))
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


def run_spherical_saddle(options: argparse.Namespace, advance: Advance) -> Result:
    """the function whose minimum solves O(d) spins, over multipliers and temperature"""
    generator = torch.Generator().manual_seed(options.seed)
    model = SaddleModel.drawn(options.sites, options.dim, generator)
    pair = SaddleModel.drawn(2, options.pair_dim, generator)
    grid = torch.linspace(-1, 3, 1001, dtype=torch.float64)
    betas = torch.logspace(-0.6, 1, options.frames, dtype=torch.float64).tolist()
    table, failed = sweep(model, betas, advance)
    if failed:
        raise RuntimeError(f"{failed} of {2 * len(betas)} saddle points did not converge")
    advance("curves")
    root = model.solve(options.beta, per_site=False).multiplier.item() / (2 * options.beta)
    alone = (1 + (1 + 4 * options.beta**2) ** 0.5) / (4 * options.beta)
    values = torch.linspace(0.02, 3, 150, dtype=torch.float64)
    parts = {
        "curve": curves(model, options.beta, grid),
        "root": root,
        "border": model.levels[-1].item(),
        "lowest": model.levels[0].item(),
        "beta": options.beta,
        "uncoupled": alone,
        "frames": {beta: curves(model, beta, grid) for beta in betas[:: max(1, len(betas) // 10)]},
        "sweep": table,
        "values": values,
        "plane": plane(pair, options.beta, values),
        "pair": (
            pair.solve(options.beta, per_site=True).multiplier[0] / (2 * options.beta)
        ).tolist(),
        "product": pair.couplings[0, 1].item() ** 2,
    }
    note = f": N = {options.sites}, d = {options.dim}"
    return Result(
        {"temperature": table, "curve": parts["curve"]},
        (),
        partial(saddle_figure, parts=parts),
        note,
    )


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
    "spherical-saddle": Experiment(
        run_spherical_saddle,
        "O(d) spins: the saddle point of their multipliers",
        (
            ("--sites", whole(2, 4096), 32, "spins of the first five panels"),
            ("--dim", whole(2, 1_000_000), 128, "their components"),
            (
                "--pair-dim",
                whole(2, 1_000_000),
                64,
                "components of the two spins of the last panel",
            ),
            ("--beta", number(0, 1000, above=True), 1.0, "inverse temperature, but for the sweep"),
            ("--frames", whole(2, 10_000), 100, "inverse temperatures of the sweep, 0.25 to 10"),
            ("--seed", seed_number, 0, "of couplings and fields"),
        ),
        quick=("--sites", "4", "--dim", "6", "--frames", "3"),
    ),
}
