"""What a layer returns for every budget of evaluations, from one solve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import solvers
from implicit_attn.deq import DEQ
from implicit_attn.updates import Update
from solvers.core.solver import ExternalSolver


@dataclass(frozen=True)
class Returned:
    """What a solve within a budget returns.

    Attributes:
        value: the state.
        residual: (B,) relative residual of that state.
        energy: (B,) or None.
    """

    value: Tensor
    residual: Tensor
    energy: Tensor | None


class Recorder(Update):
    """An update that keeps every state at which it is evaluated, in the order of the whole batch.

    Attributes:
        states: a tensor (B, ...) for each evaluation; rows of samples that had ended are stale.
    """

    def __init__(self, update: Update) -> None:
        super().__init__()
        self.update, self.symmetric, self.monitored = update, update.symmetric, update.monitored
        self.states: list[Tensor] = []

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Any:
        first = pytree.tree_leaves(x)[0]
        # Finished samples leave the batch; who is left is known by number.
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

    One solve is made with the largest budget and looked at on its way. A solver whose evaluations
    leave no trace of their own (Newton's inner products, foreign loops) solves anew each time.

    Args:
        layer: whose state is one tensor.
        x: its input.
        budgets: evaluations per sample, each >= 1.
        solver: instead of the layer's own.
        rtol: relative residual at which a sample is left alone.
    """
    solver = layer.solver if solver is None else solver
    options: Any = {"tolerance": solvers.Tolerance(rtol=rtol), "on_failure": "ignore"}
    with torch.no_grad():
        if isinstance(solver, solvers.Newton | ExternalSolver):
            found = [layer.solve(x, solver=solver, max_steps=b, **options) for b in budgets]
            return [Returned(each.value, each.residual, each.energy) for each in found]
        recorder = Recorder(layer.update)
        watched = DEQ(recorder, init=layer.init)
        options |= {"solver": solver, "max_steps": max(budgets), "record": True}
        solution = watched.solve(x, **options)
    return _cut(recorder.states, solution, budgets)


def _cut(
    states: list[Tensor], solution: solvers.Solution, budgets: Sequence[int]
) -> list[Returned]:
    """The best accepted state among the first evaluations, for each number of them."""
    trace = solution.trace
    assert trace is not None and trace.accepted is not None  # record=True
    usable = torch.isfinite(trace.residual) & trace.accepted
    residual = torch.where(usable, trace.residual, torch.inf)
    best = residual.cummin(dim=1).values
    before = torch.cat([torch.full_like(best[:, :1], torch.inf), best[:, :-1]], dim=1)
    columns = torch.arange(best.shape[1], device=best.device)
    # The first of equals, as in a solve; where nothing is usable, the start.
    place = torch.where(residual < before, columns, 0).cummax(dim=1).values
    kept = torch.stack(states)
    samples = torch.arange(kept.shape[1], device=kept.device)
    found = []
    for budget in budgets:
        index = place[:, min(budget, best.shape[1]) - 1]
        energy = None if trace.energy is None else trace.energy[samples, index]
        reached = best[:, min(budget, best.shape[1]) - 1]
        found.append(Returned(kept[index, samples], reached, energy))
    return found
