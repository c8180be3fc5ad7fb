"""Solved share and accuracy against iterations, with stopping by sample, and by difficulty."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

import solvers
from implicit_attn.data.tasks.instances import Instances
from implicit_attn.studies.harder.methods import Equilibrium, Method, solved_by
from implicit_attn.studies.tables import Table
from solvers.core.checks import require_count, require_number, require_positive

RTOLS = (0.1, 0.03, 0.01, 1e-3, 1e-4)
BATCH = 100


def multiples(trained: int, low: float = 0.25, high: float = 16) -> list[int]:
    """Budgets from ``low`` to ``high`` times those of training, each twice the one before.

    Raises:
        TypeError, ValueError: ``trained`` is no integer >= 1, or not ``0 < low <= high``.
    """
    require_count("trained", trained)
    require_positive("low", low)
    require_number("high", high, low=low)
    found, factor = set[int](), low
    while factor <= high:
        found.add(max(1, round(trained * factor)))
        factor *= 2
    return sorted(found)


def iteration_curve(
    method: Method, instances: Instances, budgets: Sequence[int], *, batch: int = BATCH
) -> Table:
    """One row for each budget: iterations, evaluations (mean), solved, accuracy.

    ``solved`` is the share of instances with every counted position right, ``accuracy`` the share of
    counted positions.
    """
    found = _answers(method, instances, budgets, batch)
    return [
        {"iterations": budget, "evaluations": each.evaluations.double().mean().item()}
        | shares(each.right, instances)
        for budget, each in zip(budgets, found, strict=True)
    ]


def shares(right: Tensor, instances: Instances) -> dict[str, float]:
    """Solved share of instances and accuracy of counted positions, from ``right`` (B, N)."""
    counted = instances.counted
    return {
        "solved": right.all(1).double().mean().item(),
        "accuracy": (right & counted).sum().item() / counted.sum().item(),
    }


def adaptive_curve(
    model: Equilibrium,
    instances: Instances,
    solver: solvers.Solver,
    most: int,
    *,
    rtols: Sequence[float] = RTOLS,
    batch: int = BATCH,
) -> tuple[Table, Table]:
    """Each instance stops where its own residual is small enough, or after ``most`` evaluations.

    Returns:
        For each tolerance a row with rtol, evaluations (mean), evaluations_90 (90 % quantile), converged
        (share that reached the tolerance, not counting what ended for another reason), solved and
        accuracy; and a row for each tolerance and difficulty with rtol, difficulty, samples and
        evaluations (mean).
    """
    table: Table = []
    depths: Table = []
    for rtol in rtols:
        method = solved_by(model, solver, solvers.Tolerance(rtol=rtol))
        (found,) = _answers(method, instances, [most], batch)
        numbers = found.evaluations.double()
        row = {"rtol": rtol, "evaluations": numbers.mean().item()}
        row["evaluations_90"] = numbers.quantile(0.9).item()
        row["converged"] = found.converged.double().mean().item()
        table.append(row | shares(found.right, instances))
        for difficulty in instances.difficulty.unique().tolist():
            some = instances.difficulty == difficulty
            mean = numbers[some].mean().item()
            depths.append(
                {"rtol": rtol, "difficulty": difficulty, "samples": int(some.sum())}
                | {"evaluations": mean}
            )
    return table, depths


def needed_iterations(
    method: Method, instances: Instances, budgets: Sequence[int], *, batch: int = BATCH
) -> Tensor:
    """(B,) int64: the least of ``budgets`` from which on an instance is solved; 0 where it is never.

    One that is solved and lost again counts from where it is solved for good.
    """
    solved = [each.right.all(1) for each in _answers(method, instances, budgets, batch)]
    lasting = torch.stack(solved).flip(0).cumprod(0).flip(0).bool()
    first = torch.tensor(budgets)[lasting.long().argmax(0).cpu()]
    return torch.where(lasting[-1].cpu(), first, 0)


def needed_by_difficulty(
    method: Method, instances: Instances, budgets: Sequence[int], *, batch: int = BATCH
) -> Table:
    """Rows with difficulty, samples, solved (share at the last budget) and iterations that were needed.

    ``iterations`` is the mean, ``iterations_most`` the largest number over the solved instances of this
    difficulty; both are None where there is none.
    """
    needed = needed_iterations(method, instances, budgets, batch=batch)
    table: Table = []
    for difficulty in instances.difficulty.unique().tolist():
        some = needed[(instances.difficulty == difficulty).cpu()]
        reached = some[some > 0]
        solved = len(reached) > 0
        table.append(
            {
                "difficulty": difficulty,
                "samples": len(some),
                "solved": len(reached) / len(some),
                "iterations": reached.double().mean().item() if solved else None,
                "iterations_most": int(reached.max()) if solved else None,
            }
        )
    return table


class _Answers(NamedTuple):
    """Of one budget: right positions (B, N) bool, evaluations (B,), converged (B,) bool."""

    right: Tensor
    evaluations: Tensor
    converged: Tensor


@torch.no_grad()
def _answers(
    method: Method, instances: Instances, budgets: Sequence[int], batch: int
) -> list[_Answers]:
    """What was found within each budget; nothing has converged where a method asks for no tolerance."""
    if not budgets or any(b <= a for a, b in pairwise(budgets)):
        raise ValueError(f"budgets must increase, got {list(budgets)}")
    if budgets[0] < 1:
        raise ValueError(f"budgets must be >= 1, got {list(budgets)}")
    require_count("batch", batch)
    parts: list[list[_Answers]] = [[] for _ in budgets]
    for part in instances.split(batch):
        for kept, answer in zip(parts, method(part.inputs, budgets), strict=True):
            ended = answer.converged
            ended = (
                torch.zeros_like(answer.evaluations, dtype=torch.bool) if ended is None else ended
            )
            kept.append(_Answers(part.right(answer.predicted), answer.evaluations, ended))
    return [_Answers(*(torch.cat(each) for each in zip(*kept, strict=True))) for kept in parts]
