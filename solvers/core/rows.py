"""Records of the samples of a solve, operations on their rows, and products of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from solvers.core.cuda import on_cuda
from solvers.core.layout import map_tensors
from solvers.core.solution import Status

STEPS = 10  # accepted steps that are remembered of a sample
RUNNING = -1  # status of a sample that is still being solved
# Squares of a norm above these are far from underflow, and so are those of 1e-7 of it.
MODERATE_ABOVE = {torch.float32: 1e-8, torch.float64: 1e-138}
SHRINK = 16  # the batch is made smaller when 1/SHRINK of it has finished;
SHRINK_SMALL, SMALL = 4, 1 << 14  # this share of one with so few numbers, where little is saved,
FEW = 16  # unless it has so few rows: from these each one leaves at once
LARGE = 1 << 22  # numbers in a history above which its rows are moved within their storage


@dataclass
class Recent:
    """The last accepted points of a solver and their residuals, (B, D) each."""

    points: list[Tensor] = field(default_factory=list)
    residuals: list[Tensor] = field(default_factory=list)

    def note(self, point: Evaluation) -> None:
        """Note that the solver has arrived at this point."""
        for kept, new in ((self.points, point.z), (self.residuals, point.residual)):
            kept[:] = [*kept[-STEPS:], new.detach()]

    def renew(self, places: Tensor, point: Evaluation) -> None:
        """Forget the steps of the rows ``places`` (n,), which begin at ``point``."""
        for kept, new in ((self.points, point.z), (self.residuals, point.residual)):
            kept[:] = [put_rows(t, new.detach(), places) for t in kept]

    def pairs(self, rows: Tensor) -> tuple[Tensor, Tensor] | None:
        """The steps of the ``rows`` (k,) and the changes of their residuals, (k, m, D); None without any."""
        if len(self.points) < 2:
            return None
        of = (self.points, self.residuals)
        steps, changes = (torch.stack([t[rows] for t in kept], 1).diff(dim=1) for kept in of)
        return steps, changes


def should_shrink(status: Tensor, batch: Tensor) -> bool:
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
        evaluation: number of points evaluated so far, without products with the Jacobian.
        residual: (B,) relative residual of this evaluation, NaN for samples that have ended.
        energy: (B,) energy of this evaluation, NaN for samples that have ended, or None.
        running: number of samples that are still running.
        value: latest accepted iterate of every sample, with the structure of the state.
    """

    evaluation: int
    residual: Tensor
    energy: Tensor | None
    running: int
    value: Any = None


@dataclass
class Evaluation:
    """An evaluated point of every sample in the working batch.

    A sample has L parts that are judged one by one: the leaves of its state, or what a ``measure`` shows of
    it.
    """

    z: Tensor  # (B, D)
    residual: Tensor  # (B, D) f(z) - z, a descent direction for a gradient step
    norms: Tensor  # (B, L) of the residual
    references: Tensor  # (B, L) norm of f(z), or of z for energies and roots: the scale of a sample
    energy: Tensor | None = None  # (B,)
    gradient: Tensor | None = None  # (B, D) of the energy, None where only its value is known
    sizes: tuple[int, ...] = ()  # of the parts; empty for one part
    view: Tensor | None = None  # (B, M) what a measure shows of z; None: z itself
    view_residual: Tensor | None = None  # (B, M) the same of f(z), minus that of z

    @property
    def norm(self) -> Tensor:
        """(B,) norm of the residual."""
        return self.norms[:, 0] if self.norms.shape[1] == 1 else scaled_norm(self.norms)

    @property
    def reference(self) -> Tensor:
        """(B,) the scale of the whole sample."""
        one = self.references.shape[1] == 1
        return self.references[:, 0] if one else scaled_norm(self.references)

    def difference(self, last: Evaluation) -> tuple[Tensor, Tensor]:
        """(B, L) norms of the differences of z and of the residual to those of ``last``."""
        names = ("z", "residual") if self.view is None else ("view", "view_residual")
        pairs = [(getattr(self, name).detach(), getattr(last, name).detach()) for name in names]
        moved, changed = (part_norms(new - old, self.sizes) for new, old in pairs)
        return moved.to(self.norms.dtype), changed.to(self.norms.dtype)

    def detached(self) -> Evaluation:
        """The same numbers without a graph."""
        energy, gradient = (None if t is None else t.detach() for t in (self.energy, self.gradient))
        return replace(self, residual=self.residual.detach(), energy=energy, gradient=gradient)

    def relative(self) -> Tensor:
        """(B,) relative residual ``|f(z) - z| / |f(z)|`` of the worst part."""
        tiny = torch.finfo(self.norms.dtype).tiny  # where f(z) = 0, not where it is subnormal
        ratio = self.norms / self.references.masked_fill(self.references == 0, tiny)
        return ratio[:, 0] if ratio.shape[1] == 1 else ratio.amax(1)

    def finite(self) -> Tensor:
        """(B,) bool. Both norms count: a residual over an overflowed f(z) would look converged."""
        finite = self.norm + self.reference < math.inf
        return finite if self.energy is None else finite & (self.energy.detach().abs() < math.inf)


