"""Anderson's method on buffers that keep their place, for CUDA devices.

A turn takes the value of the map at the current points and moves every row: it stores the newest
difference, judges the row, and combines the differences to the next point, as
:class:`solvers.Anderson` does. The host reads one number a turn, how many rows are left. The turn here
is written in torch, and the one in ``triton_kernels`` is three Triton kernels. :func:`solve_on_cuda` calls
the map and a turn alternately; ``recording`` does the same with CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from itertools import count
from math import prod

import torch
from torch import Tensor

from solvers.core.cuda import on_cuda
from solvers.core.loop import DIVERGENCE, PATIENCE
from solvers.core.problem import Problem
from solvers.core.rows import RUNNING, Evaluation
from solvers.core.safeguard import FAR, rounding
from solvers.core.solution import Solution, Status, Tolerance
from solvers.core.telling import warn_user
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
        tolerance: Tolerance | None = None,
        *,
        mask: Tensor | None = None,
        fused: bool | None = None,
    ) -> None:
        batch, size = like.shape
        self.max_steps = max_steps
        self.mask = None if mask is None else mask.contiguous()  # the kernels know no strides
        self.memory = max(1, min(solver.memory, size, max_steps - 1))
        self.dtype = like.dtype  # of the points; f is evaluated at rounded ones
        self.fused = (like.is_cuda and launches(like.device)) if fused is None else fused
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        width, self.chunk = _power_of_two(self.memory), min(1024, _power_of_two(size, 64))
        chunks = -(-size // self.chunk)

        def new(*shape: int, dtype: torch.dtype = wide) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device=like.device)

        self.z, self.kept, self.previous, self.residual = new(4, batch, size).unbind()
        self.steps, self.changes = new(2, batch, self.memory, size).unbind()
        # What is small is in float64, in which no square of a float32 number over- or underflows.
        small = torch.float64
        shapes = (chunks, 2 * width + 2), (width, width), (width,), (), (), ()
        sizes = [batch * prod(shape) for shape in shapes]
        pieces = new(sum(sizes), dtype=small).split(sizes)
        views = (t.view(batch, *shape) for t, shape in zip(pieces, shapes, strict=True))
        self.partial, self.gram, self.weights, self.best, self.norm, self.limit = views
        counts = new(3 * batch + 1, dtype=torch.int32)
        self.counts, self.left = counts[:-1].view(3, batch), counts[-1:]
        self.status, self.evaluations, self.better = self.counts.unbind()
        ridge, tiny = solver.ridge(wide)
        allowed = tolerance or Tolerance()
        numbers = (allowed.rtol, allowed.atol, solver.damping, ridge, tiny, torch.finfo(wide).max)
        self.settings = torch.tensor(numbers, dtype=small, device=like.device)

    def set_tolerance(self, tolerance: Tolerance) -> None:
        """Use another tolerance from the next turn on."""
        limits = torch.tensor((tolerance.rtol, tolerance.atol), dtype=self.settings.dtype)
        self.settings[:2].copy_(limits)

    def start(self, z: Tensor) -> None:
        """Begin a solve at ``z`` (B, ...)."""
        self.z.copy_(z.reshape(self.z.shape))
        self.counts.zero_()
        self.status.fill_(RUNNING)

    def turn(self, value: Tensor) -> None:
        """Move every row by the ``value`` of the map at ``z``, (B, ...) of any floating dtype."""
        value = value.reshape(self.z.shape).to(self.z.dtype)
        if self.fused:
            from solvers.methods import triton_kernels as kernels

            with torch.cuda.device(self.z.device) if self.z.is_cuda else nullcontext():
                kernels.turn(self, value.contiguous())
        else:
            turn(self, value)
        if self.dtype != self.z.dtype:
            self.z.copy_(self.z.to(self.dtype))

    def solution(self) -> Solution:
        """Return copies of the results, the value (B, D)."""
        status, evaluations, _ = self.counts.long().unbind()
        return Solution(
            value=self.kept.clone(),
            status=status,
            residual=self.best.to(self.z.dtype),
            residual_norm=self.norm.to(self.z.dtype),
            steps=evaluations.clone(),
            evaluations=evaluations,
        )


def turn(s: Turns, value: Tensor) -> None:
    """Move every row of ``s`` by ``value`` (B, D), in torch."""
    rtol, atol, damping, ridge, tiny, largest = s.settings.unbind()
    running, first, count = s.status == RUNNING, s.evaluations == 0, s.evaluations + 1
    width, slots = s.gram.shape[1], torch.arange(s.gram.shape[1], device=s.z.device)
    residual = value - s.z
    if s.mask is not None:
        residual, value = residual.where(s.mask, 0.0), value.where(s.mask, 0.0)
    # What a buffer holds before the first turn does not count.
    begins = first[:, None]
    s.previous.masked_fill_(begins, 0)
    s.residual.masked_fill_(begins, 0)
    for buffer in (s.steps, s.changes):
        buffer.masked_fill_(begins[:, :, None], 0)
    s.best.masked_fill_(first, torch.inf)
    s.norm.masked_fill_(first, torch.inf)
    # Store the newest difference in the place of the oldest.
    change = residual - s.residual
    step = torch.addcmul(s.z - s.previous, damping.to(change.dtype), change)
    fresh = (slots == ((count + (s.memory - 2)) % s.memory)[:, None]) & ~begins
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
    s.better.copy_(better)
    torch.where(better, relative, s.best, out=s.best)
    torch.where(better, norm, s.norm, out=s.norm)
    torch.where((better | first)[:, None], s.z, s.kept, out=s.kept)
    torch.where(running, status, s.status, out=s.status)
    torch.where(running, count, s.evaluations, out=s.evaluations)
    goes_on = s.status == RUNNING
    s.left.copy_(goes_on.sum())
    # Empty slots have a row and a column of the identity, and so the weight 0.
    sums = torch.bmm(s.changes, torch.stack((change, residual), 2)).to(s.gram.dtype)
    sums = torch.nn.functional.pad(sums, (0, 0, 0, width - s.memory))
    by_change, by_residual = sums.unbind(2)
    row = torch.where(fresh, by_change * ridge + tiny, by_change)
    identity = torch.eye(width, dtype=s.gram.dtype, device=s.z.device)
    torch.where(begins[:, :, None], identity, s.gram, out=s.gram)
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


@cache
def launches(device: torch.device) -> bool:
    """Return whether Triton's kernels can be launched on a CUDA device; warn where they should."""
    if find_spec("triton") is None:
        return False
    try:
        like = torch.zeros(1, 1, device=device)
        turns = Turns(like, Anderson(1), 2, fused=True)
        turns.start(like)
        turns.turn(like)
        torch.cuda.synchronize(device)
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        message = (
            f"solvers run without Triton's kernels on {device}, which cannot be launched: {reason}"
        )
        warn_user(message, RuntimeWarning)
        return False
    return True


