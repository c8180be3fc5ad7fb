"""The extrapolation study: a model at other numbers of iterations than in training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import solvers
from implicit_attn.models import RecurrentBackbone
from implicit_attn.studies.convergence import solver_choices
from implicit_attn.studies.evaluations import (
    Returned,
    accuracy_by_evaluations,
    evaluations_to_reach,
    pool_states,
)
from implicit_attn.studies.subjects import Pool, Subject
from implicit_attn.studies.tables import Table, histogram
from implicit_attn.updates.hyperset_step import HyperSETLayer
from implicit_attn.updates.step_sizes import ConditionedStepSizes

ACCELERATED = ("L-BFGS", "Anderson", "Broyden")
RTOLS = (0.3, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01, 0.005, 0.003, 0.002, 0.001)


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


def accuracy_by_iterations(subject: Subject, iterations: Sequence[int]) -> Table:
    """Accuracy, loss, residual and energy of an unrolled model after so many iterations.

    Args:
        subject: an unrolled model.
        iterations: of each layer, >= 1.

    Returns:
        Rows with evaluations (iterations of each layer), the columns of ``subject.measure``,
        residual (the last relative change, median) and, where there is one, energy (mean).

    Raises:
        TypeError: the model is not unrolled.
    """
    backbone, energy = subject.require_recurrence(), subject.energy

    def run(inputs: Tensor) -> Iterator[Returned]:
        x = subject.tokens(inputs)
        for z, change in _states_after(backbone, x, iterations):
            yield Returned(z, change, None if energy is None else energy(z, x))

    return pool_states(iterations, subject.parts(), run, subject.classify, subject.measure)


def _states_after(
    backbone: RecurrentBackbone, x: Tensor, iterations: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """State (B, N, d) and last relative change (B,) after each number of iterations."""
    number = len(backbone.layers)
    if number == 1 or backbone.order == "cyclic":  # a longer run contains the shorter ones
        states = backbone.states(x, iterations=max(iterations))[::number]
        changes = relative_changes(states)
        return [(states[count], changes[count - 1]) for count in iterations]
    found = []
    for count in iterations:
        states = backbone.states(x, iterations=count)
        found.append((states[-1], relative_changes(states[-2:])[0]))
    return found


def adaptive_stopping(
    subject: Subject, most: int, rtols: Sequence[float] = RTOLS
) -> tuple[Table, Table]:
    """Accuracy where each sample stops once its relative change (or residual) is small enough.

    Args:
        subject: an unrolled model, or an equilibrium, which its own solver solves.
        most: iterations that a sample may have.
        rtols: relative changes at which a sample stops.

    Returns:
        Rows with rtol, evaluations (mean per sample), evaluations_90 (90 % quantile), stopped
        (share of samples that met rtol), and the columns of ``subject.measure``; and rows with
        rtol, evaluations, samples: how many samples took so many evaluations.
    """
    taken: list[list[Tensor]] = [[] for _ in rtols]
    met = [0.0] * len(rtols)
    pools = [Pool() for _ in rtols]
    for inputs, targets in subject.parts():
        with torch.no_grad():
            stops = _stops(subject, subject.tokens(inputs), most, rtols)
            for k, (z, times, share) in enumerate(stops):
                pools[k].add(subject.measure(subject.classify(z), inputs, targets))
                taken[k].append(times)
                met[k] += share * len(inputs) / len(subject.inputs)
    table: Table = []
    depths: Table = []
    for k, rtol in enumerate(rtols):
        times = torch.cat(taken[k])
        row = {"rtol": rtol, "evaluations": times.double().mean().item()}
        row["evaluations_90"] = times.double().quantile(0.9).item()
        table.append(row | {"stopped": met[k], **pools[k].means()})
        depths += histogram(times, rtol=rtol)
    return table, depths


def _stops(
    subject: Subject, x: Tensor, most: int, rtols: Sequence[float]
) -> list[tuple[Tensor, Tensor, float]]:
    """For each tolerance the states at the stop, the evaluations, the share that met it."""
    found = []
    if subject.recurrence is None:
        for rtol in rtols:
            options: Any = {"tolerance": solvers.Tolerance(rtol=rtol), "on_failure": "ignore"}
            end = subject.layer.solve(x, max_steps=most, **options)
            found.append((end.value, end.evaluations, end.converged.double().mean().item()))
        return found
    pairs = _states_after(subject.recurrence, x, range(1, most + 1))
    states, changes = (torch.stack(column) for column in zip(*pairs, strict=True))
    samples = torch.arange(len(x), device=x.device)
    for rtol in rtols:
        times = stopping_times(changes, rtol)
        share = (changes <= rtol).any(dim=0).double().mean().item()
        found.append((states[times - 1, samples], times, share))
    return found


@dataclass(frozen=True)
class Extrapolation:
    """Tables of :func:`extrapolate`.

    Attributes:
        curves: rows with method, evaluations, the columns of ``subject.measure``, residual, and
            energy where there is one; the first method is the one the others are compared with.
        reach: rows with method, accuracy_1x, accuracy_2x and accuracy_4x (at so many times the
            training iterations), and to_accuracy, to_loss, to_residual: the fewest evaluations
            with which the method is as good as the first one at 1x; None where it never is.
        adaptive, depths: of :func:`adaptive_stopping`.
    """

    curves: Table
    reach: Table
    adaptive: Table
    depths: Table


def extrapolate(
    subject: Subject, factor: int = 4, advance: Callable[[str], object] | None = None
) -> Extrapolation:
    """Accuracy against test-time iterations from 1 to ``factor`` times those of training.

    An unrolled model is iterated further with its time going on and with its time held, and the
    step of its last iteration is given to accelerated solvers. An equilibrium is solved by forward
    iteration, with and without the safeguard of its energy, and by accelerated solvers. All are
    charged by evaluations; a solver returns the best state that it has evaluated, a recurrence its
    last.

    Args:
        subject: the model and its samples.
        factor: to how many times the iterations of training.
        advance: called with the name of each method before it runs.
    """
    budgets = budgets_up_to(subject.trained, factor)
    runs: dict[str, Callable[[], Table]] = {}
    choices = solver_choices(subject.layer)
    parts = (subject.tokens, subject.classify, subject.inputs, subject.targets)
    if subject.recurrence is None:
        labels = {name: name for name in ("forward", "plain forward", *ACCELERATED)}
    else:
        for name, variant in _time_variants(subject).items():
            runs[name] = partial(accuracy_by_iterations, variant, budgets)
        labels = {name: f"{name} on the step of iteration T" for name in ACCELERATED}
    for name, label in labels.items():
        if name in choices:
            layer, solver = choices[name]
            options: Any = {"solver": solver, "measure": subject.measure}
            runs[label] = partial(accuracy_by_evaluations, layer, *parts, budgets, **options)
    curves: Table = []
    for name, run in runs.items():
        if advance is not None:
            advance(name)
        curves += [{"method": name, **row} for row in run()]
    if advance is not None:
        advance("adaptive stopping")
    adaptive, depths = adaptive_stopping(subject, factor * subject.trained)
    return Extrapolation(curves, _reach(curves, subject.trained, factor), adaptive, depths)


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
        isinstance(layer, HyperSETLayer) and isinstance(layer.step_sizes, ConditionedStepSizes)
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
