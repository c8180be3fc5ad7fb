"""Convergence of the equilibrium layers of a model, counted over an epoch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from implicit_attn.deq import DEQ

Reduce = Callable[[Tensor, str], Tensor]
SUMS = ("solves", "converged", "adjoint_solves", "adjoint_converged", "adjoint_products")
MAXIMA = ("adjoint_residual", "most_evaluations")


class SolveCounts:
    """Statuses, evaluations and residuals of every :class:`DEQ` in a model, which may have none."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = [module for module in model.modules() if isinstance(module, DEQ)]
        self.reset()

    def reset(self) -> None:
        """Start an epoch."""
        names = (*SUMS, *MAXIMA) if self.layers else ()
        self.sums: dict[str, float] = dict.fromkeys(names, 0)
        limits = (layer.max_steps + layer.evaluations_before for layer in self.layers)
        longest = max(limits, default=0)
        self.spent = [0] * (1 + longest)  # solves by their number of evaluations

    def add(self, reduce: Reduce, counted: bool = True) -> None:
        """Count the latest solve of every layer, which ``reduce(tensor, "sum" | "max")`` adds over the
        processes; ``counted`` is False where this one had no samples of its own."""
        if not self.layers:
            return
        sums = torch.zeros(len(SUMS), dtype=torch.float64)
        maxima = torch.zeros(len(MAXIMA), dtype=torch.float64)
        spent = torch.zeros(len(self.spent), dtype=torch.float64)
        for layer in self.layers if counted else ():
            if layer.last is None:  # not a part of this forward pass
                continue
            solve, adjoint = layer.last, layer.last.adjoint.solution
            sums[0] += solve.status.numel()
            sums[1] += int(solve.converged.sum())
            # A call may have asked for more evaluations than the layer's own limit.
            counted_up_to = solve.evaluations.cpu().clamp(max=len(spent) - 1)
            spent += torch.bincount(counted_up_to, minlength=len(spent))
            worst = [0.0, float(solve.evaluations.max())]
            if adjoint is not None:
                sums[2] += adjoint.status.numel()
                sums[3] += int(adjoint.converged.sum())
                sums[4] += int(adjoint.evaluations.sum())
                worst[0] = adjoint.residual.max().item()
            maxima = torch.maximum(maxima, torch.tensor(worst, dtype=torch.float64))
        added = reduce(torch.cat([sums, spent]), "sum").tolist()
        for name, value in zip(SUMS, added, strict=False):
            self.sums[name] += value
        self.spent = [a + int(b) for a, b in zip(self.spent, added[len(SUMS) :], strict=True)]
        before = torch.tensor([self.sums[name] for name in MAXIMA], dtype=torch.float64)
        largest = torch.maximum(before, reduce(maxima, "max"))  # keeps NaN, which max() may lose
        self.sums |= dict(zip(MAXIMA, largest.tolist(), strict=True))

    def means(self) -> dict[str, Any]:
        """Shares and means per solve, the median of the evaluations, the maxima; {} without DEQ.

        What tells of solves or of adjoint solves is NaN where there were none of them.
        """
        if not self.layers:
            return {}
        solves, adjoints = (self.sums[name] or math.nan for name in ("solves", "adjoint_solves"))
        return {
            "converged": self.sums["converged"] / solves,
            "adjoint_converged": self.sums["adjoint_converged"] / adjoints,
            "adjoint_products": self.sums["adjoint_products"] / adjoints,
            "evaluations": math.nan if math.isnan(solves) else median_of_counts(self.spent),
            "adjoint_residual": math.nan if math.isnan(adjoints) else self.sums["adjoint_residual"],
            "most_evaluations": int(self.sums["most_evaluations"]),
        }


def median_of_counts(counts: list[int]) -> int:
    """Median of numbers given as how often each occurs."""
    half, seen = sum(counts) / 2, 0
    for number, count in enumerate(counts):
        seen += count
        if seen >= half:
            return number
    return 0
