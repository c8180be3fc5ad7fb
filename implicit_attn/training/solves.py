"""Convergence of the equilibrium layers of a model, counted over an epoch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from implicit_attn.deq import DEQ


class SolveCounts:
    """Statuses, evaluations and residuals of every :class:`DEQ` in a model, which may have none."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = [module for module in model.modules() if isinstance(module, DEQ)]
        self.reset()

    def reset(self) -> None:
        """Start an epoch."""
        # Solves, converged ones, adjoint solves, converged ones, products of these.
        self.sums = torch.zeros(5, dtype=torch.float64)
        self.largest = torch.zeros(2, dtype=torch.float64)  # adjoint residual, evaluations
        limits = (layer.max_steps for layer in self.layers)
        # Solves by their number of evaluations.
        self.spent = torch.zeros(1 + max(limits, default=0), dtype=torch.float64)

    def add(self) -> None:
        """Count the latest solve of every layer."""
        for layer in self.layers:
            if layer.last is None:  # not a part of this forward pass
                continue
            solve, adjoint = layer.last, layer.last.adjoint.solution
            # A call may have asked for more evaluations than the layer's own limit.
            spent = solve.evaluations.cpu().clamp(max=len(self.spent) - 1)
            self.spent += torch.bincount(spent, minlength=len(self.spent))
            sums = [solve.status.numel(), int(solve.converged.sum()), 0, 0, 0]
            residual = 0.0
            if adjoint is not None:
                sums[2:] = [adjoint.status.numel(), int(adjoint.converged.sum())]
                sums.append(int(adjoint.evaluations.sum()))
                residual = adjoint.residual.max().item()
            self.sums += torch.tensor(sums)
            largest = torch.tensor([residual, float(solve.evaluations.max())])
            self.largest = torch.maximum(self.largest, largest)  # keeps NaN

    def means(self, reduce: Callable[[Tensor, str], Tensor]) -> dict[str, Any]:
        """Shares and means per solve, the median of the evaluations, the maxima; {} without DEQ.

        ``reduce(tensor, "sum" | "max")`` is over the processes. What tells of solves or of adjoint solves
        is NaN where there were none of them.
        """
        if not self.layers:
            return {}
        solves, converged, adjoints, adjoint_converged, products = reduce(self.sums, "sum").tolist()
        spent, (residual, most) = reduce(self.spent, "sum"), reduce(self.largest, "max").tolist()
        median = int((spent.cumsum(0) >= spent.sum() / 2).int().argmax())
        return {
            "converged": converged / (solves or math.nan),
            "adjoint_converged": adjoint_converged / (adjoints or math.nan),
            "adjoint_products": products / (adjoints or math.nan),
            "evaluations": median if solves else math.nan,
            "adjoint_residual": residual if adjoints else math.nan,
            "most_evaluations": int(most),
        }
