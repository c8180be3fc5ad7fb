"""The sub-commands about associative memories."""

from __future__ import annotations

import argparse
from functools import partial
from itertools import chain

from implicit_attn.command_line import number, seed_number, whole
from implicit_attn.studies.experiments.experiment import Advance, Experiment
from implicit_attn.studies.experiments.memories.capacity import capacity_curve, half_load
from implicit_attn.studies.experiments.memories.figures import capacity_figure
from implicit_attn.studies.tables import Result, Table

PAIR_LOADS = (0.05, 0.1, 0.12, 0.138, 0.16, 0.18, 0.2, 0.3, 0.5, 0.65, 0.8, 1.0)
DENSE_LOADS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
PAIR_RULES = ("hebb", "pseudo-inverse", "pseudo-likelihood")
DENSE_RULES = (2, 3, 4, "exp")


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
}
