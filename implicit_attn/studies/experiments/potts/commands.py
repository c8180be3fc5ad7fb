"""The sub-commands about Potts models."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

from implicit_attn.command_line import count, seed_number, whole
from implicit_attn.studies.experiments.experiment import Advance, Experiment
from implicit_attn.studies.experiments.potts.data import draw_data
from implicit_attn.studies.experiments.potts.figures import learning_figure, recovery_figure
from implicit_attn.studies.experiments.potts.learning import compare_rules
from implicit_attn.studies.experiments.potts.methods import Effort, read_method
from implicit_attn.studies.experiments.potts.recovery import compare_methods
from implicit_attn.studies.spins.graphs import GRAPHS
from implicit_attn.studies.tables import Result
from solvers.core.checks import require_choice


def graph_name(text: str) -> str:
    """``type=`` of an option: a model of ``graph_potts``."""
    return _read(text, partial(require_choice, "data", choices=GRAPHS))


def method_name(text: str) -> str:
    """``type=`` of an option: a method of the recovery."""
    return _read(text, read_method)


def _read(text: str, check: Callable[[str], str]) -> str:
    try:
        return check(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def run_recovery(options: argparse.Namespace, advance: Advance) -> Result:
    """couplings of a sparse Potts model from samples: factored attention, Potts, transformers"""
    advance(f"{options.data}: Gibbs sampling")
    sizes = {"sites": options.sites, "colours": options.colours}
    test = min(options.samples, 1000)
    data = draw_data(options.data, options.samples, test, seed=options.seed, **sizes)
    effort = Effort(steps=options.steps, masked=options.masked, batch=128, dim=32, tested=300)
    few = [number for number in options.few if number < options.samples] + [options.samples]
    recovery = compare_methods(
        data, options.methods, effort, few=few, seed=options.seed, advance=advance
    )
    note = (
        f": {data.sites} sites, {data.colours} colours, {options.data}, "
        f"{options.samples} samples, loss of the truth {data.bayes():.3f} nats a site"
    )
    return Result(
        recovery.tables(), ("methods",), partial(recovery_figure, recovery=recovery), note
    )


def run_learning(options: argparse.Namespace, advance: Advance) -> Result:
    """contrastive divergence, PCD and pseudo-likelihood against the exact likelihood"""
    by_samples, by_step = compare_rules(
        options.samples,
        sites=options.sites,
        colours=options.colours,
        seeds=options.seeds,
        steps=options.steps,
        advance=advance,
    )
    draw = partial(learning_figure, by_samples=by_samples, by_step=by_step)
    note = f": {options.sites} sites, {options.colours} colours, {options.seeds} models"
    return Result({"samples": by_samples, "steps": by_step}, ("samples",), draw, note)


EXPERIMENTS = {
    "potts-recovery": Experiment(
        run_recovery,
        "Couplings of a Potts model from samples",
        (
            ("--data", graph_name, "er-kron", f"the model: {', '.join(GRAPHS)}"),
            (
                "--samples",
                whole(1, 10_000_000),
                5000,
                "for training; at most 1000 more for the test",
            ),
            (
                "--methods",
                method_name,
                ("linear", "softmax", "potts", "vanilla", "vanilla-3", "fixed", "recycled"),
                "such as linear, sink-long, softmax-16, potts, vanilla, vanilla-3, fixed, recycled",
            ),
            ("--few", count, (200, 1000), "numbers of samples of further fits"),
            ("--steps", count, 500, "of factored attention"),
            ("--masked", count, 400, "steps of transformers"),
            ("--sites", whole(9, 1000), 12, "N"),
            ("--colours", whole(2, 100), 5, "d"),
            ("--seed", seed_number, 0, "of the model, its samples and the fits"),
        ),
        quick=(
            *("--sites", "9", "--colours", "3", "--samples", "60", "--few", "20", "--steps", "3"),
            *("--masked", "3", "--methods", "linear", "recycled"),
        ),
    ),
    "boltzmann-learning": Experiment(
        run_learning,
        "Rules that learn the couplings of small Potts models",
        (
            ("--samples", count, (300, 1000, 5000, 20_000), "numbers of samples"),
            ("--sites", whole(2, 12), 6, "N"),
            ("--colours", whole(2, 8), 3, "d; there must be at most 2^20 configurations"),
            ("--seeds", whole(1, 100), 3, "models, each with samples of its own"),
            ("--steps", whole(1, 100_000), 800, "of the rules that sample"),
        ),
        quick=(
            *("--sites", "3", "--colours", "2", "--samples", "20", "50"),
            *("--seeds", "1", "--steps", "3"),
        ),
    ),
}