@dataclass
class Best:
    """The best accepted iterate (B, D) of every sample, with its residuals, error and energy (B,)."""

    value: Tensor
    score: Tensor  # by which iterates are compared, see ``judge``
    relative: Tensor
    norm: Tensor
    error: Tensor  # estimated, relative
    energy: Tensor | None


@dataclass
class Rows:
    """What the loop keeps of every sample of the working batch; first dimension the rows."""

    index: Tensor  # position in the caller's batch
    best: Best
    status: Tensor  # RUNNING or a solvers.Status
    steps: Tensor  # trials that were accepted
    evaluations: Tensor  # of f, those made by the solver itself included
    extra_evaluations: Tensor  # evaluations made by the solver itself, or before the loop
    rejections: Tensor  # consecutive trials that were rejected
    scale: Tensor  # t of the fall-back step z + t (f(z) - z)
    limit: Tensor  # residual norm beyond which the sample diverges
    caps: Tensor  # (n, L) largest residual that may count as converged
    gains: Tensor  # (n, L, STEPS) |dz| / |dr| of the latest accepted steps; 0 where there was none
    # (n, W) residual norms of the latest accepted points; W is the solver's window
    recent_norms: Tensor
    milestone: Tensor  # best score at the last stall check
    energy_milestone: Tensor  # lowest energy there
    path: Tensor  # length of the steps since then
    near: Tensor  # (n,) bool: at the last accepted point the error was within the tolerance
    anchor: Tensor | None = None  # (n, D) the accepted point there

    def at(self, count: int) -> Tensor:
        """(n,) evaluations of each row after so many turns of the loop."""
        return torch.where(self.status == RUNNING, count + self.extra_evaluations, self.evaluations)


Record = TypeVar("Record")


def select_rows(record: Any, index: Tensor) -> Any:
    """The rows ``index`` (increasing) of a tensor, or of every tensor of a list or an object.

    Nested dataclasses are included. Large histories (B, m, D) are moved slot by slot within their storage, so
    that no second copy of them ever exists; the old record is invalid then.
    """
    value = record
    if isinstance(value, Tensor):
        if value.dim() != 3 or value.numel() <= LARGE or torch.is_grad_enabled():
            return value.index_select(0, index)
        for slot in range(value.shape[1]):
            value[: len(index), slot] = value[:, slot].index_select(0, index)
        return value[: len(index)]
    if isinstance(value, list):
        return [select_rows(each, index) for each in value]
    if not hasattr(value, "__dict__"):
        return value
    part: Any = object.__new__(type(value))  # as copy does, in a third of its time
    taken: dict[int, Any] = {}  # several names may have one tensor
    for name, each in vars(value).items():
        if id(each) not in taken:
            own = isinstance(each, (Tensor, list)) or is_dataclass(each)
            taken[id(each)] = select_rows(each, index) if own else each
        part.__dict__[name] = taken[id(each)]
    return part


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


