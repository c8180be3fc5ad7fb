"""The sub-commands about associative memories."""

from __future__ import annotations

import argparse
from functools import partial
from itertools import chain

import torch

from implicit_attn.command_line import number, seed_number, whole
from implicit_attn.studies.experiments.experiment import Advance, Experiment
from implicit_attn.studies.experiments.memories.capacity import capacity_curve, half_load
from implicit_attn.studies.experiments.memories.density import (
    density_map,
    fit_histories,
    ring_memory,
    summary_of_fits,
    temperatures,
)
from implicit_attn.studies.experiments.memories.density_figures import (
    density_figure,
    machines_figure,
)
from implicit_attn.studies.experiments.memories.figures import capacity_figure, kinds_figure
from implicit_attn.studies.experiments.memories.kinds import (
    clustered_patterns,
    fixed_point_kinds,
    summary_of_kinds,
)
from implicit_attn.studies.experiments.memories.machines import (
    SCALAR,
    cumulant_curves,
    gibbs_errors,
    gibbs_histogram,
)
from implicit_attn.studies.tables import Result, Table

PAIR_LOADS = (0.05, 0.1, 0.12, 0.138, 0.16, 0.18, 0.2, 0.3, 0.5, 0.65, 0.8, 1.0)
DENSE_LOADS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
PAIR_RULES = ("hebb", "pseudo-inverse", "pseudo-likelihood")
DENSE_RULES = (2, 3, 4, "exp")
BETAS = (
    *(1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 12.0, 15.0, 20.0, 25.0, 30.0),
    *(40.0, 50.0, 60.0, 80.0, 100.0, 150.0),
)
ORDERS = (2, 4, 8)
MACHINES = (("normal", 0.35), ("poisson", 0.25), ("one-hot", 0.6))  # hidden law, strength of W


def run_capacity(options: argparse.Namespace, advance: Advance) -> Result:
    """how many random patterns binary memories retrieve: six learning rules against the load"""
    seeds = range(options.seed, options.seed + options.seeds)
    curve = partial(
        capacity_curve, flips=options.flips, seeds=seeds, probes=options.probes, advance=advance
    )
    pairs = [curve(rule, options.sites, sorted(options.loads)) for rule in PAIR_RULES]
    dense = [curve(rule, options.dense_sites, sorted(options.dense_loads)) for rule in DENSE_RULES]
    halves: Table = [
        {"rule": rows[0]["rule"], "sites": rows[0]["sites"], "half load": half_load(rows)}
        for rows in (*pairs, *dense)
    ]
    tables = {"pairs": list(chain(*pairs)), "dense": list(chain(*dense))}
    return Result(
        tables | {"half": halves},
        ("half",),
        partial(capacity_figure, **tables),
        f"; {options.flips:.0%} of the spins flipped, mean and range of {options.seeds} seeds",
    )


def run_kinds(options: argparse.Namespace, advance: Advance) -> Result:
    """what attention over patterns settles on: one pattern, the average of a cluster, or of all"""
    count = options.clusters * options.members
    betas = sorted(options.betas)
    draws = {
        f"{count} random patterns": (count, 1, 0.0, (1, count)),
        f"{options.clusters} clusters of {options.members} patterns": (
            *(options.clusters, options.members, options.spread, (1, options.members, count)),
        ),
    }
    panels, tables = {}, {}
    for (heading, (groups, members, spread, sizes)), name in zip(
        draws.items(), ("random", "clusters"), strict=True
    ):
        generator = torch.Generator().manual_seed(options.seed)
        patterns = clustered_patterns(groups, members, options.dim, spread, generator)
        table = fixed_point_kinds(patterns, betas, advance=advance)
        panels[heading] = (table, sizes)
        tables |= {name: table, f"{name}-summary": summary_of_kinds(table, sizes)}
    return Result(
        tables, ("random-summary", "clusters-summary"), partial(kinds_figure, panels=panels)
    )


def run_memory_density(options: argparse.Namespace, advance: Advance) -> Result:
    """the continuous memory as a density: normaliser, samples, denoising, maximum likelihood"""
    generator = torch.Generator().manual_seed(options.seed)
    memory = ring_memory(options.patterns, options.beta, generator)
    advance("densities")
    maps = [density_map(memory, k, options.samples, generator) for k in (1, options.cooling)]
    table = temperatures(memory, sorted({1, 2, options.cooling}))
    advance("fits")
    data = memory.sample(options.samples, generator)
    fits = fit_histories(memory, data, options.starts, options.steps, generator)
    noisy = memory.sample(60, generator)
    best = memory.log_prob(data).mean().item()
    return Result(
        {"temperatures": table, "fits": fits, "ends": summary_of_fits(fits, best)},
        ("temperatures", "ends"),
        partial(
            density_figure,
            memory=memory,
            maps=maps,
            noisy=noisy,
            fits=fits,
            best=best,
        ),
    )


