"""Completion of boards whose givens are drawn anew each time, by a solver with several answers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.training.tasks import SudokuCompletion
from solvers.core.checks import require_count


@dataclass(frozen=True)
class BoardCompletion(SudokuCompletion):
    """:class:`SudokuCompletion` with random givens, its loss averaged over the answers of a batch.

    The model maps puzzles (B, 81), 0 = unknown, to logits (B, 81, 9); in training to (K, B, 81, 9), the
    answers after each of its last K iterations. In every training puzzle, each time it is seen, further
    cells of the solution are revealed, so that it has a number of givens drawn uniformly from
    ``givens``, or its own number where that is larger.

    Attributes:
        data: the puzzles; for training best as they are without further givens
            (``load_sudoku(..., more=0)``).
        symmetries: drawn after that; for a model that has them exactly they would change nothing.
        batch: puzzles of a batch of the evaluation.
        givens: fewest and most, the most below 81.

    Raises:
        TypeError, ValueError: numbers that are no integers or out of order.
    """

    givens: tuple[int, int] = (17, 34)

    def __post_init__(self) -> None:
        require_count("batch", self.batch)
        least, most = (require_count("givens", number, low=0) for number in self.givens)
        if not least <= most < self.data.train_puzzles.shape[1]:
            raise ValueError(f"givens must be fewest <= most < 81, got {self.givens}")

    def augmented(
        self, inputs: Tensor, targets: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        least, most = self.givens
        number = torch.randint(least, most + 1, (len(inputs), 1), generator=generator)
        puzzles = reveal_up_to(inputs, targets, number, generator)
        return super().augmented(puzzles, targets, generator)

    def loss(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        answers = outputs if outputs.dim() == 4 else outputs.unsqueeze(0)
        unknown = inputs == 0
        wanted = (targets[unknown] - 1).repeat(len(answers))
        chosen = answers[:, unknown].flatten(0, 1)
        return F.cross_entropy(chosen, wanted, reduction="sum") / len(answers)


def reveal_up_to(
    puzzles: Tensor, solutions: Tensor, givens: int | Tensor, generator: torch.Generator
) -> Tensor:
    """Puzzles with random further cells of their solutions, up to a number of givens.

    Args:
        puzzles, solutions: (B, N), 0 = unknown.
        givens: of all puzzles, or (B, 1), one for each; a puzzle with more keeps them.
        generator: on the CPU.
    """
    order = torch.rand(puzzles.shape, generator=generator).to(puzzles.device)
    place = order.masked_fill(puzzles != 0, -1.0).argsort(1).argsort(1)  # the givens come first
    most = givens.to(puzzles.device) if isinstance(givens, Tensor) else givens
    return torch.where(place < most, solutions, puzzles)
