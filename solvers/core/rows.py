"""What the loop keeps per sample, operations on the rows of such records, and products of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from solvers.core.cuda import on_cuda
from solvers.core.device import maybe_any, small_dtype, surely_all
from solvers.core.solution import Status, Tolerance, Trace

RUNNING = -1  # status of a sample that is still being solved
# Squares of a norm above these are far from underflow, and so are those of 1e-7 of it.
MODERATE_ABOVE = {torch.float32: 1e-8, torch.float64: 1e-138}
SHRINK = 16  # the batch is made smaller when 1/SHRINK of it has finished;
SHRINK_SMALL, SMALL = 4, 1 << 14  # this share of one with so few numbers, where little is saved,
FEW = 16  # unless it has so few rows: from these each one leaves at once


def shrinks(status: Tensor, batch: Tensor) -> bool:
    """Whether the rows of a batch (n, D) that have ended are enough for the others to go on without them.

    Those that have failed leave at once: they may be tried again, and each evaluation counts.
    """
    share = SHRINK_SMALL if batch.numel() <= SMALL and len(batch) > FEW else SHRINK
    ended = int((status != RUNNING).sum())
    return ended * share >= len(status) or bool((status > Status.MAX_STEPS).any())


@dataclass
class Progress:
    """Argument of the callback after each evaluation.

    Attributes:
        evaluation: number of evaluations of each sample that is still running.
        residual: (B,) relative residual of this evaluation, NaN for samples that have ended.
        energy: (B,) energy of this evaluation, NaN for samples that have ended, or None.
        running: number of samples that are still running.
    """

    evaluation: int
    residual: Tensor
    energy: Tensor | None
    running: int


@dataclass
class Point:
    """An evaluated point of every sample in the working batch."""

    z: Tensor  # (B, D)
    residual: Tensor  # (B, D) f(z) - z, a descent direction for a gradient step
    norm: Tensor  # (B,) of the residual
    reference: Tensor  # (B,) norm of f(z), the scale of a relative residual
    energy: Tensor | None = None  # (B,)
    gradient: Tensor | None = None  # (B, D) of the energy, None where only its value is known

    def relative(self) -> Tensor:
        """(B,) relative residual ``|f(z) - z| / |f(z)|``."""
        tiny = torch.finfo(self.norm.dtype).tiny  # where f(z) = 0, not where it is subnormal
        return self.norm / self.reference.masked_fill(self.reference == 0, tiny)

    def judged(self, taken: Tensor, tolerance: Tolerance) -> tuple[Tensor, Tensor]:
        """(B,) relative residuals, and which of the rows ``taken`` (B,) bool have converged."""
        # Where f(z) = 0 the ratio may overflow; a finite point is better than none all the same.
        relative = self.relative().clamp_max(torch.finfo(self.norm.dtype).max)
        return relative, taken & (self.norm <= tolerance.threshold(self.reference))

    def finite(self) -> Tensor:
        """(B,) bool. Both norms count: a residual over an overflowed f(z) would look converged."""
        finite = self.norm + self.reference < math.inf
        return finite if self.energy is None else finite & (self.energy.detach().abs() < math.inf)


@dataclass
class Best:
    """The best accepted iterate (B, D) of every sample, with its residuals and energy (B,)."""

    value: Tensor
    relative: Tensor
    norm: Tensor
    energy: Tensor | None

    def update(self, better: Tensor, point: Point, relative: Tensor) -> None:
        """Take ``point`` with its ``relative`` residual in the rows ``better`` (B,) bool."""
        if surely_all(better):
            self.replace(point, relative)
        elif maybe_any(better):
            self.value = where_rows(better, point.z, self.value)
            self.relative = torch.where(better, relative, self.relative)
            self.norm = torch.where(better, point.norm, self.norm)
            if self.energy is not None and point.energy is not None:
                self.energy = torch.where(better, point.energy, self.energy)

    def replace(self, point: Point, relative: Tensor) -> None:
        """Take ``point`` in every row."""
        self.value, self.relative, self.norm = point.z, relative, point.norm
        self.energy = point.energy


@dataclass
class Rows:
    """What the loop keeps of every sample of the working batch; first dimension the rows."""

    index: Tensor  # position in the caller's batch
    best: Best
    status: Tensor  # RUNNING or a solvers.Status
    rejected: Tensor  # trials that were not accepted
    evaluations: Tensor  # of f, products included
    products: Tensor  # evaluations made by the solver itself, see Solver.products
    limit: Tensor  # residual norm beyond which the sample diverges
    milestone: Tensor  # best relative residual at the last stall check
    energy_milestone: Tensor  # lowest energy there

    @classmethod
    def start(cls, point: Point, limit: Tensor) -> Rows:
        """Every sample running, nothing accepted or counted yet; ``point`` is the first trial."""
        index = torch.arange(point.norm.shape[0], device=point.norm.device)
        none = torch.zeros_like(index)
        infinite = torch.full_like(point.norm, torch.inf)
        energy = None if point.energy is None else torch.full_like(point.energy, torch.nan)
        best = Best(point.z, infinite, infinite, energy)
        return cls(index, best, none + RUNNING, none, none, none, limit, infinite, infinite)


Gather = Callable[[Callable[[Rows], Tensor]], Tensor]


def gathering(parts: list[Rows]) -> Gather:
    """``gather(pick)``: what ``pick`` takes of every part of a batch, in the caller's order."""
    order = torch.argsort(torch.cat([part.index for part in parts]))

    def gather(pick: Callable[[Rows], Tensor]) -> Tensor:
        pieces = [pick(part) for part in parts]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces).index_select(0, order)

    return gather


