"""Command lines of training scripts: their options, and model and training settings from them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch

from implicit_attn.command_line import (
    LARGEST_SIZE,
    Parser,
    amount,
    count,
    folder,
    learning_rate,
    number,
    repeats,
    seed_number,
    size,
    whole,
)
from implicit_attn.training.processes import ACCELERATORS, PRECISIONS
from implicit_attn.training.recipe import Recipe

# Of a backbone's constructor; handed on where they are given, and only there.
VARIANTS = (
    "attention", "feedforward", "step_size", "layers", "order", "lora_rank",
    "gains", "step_network", "share_steps", "descent",
)  # fmt: skip
# How a run is carried out, not what it computes: may change when it is resumed.
RUNNING = (
    "out", "resume", "overwrite", "devices", "accelerator", "save_every", "log_every", "tensorboard",
    "evaluate_every",
)  # fmt: skip


def add_model_options(
    parser: Parser,
    *,
    presets: Iterable[str],
    backbones: Iterable[str],
    choices: Mapping[str, tuple[str, ...]],
    token: str,
    random: str,
) -> None:
    """Add the choice of preset and backbone and the options of the backbone, each without default.

    ``choices`` are the values of the options that are names, by option. For the help, ``token`` is what
    a token stands for, ``random`` the ``--random-iterations`` of the preset "small".
    """
    add = parser.add_argument
    add("--preset", choices=sorted(presets), default="small", help="defaults of what follows")
    add("--model", choices=sorted(backbones), default="hyperset")
    add("--dim", type=size, help=f"features of a {token}")
    add("--heads", type=size)
    text = "of the feed-forward part (default: the preset's or model's own)"
    add("--width", type=size, help=text)
    add("--initial-step", type=number(-1e6, 1e6), help="step sizes of Hyper-SET at the start")
    add("--iterations", type=repeats, help="of the layer, in each batch the same number")
    text = f"train each batch with a random number of iterations (preset small: {random})"
    add("--random-iterations", type=repeats, nargs=2, metavar=("LEAST", "MOST"), help=text)
    title, text = "variants", "of the repeated layer (default: the model's own)"
    add = parser.add_argument_group(title, text).add_argument
    add("--attention", choices=choices["attention"], help="attention energy of Hyper-SET")
    add("--feedforward", choices=choices["feedforward"], help="feed-forward energy of Hyper-SET")
    add("--step-size", choices=choices["step_size"], help="where Hyper-SET's step sizes come from")
    add("--layers", type=whole(1, 1000), help="with weights of their own, each repeated")
    add("--order", choices=choices["order"], help="of several layers")
    add(
        "--lora-rank",
        type=whole(0, LARGEST_SIZE),
        help="rank by which Hyper-SET's iterations differ",
    )
    title = "variants of Hyper-SET in its official code"
    add = parser.add_argument_group(title, "(default: none of them)").add_argument
    add("--gains", choices=choices["gains"], help="trained gains of the norms")
    add("--step-network", choices=choices["step_network"], help="that says the step sizes")
    add("--share-steps", action="store_true", default=None, help="among all layers")
    add("--descent", choices=choices["descent"], help="what becomes of the directions")


def add_training_options(
    parser: Parser, *, batch: int | None = None, rate: float | None = None
) -> None:
    """Add batch size, learning rate and seed."""
    add = parser.add_argument
    add("--batch", type=count, default=batch, help="samples at once, of all processes")
    add(
        "--rate",
        type=learning_rate,
        default=rate,
        help="peak learning rate (warm-up, cosine decay)",
    )
    add("--seed", type=seed_number, default=0)


def add_solver_options(parser: Parser, *, rtol: float) -> None:
    """Add the tolerance and the limit of an equilibrium layer's solves."""
    add = parser.add_argument
    text = "relative residual at which a sample has converged"
    add("--rtol", type=amount, default=rtol, help=text)
    add("--max-steps", type=count, default=60, help="evaluations per sample, at most")


def add_process_options(parser: Parser, *, save_every: int | None) -> None:
    """Add devices and precision, compilation, checkpoints and logs."""
    add = parser.add_argument
    add(
        "--devices",
        type=whole(1, 256),
        default=1,
        help="processes, one per card or sharing the CPU",
    )
    add("--accelerator", choices=ACCELERATORS, default="auto")
    add("--precision", choices=PRECISIONS, default="32-true")
    add("--compile", action="store_true", help="compile the repeated layer (a minute at the start)")
    text = "a checkpoint every so many steps, besides every epoch"
    add("--save-every", type=count, default=save_every, help=text)
    add("--log-every", type=count, default=10, help="a row in steps.csv every so many steps")
    add("--tensorboard", action="store_true", help="write events for TensorBoard, too")


