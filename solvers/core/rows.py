"""What the loop keeps per sample, and what a callback sees of it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

RUNNING = -1  # status of a sample that is still being solved


@dataclass
class Progress:
    """What a callback sees after each evaluation.

    Attributes:
        evaluation: how many evaluations a sample that is still running has had.
        residual: (B,) relative residual of this evaluation, NaN where the sample has ended.
        energy: (B,) energy of this evaluation or None, NaN where the sample has ended.
        running: number of samples still being solved.
    """

    evaluation: int
    residual: Tensor
    energy: Tensor | None
    running: int


@dataclass
class Rows:
    """Everything that is kept per sample of the working batch; first dimension the rows."""

    index: Tensor  # position in the caller's batch
    value: Tensor  # best accepted iterate
    relative: Tensor
    norm: Tensor
    energy: Tensor | None
    status: Tensor
    rejected: Tensor  # trials that were not taken
    evaluations: Tensor
    extra: Tensor  # products with the Jacobian (Newton methods)
    limit: Tensor  # residual norm beyond which the sample diverges
    milestone: Tensor  # best relative residual at the last check for progress
    energy_milestone: Tensor  # and the energy


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


def select_rows(record: Record, index: Tensor) -> Record:
    """The same dataclass with rows ``index`` of every tensor in it (also inside nested records)."""
    changes: dict[str, Any] = {}
    for entry in fields(record):  # type: ignore[arg-type]
        value = getattr(record, entry.name)
        if isinstance(value, Tensor):
            changes[entry.name] = value.index_select(0, index)
        elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
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
        elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
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


def small_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the small systems of a solver: float32 for half precision, else the state's."""
    return torch.float64 if dtype == torch.float64 else torch.float32
