"""Options of training scripts: numbers in range, and variants that only some models have."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

# Of a backbone's constructor; a script hands them on where they are given, and only there.
VARIANTS = ("attention", "feedforward", "step_size", "layers", "order", "lora_rank")
SOLVED = "hyperset-equilibrium"  # its iterations are a limit of a solve, not a depth


def count(text: str) -> int:
    """``type=`` of an option: an integer >= 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, got {text!r}")
    return value


def amount(text: str) -> float:
    """``type=`` of an option: a finite number >= 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"must be a finite number >= 0, got {text!r}")
    return value


def add_variants(
    parser: argparse.ArgumentParser,
    *,
    attention: Iterable[str],
    feedforward: Iterable[str],
    step_size: Iterable[str],
    order: Iterable[str],
) -> None:
    """Add the options named in ``VARIANTS``, each None where it is not given.

    Args:
        parser: of the script.
        attention, feedforward, step_size, order: the kinds to choose from.
    """
    group = parser.add_argument_group(
        "variants", "of the repeated layer (default: the model's own)"
    )
    add = group.add_argument
    add("--attention", choices=tuple(attention), help="attention energy of Hyper-SET")
    add("--feedforward", choices=tuple(feedforward), help="feed-forward energy of Hyper-SET")
    add("--step-size", choices=tuple(step_size), help="where Hyper-SET's step sizes come from")
    add("--layers", type=count, help="with weights of their own, each repeated")
    add("--order", choices=tuple(order), help="of several layers")
    add("--lora-rank", type=int, help="rank by which Hyper-SET's iterations differ")


def given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Those of the named options that have a value."""
    values = {name: getattr(options, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def check_model_options(
    parser: argparse.ArgumentParser, options: argparse.Namespace, build: Callable[..., Any]
) -> None:
    """Leave the script where an option is given that the chosen model does not take.

    The model's own constructor decides: a tiny backbone is built with each option, and with all of
    them. To be called before the presets are filled in, so that what is there was asked for.

    Args:
        parser, options: of the script; ``model``, ``width``, ``initial_step``,
            ``random_iterations`` and ``VARIANTS`` are looked at.
        build: ``build(name, dim, heads, **options)``, as ``build_backbone``.

    Raises:
        SystemExit: by ``parser.error``; the message names the option and the model.
    """
    chosen = given(options, *VARIANTS, "width", "initial_step")
    for trial in [*({name: value} for name, value in chosen.items()), chosen]:
        try:
            build(options.model, 8, 2, **trial)
        except (TypeError, ValueError) as error:
            words = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in trial.items())
            parser.error(f"{words} does not go with --model {options.model}: {error}")
    if options.random_iterations is not None:
        least, most = options.random_iterations
        if options.model == SOLVED:
            parser.error(
                f"--random-iterations is for models that are unrolled, got --model {options.model}"
            )
        if least > most:
            parser.error(f"--random-iterations must be LEAST <= MOST, got {least} {most}")


def fill_in(options: argparse.Namespace, preset: Mapping[str, Any]) -> None:
    """Give the options that the command line leaves out the values of a preset."""
    chosen = dict(preset)
    # A preset's initial step, 0 for example, is meant for a network that says the steps.
    if options.step_size is not None and not options.step_size.startswith("conditioned-"):
        chosen.pop("initial_step", None)
    for name, value in chosen.items():
        if getattr(options, name, None) is None:
            setattr(options, name, value)
