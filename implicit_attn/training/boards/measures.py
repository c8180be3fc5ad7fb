"""How many boards a solver has solved after each number of iterations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from implicit_attn.data import board_counts
from solvers.core.checks import require_count


class SolvesBoards(Protocol):
    """What is measured here, as ``implicit_attn.models.BoardSolver`` has it."""

    def trajectory(self, puzzles: Tensor, iterations: int) -> Iterable[Tensor]:
        """Logits (B, N, q) after each iteration."""
        ...

    def solve(self, puzzles: Tensor, **options: Any) -> Any:
        """A ``solvers.Solution`` whose value are logits (B, N, q)."""
        ...


class SolvedShares(NamedTuple):
    """Shares after each number of iterations: of the boards solved, of the unknown cells right."""

    boards: list[float]
    cells: list[float]


class ConvergedShares(NamedTuple):
    """Solves with a tolerance: shares of boards solved, of boards converged, of those solved; evaluations.

    A board may be solved without having converged; ``solved_of_converged`` is 0 where none has.
    """

    solved: float
    converged: float
    solved_of_converged: float
    mean_evaluations: float


@torch.no_grad()
def solved_by_iterations(
    model: SolvesBoards, puzzles: Tensor, solutions: Tensor, at: Sequence[int], batch: int = 100
) -> SolvedShares:
    """Shares of boards and cells after ``at`` iterations of the update.

    Args:
        model: in evaluation mode.
        puzzles, solutions: (B, N), 0 = unknown.
        at: numbers of iterations, each at least 1.
        batch: puzzles at once.

    Raises:
        ValueError: no puzzle, or no number of iterations.
    """
    marks = [require_count("at", number) for number in at]
    if not marks or len(puzzles) == 0:
        raise ValueError(
            f"at and puzzles must not be empty, got {list(at)}, {len(puzzles)} puzzles"
        )
    require_count("batch", batch)
    boards, cells, unknown = dict.fromkeys(marks, 0), dict.fromkeys(marks, 0), 0
    for part, answers in zip(puzzles.split(batch), solutions.split(batch), strict=True):
        unknown += int((part == 0).sum())
        for number, logits in enumerate(model.trajectory(part, max(marks)), start=1):
            if number in boards:
                right, wanted = board_counts(logits.argmax(-1) + 1, part, answers)
                boards[number] += int((right == wanted).sum())
                cells[number] += int(right.sum())
    return SolvedShares(
        [boards[number] / len(puzzles) for number in marks],
        [cells[number] / max(unknown, 1) for number in marks],
    )


@torch.no_grad()
def solved_when_converged(
    model: SolvesBoards, puzzles: Tensor, solutions: Tensor, batch: int = 100, **options: Any
) -> ConvergedShares:
    """Boards solved where each stops by itself: the model's ``solve`` with ``options``.

    Args:
        model, puzzles, solutions, batch: as for :func:`solved_by_iterations`.
        options: of the solve (solver, tolerance, max_steps, ...).

    Raises:
        ValueError: no puzzle.
    """
    require_count("batch", batch)
    if len(puzzles) == 0:
        raise ValueError("puzzles must not be empty, got none")
    solved, converged, evaluations = [], [], []
    for part, answers in zip(puzzles.split(batch), solutions.split(batch), strict=True):
        solution = model.solve(part, **options)
        right, wanted = board_counts(solution.value.argmax(-1) + 1, part, answers)
        solved.append(right == wanted)
        converged.append(solution.converged)
        evaluations.append(solution.evaluations)
    right, done = torch.cat(solved), torch.cat(converged)
    both = (right & done).sum().item() / max(int(done.sum()), 1)
    return ConvergedShares(
        right.float().mean().item(),
        done.float().mean().item(),
        both,
        torch.cat(evaluations).float().mean().item(),
    )
