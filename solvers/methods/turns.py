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
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from itertools import accumulate, chain, pairwise
from math import prod

import torch
from torch import Tensor

from solvers.core.cuda import on_cuda
from solvers.core.judge import ROUNDINGS, Rule, relative_error, sharpen, stiffness
from solvers.core.loop import DIVERGENCE, DRIFT, PROGRESS, Options
from solvers.core.messages import warn_user
from solvers.core.problem import Problem
from solvers.core.rows import RUNNING, STEPS, Evaluation, combine, scaled_norm, select_rows
from solvers.core.safeguard import MAX_REJECTIONS
from solvers.core.solution import Solution, Status
from solvers.core.tolerance import Limits, Tolerance
from solvers.core.verify import differs, rounded
from solvers.methods.anderson import Anderson


class Turns:
    """The state of a solve of ``z = f(z)`` for rows (B, D).

    With ``unit_free`` the residual is that of a gradient step, in units of its own. Then, and with
    ``residuals``, each turn is given the residual instead of ``f(z)``, because their difference would be
    rounded to the size of z.

    Attributes:
        z: points to evaluate next. Rows that have ended stay where they ended.
        base, residual: the points that were accepted last, and their residuals.
        kept: the best iterates, with ``score``, ``relative`` residual, residual ``norm`` and ``error``.
        status, evaluations: of each row, as in :class:`solvers.Solution`; -1 for a row that goes on.
        left: (1,) int32, the number of rows that go on.
    """

    def __init__(
        self, like: Tensor, solver: Anderson, max_steps: int, tolerance: Tolerance | None = None, *,
        mask: Tensor | None = None, sizes: tuple[int, ...] = (), eps: float | None = None,
        unit_free: bool = False, residuals: bool = False, fused: bool | None = None,
    ) -> None:  # fmt: skip
        batch, size = like.shape
        self.max_steps, self.unit_free = max_steps, unit_free
        self.residuals = residuals or unit_free
        self.mask = None if mask is None else mask.contiguous()  # the kernels know no strides
        self.memory = max(1, min(solver.memory, size, max_steps - 1))
        self.dtype = like.dtype  # of the points; f is evaluated at rounded ones
        self.fused = (like.is_cuda and launches(like.device)) if fused is None else fused
        self.sizes = sizes or (size,)
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        self.chunk = min(1024, _power_of_two(max(self.sizes), 64))
        # A chunk of numbers belongs to one part of the state.
        bounds = [0, *accumulate(self.sizes)]
        starts = [list(range(low, high, self.chunk)) for low, high in pairwise(bounds)]
        edges = [*chain(*starts), size]  # a chunk ends where the next one begins
        table = [edges[:-1], edges[1:]]
        self.chunks = torch.tensor(table, dtype=torch.int32, device=like.device)
        firsts = [0, *accumulate(map(len, starts))]
        self.first_chunks = torch.tensor(firsts, dtype=torch.int32, device=like.device)
        width, parts = _power_of_two(self.memory), len(self.sizes)

        def new(*shape: int, dtype: torch.dtype = wide) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device=like.device)

        self.z, self.kept, self.base, self.residual, self.trial = new(5, batch, size).unbind()
        self.steps, self.changes = new(2, batch, self.memory, size).unbind()
        # What is small is in float64, in which no square of a float32 number over- or underflows.
        small = torch.float64
        shapes: list[tuple[int, ...]] = [
            (len(table[0]), 2 * width + 4), (width, width), (width,), (parts,), (parts,), (parts, STEPS),
            *[()] * 9,
        ]  # fmt: skip
        lengths = [batch * prod(shape) for shape in shapes]
        pieces = zip(new(sum(lengths), dtype=small).split(lengths), shapes, strict=True)
        # ``partial`` has inner products of each chunk; ``room`` is by what ``error`` may grow.
        (
            self.partial, self.gram, self.weights, self.norms, self.caps, self.gains, self.score,
            self.relative, self.norm, self.error, self.room, self.limit, self.bound, self.scale, self.path,
        ) = [piece.view(batch, *shape) for piece, shape in pieces]  # fmt: skip
        counts = new(6 * batch + 1, dtype=torch.int32)
        self.counts, self.left = counts[:-1].view(6, batch), counts[-1:]
        self.status, self.evaluations, self.flags, *rest = self.counts.unbind()
        self.rejections, self.pairs, self.near = rest
        self.examined = torch.zeros(batch, dtype=torch.bool, device=like.device)
        ridge, tiny = solver.ridge(wide)
        self.eps = torch.finfo(like.dtype).eps if eps is None else eps
        tolerance = tolerance or Tolerance()
        fallen = Rule(tolerance, self.eps).fallen
        numbers = (
            tolerance.rtol, tolerance.atol, solver.damping, ridge, tiny, torch.finfo(wide).max, self.eps,
            fallen, ROUNDINGS * self.eps, DIVERGENCE, float(unit_free), float(self.residuals),
        )  # fmt: skip
        self.settings = torch.tensor(numbers, dtype=small, device=like.device)
        self.rule = Rule(Limits(*self.settings[:2]), self.eps, unit_free)

    def set_tolerance(self, tolerance: Tolerance) -> None:
        """Use another tolerance from the next turn on."""
        limits = torch.tensor((tolerance.rtol, tolerance.atol), dtype=self.settings.dtype)
        self.settings[:2].copy_(limits)

    def start(self, z: Tensor) -> None:
        """Begin a solve at ``z`` (B, ...)."""
        self.z.copy_(z.reshape(self.z.shape))
        self.counts.zero_()
        self.examined.zero_()
        self.status.fill_(RUNNING)

    def turn(self, value: Tensor) -> None:
        """Move every row by the ``value`` of the map at ``z``, (B, ...) of any floating dtype.

        With ``residuals`` it is the residual there.
        """
        value = value.reshape(self.z.shape).to(self.z.dtype)
        if self.fused:
            from solvers.methods import triton_kernels as kernels

            with torch.cuda.device(self.z.device) if self.z.is_cuda else nullcontext():
                kernels.turn(self, value.contiguous())
        else:
            turn(self, value)
        if self.dtype != self.z.dtype:
            self.z.copy_(self.z.to(self.dtype))

    def changed(self, value: Tensor) -> Tensor:
        """Return (B,) bool: converged rows whose residual is not the same after the last turn.

        The rows depend on each other then. ``value`` is what the last turn was given.
        """
        value = value.reshape(self.z.shape).to(self.z.dtype)
        residual, scale = (value, self.z) if self.unit_free else (value - self.z, value)
        if self.mask is not None:
            residual, scale = residual.where(self.mask, 0.0), scale.where(self.mask, 0.0)
        norm = torch.linalg.vector_norm(residual, dim=1, dtype=torch.float64)
        sizes = part_norms64(scale, self.sizes)
        rounding = rounded(self.eps, sizes, stiffness(self.gains) if self.unit_free else None)
        return (self.status == Status.CONVERGED) & differs(norm, self.norm, rounding)

    def sharpen(self) -> int:
        """Let rows go on that have converged by single steps only; return how many."""
        damping = self.settings[2].to(self.z.dtype)
        rows = sharpen({**vars(self), "count": self.pairs}, damping, self.max_steps)
        point = torch.addcmul(self.base[rows], damping, self.residual[rows])
        weights = self.weights[rows, : self.memory].to(point.dtype)
        point = combine(point, weights, self.steps[rows], sign=-1)
        self.z[rows] = point.to(self.dtype).to(self.z.dtype)
        self.left += len(rows)
        return len(rows)

    def solution(self) -> Solution:
        """Return copies of the results, the value (B, D)."""
        status, evaluations = self.counts[:2].long().unbind()
        return Solution(
            value=self.kept.clone(),
            status=status,
            residual=self.relative.to(self.z.dtype),
            residual_norm=self.norm.to(self.z.dtype),
            steps=evaluations.clone(),
            evaluations=evaluations,
            error=self.error.to(self.z.dtype),
            _stiffness=stiffness(self.gains) if self.unit_free else None,
        )


