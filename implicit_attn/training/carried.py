"""A pool of boards whose states earlier steps of a training left: what is found must stay."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from solvers.core.checks import require_count, require_nonnegative

Batch = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass
class CarriedStates:
    """Boards that a training goes on with, each from the state that its last step left.

    A board's age is the number of its iterations. At the age of its life, drawn log-uniformly from
    ``lives``, it retires, and a fresh board of the same step takes its place. So the training sees
    states up to the longest life at the cost of a few iterations a step, and an update that leaves
    what it has found is shown its error.

    Attributes:
        size: boards of the pool; as long as it has fewer than a batch, none is carried.
        lives: shortest and longest, in iterations.
        noise: standard deviation of what is added to carried states, times a uniform number a board.

    Raises:
        TypeError, ValueError: a size below 1, lives out of order, or a negative noise.

    Source: states carried from step to step as in Anil et al., "Path independent equilibrium models
    can better exploit test-time computation" (2022), https://arxiv.org/abs/2211.09961, who ask for the
    same end from every start; the pool is that of Mordvintsev et al., "Growing neural cellular
    automata" (2020), https://distill.pub/2020/growing-ca.
    """

    size: int = 48
    lives: tuple[int, int] = (48, 1024)
    noise: float = 0.1
    _rows: tuple[Tensor, ...] = field(default=(), init=False, repr=False)

    def __post_init__(self) -> None:
        require_count("size", self.size)
        least, most = (require_count("lives", number) for number in self.lives)
        if least > most:
            raise ValueError(f"lives must be (shortest, longest), got {self.lives}")
        require_nonnegative("noise", self.noise)

    def __len__(self) -> int:
        return len(self._rows[0]) if self._rows else 0

    @property
    def ages(self) -> Tensor:
        """(len,) iterations that every board of the pool has behind it."""
        return self._rows[3]

    def clear(self) -> None:
        """Forget all boards."""
        self._rows = ()

    def join(self, inputs: Tensor, targets: Tensor, generator: torch.Generator) -> Batch:
        """A batch with as many carried boards behind it.

        Returns:
            Indices of the carried boards in the pool (C,), C = B or 0; inputs and targets (B + C, N);
            states (C, N, q, m), or (0,) where C = 0.
        """
        number = len(inputs) if len(self) >= len(inputs) else 0
        index = torch.randperm(len(self), generator=generator)[:number].to(inputs.device)
        if number == 0:
            return index, inputs, targets, torch.empty(0, device=inputs.device)
        puzzles, solutions, states = (rows[index] for rows in self._rows[:3])
        if self.noise > 0:
            strength = self.noise * torch.rand(number, generator=generator)
            drawn = torch.randn(states.shape, generator=generator)
            drawn *= strength.view(-1, *[1] * (drawn.dim() - 1))
            states = states + drawn.to(states)
        return index, torch.cat([inputs, puzzles]), torch.cat([targets, solutions]), states

    def put(
        self,
        index: Tensor,
        inputs: Tensor,
        targets: Tensor,
        states: Tensor,
        iterations: int,
        generator: torch.Generator,
    ) -> None:
        """Keep what a step of so many ``iterations`` left of the batch that :meth:`join` made."""
        number = len(inputs) - len(index)
        least, most = (math.log(life) for life in self.lives)
        lives = torch.exp(least + (most - least) * torch.rand(number, generator=generator))
        ages = torch.full((number,), iterations, device=inputs.device)
        lives = lives.to(inputs.device)
        fresh = (inputs[:number], targets[:number], states[:number], ages, lives)
        rows = self._rows or tuple(new[:0].clone() for new in fresh)
        rows[2][index], rows[3][index] = states[number:], rows[3][index] + iterations
        retired = index[rows[3][index] >= rows[4][index]][:number]
        for kept, new in zip(rows, fresh, strict=True):
            kept[retired] = new[: len(retired)]
        room = slice(len(retired), len(retired) + self.size - len(rows[0]))
        pairs = zip(rows, fresh, strict=True)
        self._rows = tuple(torch.cat([kept, new[room]]) for kept, new in pairs)