def best_of(parts: list[Rows], gather: Gather) -> Best:
    """The best iterates of all samples, in the caller's order; their energies are detached."""
    value, relative = gather(lambda part: part.best.value), gather(lambda part: part.best.relative)
    norm, energy = gather(lambda part: part.best.norm), None
    if all(part.best.energy is not None for part in parts):
        energy = gather(lambda part: torch.as_tensor(part.best.energy).detach())
    return Best(value, relative, norm, energy)


class Snapshots:
    """The best iterates of all samples after each of the numbers ``at`` of evaluations.

    A sample that has ended before keeps its last one. ``uneven`` says that samples may have had different
    numbers of evaluations at the same turn (Newton's products count): then each one's latest iterate
    counts that took no more than the number. Its residual is infinite where there is none.
    """

    def __init__(self, at: Sequence[int], *, uneven: bool = False) -> None:
        self.at, self.uneven = tuple(at), uneven
        self.found: dict[int, Best] = {}

    def note(self, parts: list[Rows], evaluation: int) -> None:
        """The turn of an evaluation is over."""
        if not self.uneven:
            if evaluation in self.at:
                self.found[evaluation] = best_of(parts, gathering(parts))
            return
        open_ones = [number for number in self.at if number >= evaluation]
        if not open_ones:
            return
        gather = gathering(parts)
        best = best_of(parts, gather)
        spent = gather(lambda part: _spent(part, evaluation))
        for number in open_ones:
            none = replace(best, relative=torch.full_like(best.relative, torch.inf))
            self.found[number] = merge_rows(spent <= number, best, self.found.get(number, none))

    def keep(self, best: Best, evaluation: int) -> None:
        """The best iterates of all samples after that number of evaluations, if it is among ``at``."""
        if evaluation in self.at:
            self.found[evaluation] = replace(best)

    def states(self, last: Best) -> list[Best] | None:
        """One for each number, ``last`` for those that were not reached; None where none was asked for."""
        return [replace(self.found.get(number, last)) for number in self.at] if self.at else None


def _spent(part: Rows, evaluation: int) -> Tensor:
    """(n,) evaluations of each row, also where the account of this turn was a brief one."""
    return torch.where(part.status == RUNNING, evaluation + part.products, part.evaluations)


class History:
    """One column per evaluation (B = ``batch`` samples), for the trace and the callback of a solve."""

    def __init__(
        self, batch: int, record: bool, callback: Callable[[Progress], object] | None
    ) -> None:
        self.batch, self.record, self.callback = batch, record, callback
        self.wanted = record or callback is not None
        self.residuals: list[Tensor] = []
        self.energies: list[Tensor] = []
        self.accepted: list[Tensor] = []

    def note(self, trial: Point, accepted: Tensor | None, rows: Rows, evaluation: int) -> None:
        """One evaluation, at ``trial``, of the rows that are running."""
        if not self.wanted:
            return
        running = rows.status == RUNNING
        index = rows.index[running]

        def column(values: Tensor, fill: float) -> Tensor:
            return scatter_rows(values.detach()[running], index, self.batch, fill)

        residual = column(trial.relative(), torch.nan)
        energy = None if trial.energy is None else column(trial.energy, torch.nan)
        if self.record:
            taken = torch.ones_like(running) if accepted is None else accepted
            self.residuals.append(residual)
            self.accepted.append(column(taken, False))
            if energy is not None:
                self.energies.append(energy)
        if self.callback is not None:
            self.callback(Progress(evaluation, residual, energy, index.numel()))

    def trace(self) -> Trace | None:
        """The columns as a :class:`solvers.Trace`."""
        if not self.record:
            return None
        energy = torch.stack(self.energies, dim=1) if self.energies else None
        return Trace(torch.stack(self.residuals, 1), energy, torch.stack(self.accepted, 1))


Record = TypeVar("Record")
LARGE = 1 << 22  # numbers in a history above which its rows are moved within their storage