def descended(turns: Turns, before: Tensor, after: Tensor) -> Tensor:
    """Return (B,) bool: samples that converged at an energy ``after`` that is not above ``before``.

    A relative residual may also be small because the state has grown, down an unbounded energy: a sample that
    is far from its start, by :class:`solvers.core.safeguard.Growth`, does not count.
    """
    far = torch.linalg.vector_norm(turns.kept, dim=1) > FAR / DIVERGENCE * turns.limit
    lower = after <= before + rounding(before)  # False for NaN
    return (turns.status == Status.CONVERGED) & lower & ~far


def serves_cuda(like: Tensor) -> bool:
    """Return whether :func:`solve_on_cuda` serves states (B, D) like this one.

    In float64 the squares of a norm could over- or underflow.
    """
    return on_cuda(like) and like.dtype != torch.float64 and not torch.is_grad_enabled()


def solve_on_cuda(
    problem: Problem, first: Evaluation, solver: Anderson, tolerance: Tolerance, max_steps: int
) -> tuple[Solution | None, Callable[[], Evaluation] | None]:
    """Solve from the ``first`` evaluation, at the start (B, D).

    Returns:
        The solution, and a function that gives the last evaluation, which was at the returned values of the
        samples that have converged. None, None if a sample failed, for which the ordinary loop knows more;
        also if the map descends an energy and a sample did not converge or ended at a higher energy than it
        began.
    """
    turns = Turns(first.z, solver, max_steps, tolerance, mask=problem.mask)
    turns.start(first.z)
    dtype, value, energy = first.z.dtype, first.z + first.residual, first.energy
    kept = energy
    milestone = turns.best
    for number in count(1):
        turns.turn(value)
        if energy is not None and kept is not None and energy is not first.energy:
            kept = torch.where(turns.better.bool(), energy, kept)
        if not int(turns.left):
            break
        if number % PATIENCE == 0:
            if number > PATIENCE and bool(
                ((turns.status == RUNNING) & (turns.best > 0.99 * milestone)).any()
            ):
                return None, None  # stalled
            milestone = turns.best.clone()
        point = turns.z.to(dtype, copy=True)  # f may keep it
        if energy is None:
            value = problem.image(point)
        else:
            value, energy, _ = problem.joint(point)
    solution = turns.solution()
    if kept is not None and first.energy is not None:
        failed = not bool(descended(turns, first.energy, kept).all())
    else:
        failed = not solution.all_converged()
        failed = failed and bool((turns.status > int(Status.MAX_STEPS)).any())
    if failed:
        return None, None
    solution.value, solution.energy = solution.value.to(dtype), kept
    return solution, lambda: problem.point(turns.z.to(dtype), value, energy)


def _power_of_two(number: int, least: int = 4) -> int:
    return max(least, 1 << (number - 1).bit_length())
