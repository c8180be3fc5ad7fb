"""What the loop keeps per sample, and what a callback sees of it."""

from __future__ import annotations

from dataclasses import dataclass

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