def run_effective_rbm(options: argparse.Namespace, advance: Advance) -> Result:
    """hidden units summed out: cumulant functions of their laws, and Gibbs sampling checked"""
    advance("cumulant functions")
    curves = cumulant_curves(SCALAR, ORDERS)
    histograms = []
    for hidden, strength in MACHINES:
        advance(f"Gibbs sampling, {hidden} units")
        chosen = (options.spins, options.units, strength, options.chains, options.sweeps)
        histograms.append(gibbs_histogram(hidden, *chosen, options.seed))
    tables = {"cumulants": curves, "gibbs": list(chain(*histograms))}
    draw = partial(machines_figure, curves=curves, orders=ORDERS, histograms=histograms)
    return Result(tables | {"errors": gibbs_errors(histograms)}, ("errors",), draw)


EXPERIMENTS: dict[str, Experiment] = {
    "capacity": Experiment(
        run_capacity,
        "Capacity of binary memories",
        (
            ("--sites", whole(2, 10_000), 100, "spins of the pair rules"),
            ("--loads", number(0, 100, above=True), PAIR_LOADS, "patterns by spins, pair rules"),
            ("--dense-sites", whole(2, 10_000), 40, "spins of the dense rules"),
            ("--dense-loads", number(0, 1e4, above=True), DENSE_LOADS, "of the dense rules"),
            ("--flips", number(0, 1), 0.1, "share of flipped spins at the start"),
            ("--seeds", whole(1, 1000), 5, "independent sets of patterns"),
            ("--probes", whole(1), 40, "patterns retrieved at most, of each set"),
            ("--seed", seed_number, 0, "of the first set"),
        ),
        quick=(
            *("--sites", "20", "--loads", "0.1", "0.5", "--dense-sites", "12"),
            *("--dense-loads", "0.5", "2", "--seeds", "2", "--probes", "5"),
        ),
    ),
    "fixed-point-kinds": Experiment(
        run_kinds,
        "What attention over stored patterns settles on",
        (
            ("--clusters", whole(1, 1000), 10, "groups of patterns"),
            ("--members", whole(1, 1000), 20, "patterns of a group"),
            (
                "--spread",
                number(0, 100),
                0.3,
                "distance of patterns from the centre of their group",
            ),
            ("--dim", whole(2, 10_000), 64, "features of a pattern"),
            ("--betas", number(0, 1e4, above=True), BETAS, "inverse temperatures"),
            ("--seed", seed_number, 0, "of the patterns"),
        ),
        quick=("--clusters", "2", "--members", "3", "--dim", "8", "--betas", "1", "20"),
    ),
    "memory-density": Experiment(
        run_memory_density,
        "The continuous memory as a density",
        (
            ("--patterns", whole(1, 30), 5, "in two dimensions"),
            ("--beta", number(0.5, 1000), 4.0, "inverse temperature"),
            ("--cooling", whole(2, 5), 3, "the second temperature is 1 / (cooling beta)"),
            ("--samples", whole(30, 100_000), 600, "of each density"),
            ("--starts", whole(1, 100), 5, "of the fits"),
            ("--steps", whole(1, 10_000), 200, "of a fit"),
            ("--seed", seed_number, 0, "of patterns and samples"),
        ),
        quick=("--samples", "40", "--starts", "1", "--steps", "3"),
    ),
    "effective-rbm": Experiment(
        run_effective_rbm,
        "RBMs without their hidden units: cumulant functions and Gibbs sampling",
        (
            ("--spins", whole(1, 10), 6, "visible units"),
            ("--units", whole(2, 100), 4, "hidden units"),
            ("--chains", whole(1, 1_000_000), 20_000, "independent chains"),
            ("--sweeps", whole(1, 10_000), 50, "of each chain"),
            ("--seed", seed_number, 0, "of weights and chains"),
        ),
        quick=("--spins", "3", "--chains", "100", "--sweeps", "2"),
    ),
}
