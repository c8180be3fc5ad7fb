"""The sub-commands about bare self-attention."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

from implicit_attn.command_line import number, seed_number, share, whole
from implicit_attn.energies import BareAttention
from implicit_attn.studies.experiments.bare.ends import random_ends, trained_ends
from implicit_attn.studies.experiments.bare.figures import attractors_figure, comparison_figure
from implicit_attn.studies.experiments.bare.pipeline import (
    EXACT,
    KINDS,
    RECIPES,
    SIZES,
    SOURCE,
    Setup,
    compare,
    open_setup,
)
from implicit_attn.studies.experiments.bare.transients import (
    Corruption,
    baselines,
    check_masked,
    iterate_mean,
    measure,
    transients,
)
from implicit_attn.studies.experiments.experiment import Advance, Experiment, Option
from implicit_attn.studies.tables import Result, Table

MEAN_STEPS = 10  # of the iterated conditional mean, which stands still after about five


def run_bare_attention(options: argparse.Namespace, advance: Advance) -> Result:
    """masked patches of images by bare self-attention, with the errors of simpler predictors"""
    setup = _open(options, advance)
    found = compare(setup, advance)
    draw = partial(comparison_figure, setup=setup, found=found)
    return Result({"errors": found.table}, ("errors",), draw)


def run_attractors(options: argparse.Namespace, advance: Advance) -> Result:
    """where the step of bare self-attention takes corrupted images, and random states"""
    setup = _open(options, advance)
    check_masked(setup, options.masked)  # before the training
    models: dict[str, BareAttention] = {}
    for name in (EXACT, SOURCE.format(8)):
        advance(f"training: {name}")
        model = setup.fit(RECIPES[name])
        assert isinstance(model, BareAttention)
        models[name] = model
    advance("denoising")
    how = Corruption(sigma=options.noise, gamma=options.gamma, steps=options.moves)
    denoising, noisy = transients(setup, models, how, SIZES[setup.data].runs)
    advance("masked patches")
    how = Corruption(masked=options.masked, gamma=options.gamma, steps=options.moves)
    masked, filled = transients(setup, models, how, SIZES[setup.data].runs)
    mean = iterate_mean(setup, models[EXACT], filled[EXACT], min(MEAN_STEPS, options.moves))
    name = "conditional mean, exact"
    rows = measure(setup, models[EXACT], mean, range(len(mean.states)))
    masked += [{"model": name, "part": "test"} | row for row in rows]
    ends = random_ends(
        models=options.models, steps=options.random_moves, seed=options.seed, advance=advance
    )
    advance("ends of trained models")
    trained = trained_ends(
        setup, models, gamma=options.gamma, images=options.ends, steps=options.random_moves
    )
    tables: dict[str, Table] = {
        "denoising": denoising,
        "baselines": baselines(setup, noisy[EXACT]),
        "masked": masked,
        "residuals": ends.residuals,
        "ends": [*ends.table, *trained],
    }
    runs = {"denoising": noisy[EXACT], "masked\npatches": filled[EXACT]}
    error = (setup.codec.decode_patches(setup.train.mean(0)) - setup.test_values).square().mean()
    draw = partial(
        attractors_figure,
        setup=setup,
        tables=tables,
        runs=runs,
        mean_error=error.sqrt().item(),
    )
    return Result(tables, ("ends",), draw)


def _open(options: argparse.Namespace, advance: Advance) -> Setup:
    advance(f"reading {options.data}")
    return open_setup(
        options.data,
        images=options.images,
        steps=options.steps,
        features=options.features,
        kind=options.kind,
        seed=options.seed,
    )


def _one_of(names: tuple[str, ...]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(names)}, got {text!r}")
        return text

    return read


_COMMON: tuple[Option, ...] = (
    ("--data", _one_of(tuple(SIZES)), "digits", "digits (2 x 2 patches) or cifar10 (8 x 8)"),
    ("--images", whole(8, 50_000), None, "training and test images each; default: by the data"),
    ("--steps", whole(1, 100_000), None, "of training; default: by the data"),
    ("--features", whole(0, 10_000), None, "rows of F, 0 for none; default: by the data"),
    (
        "--kind",
        _one_of(KINDS),
        None,
        "of F: principal (directions of the tokens, default) or random",
    ),
    ("--seed", seed_number, 0, "of images, couplings and batches"),
)

EXPERIMENTS: dict[str, Experiment] = {
    "bare-attention": Experiment(
        run_bare_attention,
        "Bare self-attention: masked patches by couplings between positions alone",
        _COMMON,
        quick=("--images", "40", "--steps", "4"),
    ),
    "attractors": Experiment(
        run_attractors,
        "Bare self-attention as a network of attractors",
        (
            *_COMMON,
            ("--noise", number(0, 10), 0.8, "standard deviation of the noise on the angles"),
            ("--masked", whole(1, 10_000), 4, "patches masked at once"),
            ("--gamma", share, 0.5, "share of the old state in a step"),
            ("--moves", whole(2, 100_000), 100, "steps from corrupted images"),
            ("--random-moves", whole(2, 100_000), 500, "steps of the runs whose end is classified"),
            ("--models", whole(1, 10_000), 8, "random couplings of each kind"),
            ("--ends", whole(1, 10_000), 40, "images whose end is classified"),
        ),
        quick=(
            *("--images", "16", "--steps", "3", "--moves", "6", "--random-moves", "12"),
            *("--models", "1", "--ends", "4"),
        ),
    ),
}
