"""``implicit-attn study``, also ``python -m implicit_attn.studies``: sub-commands, options, files."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import solvers
from implicit_attn.command_line import (
    Parser,
    called_as,
    command,
    count,
    folder,
    learning_rate,
    make_folder,
    mistakes,
    positive,
    repeats,
    whole,
)
from implicit_attn.data import LOADERS, load
from implicit_attn.studies.convergence import (
    jacobian_eigenvalues,
    solver_costs,
    solver_curves,
    twice_differentiable,
)
from implicit_attn.studies.experiments.experiment import Advance, Experiment, Option, progress
from implicit_attn.studies.experiments.registry import EXPERIMENTS
from implicit_attn.studies.extrapolation import extrapolate
from implicit_attn.studies.figures.convergence import convergence_figure
from implicit_attn.studies.figures.extrapolation import extrapolation_figure
from implicit_attn.studies.figures.paths import paths_figure
from implicit_attn.studies.figures.token_geometry import geometry_figure
from implicit_attn.studies.figures.trade_off import trade_off_figure
from implicit_attn.studies.paths import paths_of_layer, paths_of_recurrence
from implicit_attn.studies.subjects import DataDiffers, Subject, open_subject
from implicit_attn.studies.tables import Result, Table
from implicit_attn.studies.token_geometry import check_observed, geometry
from implicit_attn.studies.trade_off import (
    layers_of_depth,
    read_trade_off,
    small_classifier,
    train_trade_off,
)
from implicit_attn.training import Recipe
from implicit_attn.weights import weights_file, weights_path

UNROLLED, SOLVED = "digits-hyperset", "digits-hyperset-equilibrium"
OUT = Path("runs") / "studies"
TEST_SAMPLES = 10_000  # of the trained models that trade-off reads
# Options of trade-off's trainings, where the command line gives none; layers None: all divisors.
TRAINING = {"depth": 12, "layers": None, "epochs": 6, "rate": 4e-3, "seeds": 1}


def run_convergence(subject: Subject, options: argparse.Namespace, advance: Advance) -> Result:
    """every solver on the layer: residual, energy, steps, time, eigenvalues at the end"""
    _require_layer(subject)
    rtol = subject.rtol if options.rtol is None else options.rtol
    exact, tight = subject.exact(), solvers.Tolerance(rtol=1e-8)
    with torch.no_grad():
        x, precise = subject.tokens(subject.inputs), exact.tokens(exact.inputs)
    limits: Any = {"max_steps": options.max_steps, "advance": advance}
    with twice_differentiable(subject.model):
        curves = solver_curves(exact.layer, precise, **limits)
        costs = solver_costs(subject.layer, x, solvers.Tolerance(rtol=rtol), **limits)
        advance("eigenvalues")
        few = precise[: options.spectra]
        with torch.no_grad():
            end = exact.layer.solve(few, tolerance=tight, max_steps=500, on_failure="ignore")
        eigenvalues = jacobian_eigenvalues(exact.layer, end.value, few)
    note = f"; Jacobian where the residual is {end.residual.max().item():.0e}"
    if subject.recurrence is not None:
        note += f"; the step of iteration {subject.recurrence.iterations} repeated for ever"
    figure: Any = {"curves": curves, "costs": costs, "eigenvalues": eigenvalues, "rtol": rtol}
    tables = {"curves": curves, "costs": costs[0], "steps": costs[1], "eigenvalues": eigenvalues}
    return Result(tables, ("costs",), partial(convergence_figure, **figure), note)


def run_extrapolation(subject: Subject, options: argparse.Namespace, advance: Advance) -> Result:
    """accuracy, loss, energy, residual against test-time iterations; adaptive stopping"""
    _require_layer(subject)
    found = extrapolate(subject, options.factor, advance)
    draw = partial(extrapolation_figure, found=found, trained=subject.trained)
    return Result(vars(found), ("reach", "adaptive"), draw)


def run_paths(subject: Subject, options: argparse.Namespace, advance: Advance) -> Result:
    """distances of the ends from the input, from zero and from random starts"""
    _require_layer(subject)
    exact = subject.exact()
    runs: dict[str, tuple[Table, Table]] = {}
    if exact.recurrence is None:
        advance("equilibrium")
        runs["equilibrium"] = paths_of_layer(exact, random=options.starts)
    else:
        for iterations in (exact.trained, 4 * exact.trained):
            name = f"{iterations} iterations"
            advance(name)
            runs[name] = paths_of_recurrence(exact, iterations, random=options.starts)
    tables = {
        table: [{"run": name, **row} for name, run in runs.items() for row in run[number]]
        for number, table in enumerate(("summary", "samples"))
    }
    return Result(tables, ("summary",), partial(paths_figure, runs=runs))


def _require_layer(subject: Subject) -> None:
    """A model whose iterations are those of one equilibrium layer, or unrolled."""
    with mistakes("--weights"):
        if subject.recurrence is None:
            _ = subject.layer


def run_geometry(subject: Subject, options: argparse.Namespace, advance: Advance) -> Result:
    """both energies, effective rank and average angle per head and iteration"""
    with mistakes("--weights"):
        check_observed(subject)
    advance("energies, ranks and angles")
    energies, heads = geometry(subject, options.iterations or subject.trained)
    tables = {"energies": energies, "heads": heads}
    draw = partial(geometry_figure, **tables, trained=subject.trained)
    return Result(tables, ("energies",), draw)


def run_trade_off(options: argparse.Namespace) -> None:
    """layers x iterations at constant depth: trains small models, or reads --weights"""
    folder = options.out / "trade-off"
    with mistakes("--out"):
        make_folder(folder)
    if options.weights:
        subjects = [_open(path, options) for path in options.weights]
        with mistakes("--weights"):
            for subject in subjects:
                subject.require_recurrence()
        table = read_trade_off(subjects)
        title = f"{subjects[0].title.split(':')[0]}, trained models"
    else:
        name = options.data or "digits"
        with mistakes("--data"):
            data = load(name)
        pairs = [p for p in layers_of_depth(options.depth) if p[0] in options.layers]
        model, table = small_classifier(data), []
        with progress("trade-off", len(pairs) * options.seeds) as advance:
            for seed in range(options.seeds):
                recipe = Recipe(options.epochs, 64, options.rate, seed=seed)
                table += train_trade_off(data, pairs, recipe, model, folder, advance=advance)
        title = f"{name}, hyperset, depth {options.depth}, {options.epochs} epochs of training"
    result = Result({"table": table}, ("table",), partial(trade_off_figure, table=table))
    result.write(options.out / "trade-off", title)


class Study(NamedTuple):
    """A sub-command that studies trained models; the docstring of ``run`` is its help."""

    run: Callable[[Subject, argparse.Namespace, Advance], Result]
    weights: tuple[str, ...]  # studied by default, of those that come with the package
    samples: int  # test samples by default
    options: tuple[Option, ...]


STUDIES = {
    "convergence": Study(
        run_convergence,
        (SOLVED,),
        64,
        (
            ("--rtol", positive, None, "tolerance of the costs (default: of training)"),
            ("--max-steps", repeats, 100, "evaluations per sample"),
            ("--spectra", whole(1, 1000), 2, "samples whose Jacobian is studied"),
        ),
    ),
    "extrapolation": Study(
        run_extrapolation,
        (UNROLLED, SOLVED),
        1000,
        (("--factor", whole(1, 1000), 4, "up to so many times training's"),),
    ),
    "paths": Study(
        run_paths, (UNROLLED, SOLVED), 128, (("--starts", whole(1, 1000), 2, "random starts"),)
    ),
    "geometry": Study(
        run_geometry,
        (UNROLLED,),
        256,
        (("--iterations", repeats, None, "how many (default: as in training)"),),
    ),
}


def parser() -> Parser:
    """The command's options."""
    top = Parser(
        prog=called_as("python -m implicit_attn.studies"),
        description="Studies of trained models and of small systems: a figure and CSV tables each.",
    )
    commands = top.add_subparsers(dest="study", required=True, metavar="STUDY")

    def study(name: str, text: str | None, default: str, *options: Option) -> Callable[..., Any]:
        add = commands.add_parser(name, help=text, description=text).add_argument
        weights: Any = {"type": weights_file, "nargs": "+", "metavar": "FILE"}
        add(
            "--weights",
            help=f"checkpoints, or names of shipped ones (default: {default})",
            **weights,
        )
        add("--data", choices=sorted(LOADERS), help="default: what the checkpoint was trained on")
        add("--out", type=folder, default=OUT, help="folder of the files")
        for flag, kind, value, meaning in options:
            add(flag, type=kind, default=value, help=meaning)
        return add

    for name, (run, weights, samples, options) in STUDIES.items():
        study(
            name,
            run.__doc__,
            ", ".join(weights),
            ("--samples", count, samples, "test samples"),
            *options,
        )
    add = study(
        "trade-off",
        run_trade_off.__doc__,
        "train here",
        ("--samples", count, None, f"test samples, with --weights (default {TEST_SAMPLES})"),
        ("--depth", whole(1, 1000), None, f"layers times iterations (default {TRAINING['depth']})"),
        ("--epochs", count, None, f"default {TRAINING['epochs']}"),
        ("--rate", learning_rate, None, f"peak learning rate (default {TRAINING['rate']})"),
        ("--seeds", whole(1, 10_000), None, f"trainings of each (default {TRAINING['seeds']})"),
    )
    add("--layers", type=count, nargs="+", help="divisors of the depth (default: all)")
    for name, experiment in EXPERIMENTS.items():
        text = experiment.run.__doc__
        one = commands.add_parser(name, help=text, description=text)
        one.add_argument("--out", type=folder, default=OUT, help="folder of the files")
        experiment.add_to(one)
    return top


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; ``arguments`` None: those of the process."""
    top = parser()
    with command(top):
        options = top.parse_args(arguments)
        start = time.perf_counter()
        if options.study == "trade-off":
            _complete_trade_off(top, options)
        _run(options)
        print(f"{time.perf_counter() - start:.0f} s")


def _run(options: argparse.Namespace) -> None:
    if options.study == "trade-off":
        run_trade_off(options)
        return
    with mistakes("--out"):
        make_folder(options.out)
    if options.study in EXPERIMENTS:
        _run_experiment(EXPERIMENTS[options.study], options)
    else:
        study = STUDIES[options.study]
        for path in options.weights or [weights_path(name) for name in study.weights]:
            subject = _open(path, options)
            stem = f"{options.study}-{subject.name}"
            print(f"{stem}: {subject.title}", flush=True)
            with progress(stem) as advance:
                result = study.run(subject, options, advance)
            title = f"{subject.title}\n{len(subject.inputs)} test samples"
            result.write(options.out / stem, title)


def _run_experiment(experiment: Experiment, options: argparse.Namespace) -> None:
    with mistakes(), progress(options.study) as advance:
        result = experiment.run(options, advance)
    result.write(options.out / options.study, experiment.title)


def _complete_trade_off(top: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse options that have no effect, with --weights or without; fill in the defaults."""
    if options.weights:
        idle = [name for name in TRAINING if getattr(options, name) is not None]
        if idle:
            top.error(f"--{' --'.join(idle)} cannot be given with --weights, which are trained")
        options.samples = options.samples or TEST_SAMPLES
        return
    if options.samples is not None:
        top.error("--samples needs --weights; models trained here are tested on all samples")
    for name, value in TRAINING.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    divisors = [layers for layers, _ in layers_of_depth(options.depth)]
    options.layers = options.layers or divisors
    wrong = [n for n in options.layers if n not in divisors]
    if wrong:
        top.error(f"--layers must divide --depth {options.depth}, got {wrong}")


def _open(path: Path, options: argparse.Namespace) -> Subject:
    with mistakes("--weights"):
        try:
            return open_subject(path, options.data, options.samples)
        except DataDiffers as error:
            raise SystemExit(f"argument --data: {error}") from error
