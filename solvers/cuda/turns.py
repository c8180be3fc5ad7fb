"""Anderson's method on buffers that keep their place: turns that a CUDA graph can record.

A turn takes the value of the map at the current points and moves every row: it stores the newest
difference, judges the row, and combines the differences to the next point, as
:class:`solvers.Anderson` does. The host reads one number a turn, how many rows are left. The turn here
is written in torch, and the one in ``kernels`` is three Triton kernels.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from solvers.core.loop import DIVERGENCE
from solvers.core.rows import RUNNING
from solvers.core.solution import Solution, Status, Tolerance
from solvers.methods.anderson import Anderson


class Turns:
    """The state of a solve of ``z = f(z)`` for rows (B, D).

    Attributes:
        z: points to evaluate next. Rows that have ended stay where they ended.
        kept: the best iterates, with the relative residuals ``best`` and the residual norms ``norm``.
        status, evaluations: of each row, as in :class:`solvers.Solution`; -1 for a row that goes on.
        left: (1,) int32, the number of rows that go on.
    """

    def __init__(
        self,
        like: Tensor,
        solver: Anderson,
        max_steps: int,
        *,
        mask: Tensor | None = None,
        fused: bool | None = None,
    ) -> None:
        batch, size = like.shape
        self.max_steps, self.mask = max_steps, mask
        self.memory = max(1, min(solver.memory, size, max_steps - 1))
        self.fused = (like.is_cuda and find_spec("triton") is not None) if fused is None else fused
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        width, self.chunk = _power_of_two(self.memory), min(1024, _power_of_two(size, 64))
        chunks = -(-size // self.chunk)

        def new(*shape: int, dtype: torch.dtype = wide) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=like.device)

        self.z, self.kept, self.previous, self.residual = (new(batch, size) for _ in range(4))
        self.steps, self.changes = (new(batch, self.memory, size) for _ in range(2))
        # What is small is in float64, in which no square of a float32 number over- or underflows.
        small = torch.float64
        self.partial = new(batch, chunks, 2 * width + 2, dtype=small)
        self.gram, self.weights = (
            new(batch, width, width, dtype=small),
            new(batch, width, dtype=small),
        )
        self.best, self.norm, self.limit = (new(batch, dtype=small) for _ in range(3))
        self.status, self.evaluations, self.better = (
            new(batch, dtype=torch.int32) for _ in range(3)
        )
        self.left = new(1, dtype=torch.int32)
        self.slots = torch.arange(width, device=like.device)
        self.identity = torch.eye(width, dtype=small, device=like.device)
        ridge, tiny = solver.ridge(wide)
        numbers = (0.0, 0.0, solver.damping, ridge, tiny, torch.finfo(wide).max)
        self.settings = torch.tensor(numbers, dtype=small, device=like.device)

    def set_tolerance(self, tolerance: Tolerance) -> None:
        """Use another tolerance from the next turn on."""
        limits = torch.tensor((tolerance.rtol, tolerance.atol), dtype=self.settings.dtype)
        self.settings[:2].copy_(limits)

    def start(self, z: Tensor) -> None:
        """Begin a solve at ``z`` (B, ...)."""
        self.z.copy_(z.reshape(self.z.shape))
        self.kept.copy_(self.z)
        self.status.fill_(RUNNING)
        self.best.fill_(torch.inf)
        self.norm.fill_(torch.inf)
        for buffer in (self.evaluations, self.previous, self.residual):
            buffer.zero_()
        if not self.fused:  # the kernels know which slots are in use
            for buffer in (self.steps, self.changes):
                buffer.zero_()

    def turn(self, value: Tensor) -> None:
        """Move every row by the ``value`` of the map at ``z``, (B, ...) of any floating dtype."""
        value = value.reshape(self.z.shape).to(self.z.dtype)
        if self.fused:
            from solvers.cuda import triton_kernels as kernels

            kernels.turn(self, value.contiguous())
        else:
            turn(self, value)

    def solution(self) -> Solution:
        """Copies of the results, the value (B, D)."""
        evaluations = self.evaluations.long()
        return Solution(
            value=self.kept.clone(),
            status=self.status.long(),
            residual=self.best.to(self.z.dtype),
            residual_norm=self.norm.to(self.z.dtype),
            steps=(evaluations - 1).clamp_min(0),
            evaluations=evaluations,
        )


def turn(s: Turns, value: Tensor) -> None:
    """Move every row of ``s`` by ``value`` (B, D), in torch."""
    rtol, atol, damping, ridge, tiny, largest = s.settings.unbind()
    running, first, count = s.status == RUNNING, s.evaluations == 0, s.evaluations + 1
    residual = value - s.z
    if s.mask is not None:
        residual, value = residual.where(s.mask, 0.0), value.where(s.mask, 0.0)
    # Store the newest difference in the place of the oldest.
    change = residual - s.residual
    step = torch.addcmul(s.z - s.previous, damping.to(change.dtype), change)
    fresh = (s.slots == ((count + (s.memory - 2)) % s.memory)[:, None]) & ~first[:, None]
    newest = fresh[:, : s.memory, None]
    torch.where(newest, change[:, None], s.changes, out=s.changes)
    torch.where(newest, step[:, None], s.steps, out=s.steps)
    # Judge the row.
    norm, scale = (
        torch.linalg.vector_norm(t, dim=1, dtype=s.best.dtype) for t in (residual, value)
    )
    torch.where(first, DIVERGENCE * torch.maximum(norm, scale), s.limit, out=s.limit)
    finite = norm + scale < torch.inf
    fits = finite & (norm <= s.limit)
    converged = fits & (norm <= torch.maximum(rtol * scale, atol))
    status = torch.where(count >= s.max_steps, int(Status.MAX_STEPS), RUNNING)
    status = status.masked_fill(converged, int(Status.CONVERGED))
    failed = torch.where(finite, int(Status.DIVERGED), int(Status.NONFINITE))
    status = torch.where(fits, status, failed).int()
    relative = (norm / torch.where(scale == 0, tiny, scale)).minimum(largest)
    better = running & fits & ((relative < s.best) | converged)
    torch.where(better, relative, s.best, out=s.best)
    torch.where(better, norm, s.norm, out=s.norm)
    torch.where(better[:, None], s.z, s.kept, out=s.kept)
    torch.where(running, status, s.status, out=s.status)
    torch.where(running, count, s.evaluations, out=s.evaluations)
    goes_on = s.status == RUNNING
    s.left.copy_(goes_on.sum())
    # Empty slots have a row and a column of the identity, and so the weight 0.
    sums = torch.bmm(s.changes, torch.stack((change, residual), 2)).to(s.gram.dtype)
    sums = torch.nn.functional.pad(sums, (0, 0, 0, s.gram.shape[1] - s.memory))
    by_change, by_residual = sums.unbind(2)
    row = torch.where(fresh, by_change * ridge + tiny, by_change)
    torch.where(first[:, None, None], s.identity, s.gram, out=s.gram)
    torch.where(fresh[:, :, None], row[:, None], s.gram, out=s.gram)
    torch.where(fresh[:, None], row[:, :, None], s.gram, out=s.gram)
    weights = torch.linalg.solve_ex(s.gram, by_residual[:, :, None])[0][:, : s.memory, 0]
    # Where products of differences overflow, the next step is a plain one.
    weights = weights.where(weights.isfinite().all(1, keepdim=True), 0.0)
    # The next point.
    new = torch.addcmul(s.z, damping.to(residual.dtype), residual)
    new = new - torch.bmm(weights.to(new.dtype)[:, None], s.steps)[:, 0]
    s.previous.copy_(s.z)
    s.residual.copy_(residual)
    torch.where(goes_on[:, None], new, s.z, out=s.z)


def _power_of_two(number: int, least: int = 4) -> int:
    return max(least, 1 << (number - 1).bit_length())
