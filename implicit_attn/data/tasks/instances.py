"""Instances of a task: inputs, answers, which positions count, how hard each is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Instances:
    """B instances of a task whose answer is a class at each of N positions.

    Attributes:
        inputs: what a model is given, a tensor (B, ...) or a pytree of them.
        targets: (B, N) int64, the right classes.
        counted: (B, N) bool, the positions that are asked for; at least one of each instance.
        difficulty: (B,), a number that grows with the steps an instance takes.

    Raises:
        TypeError, ValueError: a shape or dtype that does not fit, or an instance that asks for nothing.

    Example, Sudoku boards:
        >>> puzzles, solutions = (
        ...     torch.tensor([[0, 2, 1]]),
        ...     torch.tensor([[3, 2, 1]]),
        ... )  # of three cells
        >>> boards = Instances(puzzles, solutions - 1, puzzles == 0, (puzzles == 0).sum(1))
        >>> len(boards)
        1
    """

    inputs: Any
    targets: Tensor
    counted: Tensor
    difficulty: Tensor

    def __post_init__(self) -> None:
        if self.targets.dtype != torch.int64 or self.targets.dim() != 2 or not len(self.targets):
            got = f"{self.targets.dtype} {tuple(self.targets.shape)}"
            raise TypeError(f"targets must be int64 (B, N), B >= 1, got {got}")
        if self.counted.dtype != torch.bool or self.counted.shape != self.targets.shape:
            got = f"{self.counted.dtype} {tuple(self.counted.shape)}"
            raise TypeError(f"counted must be bool {tuple(self.targets.shape)}, got {got}")
        for name, tree in (("inputs", self.inputs), ("difficulty", self.difficulty)):
            for leaf in pytree.tree_leaves(tree):
                if leaf.shape[:1] != self.targets.shape[:1]:
                    number, got = len(self.targets), tuple(leaf.shape)
                    raise ValueError(f"{name} must have {number} instances, got shape {got}")
        if self.difficulty.dim() != 1:
            raise ValueError(f"difficulty must be (B,), got {tuple(self.difficulty.shape)}")
        if not bool(self.counted.any(1).all()):
            empty = int((~self.counted.any(1)).nonzero()[0])
            raise ValueError(f"counted must have a position of each instance, got none of {empty}")

    def __len__(self) -> int:
        return len(self.targets)

    def select(self, rows: Tensor | slice) -> Instances:
        """The instances ``rows``: numbers, a mask or a slice."""
        return Instances(
            pytree.tree_map(lambda leaf: leaf[rows], self.inputs),
            self.targets[rows],
            self.counted[rows],
            self.difficulty[rows],
        )

    def split(self, size: int) -> Iterator[Instances]:
        """Parts of at most ``size`` instances, in order."""
        for start in range(0, len(self), size):
            yield self.select(slice(start, start + size))

    def right(self, predicted: Tensor) -> Tensor:
        """(B, N) bool: positions where ``predicted`` (B, N) is right or that are not asked for."""
        if predicted.shape != self.targets.shape:
            wanted, got = tuple(self.targets.shape), tuple(predicted.shape)
            raise ValueError(f"predicted must be {wanted}, got {got}")
        return (predicted == self.targets) | ~self.counted
