"""The whole extrapolation study of one model: every way to iterate it, at every budget."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import solvers
from implicit_attn.deq import DEQ
from implicit_attn.models import RecurrentBackbone
from implicit_attn.studies.accuracy import (
    accuracy_by_evaluations,
    budgets_up_to,
    evaluations_to_reach,
)
from implicit_attn.studies.convergence import solver_choices
from implicit_attn.studies.recurrence import accuracy_by_iterations, adaptive_stopping
from implicit_attn.studies.subjects import Subject
from implicit_attn.studies.tables import Table
from implicit_attn.updates.hyperset_step import HyperSETLayer
from implicit_attn.updates.step_sizes import ConditionedStepSizes

ACCELERATED = ("L-BFGS", "Anderson", "Broyden")


@dataclass(frozen=True)
class Extrapolation:
    """Tables of :func:`extrapolate`.

    Attributes:
        curves: rows with method, evaluations, the measures, residual, and energy where there is
            one; the first method is the one that the others are compared with.
        reach: rows with method, accuracy_1x, accuracy_2x and accuracy_4x (at so many times the
            training iterations), and to_accuracy, to_loss, to_residual: the fewest evaluations
            with which the method is as good as the first one at 1x; None where it never is.
        adaptive, depths: of :func:`implicit_attn.studies.recurrence.adaptive_stopping`.
    """

    curves: Table
    reach: Table
    adaptive: Table
    depths: Table


def extrapolate(
    subject: Subject, factor: int = 4, advance: Callable[[str], object] | None = None
) -> Extrapolation:
    """Measures against test-time iterations from 1 to ``factor`` times those of training.

    An unrolled model is iterated on, with its time going on and with its time held, and its last
    step is given to accelerated solvers. An equilibrium is approached by forward iteration,
    with and without the safeguard of its energy, and by accelerated solvers. All are charged by
    evaluations; a solver returns the best state that it has evaluated, a recurrence its last.

    Args:
        subject: what to iterate.
        factor: to how many times the iterations of training.
        advance: called with the name of each method before it runs.
    """
    budgets = budgets_up_to(subject.trained, factor)
    curves: Table = []

    def keep(name: str, run: Callable[[], Table]) -> None:
        if advance is not None:
            advance(name)
        curves.extend({"method": name, **row} for row in run())

    if subject.recurrence is not None:
        for name, variant in _time_variants(subject).items():
            keep(name, lambda v=variant: accuracy_by_iterations(v, budgets))
    choices = solver_choices(subject.layer)
    names = [n for n in ("forward", "plain forward", *ACCELERATED) if n in choices]
    for name in names if subject.recurrence is None else [n for n in names if n in ACCELERATED]:
        owner, solver = choices[name]
        label = name if subject.recurrence is None else f"{name} on the step of iteration T"
        keep(label, lambda o=owner, s=solver: _by_solver(subject, o, s, budgets))
    if advance is not None:
        advance("adaptive stopping")
    adaptive, depths = adaptive_stopping(subject, factor * subject.trained)
    return Extrapolation(curves, _reach(curves, subject.trained, factor), adaptive, depths)


def _by_solver(subject: Subject, layer: DEQ, solver: solvers.Solver, budgets: list[int]) -> Table:
    return accuracy_by_evaluations(
        layer,
        subject.tokens,
        subject.classify,
        subject.inputs,
        subject.targets,
        budgets,
        solver=solver,
        measure=subject.measure,
    )


def _time_variants(subject: Subject) -> dict[str, Subject]:
    """The recurrence as it is; where its steps depend on time, once more with time the other way."""
    backbone = subject.recurrence
    timed = backbone is not None and any(
        isinstance(layer, HyperSETLayer) and isinstance(layer.step_sizes, ConditionedStepSizes)
        for layer in backbone.layers
    )
    if backbone is None or not timed:
        return {"recurrence": subject}
    names = {"extrapolate": "recurrence, time goes on", "hold": "recurrence, time held at T"}
    other = "hold" if backbone.beyond == "extrapolate" else "extrapolate"
    model = copy.deepcopy(subject.model)
    changed: RecurrentBackbone = model.backbone
    changed.beyond = other
    return {names[backbone.beyond]: subject, names[other]: replace(subject, model=model)}


def _reach(curves: Table, trained: int, factor: int) -> Table:
    methods = dict.fromkeys(row["method"] for row in curves)
    parts = {name: [row for row in curves if row["method"] == name] for name in methods}
    aim = _at(parts[next(iter(parts))], trained)
    table: Table = []
    for name, rows in parts.items():
        multiples = sorted({1, min(2, factor), factor})
        shown = {f"accuracy_{k}x": _at(rows, k * trained)["accuracy"] for k in multiples}
        needed = {
            f"to_{key}": evaluations_to_reach(rows, key, aim[key], at_most=key != "accuracy")
            for key in ("accuracy", "loss", "residual")
        }
        table.append({"method": name, **shown, **needed})
    return table


def _at(rows: Table, evaluations: int) -> dict[str, Any]:
    return next(row for row in rows if row["evaluations"] == evaluations)