BETTER, ACCEPTED = 1, 2  # flags of a row


def turn(s: Turns, value: Tensor) -> None:
    """Move every row of ``s`` by ``value`` (B, D), in torch."""
    damping, ridge, tiny, largest = s.settings[2:6].unbind()
    rule, running, first = s.rule, s.status == RUNNING, s.evaluations == 0
    count, width = s.evaluations + 1, s.gram.shape[1]
    slots = torch.arange(width, device=s.z.device)
    residual, value = (value, s.z + value) if s.residuals else (value - s.z, value)
    scale = s.z if s.unit_free else value
    if s.mask is not None:
        residual, scale = residual.where(s.mask, 0.0), scale.where(s.mask, 0.0)
    # What a buffer holds before the first turn does not count.
    begins, none = first[:, None], s.pairs == 0
    for buffer in (s.base, s.residual):
        buffer.masked_fill_(begins, 0)
    for buffer in (s.steps, s.changes):
        buffer.masked_fill_(none[:, None, None], 0)
    s.gains.masked_fill_(begins[:, :, None], 0)
    for buffer, start in ((s.score, torch.inf), (s.relative, torch.inf), (s.norm, torch.inf),
                          (s.error, torch.inf), (s.scale, 1.0), (s.path, 0.0)):  # fmt: skip
        buffer.masked_fill_(first, start)
    # Store the newest difference in the place of the oldest.
    change, moved = residual - s.residual, s.z - s.base
    step = torch.addcmul(moved, damping.to(change.dtype), change)
    slot = s.pairs % s.memory
    fresh = (slots == slot[:, None]) & ~begins & running[:, None]
    newest = fresh[:, : s.memory, None]
    torch.where(newest, change[:, None], s.changes, out=s.changes)
    torch.where(newest, step[:, None], s.steps, out=s.steps)
    # Judge the row, part by part.
    sizes = s.sizes if len(s.sizes) > 1 else ()
    vectors = (residual, scale, moved, change)
    norms, scales, moves, changed = (part_norms64(t, sizes) for t in vectors)
    point = Evaluation(s.z, residual, norms, scales, sizes=sizes)
    norm, reference = point.norm, point.reference
    torch.where(first, DIVERGENCE * torch.maximum(norm, reference), s.limit, out=s.limit)
    finite = norm + reference < torch.inf
    guarded = (count > 2) & (s.rejections == 0)
    accepted = finite & (first | (norm <= s.limit)) & (~guarded | (norm <= s.bound))
    gain, known = rule.gain(point, s.norms, moves, changed, (s.rejections > 0)[:, None])
    known = known & (accepted & ~first & running)[:, None]
    here = torch.arange(STEPS, device=s.z.device) == (count % STEPS)[:, None]
    torch.where(known[:, :, None] & here[:, None], gain[:, :, None], s.gains, out=s.gains)
    s.path.add_(moves.where(known, 0.0).sum(1))
    error = rule.error(point, s.gains)
    grown = rule.grown(point, s.caps, s.limit / DIVERGENCE)
    grown = torch.where(begins, rule.caps(point), grown)
    torch.where(accepted[:, None], grown, s.caps, out=s.caps)
    room = rule.room(point, s.caps, error, s.limit)
    near, before = room >= 1, (s.near > 0) & ~first
    converged = accepted & rule.converged(point, s.caps, near, before, s.gains)
    s.near.copy_(torch.where(running & accepted, near.int(), s.near))
    score = rule.score(point, s.caps)
    better = running & accepted & ((score < s.score) | converged)
    hopeless = ~accepted & (first | (s.rejections >= MAX_REJECTIONS))
    reason = torch.where(finite, int(Status.STALLED), int(Status.NONFINITE))
    status = torch.where(hopeless, reason, RUNNING)
    gone = ~accepted & (s.rejections > 0) & (norm > s.limit)
    status = status.masked_fill(gone, int(Status.DIVERGED))
    status = status.masked_fill(converged, int(Status.CONVERGED))
    over = (status == RUNNING) & (count >= s.max_steps)
    status = torch.where(over, int(Status.MAX_STEPS), status)
    # What is reported keeps to the range of the state's dtype; an infinite error is an unknown one.
    shown = replace(point, references=torch.where(scales == 0, tiny, scales))
    relative, wrong = shown.relative().minimum(largest), relative_error(shown, error)
    wrong = wrong.where(wrong == torch.inf, wrong.minimum(largest))
    pairs = [
        (score, s.score), (relative, s.relative), (norm, s.norm), (wrong, s.error), (room, s.room),
    ]  # fmt: skip
    for new, old in pairs:
        torch.where(better, new, old, out=old)
    torch.where((better | first)[:, None], s.z, s.kept, out=s.kept)
    torch.where((running & accepted)[:, None], norms, s.norms, out=s.norms)
    torch.where(running & accepted, norm, s.bound, out=s.bound)
    torch.where(running, status.int(), s.status, out=s.status)
    torch.where(running, count, s.evaluations, out=s.evaluations)
    goes_on = s.status == RUNNING
    s.left.copy_(goes_on.sum())
    s.flags.copy_(better * BETTER + (running & accepted) * ACCEPTED)
    # Empty slots have a row and a column of the identity, and so the weight 0.
    sums = torch.bmm(s.changes, torch.stack((change, residual), 2)).to(s.gram.dtype)
    sums = torch.nn.functional.pad(sums, (0, 0, 0, width - s.memory))
    by_change, by_residual = sums.unbind(2)
    own = by_change * (1 + ridge) + ridge * moves.square().sum(1, keepdim=True) + tiny
    row = torch.where(fresh, own, by_change)
    identity = torch.eye(width, dtype=s.gram.dtype, device=s.z.device)
    torch.where(none[:, None, None], identity, s.gram, out=s.gram)
    torch.where(fresh[:, :, None], row[:, None], s.gram, out=s.gram)
    torch.where(fresh[:, None], row[:, :, None], s.gram, out=s.gram)
    weights = torch.linalg.solve_ex(s.gram, by_residual[:, :, None])[0][:, : s.memory, 0]
    # Where products of differences overflow, the next step is a plain one.
    weights = weights.where(weights.isfinite().all(1, keepdim=True) & ~begins, 0.0)
    s.weights[:, : s.memory] = weights
    # The next point: an accelerated one, or a shortened step from the last accepted point.
    new = torch.addcmul(s.z, damping.to(residual.dtype), residual)
    new = new - torch.bmm(weights.to(new.dtype)[:, None], s.steps)[:, 0]
    halved = torch.where(s.rejections > 0, 0.5 * s.scale, s.scale)
    doubled = torch.where(s.rejections > 0, (2 * s.scale).clamp_max(1.0), s.scale)
    shorter = s.base + halved.to(new.dtype)[:, None] * s.residual
    s.scale.copy_(torch.where(goes_on, torch.where(accepted, doubled, halved), s.scale))
    counted = torch.where(accepted, s.pairs + (~first).int(), 0)
    s.pairs.copy_(torch.where(running, counted, s.pairs))
    s.rejections.copy_(torch.where(accepted, 0, s.rejections + 1))
    taken = (running & accepted)[:, None]
    torch.where(taken, s.z, s.base, out=s.base)
    torch.where(taken, residual, s.residual, out=s.residual)
    torch.where(goes_on[:, None], torch.where(accepted[:, None], new, shorter), s.z, out=s.z)