def put_rows(old: Any, new: Any, places: Tensor) -> Any:
    """``old`` with the rows ``places`` (n,) of ``new``: two tensors (B, ...), or records of them.

    A tensor that ``new`` lacks (None) stays as it is.
    """
    if isinstance(old, Tensor):
        return old if new is None else old.index_copy(0, places, new.index_select(0, places))
    if not is_dataclass(old):
        return old
    names = [entry.name for entry in fields(old)]
    changes = {name: put_rows(getattr(old, name), getattr(new, name), places) for name in names}
    return replace(old, **changes)  # type: ignore[type-var]


def join_rows(parts: Sequence[Any], order: Tensor | None = None) -> Any:
    """The rows of all parts, tensors or pytrees or records of them, in this order."""
    first = parts[0]
    if len(parts) == 1 and order is None:
        return first
    if is_dataclass(first):
        names = [entry.name for entry in fields(first)]
        whole = {name: join_rows([getattr(each, name) for each in parts], order) for name in names}
        return replace(first, **whole)  # type: ignore[type-var]
    if type(first) is tuple:
        return tuple([join_rows(own, order) for own in zip(*parts, strict=True)])

    def join(*tensors: Tensor) -> Tensor:
        whole = torch.cat(tensors) if tensors[0].dim() else tensors[0]
        return whole if order is None or not whole.dim() else whole.index_select(0, order)

    return map_tensors(join, *parts)


def clear_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """Zeros in ``rows`` (B,) bool; in place unless autograd records."""
    mask = rows.reshape(-1, *([1] * (tensor.dim() - 1)))
    return tensor.masked_fill(mask, 0) if torch.is_grad_enabled() else tensor.masked_fill_(mask, 0)


