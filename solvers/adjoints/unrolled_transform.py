""":class:`solvers.Unrolled` inside of ``torch.func``'s transforms: plain iteration by masks alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from solvers.adjoints.kinds import Unrolled
from solvers.core.device import small_dtype
from solvers.core.layout import Layout
from solvers.core.problem import Problem
from solvers.core.solution import Solution, Status
from solvers.core.tolerance import Tolerance, criterion


def refuse_unrolled(solver: object, adjoint: Unrolled) -> NoReturn:
    """Raise RuntimeError: of this solver, or with checkpoints, iterations look at numbers."""
    raise RuntimeError(
        "inside of torch.func's transforms adjoint=Unrolled() needs solver=solvers.Forward(...), whose "
        f"steps look at no numbers, and checkpoint=False; got solver={solver}, {adjoint}. Of a DEQ, "
        "layer.unrolled(k) has Anderson's steps too; or use Implicit(), Phantom() or OneStep()"
    )


def unrolled_solution(
    problem: Problem,
    z0: Any,
    damping: float,
    tolerance: Tolerance | None,
    *,
    max_steps: int,
    states_at: Sequence[int],
) -> Solution:
    """The solution by ``max_steps`` damped evaluations in every sample; its value carries the gradient.

    A sample that has converged stands still, so value, status and counts are those of the solve by
    ``Forward(damping)`` outside of transforms, without its energy safeguard. All modes of differentiation
    go through.
    """
    layout = Layout.of(z0)
    z = layout.vector(z0)
    limit = criterion(tolerance, z.dtype, problem.autocast)[0]
    states: list[Tensor] = []
    account: _Account | None = None
    for number in range(1, max_steps + 1):
        value = problem.masked_map(z)
        residual = value - z
        if account is None:
            account = _Account(z, residual)
        account.note(z, value, residual, problem.mask, limit)
        if number in states_at:
            states.append(account.best)
        moved = z.add(residual, alpha=damping)
        z = torch.where(account.running.unsqueeze(1), moved, z)
    assert account is not None
    return account.solution(layout, tuple(states) if states_at else None)


class _Account:
    """What is known of each sample; tensors alone, changed by ``torch.where``."""

    def __init__(self, z: Tensor, residual: Tensor) -> None:
        # Made of a residual, so that it belongs to all transforms that the state will belong to.
        norm = _norm(residual)
        self.best = z
        self.relative = torch.full_like(norm, torch.inf)
        self.norm = torch.full_like(norm, torch.inf)
        self.running = torch.ones_like(norm, dtype=torch.bool)
        self.evaluations = torch.zeros_like(norm, dtype=torch.int64)

    def note(
        self, z: Tensor, value: Tensor, residual: Tensor, mask: Tensor | None, limit: Tolerance
    ) -> None:
        """Judge the evaluation ``value`` at z."""
        norm = _norm(residual)
        reference = _norm(value if mask is None else torch.where(mask, value, 0))
        # Where f(z) = 0 the ratio may overflow; a finite point is better than none all the same.
        limits = torch.finfo(norm.dtype)
        relative = (norm / reference.clamp_min(limits.tiny)).clamp_max(limits.max)
        converged = self.running & (norm <= limit.threshold(reference))
        better = (self.running & (relative < self.relative)) | converged
        self.best = torch.where(better.unsqueeze(1), z, self.best)
        self.relative = torch.where(better, relative, self.relative)
        self.norm = torch.where(better, norm, self.norm)
        self.evaluations = self.evaluations + self.running
        self.running = self.running & ~converged

    def solution(self, layout: Layout, states: tuple[Tensor, ...] | None) -> Solution:
        ended = torch.where(torch.isfinite(self.norm), int(Status.MAX_STEPS), int(Status.NONFINITE))
        return Solution(
            value=layout.tree(self.best),
            status=torch.where(self.running, ended, int(Status.CONVERGED)),
            residual=self.relative,
            residual_norm=self.norm,
            steps=self.evaluations,
            evaluations=self.evaluations,
            states=None if states is None else tuple(layout.tree(state) for state in states),
        )


def _norm(vector: Tensor) -> Tensor:
    """Norms (B,) without a gradient; that of zero has none."""
    return torch.linalg.vector_norm(vector.detach(), dim=1, dtype=small_dtype(vector.dtype))
