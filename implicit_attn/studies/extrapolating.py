"""The extrapolation study: a trained model with other numbers of iterations than in training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import solvers
from implicit_attn.deq import DEQ
from implicit_attn.optional import progress
from implicit_attn.studies.converging import solver_choices
from implicit_attn.studies.study import (
    GREY,
    LOOKS,
    Subject,
    Table,
    leave_empty,
    new_figure,
    subject_of,
)

METHODS = ("forward", "plain forward", "L-BFGS", "Anderson", "Broyden")
LABELS = {
    "accuracy": "test accuracy, %", "loss": "test loss (cross-entropy)",
    "residual": "residual of a solve, or last relative change", "energy": "energy (mean)",
}  # fmt: skip


class Extrapolation(NamedTuple):
    """Result of :func:`extrapolation`.

    Attributes:
        curves: rows with method, evaluations, accuracy and loss where there are targets, residual
            (median; of a recurrence the last relative change), and energy (mean; None without one).
            The first method is the one the others are compared with.
        reach: rows with method, accuracy_1x, accuracy_2x and accuracy_4x (at so many times the
            training iterations), and to_accuracy, to_loss, to_residual: the fewest evaluations
            with which the method is as good as the first one at 1x; None where it never is.
        trained: iterations in training.
    """

    curves: Table
    reach: Table
    trained: int

    def plot(self, title: str = "") -> Any:
        """Draw four panels: accuracy, loss, residual, energy."""
        figure = new_figure((13, 8), title)
        panels = figure.subplots(2, 2).flat
        most = max(row["evaluations"] for row in self.curves)
        for axes, (key, label) in zip(panels, LABELS.items(), strict=True):
            axes.set(xlabel="iterations (evaluations) at test time", ylabel=label)
            known = [row for row in self.curves if row.get(key) is not None]
            if not known:
                leave_empty(axes, f"no {key} is defined")
                continue
            scale = 100 if key == "accuracy" else 1
            for name in dict.fromkeys(row["method"] for row in self.curves):
                rows = [row for row in known if row["method"] == name]
                color, marker = LOOKS[name]
                look: Any = {"marker": marker, "markersize": 4, "color": color}
                steps, values = [r["evaluations"] for r in rows], [scale * r[key] for r in rows]
                axes.plot(steps, values, label=name, **look)
            for place in range(self.trained, most + 1, self.trained):
                axes.axvline(place, color=GREY, linestyle=":", linewidth=1)
            if key == "accuracy":
                axes.set_title(f"dotted: 1, 2, ... times the {self.trained} of training")
            elif key != "energy":
                axes.set_yscale("log")
        panels[2].legend(frameon=False, fontsize=8)
        return figure


def extrapolation(
    layer: Any, x: Any = None, targets: Tensor | None = None, *, factor: int = 4
) -> Extrapolation:
    """Measure accuracy, loss, residual and energy for 1 to ``factor`` times the iterations of training.

    An equilibrium is solved by forward iteration, with and without the safeguard of its energy, and
    by accelerated solvers; an unrolled model is iterated further. All are charged by evaluations; a
    solver returns the best state that it has evaluated, a recurrence its last.

    Args:
        layer, x: as for :func:`convergence`.
        targets: labels (B,) of the model's outputs, for accuracy and loss; None: without these.
        factor: to how many times the iterations of training; of a layer of unknown training these
            are the median evaluations of its solves.
    """
    subject = subject_of(layer, x, targets)
    budgets, curves = budgets_up_to(subject.trained, factor), Table()
    if subject.recurrence is not None:
        rows = accuracy_by_iterations(subject, budgets)
        curves = [{"method": "recurrence", **row} for row in rows]
    else:
        choices = solver_choices(subject.layer)
        for name in progress([name for name in METHODS if name in choices], "methods"):
            rows = accuracy_by_iterations(subject, budgets, *choices[name])
            curves += [{"method": name, **row} for row in rows]
    return Extrapolation(curves, _reach(curves, subject.trained, factor), subject.trained)


@torch.no_grad()
def accuracy_by_iterations(
    subject: Subject, numbers: Sequence[int], layer: DEQ | None = None, solver: Any = None
) -> Table:
    """Measure a model after each of these numbers of iterations, or evaluations of its solve.

    The tolerance is zero, so a sample of a solve ends early only where rounding allows no better residual.

    Args:
        subject: a layer or model with its inputs.
        numbers: numbers of iterations or evaluations, each >= 1.
        layer, solver: in place of the subject's layer and of its solver.

    Returns:
        Rows with evaluations, accuracy and loss, residual (median; of a recurrence the last relative
        change) and energy (mean; None without one).
    """
    run = _solved if subject.recurrence is None else _iterated
    columns: list[list[list[Tensor]]] = [[] for _ in numbers]
    for inputs in progress(list(subject.parts()), "batches"):
        x, mask = subject.given(inputs)
        states = run(subject, x, mask, numbers, layer, solver)
        for column, (z, *values) in zip(columns, states, strict=True):
            judged = [] if subject.targets is None else [subject.outputs(inputs, z)]
            column.append([*judged, *(each for each in values if each is not None)])
    table: Table = []
    for number, column in zip(numbers, columns, strict=True):
        found = [torch.cat(parts) for parts in zip(*column, strict=True)]
        row: dict[str, Any] = {"evaluations": number}
        row |= {} if subject.targets is None else subject.judge(found.pop(0))
        row["residual"] = found[0].median().item()
        table.append(row | {"energy": found[1].mean().item() if found[1:] else None})
    return table


States = Iterator[tuple[Any, Tensor, Tensor | None]]  # states, residuals and energies (B,)


def _solved(
    subject: Subject, x: Any, mask: Any, numbers: Sequence[int], layer: DEQ | None, solver: Any
) -> States:
    options: Any = {"tolerance": solvers.Tolerance(rtol=0.0), "on_failure": "ignore"}
    options |= {} if solver is None else {"solver": solver}
    for number in numbers:
        found = (layer or subject.layer).solve(x, mask, max_steps=number, **options)
        yield found.value, found.residual, found.energy


def _iterated(subject: Subject, x: Any, mask: Any, numbers: Sequence[int], *unused: Any) -> States:
    backbone: Any = subject.recurrence
    single = len(backbone.layers) == 1  # a longer run contains the shorter ones
    every = backbone.states(x, iterations=max(numbers)) if single else None
    for number in numbers:
        states = backbone.states(x, iterations=number) if every is None else every[: number + 1]
        before, after = states[-2].flatten(1), states[-1].flatten(1)
        change = (after - before).norm(dim=1) / after.norm(dim=1)
        yield states[-1], change, subject.energy(states[-1], x)


def budgets_up_to(trained: int, factor: int = 4) -> list[int]:
    """Return about twenty numbers of iterations from 1 to ``factor * trained``, with all multiples."""
    if trained < 1 or factor < 1:
        raise ValueError(f"trained and factor must be >= 1, got {trained} and {factor}")
    dense = range(1, trained + 1, max(1, -(-trained // 8)))
    later = range(trained, factor * trained + 1, max(1, trained // 4))
    return sorted({*dense, *later, *(k * trained for k in range(1, factor + 1))})


def _reach(curves: Table, trained: int, factor: int) -> Table:
    """Return the table ``reach`` of :class:`Extrapolation`."""
    parts: dict[str, dict[int, Any]] = {}
    for each in curves:
        parts.setdefault(each["method"], {})[each["evaluations"]] = each
    aim = next(iter(parts.values()))[trained]
    table: Table = []
    for name, rows in parts.items():
        row: dict[str, Any] = {"method": name}
        if "accuracy" in aim:
            for k in sorted({1, min(2, factor), factor}):
                row[f"accuracy_{k}x"] = rows[k * trained]["accuracy"]
        for key, sign in (("accuracy", 1), ("loss", -1), ("residual", -1)):
            if key in aim:
                enough = [n for n, each in rows.items() if sign * each[key] >= sign * aim[key]]
                row[f"to_{key}"] = min(enough, default=None)
        table.append(row)
    return table
