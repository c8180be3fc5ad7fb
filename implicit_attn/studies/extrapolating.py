"""The extrapolation study: a trained model with other numbers of iterations than in training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import solvers
from implicit_attn.deq import DEQ
from implicit_attn.optional import progress
from implicit_attn.studies.converging import solver_choices, with_energies
from implicit_attn.studies.study import (
    GREY,
    LINES,
    Study,
    Subject,
    Table,
    leave_empty,
    new_figure,
    subject_of,
)

ACCELERATED = ("L-BFGS", "Anderson", "Broyden")
WINDOW = 10.0  # percentage points of accuracy that are drawn below the best
RECURRENCE = "recurrence"


@dataclass(frozen=True)
class Extrapolation(Study):
    """What :func:`extrapolation` returns.

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
    printed = ("reach",)

    def plot(self, title: str = "") -> Any:
        """Four panels: accuracy, loss, residual, energy."""
        figure = new_figure((13, 8), title)
        panels = figure.subplots(2, 2).flat
        keys = {
            "accuracy": "test accuracy, %", "loss": "test loss (cross-entropy)",
            "residual": "residual of a solve, or last relative change", "energy": "energy (mean)",
        }  # fmt: skip
        for axes, (key, label) in zip(panels, keys.items(), strict=True):
            best = 0.0
            for number, name in enumerate(dict.fromkeys(row["method"] for row in self.curves)):
                rows = [r for r in self.curves if r["method"] == name and r.get(key) is not None]
                values = [(100 if key == "accuracy" else 1) * row[key] for row in rows]
                look: Any = {"marker": "osv^DP*"[number], "markersize": 4, "color": LINES[number]}
                axes.plot([row["evaluations"] for row in rows], values, label=name, **look)
                best = max(best, *values, 0.0)
            axes.set(xlabel="iterations (evaluations) at test time", ylabel=label)
            if not any(len(line.get_xdata()) for line in axes.lines):
                leave_empty(axes, f"no {key} is defined")
                continue
            most = max(row["evaluations"] for row in self.curves)
            for place in range(self.trained, most + 1, self.trained):
                axes.axvline(place, color=GREY, linestyle=":", linewidth=1)
            if key == "accuracy":
                axes.set_ylim(best - WINDOW, best + 0.5)
                axes.set_title(f"dotted: 1, 2, ... times the {self.trained} of training")
            elif key != "energy":
                axes.set_yscale("log")
        panels[2].legend(frameon=False, fontsize=8)
        return figure


def extrapolation(
    layer: Any, x: Any = None, targets: Tensor | None = None, *, factor: int = 4
) -> Extrapolation:
    """Accuracy, loss, residual and energy for 1 to ``factor`` times the iterations of training.

    An equilibrium is solved by forward iteration, with and without the safeguard of its energy, and
    by accelerated solvers. An unrolled model is iterated further, and the step of its last iteration is
    given to accelerated solvers. All are charged by evaluations; a solver returns the best state that it
    has evaluated, a recurrence its last.

    Args:
        layer, x: as for :func:`convergence`.
        targets: labels (B,) of the model's outputs, for accuracy and loss; None: without these.
        factor: to how many times the iterations of training; of a layer of unknown training these
            are the median evaluations of its solves.
    """
    subject = subject_of(layer, x, targets)
    budgets, curves = budgets_up_to(subject.trained, factor), Table()
    choices, names = solver_choices(subject.layer), list(ACCELERATED)
    if subject.recurrence is None:
        names = ["forward", "plain forward", *names]
    else:
        rows = accuracy_by_iterations(subject, budgets)
        curves += [{"method": RECURRENCE, **row} for row in rows]
    for name in progress([name for name in names if name in choices], "methods"):
        rows = accuracy_by_evaluations(subject, budgets, *choices[name])
        label = name if subject.recurrence is None else f"{name} on the step of iteration T"
        curves += [{"method": label, **row} for row in rows]
    return Extrapolation(curves, _reach(curves, subject.trained, factor), subject.trained)


