"""The extrapolation study: a model at other numbers of iterations than in training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import solvers
from implicit_attn.deq import DEQ
from implicit_attn.models import RecurrentBackbone
from implicit_attn.studies.converging import solver_choices, with_energies
from implicit_attn.studies.subjects import Subject, subject_of
from implicit_attn.studies.tables import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    Study,
    Table,
    histogram,
    leave_empty,
    legend_below,
    show_best,
)
from implicit_attn.updates.hyperset import ConditionedStepSizes, HyperSETLayer

ACCELERATED = ("L-BFGS", "Anderson", "Broyden")
RTOLS = (0.3, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01, 0.005, 0.003, 0.002, 0.001)
# Of inputs: states in order, each with columns (B,) or None.
Run = Callable[[Any], Iterable[tuple[Any, ...]]]


@dataclass(frozen=True)
class Extrapolation(Study):
    """What :func:`extrapolation` finds.

    Attributes:
        curves: rows with method, evaluations, the measures, residual (median), and energy (mean)
            where there is one; the first method is the one the others are compared with.
        reach: rows with method, accuracy_1x, accuracy_2x and accuracy_4x (at so many times the
            training iterations), and to_accuracy, to_loss, to_residual: the fewest evaluations
            with which the method is as good as the first one at 1x; None where it never is.
        adaptive: rows with rtol, evaluations (mean per sample), evaluations_90, stopped (share of
            samples that met rtol), and the measures.
        depths: rows with rtol, evaluations, samples: how many samples took so many evaluations.
        trained: iterations in training.
    """

    curves: Table
    reach: Table
    adaptive: Table
    depths: Table
    trained: int
    printed = ("reach", "adaptive")

    def draw(self, figure: Any) -> None:
        """Six panels: accuracy, loss, residual, energy, adaptive stopping, iterations per sample."""
        axes = figure.subplots(2, 3)
        for panel, key in zip(axes.flat, ("accuracy", "loss", "residual", "energy"), strict=False):
            _draw_curves(panel, self.curves, key, self.trained)
        axes[0, 0].set(ylabel="test accuracy, %", title="Accuracy")
        axes[0, 1].set(ylabel="test loss (cross-entropy)", title="Loss")
        name = "Residual of a solve, last relative change of a recurrence"
        axes[0, 2].set(ylabel="relative residual (median)", yscale="log", title=name)
        axes[1, 0].set(ylabel="energy (mean)", title="Energy")
        _draw_adaptive(axes[1, 1], self)
        _draw_depths(axes[1, 2], self)
        legend_below(figure, axes[0, 2])


def extrapolation(
    layer: Any,
    x: Any = None,
    targets: Tensor | None = None,
    *,
    factor: int = 4,
) -> Extrapolation:
    """Accuracy, loss, residual and energy for 1 to ``factor`` times the iterations of training.

    An equilibrium is solved by forward iteration, with and without the safeguard of its energy, and
    by accelerated solvers. An unrolled model is iterated further with its time going on and with its
    time held, and the step of its last iteration is given to accelerated solvers. All are charged by
    evaluations; a solver returns the best state that it has evaluated, a recurrence its last.

    Args:
        layer, x: as for :func:`convergence`.
        targets: labels (B,) of the model's outputs, for accuracy and loss; None: without these.
        factor: to how many times the iterations of training; of a layer of unknown training these
            are the median evaluations of its solves.

    Raises:
        ValueError: ``factor`` is below 1.
    """
    subject = subject_of(layer, x, targets)
    budgets = budgets_up_to(subject.trained, factor)
    runs: dict[str, Callable[[], Table]] = {}
    if subject.recurrence is None:
        labels = {name: name for name in ("forward", "plain forward", *ACCELERATED)}
    else:
        for name, variant in _time_variants(subject).items():
            runs[name] = partial(accuracy_by_iterations, variant, budgets)
        labels = {name: f"{name} on the step of iteration T" for name in ACCELERATED}
    choices = solver_choices(subject.layer)
    for name, label in labels.items():
        if name in choices:
            runs[label] = partial(accuracy_by_evaluations, subject, budgets, *choices[name])
    curves: Table = []
    for name, run in runs.items():
        curves += [{"method": name, **row} for row in run()]
    adaptive, depths = adaptive_stopping(subject, factor * subject.trained)
    reach = _reach(curves, subject.trained, factor)
    return Extrapolation(curves, reach, adaptive, depths, subject.trained)


def accuracy_by_evaluations(
    subject: Subject,
    budgets: Sequence[int],
    layer: DEQ | None = None,
    solver: solvers.Solver | None = None,
) -> Table:
    """The measures of a model whose layer may spend so many evaluations a sample, each of ``budgets``.

    The tolerance is zero, so a sample ends early only where rounding allows no better residual.

    Args:
        subject: with a layer that is solved.
        budgets: numbers of evaluations, each >= 1.
        layer, solver: in place of the subject's layer and of its solver.

    Returns:
        Rows with evaluations, the columns of ``subject.measure``, residual (median) and, for a
        layer with an energy, energy (mean).
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

    Args:
        subject: an unrolled model.
        iterations: of each layer, >= 1.

    Returns:
        Rows as of :func:`accuracy_by_evaluations`; the residual is the last relative change.

    Raises:
        TypeError: the model is not unrolled.
    """
    backbone = subject.require_recurrence()

    def run(inputs: Any) -> Iterator[tuple[Any, ...]]:
        x, _ = subject.given(inputs)
        for z, change in _states_after(backbone, x, iterations):
            yield z, change, subject.energy(z, x)

    return _by_budget(subject, iterations, run)


def _by_budget(subject: Subject, budgets: Sequence[int], run: Run) -> Table:
    """A row for each number of evaluations, of residuals and energies (B,)."""
    table: Table = []
    pooled = _pooled(subject, run)
    for number, (means, (residual, *energy)) in zip(budgets, pooled, strict=True):
        row = {"evaluations": number, **means, "residual": residual.median().item()}
        table.append(row | ({"energy": energy[0].mean().item()} if energy else {}))
    return table


@torch.no_grad()
def _pooled(subject: Subject, run: Run) -> list[tuple[dict[str, float], list[Tensor]]]:
    """For each state that ``run`` gives, with columns (B,), its measures and whole columns."""
    outputs: dict[int, list[Tensor]] = {}
    columns: dict[int, list[list[Tensor]]] = {}
    for inputs, targets in subject.parts():
        for k, (z, *values) in enumerate(run(inputs)):
            columns.setdefault(k, []).append([each for each in values if each is not None])
            if targets is not None:
                outputs.setdefault(k, []).append(subject.outputs(inputs, z))
    table = []
    for k, parts in columns.items():
        means = {}
        if subject.targets is not None:
            means = subject.measure(torch.cat(outputs[k]), subject.inputs, subject.targets)
        table.append((means, [torch.cat(each) for each in zip(*parts, strict=True)]))
    return table


def _states_after(
    backbone: RecurrentBackbone, x: Tensor, iterations: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """State (B, N, d) and last relative change (B,) after each number of iterations."""
    if len(backbone.layers) == 1:  # a longer run contains the shorter ones
        states = backbone.states(x, iterations=max(iterations))
        changes = relative_changes(states)
        return [(states[count], changes[count - 1]) for count in iterations]
    found = []
    for count in iterations:
        states = backbone.states(x, iterations=count)
        found.append((states[-1], relative_changes(states[-2:])[0]))
    return found


def relative_changes(states: Tensor) -> Tensor:
    """``|z_t - z_t-1| / |z_t|`` of states (1 + T, B, ...), (T, B)."""
    new, old = states[1:].flatten(2), states[:-1].flatten(2)
    tiny = torch.finfo(states.dtype).tiny
    return (new - old).norm(dim=2) / new.norm(dim=2).clamp_min(tiny)


def stopping_times(changes: Tensor, rtol: float) -> Tensor:
    """For changes (T, B) the first t = 1 .. T with a change of at most ``rtol``, else T; (B,)."""
    met = changes <= rtol
    first = met.to(torch.int64).argmax(dim=0) + 1
    return torch.where(met.any(dim=0), first, changes.shape[0])


def adaptive_stopping(
    subject: Subject, most: int, rtols: Sequence[float] = RTOLS
) -> tuple[Table, Table]:
    """The measures where each sample stops once its relative change (or residual) is small enough.

    Args:
        subject: an unrolled model, or an equilibrium, which its own solver solves.
        most: iterations that a sample may have.
        rtols: relative changes at which a sample stops.

    Returns:
        The tables ``adaptive`` and ``depths`` of :class:`Extrapolation`.
    """
    pooled = _pooled(subject, lambda inputs: _stops(subject, inputs, most, rtols))
    table: Table = []
    depths: Table = []
    for rtol, (means, (times, met)) in zip(rtols, pooled, strict=True):
        row = {"rtol": rtol, "evaluations": times.double().mean().item()}
        row["evaluations_90"] = times.double().quantile(0.9).item()
        row["stopped"] = met.double().mean().item()
        table.append(row | means)
        depths += histogram(times, rtol=rtol)
    return table, depths


def _stops(
    subject: Subject, inputs: Any, most: int, rtols: Sequence[float]
) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """For each tolerance the states at the stop, the evaluations (B,), whether it was met (B,)."""
    x, mask = subject.given(inputs)
    if subject.recurrence is None:
        for rtol in rtols:
            options: Any = {"tolerance": solvers.Tolerance(rtol=rtol), "on_failure": "ignore"}
            end = subject.layer.solve(x, mask, max_steps=most, **options)
            yield end.value, end.evaluations, end.converged
        return
    pairs = _states_after(subject.recurrence, x, range(1, most + 1))
    states, changes = (torch.stack(column) for column in zip(*pairs, strict=True))
    samples = torch.arange(len(x), device=x.device)
    for rtol in rtols:
        times = stopping_times(changes, rtol)
        yield states[times - 1, samples], times, (changes <= rtol).any(dim=0)


def budgets_up_to(trained: int, factor: int = 4) -> list[int]:
    """About twenty numbers of iterations from 1 to ``factor * trained``, the multiples among them."""
    if trained < 1 or factor < 1:
        raise ValueError(f"trained and factor must be >= 1, got {trained} and {factor}")
    dense = range(1, trained + 1) if trained <= 8 else range(1, trained + 1, -(-trained // 8))
    later = range(trained, factor * trained + 1, max(1, trained // 4))
    multiples = (k * trained for k in range(1, factor + 1))
    return sorted({*dense, *later, *multiples})


def _time_variants(subject: Subject) -> dict[str, Subject]:
    """The recurrence as it is; if its steps depend on time, once more with the other ``beyond``."""
    backbone = subject.require_recurrence()
    if not any(
        isinstance(layer, HyperSETLayer) and isinstance(layer.steps, ConditionedStepSizes)
        for layer in backbone.layers
    ):
        return {"recurrence": subject}
    names = {"extrapolate": "recurrence, time goes on", "hold": "recurrence, time held at T"}
    other = "hold" if backbone.beyond == "extrapolate" else "extrapolate"
    model = copy.deepcopy(subject.model)
    model.backbone.beyond = other
    return {names[backbone.beyond]: subject, names[other]: replace(subject, model=model)}


def _reach(curves: Table, trained: int, factor: int) -> Table:
    methods = dict.fromkeys(row["method"] for row in curves)
    parts = {name: [row for row in curves if row["method"] == name] for name in methods}
    aim = _at(parts[next(iter(parts))], trained)
    table: Table = []
    for name, rows in parts.items():
        row: dict[str, Any] = {"method": name}
        if "accuracy" in aim:
            for k in sorted({1, min(2, factor), factor}):
                row[f"accuracy_{k}x"] = _at(rows, k * trained)["accuracy"]
        for key, sign in (("accuracy", 1), ("loss", -1), ("residual", -1)):
            if key in aim:
                enough = [r["evaluations"] for r in rows if sign * r[key] >= sign * aim[key]]
                row[f"to_{key}"] = min(enough, default=None)
        table.append(row)
    return table


def _at(rows: Table, evaluations: int) -> dict[str, Any]:
    return next(row for row in rows if row["evaluations"] == evaluations)


def _draw_curves(axes: Any, curves: Table, key: str, trained: int) -> None:
    methods = list(dict.fromkeys(row["method"] for row in curves))
    factor, drawn = 100.0 if key == "accuracy" else 1.0, list[float]()
    for number, (name, marker) in enumerate(zip(methods, "osv^DP*", strict=False)):
        rows = [row for row in curves if row["method"] == name and row.get(key) is not None]
        values = [factor * row[key] for row in rows]
        look: Any = {"marker": marker, "markersize": 4, "linewidth": 1.2, "color": f"C{number}"}
        axes.plot([row["evaluations"] for row in rows], values, label=name, **look)
        drawn += values
    axes.set_xlabel("iterations (evaluations) at test time")
    if not drawn:
        leave_empty(axes, f"no {key} is defined")
        return
    for multiple in range(1, max(row["evaluations"] for row in curves) // trained + 1):
        label = f"1x, 2x, ... training ({trained})" if multiple == 1 else None
        axes.axvline(multiple * trained, color=GREY, linestyle=":", linewidth=1, label=label)
    if key == "accuracy":
        show_best(axes, drawn)
    elif key == "loss":
        axes.set_yscale("log")


def _draw_adaptive(axes: Any, found: Extrapolation) -> None:
    axes.set_title("Adaptive stopping (numbers: tolerance) and fixed depth")
    if "accuracy" not in found.adaptive[0]:
        leave_empty(axes, "no accuracy is defined")
        return
    first = found.curves[0]["method"]
    fixed = [row for row in found.curves if row["method"] == first]
    drawn: list[float] = []
    for rows, label, color, marker in (
        (fixed, f"fixed depth ({first})", GREY, "o"),
        (found.adaptive, "every sample stops at the tolerance", ORANGE, "s"),
    ):
        steps, accuracy = zip(*((r["evaluations"], 100 * r["accuracy"]) for r in rows), strict=True)
        axes.plot(steps, accuracy, label=label, color=color, marker=marker, markersize=4)
        drawn += accuracy
    for row in found.adaptive[::3]:  # labels of all would overlap
        place = (row["evaluations"], 100 * row["accuracy"])
        text: Any = {"textcoords": "offset points", "xytext": (0, -13), "ha": "center"}
        axes.annotate(f"{row['rtol']:g}", place, fontsize=8, **text)
    label = f"training ({found.trained})"
    axes.axvline(found.trained, color=GREY, linestyle=":", linewidth=1, label=label)
    show_best(axes, drawn)
    axes.set(xlabel="mean iterations per sample", ylabel="test accuracy, %")
    axes.legend(frameon=False, fontsize=8)


def _draw_depths(axes: Any, found: Extrapolation) -> None:
    """Histograms for three tolerances that most samples meet: the others show only the limit."""
    met = [row["rtol"] for row in found.adaptive if row["stopped"] >= 0.5]
    shown = met[:: max(1, len(met) // 3)][-3:] if met else [found.adaptive[0]["rtol"]]
    total = sum(row["samples"] for row in found.depths if row["rtol"] == shown[0])
    most = max(row["evaluations"] for row in found.depths if row["rtol"] in shown)
    for rtol, color in zip(shown, (BLUE, ORANGE, GREEN), strict=False):
        count = {r["evaluations"]: r["samples"] for r in found.depths if r["rtol"] == rtol}
        share = [100 * count.get(k, 0) / total for k in range(1, most + 1)]
        edges = [k + 0.5 for k in range(most + 1)]
        label = f"tolerance {rtol:g}"
        axes.stairs(share, edges, color=color, fill=True, alpha=0.45, label=label)
    axes.set(
        xlabel="iterations until the sample stops",
        ylabel="share of samples, %",
        title="Iterations per sample under adaptive stopping",
    )
    axes.legend(frameon=False)
