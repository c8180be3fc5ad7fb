"""States, residuals, energies and accuracies of a layer against the number of evaluations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import solvers
from implicit_attn.deq import DEQ
from implicit_attn.studies.subjects import Measure, Pool, measure_classes
from implicit_attn.studies.tables import Table, median_and_band
from implicit_attn.updates import Update
from solvers.core.solver import ExternalSolver


class Returned(NamedTuple):
    """What a solve within a budget returns."""

    value: Tensor  # the state
    residual: Tensor  # (B,), relative, of that state
    energy: Tensor | None  # (B,)


class Recorder(Update):
    """An update that keeps every state at which it is evaluated, in the order of the whole batch."""

    def __init__(self, update: Update) -> None:
        super().__init__()
        self.update, self.symmetric, self.monitored = update, update.symmetric, update.monitored
        self.states: list[Tensor] = []  # (B, ...) each; rows of samples that had ended are stale

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Any:
        first = pytree.tree_leaves(x)[0]
        # Samples that have ended leave the batch; their numbers tell which ones are left.
        return torch.arange(len(first), device=first.device), self.update.prepare(x, mask=mask)

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Any:
        self._keep(z, x[0])
        return self.update(z, x[1], mask=mask)

    def joint(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Any:
        self._keep(z, x[0])
        return self.update.joint(z, x[1], mask=mask)

    def _keep(self, z: Tensor, number: Tensor) -> None:
        if self.states and len(z) < len(self.states[0]):
            z = self.states[-1].index_copy(0, number, z.detach())
        self.states.append(z.detach())


def returned_within(
    layer: DEQ,
    x: Any,
    budgets: Sequence[int],
    *,
    solver: solvers.Solver | None = None,
    rtol: float = 0.0,
) -> list[Returned]:
    """What ``layer.solve(x, max_steps=budget)`` returns, for each budget.

    One recorded solve with the largest budget tells all of it. A solver whose evaluations cannot
    all be recorded (Newton's inner products, foreign loops) solves anew for each budget.

    Args:
        layer: whose state is one tensor.
        x: its input.
        budgets: evaluations per sample, each >= 1.
        solver: in place of the layer's own.
        rtol: relative residual at which a sample ends.
    """
    solver = solver or layer.solver
    options: Any = {"tolerance": solvers.Tolerance(rtol=rtol), "on_failure": "ignore"}
    with torch.no_grad():
        if isinstance(solver, solvers.Newton | ExternalSolver):
            found = [layer.solve(x, solver=solver, max_steps=b, **options) for b in budgets]
            return [Returned(each.value, each.residual, each.energy) for each in found]
        recorder = Recorder(layer.update)
        recorded = DEQ(recorder, init=layer.init)
        options |= {"solver": solver, "max_steps": max(budgets), "record": True}
        trace = recorded.solve(x, **options).trace
    assert trace is not None and trace.accepted is not None  # a recorded solve of ours says it
    usable = torch.isfinite(trace.residual) & trace.accepted
    residual = torch.where(usable, trace.residual, torch.inf)
    best = residual.cummin(dim=1).values
    before = torch.cat([torch.full_like(best[:, :1], torch.inf), best[:, :-1]], dim=1)
    columns = torch.arange(best.shape[1], device=best.device)
    # The first of equals, as in a solve; where nothing is usable, the start.
    place = torch.where(residual < before, columns, 0).cummax(dim=1).values
    kept = torch.stack(recorder.states)
    samples = torch.arange(kept.shape[1], device=kept.device)
    found = []
    for budget in budgets:
        last = min(budget, best.shape[1]) - 1
        index = place[:, last]
        energy = None if trace.energy is None else trace.energy[samples, index]
        found.append(Returned(kept[index, samples], best[:, last], energy))
    return found


def solve_history(
    layer: DEQ, x: Any, mask: Tensor | None = None, **options: Any
) -> tuple[Table, solvers.Solution]:
    """Residual and energy after every evaluation of one solve, summed up over the samples.

    A sample that has ended keeps its last value, so that every row speaks of all samples.

    Args:
        layer, x, mask, options: as for ``DEQ.solve``.

    Returns:
        The table, and the solution with its trace. Rows with evaluation; residual (best so far:
        median), residual_10 and residual_90 (quantiles); converged (share of samples); and for a
        monitored layer, of the accepted iterates: energy_drop (energy minus the sample's first,
        median), energy_above (energy minus the sample's last, median), largest_rise (of any sample
        since the previous row).
    """
    with torch.no_grad():
        solution = layer.solve(x, mask, record=True, **options)
    trace = solution.trace
    assert trace is not None  # record=True
    best = carry_forward(trace.residual, trace.accepted).cummin(dim=1).values
    energies = None if trace.energy is None else carry_forward(trace.energy, trace.accepted)
    taken = torch.isfinite(trace.residual).sum(1)
    ended = solution.converged[:, None] & (
        torch.arange(1, best.shape[1] + 1, device=best.device) >= taken[:, None]
    )
    table: Table = []
    for k in range(best.shape[1]):
        row: dict[str, Any] = {"evaluation": k + 1, **median_and_band("residual", best[:, k])}
        row["converged"] = ended[:, k].double().mean().item()
        if energies is not None:
            now = energies[:, k]
            row["energy_drop"] = (now - energies[:, 0]).median().item()
            row["energy_above"] = (now - energies[:, -1]).median().item()
            row["largest_rise"] = (now - energies[:, max(k - 1, 0)]).max().item()
        table.append(row)
    return table, solution


def carry_forward(values: Tensor, accepted: Tensor | None) -> Tensor:
    """(B, T) with NaN and rejected trials replaced by the last accepted value of the row."""
    valid = torch.isfinite(values)
    if accepted is not None:
        valid = valid & accepted
    columns = torch.arange(values.shape[1], device=values.device).expand_as(values)
    last = torch.where(valid, columns, 0).cummax(dim=1).values
    return values.gather(1, last)


def pool_states(
    evaluations: Sequence[int],
    samples: Iterable[tuple[Tensor, Tensor]],
    run: Callable[[Tensor], Iterable[Returned]],
    classify: Callable[[Tensor], Tensor],
    measure: Measure,
) -> Table:
    """A row for each number of evaluations, pooled over batches of (inputs, targets).

    ``run(inputs)`` gives what is returned after each of these numbers. The rows have evaluations,
    the measures, residual (median), and energy (mean) if there is one.
    """
    pools = [Pool() for _ in evaluations]
    residuals: list[list[Tensor]] = [[] for _ in evaluations]
    energies: list[list[Tensor]] = [[] for _ in evaluations]
    with torch.no_grad():
        for inputs, targets in samples:
            for k, each in enumerate(run(inputs)):
                pools[k].add(measure(classify(each.value), inputs, targets))
                residuals[k].append(each.residual)
                if each.energy is not None:
                    energies[k].append(each.energy)
    table: Table = []
    for k, number in enumerate(evaluations):
        row: dict[str, Any] = {"evaluations": number, **pools[k].means()}
        row["residual"] = torch.cat(residuals[k]).median().item()
        if energies[k]:
            row["energy"] = torch.cat(energies[k]).mean().item()
        table.append(row)
    return table


def accuracy_by_evaluations(
    layer: DEQ,
    embed: Callable[[Tensor], Any],
    classify: Callable[[Any], Tensor],
    images: Tensor,
    labels: Tensor,
    budgets: Sequence[int],
    *,
    batch_size: int = 256,
    solver: solvers.Solver | None = None,
    measure: Measure = measure_classes,
) -> Table:
    """Accuracy, loss, residual and energy of a layer that may spend so many evaluations a sample.

    The tolerance is zero, so a sample ends early only where rounding allows no better residual.

    Args:
        layer: the layer between ``embed`` and ``classify``.
        embed: images (B, ...) -> the layer's input.
        classify: equilibrium -> logits (B, classes).
        images: (N, ...), inputs of any kind; labels: (N,) int64, or what ``measure`` takes.
        budgets, solver: as for :func:`returned_within`.
        batch_size: images at once.
        measure: of the outputs; accuracy and cross-entropy of classes by default.

    Returns:
        Rows with evaluations, accuracy, loss (or the columns of ``measure``), residual (median)
        and, for a monitored layer, energy (mean).

    Raises:
        ValueError: there are no images.
    """
    if len(images) == 0:
        raise ValueError("images must hold at least one image, got none")
    samples = zip(images.split(batch_size), labels.split(batch_size), strict=True)

    def run(part: Tensor) -> list[Returned]:
        return returned_within(layer, embed(part), budgets, solver=solver)

    return pool_states(budgets, samples, run, classify, measure)


def evaluations_to_reach(
    table: Table, measure: str, level: float, *, at_most: bool = False
) -> int | None:
    """The fewest evaluations in a table with ``measure`` at least (or at most) ``level``, or None."""
    sign = -1 if at_most else 1
    enough = [row["evaluations"] for row in table if sign * row[measure] >= sign * level]
    return min(enough, default=None)