def accuracy_by_evaluations(
    subject: Subject, budgets: Sequence[int], layer: DEQ | None = None, solver: Any = None
) -> Table:
    """The measures of a model whose layer may spend so many evaluations a sample, each of ``budgets``.

    The tolerance is zero, so a sample ends early only where rounding allows no better residual.

    Args:
        subject: with a layer that is solved.
        budgets: numbers of evaluations, each >= 1.
        layer, solver: in place of the subject's layer and of its solver.

    Returns:
        Rows with evaluations, accuracy and loss, residual (median) and energy (mean; None without one).
    """
    own = subject.layer if layer is None else layer
    options: Any = {"tolerance": solvers.Tolerance(rtol=0.0), "on_failure": "ignore"}
    options |= {} if solver is None else {"solver": solver}

    def run(inputs: Any) -> Iterator[tuple[Any, ...]]:
        x, mask = subject.given(inputs)
        with with_energies(own):
            for budget in budgets:
                found = own.solve(x, mask, max_steps=budget, **options)
                yield found.value, found.residual, found.energy

    return _by_budget(subject, budgets, run)


def accuracy_by_iterations(subject: Subject, iterations: Sequence[int]) -> Table:
    """The measures of an unrolled model after so many iterations of each layer.

    Returns:
        Rows as of :func:`accuracy_by_evaluations`; the residual is the last relative change.
    """
    backbone = subject.recurrence
    if backbone is None:
        raise TypeError(f"model must be unrolled, got {type(subject.model).__name__}")

    def run(inputs: Any) -> Iterator[tuple[Any, ...]]:
        x, _ = subject.given(inputs)
        # Of one layer a longer run contains the shorter ones.
        every = (
            backbone.states(x, iterations=max(iterations)) if len(backbone.layers) == 1 else None
        )
        for number in iterations:
            states = backbone.states(x, iterations=number) if every is None else every[: number + 1]
            before, after = states[-2].flatten(1), states[-1].flatten(1)
            change = (after - before).norm(dim=1) / after.norm(dim=1)
            yield states[-1], change, subject.energy(states[-1], x)

    return _by_budget(subject, iterations, run)


@torch.no_grad()
def _by_budget(
    subject: Subject, budgets: Sequence[int], run: Callable[[Any], Iterator[tuple[Any, ...]]]
) -> Table:
    """A row for each of the states that ``run`` yields, with residuals and energies (B,) or None."""
    outputs, columns = [[] for _ in budgets], [[] for _ in budgets]
    for inputs in progress(list(subject.parts()), "batches"):
        for k, (z, *values) in enumerate(run(inputs)):
            columns[k].append([each for each in values if each is not None])
            if subject.targets is not None:
                outputs[k].append(subject.outputs(inputs, z))
    table: Table = []
    for number, logits, parts in zip(budgets, outputs, columns, strict=True):
        residual, *energy = (torch.cat(each) for each in zip(*parts, strict=True))
        means = subject.judge(torch.cat(logits)) if logits else {}
        row = {"evaluations": number, **means, "residual": residual.median().item()}
        table.append(row | {"energy": energy[0].mean().item() if energy else None})
    return table


def budgets_up_to(trained: int, factor: int = 4) -> list[int]:
    """Return about twenty numbers of iterations from 1 to ``factor * trained``, with all multiples."""
    if trained < 1 or factor < 1:
        raise ValueError(f"trained and factor must be >= 1, got {trained} and {factor}")
    dense = range(1, trained + 1, max(1, -(-trained // 8)))
    later = range(trained, factor * trained + 1, max(1, trained // 4))
    return sorted({*dense, *later, *(k * trained for k in range(1, factor + 1))})


def _reach(curves: Table, trained: int, factor: int) -> Table:
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
