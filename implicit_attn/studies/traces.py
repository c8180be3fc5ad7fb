"""How a layer converges: residual and energy per evaluation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import solvers
from implicit_attn.deq import DEQ
from implicit_attn.studies.tables import Table


def solve_history(
    layer: DEQ, x: Any, mask: Tensor | None = None, **options: Any
) -> tuple[Table, solvers.Solution]:
    """Solve once with a trace; quantiles over the samples at every evaluation.

    A sample that has ended keeps its last value, so that each row speaks of all samples: of the best
    residual so far, and of the energy of the current iterate relative to its first energy.

    Args:
        layer: the layer.
        x: its input, (B, ...).
        mask: (B, N) bool or None.
        options: as for ``DEQ.solve`` (solver, tolerance, max_steps, on_failure).

    Returns:
        Rows with evaluation, residual (median, 10 % and 90 % quantile), converged (share of
        samples), and, for a monitored layer, the energy against the start and above the sample's
        own end (medians), and the largest rise of any sample between two accepted iterates; and the
        solution with its trace.
    """
    with torch.no_grad():
        solution = layer.solve(x, mask, record=True, **options)
    trace = solution.trace
    assert trace is not None  # record=True
    best = carry_forward(trace.residual, trace.accepted).cummin(dim=1).values
    energies = None if trace.energy is None else carry_forward(trace.energy, trace.accepted)
    reached = torch.isfinite(trace.residual).sum(1)  # evaluations that the sample had
    ended = solution.converged[:, None] & (
        torch.arange(1, best.shape[1] + 1, device=best.device) >= reached[:, None]
    )
    table: Table = []
    for k in range(best.shape[1]):
        column = best[:, k].double()
        low, middle, high = torch.nanquantile(
            column, torch.tensor([0.1, 0.5, 0.9]).to(column)
        ).tolist()
        row: dict[str, Any] = {
            "evaluation": k + 1,
            "residual": middle,
            "residual_10": low,
            "residual_90": high,
            "converged": ended[:, k].double().mean().item(),
        }
        if energies is not None:
            above = energies[:, k] - energies[:, -1]
            drop = energies[:, k] - energies[:, 0]
            rise = energies[:, k] - energies[:, max(k - 1, 0)]
            row["energy_drop"] = drop.median().item()
            row["energy_above"] = above.median().item()
            row["largest_rise"] = rise.max().item()
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