def part_norms64(vector: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """(B, L) norms of the parts of (B, D) in float64."""
    parts = vector.split(sizes, 1) if sizes else (vector,)
    return torch.stack([torch.linalg.vector_norm(t, dim=1, dtype=torch.float64) for t in parts], 1)


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
        message = f"solvers run without Triton's kernels on {device}, which cannot be launched"
        warn_user(f"{message}: {reason}", RuntimeWarning)
        return False
    return True


def supports_cuda(like: Tensor) -> bool:
    """Return whether :func:`solve_on_cuda` serves states (B, D) like this one.

    In float64 the squares of a norm could over- or underflow.
    """
    return on_cuda(like) and like.dtype != torch.float64 and not torch.is_grad_enabled()


class Rows:
    """A solve on a CUDA device, whose rows :class:`Turns` moves: :meth:`evaluate`, then :meth:`move`.

    Attributes:
        stalled: (B,) bool, rows that have stalled; None where no row was examined.
    """

    def __init__(self, problem: Problem, turns: Turns, dtype: torch.dtype, patience: int) -> None:
        self.problem, self.turns, self.dtype, self.patience = problem, turns, dtype, patience
        self.number, self.milestone, self.anchor = 0, turns.score, turns.base
        self.stalled: Tensor | None = None

    @classmethod
    def of(cls, problem: Problem, first: Evaluation, solver: Anderson, options: Options) -> Rows:
        """Begin from the ``first`` evaluation."""
        rule = options.rule(problem, first)
        turns = Turns(
            first.z, solver, options.max_steps, options.tolerance, mask=problem.mask,
            sizes=first.sizes, eps=rule.eps,
        )  # fmt: skip
        turns.start(first.z)
        rows = cls(problem, turns, first.z.dtype, options.patience)
        rows.seen, rows.value = first.z, first.z + first.residual
        return rows

    seen: Tensor  # where the map was evaluated last
    value: Tensor  # of the map there

    def evaluate(self) -> None:
        """Evaluate the map at the next points."""
        self.seen = self.turns.z.to(self.dtype, copy=True)  # f may keep it
        self.value = self.problem.image(self.seen)

    def turn(self) -> None:
        """Move every row by the latest evaluation."""
        self.turns.turn(self.value)

    def move(self) -> int:
        """Judge the rows, and find the next point of each; return how many go on."""
        turns = self.turns
        self.turn()
        self.number += 1
        left = int(turns.left)
        if self.number > STEPS and left == 0:
            left += turns.sharpen()
        if left and self.number % self.patience == 0:
            stuck = (turns.status == RUNNING) & (turns.score > (1 - PROGRESS) * self.milestone)
            stuck = stuck & ~(scaled_norm(turns.base - self.anchor) > DRIFT * turns.path)
            if self.number > self.patience:
                self.stalled = stuck
                turns.status.masked_fill_(stuck, int(Status.STALLED))
                left -= int(stuck.sum())
            self.milestone, self.anchor = turns.score.clone(), turns.base.clone()
            turns.path.zero_()
        return left

    def put(self, places: Tensor, z: Tensor) -> None:
        """Replace the samples in the rows ``places`` (n,) by new ones that start at ``z`` (n, D)."""
        turns = self.turns
        turns.z.index_copy_(0, places, z.to(turns.z.dtype))
        turns.counts.index_fill_(1, places, 0)
        turns.examined.index_fill_(0, places, False)
        turns.status.index_fill_(0, places, RUNNING)
        if self.number >= self.patience:  # before that both are the buffers of the turns
            self.milestone = self.milestone.index_fill(0, places, torch.inf)

    def keep(self, stay: Tensor) -> bool:
        """The buffers keep their size."""
        return False

    @property
    def status(self) -> Tensor:
        """(B,) statuses of the rows."""
        return self.turns.status

    def evaluation(self) -> Evaluation:
        """The latest evaluation of all rows."""
        return self.problem.point(self.seen, self.value)

    def wait(self) -> int:
        """Let rows go on that have converged by single steps only; return how many. The others wait."""
        turns = self.turns
        number = turns.sharpen() if self.number > STEPS else 0
        turns.z.copy_(torch.where((turns.status == RUNNING)[:, None], turns.z, turns.kept))
        return number

    def record_of(self, places: Tensor) -> tuple[Solution, Tensor]:
        """The solution of the rows ``places``, and f at their latest evaluation."""
        image = self.value.index_select(0, places).to(self.dtype)
        return select_rows(self.solution(), places), image

    def read(self, record: tuple[Solution, Tensor]) -> tuple[Solution, Tensor]:
        """The solution of several groups of rows, and f at their latest evaluation."""
        return record

    def solution(self) -> Solution:
        """The solution of all rows, with a value (B, D)."""
        solution = self.turns.solution()
        solution.value = solution.value.to(self.dtype)
        return solution


def solve_on_cuda(
    problem: Problem, first: Evaluation, solver: Anderson, options: Options
) -> tuple[Solution | None, Callable[[], Evaluation] | None]:
    """Solve from the ``first`` evaluation, at the start (B, D).

    Returns:
        The solution, and a function that gives the last evaluation if it was at the returned values, because
        all samples have converged. None, None if a sample failed, for which the ordinary loop knows more.
    """
    rows = Rows.of(problem, first, solver, options)
    while rows.move():
        if rows.stalled is not None and bool(rows.stalled.any()):
            return None, None
        rows.evaluate()
    solution = rows.solution()
    if solution.all_converged():
        return solution, rows.evaluation
    failed = bool((rows.turns.status > int(Status.MAX_STEPS)).any())
    return (None, None) if failed else (solution, None)


def _power_of_two(number: int, least: int = 4) -> int:
    return max(least, 1 << (number - 1).bit_length())
