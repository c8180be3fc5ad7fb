"""Accuracy against iterations: others than in training, at constant depth, in the report on a training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import solvers
from implicit_attn.data import ImageData
from implicit_attn.deq import DEQ
from implicit_attn.models import RecurrentBackbone, build_model
from implicit_attn.optional import progress
from implicit_attn.studies.converging import (
    draw_energies,
    draw_residuals,
    solve_curves,
    solver_choices,
    with_energies,
)
from implicit_attn.studies.study import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    Study,
    Subject,
    Table,
    histogram,
    leave_empty,
    legend_below,
    show_best,
    subject_of,
)
from implicit_attn.training import Recipe, Training
from implicit_attn.updates.hyperset import ConditionedStepSizes, HyperSETLayer
from solvers.core.checks import require_count

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
    layer: Any, x: Any = None, targets: Tensor | None = None, *, factor: int = 4
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
    for name, run in progress(runs.items(), "methods"):
        curves += [{"method": name, **row} for row in run()]
    adaptive, depths = adaptive_stopping(subject, factor * subject.trained)
    reach = _reach(curves, subject.trained, factor)
    return Extrapolation(curves, reach, adaptive, depths, subject.trained)


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
    backbone = subject.recurrence
    if backbone is None:
        raise TypeError(f"model must be unrolled, got {type(subject.model).__name__}")

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
    for inputs, targets in progress(list(subject.parts()), "batches"):
        for k, (z, *values) in enumerate(run(inputs)):
            columns.setdefault(k, []).append([each for each in values if each is not None])
            if targets is not None:
                outputs.setdefault(k, []).append(subject.outputs(inputs, z))
    table = []
    for k, parts in columns.items():
        means = subject.judge(torch.cat(outputs[k])) if outputs else {}
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
    runs = [backbone.states(x, iterations=count)[-2:] for count in iterations]
    return [(states[-1], relative_changes(states)[0]) for states in runs]


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
        spent = times.double()
        row = {"rtol": rtol, "evaluations": spent.mean().item()}
        row |= {"evaluations_90": spent.quantile(0.9).item(), "stopped": met.double().mean().item()}
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
    backbone: Any = subject.recurrence
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
    parts: dict[str, Table] = {}
    for each in curves:
        parts.setdefault(each["method"], []).append(each)
    aim = _at(next(iter(parts.values())), trained)
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
    factor, drawn = 100.0 if key == "accuracy" else 1.0, dict[str, list[float]]()
    for number, (name, marker) in enumerate(zip(methods, "osv^DP*", strict=False)):
        rows = [row for row in curves if row["method"] == name and row.get(key) is not None]
        values = [factor * row[key] for row in rows]
        look: Any = {"marker": marker, "markersize": 4, "linewidth": 1.2, "color": f"C{number}"}
        axes.plot([row["evaluations"] for row in rows], values, label=name, **look)
        if values:
            drawn[name] = values
    axes.set_xlabel("iterations (evaluations) at test time")
    if not drawn:
        leave_empty(axes, f"no {key} is defined")
        return
    for multiple in range(1, max(row["evaluations"] for row in curves) // trained + 1):
        label = f"1x, 2x, ... training ({trained})" if multiple == 1 else None
        axes.axvline(multiple * trained, color=GREY, linestyle=":", linewidth=1, label=label)
    if key == "accuracy":
        show_best(axes, [value for values in drawn.values() for value in values])
        low, _ = axes.get_ylim()
        below = {name: max(values) for name, values in drawn.items() if max(values) < low}
        text = "\n".join(f"{name}: at most {most:.1f} %" for name, most in below.items())
        axes.text(0.97, 0.03, text, transform=axes.transAxes, ha="right", fontsize=8)
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
    for number, row in enumerate(found.adaptive[::3]):  # labels of all would overlap
        place, down = (row["evaluations"], 100 * row["accuracy"]), (-13, -24)[number % 2]
        text: Any = {"textcoords": "offset points", "xytext": (0, down), "ha": "center"}
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
    for rtol, color in zip(shown, (BLUE, ORANGE, GREEN), strict=False):
        rows = [row for row in found.depths if row["rtol"] == rtol]
        share = [100 * row["samples"] / total for row in rows]
        look: Any = {"color": color, "width": 1.0, "alpha": 0.45, "label": f"tolerance {rtol:g}"}
        axes.bar([row["evaluations"] for row in rows], share, **look)
    axes.set(xlabel="iterations until the sample stops", ylabel="share of samples, %")
    axes.set_title("Iterations per sample under adaptive stopping")
    axes.legend(frameon=False)


@dataclass(frozen=True)
class TradeOff(Study):
    """What :func:`trade_off` finds.

    Attributes:
        table: rows with layers, iterations (of each layer), parameters, accuracy, loss, seed and seconds
            of the training; fewest layers first.
    """

    table: Table
    printed = ("table",)
    size = (15, 4.6)

    def draw(self, figure: Any) -> None:
        """Three panels over (layers, iterations): accuracy, loss, parameters; points are seeds."""
        pairs = list(dict.fromkeys((row["layers"], row["iterations"]) for row in self.table))
        groups = [[row for row in self.table if row["layers"] == pair[0]] for pair in pairs]
        label = "mean of the seeds" if len(groups[0]) > 1 else "one seed"
        axes = figure.subplots(1, 3)
        for panel, key, factor, color in zip(
            axes, ("accuracy", "loss"), (100, 1), (ORANGE, BLUE), strict=False
        ):
            values = [[factor * row[key] for row in rows] for rows in groups]
            for place, each in enumerate(values):
                panel.plot([place] * len(each), each, "o", color=color, alpha=0.5)
            panel.plot([sum(each) / len(each) for each in values], color=color, label=label)
            panel.legend(frameon=False)
        axes[0].set(ylabel="test accuracy, %", title="Accuracy at constant depth")
        axes[1].set(ylabel="test loss (cross-entropy)", title="Loss at constant depth")
        thousands = [rows[0]["parameters"] / 1000 for rows in groups]
        axes[2].bar_label(axes[2].bar(range(len(pairs)), thousands, color=GREEN), fmt="%.1f")
        axes[2].set(ylabel="parameters, thousands", title="Number of parameters")
        for panel in axes:
            panel.set_xticks(range(len(pairs)), [f"{layers} x {count}" for layers, count in pairs])
            panel.set_xlabel("layers x iterations of each")


def layers_of_depth(depth: int, layers: Sequence[int] = ()) -> list[tuple[int, int]]:
    """All (layers, iterations) whose product is ``depth``, or those with these numbers of layers.

    Raises:
        ValueError: ``depth`` is below 1, or one of ``layers`` does not divide it.
    """
    chosen = layers or [k for k in range(1, require_count("depth", depth) + 1) if depth % k == 0]
    if any(depth % number for number in chosen):
        raise ValueError(f"layers must divide depth {depth}, got {tuple(layers)}")
    return [(number, depth // number) for number in sorted(set(chosen))]


def small_classifier(data: ImageData, dim: int = 32, patch: int = 2) -> dict[str, Any]:
    """Specification of a small Hyper-SET image classifier for ``data``, one layer."""
    _, channels, size, _ = data.train_images.shape
    backbone = {"name": "hyperset", "dim": dim, "heads": 2, "time_dim": 32, "initial_step": 0.1}
    shape = {"image_size": size, "channels": channels, "classes": data.classes, "patch": patch}
    return {"kind": "image-classifier", **shape, "readout": "tokens", "backbone": backbone}


def trade_off(
    data: ImageData,
    pairs: Sequence[tuple[int, int]],
    recipes: Sequence[Recipe],
    folder: str | Path,
    specification: Mapping[str, Any] | None = None,
) -> TradeOff:
    """Train the same model for each recipe and each (layers, iterations).

    Args:
        data: images.
        pairs: (layers, iterations) of each model, as :func:`layers_of_depth` gives them.
        recipes: of the trainings, one a seed, which also initialises the weights.
        folder: where the checkpoints go, over those that an earlier call left there.
        specification: of an unrolled model, for :func:`implicit_attn.models.build_model`; None:
            :func:`small_classifier`.

    Raises:
        NonFiniteLoss: the loss, its gradient or a parameter is NaN or infinite.
    """
    kind = specification or small_classifier(data)
    table: Table = []
    for recipe in recipes:
        for layers, iterations in pairs:
            backbone = {**kind["backbone"], "layers": layers, "iterations": iterations}
            wanted = {**kind, "backbone": backbone}
            torch.manual_seed(recipe.seed)
            model = build_model(wanted)
            path = Path(folder) / f"{layers}x{iterations}-seed{recipe.seed}.safetensors"
            training = Training(model, data, recipe, path, {"data": data.name, "model": wanted})
            # The checkpoint is a by-product of the table, which every call makes anew.
            training.run(overwrite=True)
            subject = Subject(model.eval(), data.test_images, data.test_labels, iterations)
            found = accuracy_by_iterations(subject, [iterations])[0]
            table.append({
                "layers": layers, "iterations": iterations,
                "parameters": sum(p.numel() for p in model.parameters()),
                "accuracy": found["accuracy"], "loss": found["loss"], "seed": recipe.seed,
                "seconds": sum(each["seconds"] for each in training.history),
            })  # fmt: skip
    return TradeOff(sorted(table, key=lambda row: row["layers"]))


OWN = "the layer's solver"
CONVERGENCE_SAMPLES = 256  # whose convergence is drawn


@dataclass(frozen=True)
class Report(Study):
    """What :func:`report` finds.

    Attributes:
        epochs: rows with epoch, loss, test_accuracy, converged (share of training samples) and
            evaluations (median).
        convergence: the curves of :class:`Convergence` for the layer's own solver, in float64.
        extrapolation: of :func:`accuracy_by_evaluations`.
        rtol, trained: tolerance and median evaluations per sample in training.
        couplings: of a spin classifier: (N, N) norms between its sites, before training and after
            every epoch; drawn in place of the energy. None: there are none.
        explicit: name and accuracy of a model without solves, drawn beside the accuracies.
    """

    epochs: Table
    convergence: Table
    extrapolation: Table
    rtol: float
    trained: int
    couplings: tuple[Any, ...] | None = None
    explicit: tuple[str, float] | None = None
    printed = ("extrapolation",)
    size = (13, 8)

    def draw(self, figure: Any) -> None:
        """Four panels; of spins three, and their couplings below."""
        if self.couplings is None:
            panels = list(figure.subplots(2, 2).flat)
            draw_energies(panels.pop(2), self.convergence, {OWN: BLUE})
        else:
            upper, lower = figure.subfigures(2, 1)
            panels = list(upper.subplots(1, 3))
            draw_couplings(lower, self.couplings)
        draw_training(panels[0], self.epochs)
        draw_residuals(panels[1], self.convergence, {OWN: BLUE}, self.rtol)
        panels[1].legend(frameon=False)
        draw_accuracy(panels[2], self.extrapolation, self.trained, self.explicit)


def report(
    subject: Subject, couplings: Any = None, *, explicit: tuple[str, float] | None = None
) -> Report:
    """Training, convergence and accuracy of a trained classifier on its test samples.

    Args:
        subject: a model with a ``DEQ``, test samples with targets, and the history of its training.
        couplings, explicit: as in :class:`Report`.

    Raises:
        ValueError: the subject has no history.
    """
    if not subject.history:
        raise ValueError("subject must have the history of its training, got none")
    few = subject.inputs[:CONVERGENCE_SAMPLES]
    exact = replace(subject, inputs=few, targets=None).exact()
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        own = {OWN: (exact.layer, exact.layer.solver)}
        convergence = solve_curves(own, *exact.given(exact.inputs), max_steps=100)
    trained = subject.trained
    budgets = {2**k for k in range(20) if 2**k < trained} | {trained, 2 * trained, 4 * trained}
    accuracies = accuracy_by_evaluations(subject, sorted(budgets))
    norms = None if couplings is None else tuple(couplings)
    return Report(subject.history, convergence, accuracies, subject.rtol, trained, norms, explicit)


def draw_training(axes: Any, epochs: Table) -> None:
    """Loss and test accuracy per epoch, with the share of converged training samples."""
    number = [row["epoch"] for row in epochs]
    lines = axes.plot(number, [row["loss"] for row in epochs], color=BLUE, label="loss")
    axes.set(xlabel="epoch", ylabel="training loss", yscale="log", title="Training")
    axes.xaxis.get_major_locator().set_params(integer=True)
    right = axes.twinx()
    accuracy = [100 * row["test_accuracy"] for row in epochs]
    converged = [100 * row["converged"] for row in epochs]
    lines += right.plot(number, accuracy, color=ORANGE, label="test accuracy")
    label = "training samples converged"
    lines += right.plot(number, converged, color=GREEN, linestyle=":", label=label)
    right.set_ylabel("%")
    lowest = min(*accuracy, *converged)
    right.set_ylim(max(0.0, 5 * ((lowest - 2) // 5)), 100.5)
    # Between the accuracies, which are above, and the loss, which falls below.
    axes.legend(handles=lines, frameon=False, loc="center right", bbox_to_anchor=(1.0, 0.63))


def draw_accuracy(
    axes: Any, table: Table, trained: float, explicit: tuple[str, float] | None
) -> None:
    """Test accuracy against evaluations allowed per sample."""
    budgets = [row["evaluations"] for row in table]
    accuracy = [100 * row["accuracy"] for row in table]
    axes.plot(budgets, accuracy, color=ORANGE, marker="o")
    others: list[float] = []
    if explicit is not None:
        others = [100 * explicit[1]]
        axes.axhline(others[0], color=BLUE, linestyle=":", label=f"{explicit[0]}, no solve")
    axes.axvline(trained, color=GREY, linestyle="--", label="median in training")
    axes.set_xscale("log", base=2)
    # Powers of two get a label, and the largest budget; a neighbour of one of them would overlap.
    named = [b for b in budgets if b & (b - 1) == 0 or b == budgets[-1]]
    axes.set_xticks(named, [str(budget) for budget in named])
    axes.minorticks_off()
    axes.set(
        xlabel="evaluations per sample at test time\n(1: the start of the solve)",
        ylabel="test accuracy, %",
        title="Accuracy by evaluations",
    )
    show_best(axes, [*accuracy, *others])
    axes.legend(loc="best")


def draw_couplings(figure: Any, couplings: tuple[Any, ...]) -> None:
    """Matrices of norms before, during and after training, and the last one as a graph."""
    last = len(couplings) - 1
    moments = sorted({0, max(1, last // 4), last} & set(range(last + 1)))
    axes = figure.subplots(1, len(moments) + 1)
    top = max(float(np.max(couplings[k])) for k in moments)
    image = None
    for panel, k in zip(axes, moments, strict=False):
        image = panel.imshow(np.asarray(couplings[k]), cmap="viridis", vmin=0.0, vmax=top)
        name = "before training" if k == 0 else f"after epoch {k}"
        panel.set(title=f"Couplings {name}", xlabel="site j (0: class token)")
        panel.locator_params(integer=True)
    axes[0].set_ylabel("site i")
    shared = list(axes[: len(moments)])
    figure.colorbar(image, ax=shared, label="$|J_{ij}|$ (Frobenius)", location="bottom", shrink=0.5)
    draw_coupling_graph(axes[-1], np.asarray(couplings[-1]))


def draw_coupling_graph(axes: Any, norms: Any, share: float = 0.35) -> None:
    """The strongest couplings (N, N) as lines between the sites, site 0 beside the grid."""
    side = round((len(norms) - 1) ** 0.5)
    places = [(-1.4, (side - 1) / 2)] + [(float(k % side), k // side) for k in range(side * side)]
    rows, columns = np.triu_indices(len(norms), 1)
    strength = norms[rows, columns]
    least, widest = np.quantile(strength, 1 - share), float(strength.max()) or 1.0
    for i, j, value in zip(rows, columns, strength, strict=True):
        if value >= least:
            (x0, y0), (x1, y1) = places[i], places[j]
            color, relative = ORANGE if i == 0 else BLUE, float(value) / widest
            look: Any = {"linewidth": 4 * relative**2, "alpha": 0.75 * relative}
            axes.plot([x0, x1], [y0, y1], color=color, **look)
    axes.scatter(*zip(*places, strict=True), s=90, color=[ORANGE] + [BLUE] * side**2, zorder=3)
    below: Any = {"textcoords": "offset points", "ha": "center", "va": "top"}
    axes.annotate("class\ntoken", places[0], (0, -12), **below)
    axes.invert_yaxis()
    axes.set_aspect("equal")
    axes.set_axis_off()
    axes.set_title(f"Strongest {100 * share:.0f} % of couplings,\nsites at their positions")
