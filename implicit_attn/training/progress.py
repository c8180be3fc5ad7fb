"""Whether the progress in a checkpoint is one of this training, before anything is restored."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from implicit_attn.checkpoint.checks import is_finite

NAMES = ("epoch", "batch", "sums", "seconds", "history", "observations", "settings", "solves")


class SettingsDiffer(ValueError):
    """A checkpoint was made by a run with other settings."""


def check_progress(
    progress: dict[str, Any],
    path: Path,
    *,
    settings: dict[str, Any],
    epochs: int,
    batches: int,
    observed: bool,
    solves: dict[str, Any],
    stateless: bool,
) -> None:
    """Settings are equal; every value is there, of its kind and within its range.

    Args:
        progress: of the checkpoint.
        path: of the checkpoint.
        settings: of the training.
        epochs: of the recipe.
        batches: of an epoch.
        observed: whether the training keeps observations.
        solves: an example of what is kept of the solves: ``sums`` by name, ``spent``.
        stateless: whether the checkpoint holds no optimizer state.

    Raises:
        SettingsDiffer: the settings are others.
        ValueError: the first value that is wrong, named.
    """
    if "settings" in progress and progress["settings"] != settings:
        raise SettingsDiffer(
            f"{path} was made with other settings: {progress['settings']}; "
            "give the same options, or another folder"
        )
    try:
        _check_values(progress, epochs, batches, observed)
        _check_solves(progress["solves"], solves)
        _check_rows(progress["history"], progress["epoch"], solves["sums"])
        _check_evaluations(
            progress.get("evaluations", []), progress["epoch"] * batches + progress["batch"]
        )
        if stateless and progress["epoch"] + progress["batch"] > 0:
            raise ValueError("it holds no optimizer state of the steps that were made")
    except ValueError as error:
        raise ValueError(f"{path} cannot be resumed: {error}") from error


def _check_values(progress: dict[str, Any], epochs: int, batches: int, observed: bool) -> None:
    missing = [name for name in NAMES if name not in progress]
    if missing:
        raise ValueError(f"its progress has no {missing[0]!r}")
    _integer("epoch", progress["epoch"], epochs)
    _integer("batch", progress["batch"], batches)
    _number("seconds", progress["seconds"])
    _numbers("sums", progress["sums"], ("loss", "terms"))
    observations, wanted = progress["observations"], progress["epoch"] + 1
    if not isinstance(observations, list) or (observed and len(observations) != wanted):
        raise ValueError(f"its observations must be a list of {wanted}")


def _check_solves(held: Any, solves: dict[str, Any]) -> None:
    if not isinstance(held, dict) or held.keys() != {"sums", "spent"}:
        raise ValueError("its solves must be sums and spent evaluations")
    _numbers("solves", held["sums"], solves["sums"])
    spent = held["spent"]
    if not isinstance(spent, list) or len(spent) != len(solves["spent"]):
        raise ValueError(f"its spent evaluations must be a list of {len(solves['spent'])}")
    for count in spent:
        _integer("number of solves", count, 2**63)


def _integer(name: str, value: Any, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"its {name} must be an integer from 0 to {most}, got {value!r}")


def _number(name: str, value: Any, *, finite: bool = True) -> None:
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    # An integer that no float holds is no number here.
    if not known or (not is_finite(value) and (finite or isinstance(value, int))):
        raise ValueError(f"its {name} must be a number, got {value!r}")


def _numbers(name: str, values: Any, keys: Iterable[str]) -> None:
    if not isinstance(values, dict) or values.keys() != set(keys):
        raise ValueError(f"its {name} must be a number for each of {sorted(keys)}, got {values!r}")
    for key, value in values.items():
        # The worst residual of samples that failed is infinite or NaN.
        _number(f"{name}[{key!r}]", value, finite=name == "sums")


def _check_rows(history: Any, epochs: int, solves: Iterable[str]) -> None:
    """A row an epoch, in order, with the numbers that a summary is made of."""
    if not isinstance(history, list) or len(history) != epochs:
        raise ValueError(f"its history must be a list of {epochs} epochs")
    names = ["loss", "seconds", *(["converged", "evaluations"] if any(solves) else [])]
    for number, row in enumerate(history, start=1):
        if not isinstance(row, dict) or row.get("epoch") != number:
            raise ValueError(f"its history has no epoch {number} in its place")
        for name in names:
            # An epoch in which no equilibrium was solved has no share of converged ones.
            finite = name in ("loss", "seconds")
            _number(f"{name} of epoch {number}", row.get(name), finite=finite)


def _check_evaluations(evaluations: Any, steps: int) -> None:
    """Rows of increasing steps, none of them after the last."""
    if not isinstance(evaluations, list) or not all(isinstance(row, dict) for row in evaluations):
        raise ValueError("its evaluations must be a list of rows")
    for row in evaluations:
        _integer("step of an evaluation", row.get("step"), steps)
    made = [row["step"] for row in evaluations]
    if made != sorted(set(made)):
        raise ValueError(f"its evaluations must be of increasing steps, got {made}")