def add_result_options(parser: Parser, text: str) -> None:
    """Add the folder of the results, with ``text`` as its help, and whether to resume there, or to
    replace what an earlier run left there."""
    parser.add_argument("--out", type=folder, help=text)
    add = parser.add_mutually_exclusive_group().add_argument
    add("--resume", action="store_true", help="continue from the checkpoint in that folder")
    add("--overwrite", action="store_true", help="replace an earlier run's files in that folder")


def given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Those of the named options that exist and have a value."""
    values = {name: getattr(options, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def complete(
    parser: Parser,
    options: argparse.Namespace,
    preset: Mapping[str, Any],
    *,
    build: Callable[..., Any],
    equilibria: Mapping[str, Mapping[str, Any]],
) -> None:
    """Give the options that the command line leaves out the values of a preset.

    Leave the script where an option is given that the chosen model does not take, or its sizes do
    not fit each other. The model's own constructor decides: a tiny backbone is built with each
    option, and with all; then one of the chosen size.

    Args:
        build: ``build(name, dim, heads, **options)``, as ``build_backbone``.
        equilibria: the models that are solved instead of unrolled, each with its changes to the
            preset.
    """
    chosen = given(options, *VARIANTS, "width", "initial_step")
    for trial in [*({name: value} for name, value in chosen.items()), chosen]:
        try:
            with torch.device("meta"):  # whatever the sizes, it takes no memory
                build(options.model, 8, 2, **trial)
        except (TypeError, ValueError) as error:
            words = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in trial.items())
            parser.error(f"{words} does not go with --model {options.model}: {error}")
    if options.random_iterations is not None:
        least, most = options.random_iterations
        if options.model in equilibria:
            parser.error(
                f"--random-iterations is for models that are unrolled, got --model {options.model}"
            )
        if least > most:
            parser.error(f"--random-iterations must be LEAST <= MOST, got {least} {most}")
    values = {**preset, **equilibria.get(options.model, {})}
    if options.iterations is not None:  # asked for: no random numbers unless these are, too
        values.pop("random_iterations", None)
    # A preset's initial step, 0 for example, is meant for a network that says the steps.
    if options.step_size is not None and not options.step_size.startswith("conditioned-"):
        values.pop("initial_step", None)
    for name, value in values.items():
        if getattr(options, name, None) is None:
            setattr(options, name, value)
    try:
        with torch.device("meta"):
            build(options.model, options.dim, options.heads)
    except ValueError as error:
        parser.error(parser.named(str(error)))


def backbone_specification(options: argparse.Namespace, step_size: str) -> dict[str, Any]:
    """The arguments of ``build_backbone``; ``step_size`` is Hyper-SET's where none is given."""
    names = ("dim", "heads", "width", "iterations")
    backbone = {"name": options.model, **{name: getattr(options, name) for name in names}}
    if options.model == "hyperset":
        backbone |= {"step_size": step_size, "initial_step": options.initial_step}
    return backbone | given(options, *VARIANTS)


def layer_options(
    options: argparse.Namespace, *, tolerance: Callable[..., Any], adjoint: Callable[..., Any]
) -> dict[str, Any]:
    """The options of a ``DEQ`` in training, with ``rtol`` and ``max_steps`` where they are given.

    ``tolerance`` and ``adjoint`` are ``solvers.Tolerance`` and ``solvers.Implicit``. Samples that do
    not converge are counted and shown with the loss instead of warned about.
    """
    layer: dict[str, Any] = {"on_failure": "ignore", "adjoint": adjoint(on_failure="ignore")}
    if given(options, "rtol"):
        layer["tolerance"] = tolerance(rtol=options.rtol)
    return layer | given(options, "max_steps")


def build_recipe(options: argparse.Namespace, **values: Any) -> Recipe:
    """The recipe from the options named as its attributes, and from ``values`` for the others."""
    names = [field.name for field in fields(Recipe) if field.name != "iterations"]
    values |= {name: getattr(options, name) for name in names if hasattr(options, name)}
    if given(options, "random_iterations"):
        values["iterations"] = tuple(options.random_iterations)
    return Recipe(**values)


def settings(options: argparse.Namespace, *apart: str) -> dict[str, Any]:
    """The options that must be equal when a run is resumed.

    The variants that are given stand in the specification of the model.
    """
    skipped = {*RUNNING, *VARIANTS, *apart}
    return {name: value for name, value in vars(options).items() if name not in skipped}
