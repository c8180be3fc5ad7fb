"""The sub-command about easy and hard instances of a generated task."""

from __future__ import annotations

import argparse
from functools import partial

from implicit_attn.command_line import folder, seed_number, whole
from implicit_attn.studies.experiments.experiment import Advance, Experiment
from implicit_attn.studies.experiments.harder.contenders import Settings
from implicit_attn.studies.experiments.harder.figures import easy_to_hard_figure
from implicit_attn.studies.experiments.harder.found import Found
from implicit_attn.studies.experiments.harder.runs import FACTORS, run_all
from implicit_attn.studies.harder.seeds import over_seeds
from implicit_attn.studies.tables import Result, Table


def run_easy_to_hard(options: argparse.Namespace, advance: Advance) -> Result:
    """prefix parity on rings: trained on small ones, solved on larger ones by more iterations"""
    settings = Settings(size=options.size, steps=options.steps, tests=options.tests)
    seeds = range(options.seed, options.seed + options.seeds)
    found = run_all(settings, seeds, advance, options.keep)
    tables = {
        "summary": summary(found.sizes),
        "methods": over_seeds(
            found.curves, ["method", "size", "iterations"], ["solved", "accuracy", "evaluations"]
        ),
        "stopping": _means(found),
        "sizes": found.sizes,
        "curves": found.curves,
        "adaptive": found.adaptive,
        "stops": found.stops,
        "needed": found.needed,
    }
    draw = partial(easy_to_hard_figure, found=found, settings=settings)
    note = f"; {options.seeds} seeds, mean and range"
    return Result(tables, ("summary", "stopping"), draw, note if options.seeds > 1 else "")


def summary(sizes: Table) -> Table:
    """A row for each model: the solved share of each size, mean over seeds."""
    merged = over_seeds(sizes, ["model", "parameters", "size"], ["solved", "accuracy"])
    rows: dict[str, dict[str, object]] = {}
    for row in merged:
        known = {"model": row["model"], "parameters": row["parameters"]}
        new = rows.setdefault(row["model"], known)
        new[f"solved_{row['size']}"] = row["solved"]
    sizes_followed = sorted({row["size"] for row in merged})[:: len(FACTORS) // 2]
    for row in merged:  # the accuracies stand after all solved shares
        if row["size"] in sizes_followed:
            rows[row["model"]][f"accuracy_{row['size']}"] = row["accuracy"]
    return list(rows.values())


def _means(found: Found) -> Table:
    measures = ["evaluations", "evaluations_90", "converged", "solved", "accuracy"]
    merged = over_seeds(found.adaptive, ["method", "size", "rtol"], measures)
    kept = ["method", "size", "rtol", "seeds", *measures]
    return [{name: row[name] for name in kept} for row in merged]


EXPERIMENTS = {
    "easy-to-hard": Experiment(
        run_easy_to_hard,
        "Easy to hard: parity along a ring, trained on small rings",
        (
            ("--size", whole(4, 64), 16, "positions of the largest rings in training"),
            ("--steps", whole(1, 100_000), 200, "batches of the equilibrium's training"),
            ("--tests", whole(1, 100_000), 100, "rings of each size in the test"),
            ("--seeds", whole(1, 100), 3, "trainings of each model"),
            ("--seed", seed_number, 0, "the first of them"),
            ("--keep", folder, None, "keep each training's numbers here; go on after those kept"),
        ),
        quick=("--size", "4", "--steps", "1", "--tests", "4", "--seeds", "1"),
    ),
}
