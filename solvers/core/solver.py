"""What a solver is: immutable hyperparameters, a state record, and two functions.

The loop (:mod:`solvers.fixed_point`) evaluates; a solver only proposes where to evaluate next::

    state = solver.init(point)  # after the first evaluation
    candidate = solver.step(state, turn)  # after every further one

All vectors are (B, D) and every row is a problem of its own: a solver never mixes rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from solvers.solution import Status

Record = TypeVar("Record")


@dataclass
class Point:
    """An evaluated point of every sample in the working batch.

    Attributes:
        z: (B, D) where ``f`` was evaluated.
        residual: (B, D) ``f(z) - z``; for a gradient step this is a descent direction.
        norm: (B,) norm of ``residual``.
        reference: (B,) norm of ``f(z)``, the scale of a relative residual.
        energy: (B,) or None.
        gradient: (B, D) gradient of the energy, or None where only its value is known.
    """

    z: Tensor
    residual: Tensor
    norm: Tensor
    reference: Tensor
    energy: Tensor | None = None
    gradient: Tensor | None = None


@dataclass
class Turn:
    """What a solver is told after an evaluation.

    Attributes:
        current: the current iterate of every row: the trial where it was accepted, else the last
            accepted point.
        trial: the point just evaluated; rejected rows may hold non-finite numbers.
        accepted: (B,) bool, or None where every row was accepted.
        problem: the problem of the rows that are left.
    """

    current: Point
    trial: Point
    accepted: Tensor | None
    problem: Linearizable


class Solver(ABC):
    """Base of all solvers; subclasses are frozen dataclasses of hyperparameters.

    Class attributes:
        needs_energy: the solver is a minimiser and works with an energy only.
        searches: the solver chooses the next trial of a rejected row itself (a line search);
            otherwise the loop falls back to a backtracked plain step.
        lost: status of a row that has only non-finite evaluations ahead of it.
    """

    needs_energy: ClassVar[bool] = False
    searches: ClassVar[bool] = False
    lost: ClassVar[Status] = Status.NONFINITE

    @abstractmethod
    def init(self, point: Point, problem: Linearizable) -> Any:
        """State record after the first evaluation."""

    @abstractmethod
    def step(self, state: Any, turn: Turn) -> Tensor:
        """Next point to evaluate, (B, D); ``state`` is the record made by ``init``, changed in place."""


class ExternalSolver(Solver):
    """A solver with a loop of its own; it reports what it did as a :class:`solvers.Solution`."""

    @abstractmethod
    def run(self, problem: Any, start: Tensor, tolerance: Any, max_steps: int) -> Any:
        """Solve from ``start`` (B, D) for a :class:`solvers.problem.Problem`."""

    def init(self, point: Point, problem: Linearizable) -> Any:
        raise TypeError(f"{type(self).__name__} has its own loop and cannot be stepped")

    def step(self, state: Any, turn: Turn) -> Tensor:
        raise TypeError(f"{type(self).__name__} has its own loop and cannot be stepped")


class Linearizable(ABC):
    """What a Newton method asks of the problem: products with the Jacobian of ``f`` at a point."""

    symmetric: bool
    max_steps: int
    compact: bool

    @abstractmethod
    def rows(self, index: Tensor, batch: int) -> Linearizable:
        """The same problem on the rows ``index`` of a batch of ``batch``."""

    @abstractmethod
    def jacobian_product(self, z: Tensor) -> Callable[[Tensor], Tensor]:
        """Map v (B, D) -> J(z) v (B, D)."""


def select_rows(record: Record, index: Tensor) -> Record:
    """The same dataclass with rows ``index`` of every tensor in it (also inside nested records)."""
    changes: dict[str, Any] = {}
    for entry in fields(record):  # type: ignore[arg-type]
        value = getattr(record, entry.name)
        if isinstance(value, Tensor):
            changes[entry.name] = value.index_select(0, index)
        elif hasattr(value, "__dataclass_fields__") and not isinstance(value, (type, Solver)):
            changes[entry.name] = select_rows(value, index)
    return replace(record, **changes)  # type: ignore[type-var]


LARGE = 1 << 22  # numbers in a history above which its rows are moved in place


def keep_rows(record: Any, index: Tensor) -> None:
    """Keep rows ``index`` (increasing) of every tensor of a record, changing the record.

    Large histories (B, m, D) are moved slot by slot within their own storage, so that no second
    copy of them ever exists.
    """
    for entry in fields(record):
        value = getattr(record, entry.name)
        if isinstance(value, Tensor):
            moved = value.dim() == 3 and value.numel() > LARGE and not torch.is_grad_enabled()
            setattr(
                record,
                entry.name,
                _move_up(value, index) if moved else value.index_select(0, index),
            )
        elif hasattr(value, "__dataclass_fields__") and not isinstance(value, (type, Solver)):
            setattr(record, entry.name, select_rows(value, index))


def _move_up(history: Tensor, index: Tensor) -> Tensor:
    rows = index.numel()
    for slot in range(history.shape[1]):
        history[:rows, slot] = history[:, slot].index_select(0, index)
    return history[:rows]


def clear_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """Zeros in ``rows`` (B,) bool; in place unless autograd records."""
    mask = rows.reshape(-1, *([1] * (tensor.dim() - 1)))
    return tensor.masked_fill(mask, 0) if torch.is_grad_enabled() else tensor.masked_fill_(mask, 0)


def where_rows(mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """Row-wise choice; NaN in the row that is not chosen does not leak."""
    return torch.where(mask.reshape(-1, *([1] * (yes.dim() - 1))), yes, no)


def merge_points(accepted: Tensor, trial: Point, last: Point) -> Point:
    """``trial`` in accepted rows, ``last`` in the others."""

    def pick(name: str) -> Tensor | None:
        new, old = getattr(trial, name), getattr(last, name)
        return None if new is None or old is None else where_rows(accepted, new, old)

    return Point(*[pick(entry.name) for entry in fields(Point)])  # type: ignore[arg-type]


def write_slot(buffer: Tensor, slot: int, value: Tensor) -> Tensor:
    """``buffer[:, slot] = value``; a new buffer where autograd records (unrolled solves)."""
    if torch.is_grad_enabled():
        buffer = buffer.clone()
    buffer[:, slot] = value
    return buffer


def require_number(
    name: str, value: object, *, low: float, high: float, closed: bool = True
) -> None:
    """A hyperparameter within [low, high] (``closed``) or (low, high]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not (low <= value <= high) or (not closed and value == low):
        left = "[" if closed else "("
        raise ValueError(f"{name} must be in {left}{low}, {high}], got {value!r}")


def require_count(name: str, value: object, *, low: int = 1) -> None:
    """A hyperparameter that is an integer >= low."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < low:
        raise ValueError(f"{name} must be >= {low}, got {value}")


def small_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the small systems of a solver: float32 for half precision, else the state's."""
    return torch.float64 if dtype == torch.float64 else torch.float32
