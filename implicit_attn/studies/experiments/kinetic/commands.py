"""The sub-commands about spins in time."""

from __future__ import annotations

import argparse
from functools import partial

import torch

from implicit_attn.command_line import seed_number, whole
from implicit_attn.studies.experiments.experiment import Advance, Experiment
from implicit_attn.studies.experiments.kinetic.figures import ising_figure, vectors_figure
from implicit_attn.studies.experiments.kinetic.ising import (
    compare,
    critical_beta,
    from_many_starts,
    histories,
    ising_model,
    sweep,
    turning_point,
)
from implicit_attn.studies.experiments.kinetic.vectors import (
    errors_after_one_step,
    errors_after_steps,
    vector_histories,
)
from implicit_attn.studies.tables import Result

FACTORS = (0.5, 1.0, 2.0)  # of the critical beta


def run_kinetic_ising(options: argparse.Namespace, advance: Advance) -> Result:
    """kinetic Ising spins: means in time, closures beside simulation, the transition at beta_c"""
    critical, generator = critical_beta(), torch.Generator().manual_seed(options.seed)
    model = ising_model(options.spins, generator)
    errors, shown = [], {}
    for factor in FACTORS:
        advance(f"closures and simulation at {factor:g} beta_c")
        means = histories(
            model,
            factor * critical,
            steps=options.steps,
            chains=options.chains,
            generator=generator,
        )
        errors += [{"factor": factor, **row} for row in compare(means, options.chains)]
        shown = means if factor == 1 else shown
    starts = {}
    for factor in FACTORS:
        advance(f"{options.starts} starts at {factor:g} beta_c")
        starts[factor] = from_many_starts(
            model, factor * critical, steps=options.steps, starts=options.starts
        )
    betas = (critical * torch.linspace(0.25, 2, options.betas)).tolist()
    table = sweep(
        betas,
        spins=options.sweep_spins,
        draws=options.draws,
        steps=options.steps - 1,
        generator=torch.Generator().manual_seed(options.seed),  # the same whatever was simulated
        advance=advance,
    )
    turns = [
        {"closure": name, "turns_at": turning_point(rows) / critical, "critical_beta": critical}
        for name in ("naive", "gaussian")
        for rows in [[row for row in table if row["closure"] == name]]
    ]
    draw = partial(
        ising_figure,
        histories=shown,
        errors=[row for row in errors if row["factor"] == 1],
        starts=starts,
        sweep=table,
        critical=critical,
        models=f"{options.draws} other models of {options.sweep_spins} spins",
    )
    tables = {"errors": errors, "turns": turns, "sweep": table}
    return Result(tables, ("errors", "turns"), draw)


def run_kinetic_vectors(options: argparse.Namespace, advance: Advance) -> Result:
    """kinetic vector spins: directions and lengths of the means in time, and errors of the closures"""
    table = vector_histories(
        options.spins, options.dim, steps=options.steps, seed=options.seed, advance=advance
    )
    chains = {"chains": options.chains, "seed": options.seed, "advance": advance}
    errors = errors_after_steps(**chains) + errors_after_one_step(**chains)
    draw = partial(vectors_figure, histories=table, errors=errors)
    return Result({"histories": table, "errors": errors}, ("errors",), draw)


EXPERIMENTS: dict[str, Experiment] = {
    "kinetic-ising": Experiment(
        run_kinetic_ising,
        "Kinetic Ising spins with random asymmetric couplings",
        (
            ("--spins", whole(2, 10_000), 512, "spins N"),
            ("--steps", whole(2, 10_000), 128, "time steps"),
            ("--chains", whole(2, 100_000), 1500, "simulated at each of three temperatures"),
            ("--starts", whole(2, 10_000), 24, "starts at each of them"),
            ("--betas", whole(3, 1000), 20, "temperatures between 0.25 and 2 beta_c"),
            ("--draws", whole(1, 1000), 12, "random models at each of them"),
            ("--sweep-spins", whole(2, 10_000), 256, "spins of these models"),
            ("--seed", seed_number, 1, "of models and simulations"),
        ),
        quick=(
            "--spins", "16", "--steps", "4", "--chains", "8", "--starts", "3", "--betas", "3",
            "--draws", "2", "--sweep-spins", "16",
        ),
    ),
    "kinetic-vectors": Experiment(
        run_kinetic_vectors,
        "Kinetic vector spins: closures of their means",
        (
            ("--spins", whole(2, 10_000), 256, "spins N (in the source 1024)"),
            ("--dim", whole(3, 10_000), 128, "dimensions d (in the source 512)"),
            ("--steps", whole(1, 1000), 20, "time steps"),
            ("--chains", whole(2, 100_000), 3000, "simulated for the errors"),
            ("--seed", seed_number, 0, "of models and simulations"),
        ),
        quick=("--spins", "12", "--dim", "6", "--steps", "3", "--chains", "16"),
    ),
}  # fmt: skip