def where_rows(mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """Row-wise choice; NaN in the row that is not chosen does not leak."""
    return torch.where(mask.reshape(-1, *([1] * (yes.dim() - 1))), yes, no)


def scatter_rows(values: Tensor, index: Tensor, batch: int, fill: float) -> Tensor:
    """(batch, ...) with ``values`` (n, ...) in the rows ``index`` (n,), ``fill`` in the others."""
    return values.new_full((batch, *values.shape[1:]), fill).index_copy(0, index, values)


def true_rows(mask: Tensor) -> Tensor:
    """Indices of the True entries of a mask of n entries; waits for the device."""
    return torch.nonzero(mask.reshape(-1)).reshape(-1)


def choose(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Rows of ``new`` (n, D) where ``mask`` (n, 1), else rows of ``old``."""
    return new if bool(mask.all()) else torch.where(mask, new, old)


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """``numerator / denominator``, 0 where the numerator is 0."""
    return torch.where(numerator == 0, numerator, numerator / denominator)


def small_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the small systems of a solver: float32 for half precision, else the state's."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def norms(residual: Tensor, value: Tensor, sizes: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    """Norms (B, L) of residuals and of f(z) in parts, right for any magnitude, so that 0 means zero."""
    if sizes or on_cuda(value):  # to ask the host would cost more
        return part_norms(residual, sizes), part_norms(value, sizes)
    dtype = small_dtype(value.dtype)
    norm = torch.linalg.vector_norm(residual, dim=1, dtype=dtype, keepdim=True)
    reference = torch.linalg.vector_norm(value, dim=1, dtype=dtype, keepdim=True)
    # A residual that is nothing beside a moderate reference may have the norm 0.
    fit = (reference > MODERATE_ABOVE[norm.dtype]) & (norm + reference < math.inf)
    if bool(fit.all()):
        return norm, reference
    exact = scaled_norm(residual)[:, None], scaled_norm(value)[:, None]
    return torch.where(fit, norm, exact[0]), torch.where(fit, reference, exact[1])


def part_norms(vector: Tensor, sizes: tuple[int, ...] = ()) -> Tensor:
    """(B, L) norms of the parts of (B, D), or (B, 1) without ``sizes``."""
    if not sizes:
        return scaled_norm(vector)[:, None]
    return torch.stack([scaled_norm(part) for part in vector.split(sizes, 1)], 1)


def scaled_norm(vector: Tensor) -> Tensor:
    """Euclidean norm of each row, (B,), in float64, or divided by a power of two first."""
    if vector.dtype != torch.float64:
        return torch.linalg.vector_norm(vector, dim=1, dtype=torch.float64).float()
    norm = torch.linalg.vector_norm(vector, dim=1)
    moderate = None if on_cuda(vector) else (norm > MODERATE_ABOVE[norm.dtype]) & (norm < math.inf)
    if moderate is not None and bool(moderate.all()):
        return norm
    largest = torch.linalg.vector_norm(vector, torch.inf, dim=1)
    # A power of two within the range of float64, also where the largest entry is subnormal.
    exponent = torch.frexp(largest)[1].clamp(-1000, 1000)
    scale = torch.ldexp(torch.ones_like(largest), exponent)
    norm = torch.linalg.vector_norm(vector / scale[:, None], dim=1) * scale
    return torch.where(torch.isfinite(largest), norm, largest)


def inner_products(basis: Tensor, vector: Tensor) -> Tensor:
    """(B, m) products of the rows of basis (B, m, D) with vector (B, D), float32 or wider."""
    dtype = small_dtype(vector.dtype)
    return torch.bmm(vector.to(dtype).unsqueeze(1), basis.to(dtype).mT).squeeze(1)


def combine(start: Tensor, weights: Tensor, basis: Tensor, sign: int = 1) -> Tensor:
    """``start + sign sum_j weights_j basis_j``: (B, D), (B, m), (B, m, D) -> (B, D)."""
    weights = weights.to(start.dtype).unsqueeze(1)
    return torch.baddbmm(start.unsqueeze(1), weights, basis, alpha=sign).squeeze(1)


@dataclass
class History:
    """Vectors of the last steps and their inner products; the newest ones overwrite the oldest.

    The storage grows with the number of steps.
    """

    memory: int  # vectors that are kept
    vectors: Tensor  # (B, k, D)
    gram: Tensor  # (B, k, k) inner products, in float32 or wider
    count: int = 0  # vectors written so far

    @classmethod
    def empty(cls, like: Tensor, memory: int, capacity: int) -> History:
        """For vectors (B, D) like this one, with storage for ``capacity`` of them at first."""
        (batch, size), capacity = like.shape, min(capacity, memory)
        gram = like.new_zeros(batch, capacity, capacity, dtype=small_dtype(like.dtype))
        return cls(memory, like.new_zeros(batch, capacity, size), gram)

    @property
    def filled(self) -> int:
        """Slots in use."""
        return min(self.count, self.memory)

    def write(self, *new: Tensor) -> None:
        """Write vectors (B, D) in the next slots, with their inner products."""
        slot, capacity = self.count % self.memory, self.vectors.shape[1]
        if slot >= capacity:
            extra = min(capacity, self.memory - capacity)
            self.vectors = pad(self.vectors, (0, 0, 0, extra))
            self.gram = pad(self.gram, (0, extra, 0, extra))
        elif torch.is_grad_enabled():  # an unrolled solve has recorded these
            self.vectors, self.gram = self.vectors.clone(), self.gram.clone()
        self.count += len(new)
        own, filled = slice(slot, slot + len(new)), self.filled
        for place, vector in enumerate(new):
            self.vectors[:, slot + place] = vector
        basis = self.vectors[:, :filled].to(self.gram.dtype)
        rows = torch.bmm(basis[:, own], basis.mT)
        self.gram[:, own, :filled] = rows
        self.gram[:, :filled, own] = rows.mT