def select_rows(record: Record, index: Tensor) -> Record:
    """The same dataclass with rows ``index`` (increasing) of every tensor, nested records included.

    Large histories (B, m, D) are moved slot by slot within their storage, so that no second copy of
    them ever exists; the old record is invalid then.
    """
    part = object.__new__(type(record))  # as copy does, in a third of its time
    part.__dict__.update(vars(record))
    taken: dict[int, Tensor] = {}  # several names may have one tensor
    for name, value in vars(record).items():
        if isinstance(value, Tensor) and id(value) in taken:
            object.__setattr__(part, name, taken[id(value)])
        elif isinstance(value, Tensor):
            in_place = value.dim() == 3 and value.numel() > LARGE and not torch.is_grad_enabled()
            if not in_place:
                value = value.index_select(0, index)
            else:
                for slot in range(value.shape[1]):
                    value[: len(index), slot] = value[:, slot].index_select(0, index)
                value = value[: len(index)]
            taken[id(vars(record)[name])] = value
            object.__setattr__(part, name, value)
        elif isinstance(value, list):
            object.__setattr__(part, name, [tensor.index_select(0, index) for tensor in value])
        elif is_dataclass(value):
            object.__setattr__(part, name, select_rows(value, index))
    return part


def clear_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """Zeros in ``rows`` (B,) bool; in place unless autograd records."""
    mask = rows.reshape(-1, *([1] * (tensor.dim() - 1)))
    return tensor.masked_fill(mask, 0) if torch.is_grad_enabled() else tensor.masked_fill_(mask, 0)


def where_rows(mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """Row-wise choice; NaN in the row that is not chosen does not leak."""
    return torch.where(mask.reshape(-1, *([1] * (yes.dim() - 1))), yes, no)


def merge_rows(mask: Tensor, yes: Record, no: Record) -> Record:
    """Row-wise choice (see :func:`where_rows`) for every tensor of two records of one dataclass.

    A tensor that either of them lacks (None) is lacking in the result.
    """
    changes: dict[str, Any] = {}
    for entry in fields(yes):  # type: ignore[arg-type]
        new, old = getattr(yes, entry.name), getattr(no, entry.name)
        if isinstance(new, Tensor):
            changes[entry.name] = None if old is None else where_rows(mask, new, old)
    return replace(yes, **changes)  # type: ignore[type-var]


def scatter_rows(values: Tensor, index: Tensor, batch: int, fill: float) -> Tensor:
    """(batch, ...) with ``values`` (n, ...) in the rows ``index`` (n,), ``fill`` in the others."""
    return values.new_full((batch, *values.shape[1:]), fill).index_copy(0, index, values)


def write_slot(buffer: Tensor, slot: int, value: Tensor) -> Tensor:
    """``buffer[:, slot] = value``; a new buffer where autograd records (unrolled solves)."""
    if torch.is_grad_enabled():
        buffer = buffer.clone()
    buffer[:, slot] = value
    return buffer


def row_norm(vector: Tensor) -> Tensor:
    """Euclidean norm of each row, (B,), in float32 or wider.

    On the CPU a norm whose squares over- or underflow is wrong; see :meth:`Problem.exact`.
    """
    if on_cuda(vector):  # to ask whether it is would cost more
        return scaled_norm(vector)
    return torch.linalg.vector_norm(vector, dim=1, dtype=small_dtype(vector.dtype))


def norms_fit(norm: Tensor, reference: Tensor) -> bool:
    """Whether no square in :func:`row_norm` of residuals and their references did any harm.

    A residual that is nothing beside a moderate reference may have the norm 0.
    """
    fits = (reference > MODERATE_ABOVE[norm.dtype]) & (norm + reference < math.inf)
    return bool(fits.all())


def scaled_norm(vector: Tensor) -> Tensor:
    """:func:`row_norm` for any magnitude: in float64, or divided by a power of two first."""
    if vector.dtype != torch.float64:
        return torch.linalg.vector_norm(vector, dim=1, dtype=torch.float64).float()
    largest = torch.linalg.vector_norm(vector, torch.inf, dim=1)
    # A power of two within the range of float64, also where the largest entry is subnormal.
    exponent = torch.frexp(largest)[1].clamp(-1000, 1000)
    scale = torch.ldexp(torch.ones_like(largest), exponent)
    norm = torch.linalg.vector_norm(vector / scale[:, None], dim=1) * scale
    return torch.where(torch.isfinite(largest), norm, largest)


def inner_products(basis: Tensor, vector: Tensor) -> Tensor:
    """(B, m) products of the rows of basis (B, m, D) with vector (B, D), float32 or wider."""
    dtype = small_dtype(vector.dtype)
    if vector.dtype != dtype:
        basis, vector = basis.to(dtype), vector.to(dtype)
    return torch.bmm(vector.unsqueeze(1), basis.mT).squeeze(1)


def combine(start: Tensor, weights: Tensor, basis: Tensor, sign: int = 1) -> Tensor:
    """``start + sign sum_j weights_j basis_j``: (B, D), (B, m), (B, m, D) -> (B, D)."""
    weights = weights.to(start.dtype).unsqueeze(1)
    return torch.baddbmm(start.unsqueeze(1), weights, basis, alpha=sign).squeeze(1)


def write_symmetric(gram: Tensor, slot: int, row: Tensor) -> Tensor:
    """Write row (B, k) into row and column ``slot`` of gram (B, m, m).

    Returns gram, or a changed copy where autograd records (unrolled solves).
    """
    filled = row.shape[1]
    if torch.is_grad_enabled():
        gram = gram.clone()
    gram[:, slot, :filled] = row
    gram[:, :filled, slot] = row
    return gram
