"""Sudoku boards as a task for train_boards.py: states carried from step to step, and who solves how many."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm
from training import Task

from implicit_attn.data import (
    SudokuData,
    SudokuSymmetries,
    board_counts,
    read_list,
    reveal_up_to,
    solve_by_singles,
)
from implicit_attn.data.files import find, missing

Boards = tuple[Tensor, Tensor]  # puzzles and solutions, (B, 81) each
HARD = ("magictour", "hardest_1106", "hardest_1905")  # test sets in sudoku/hard.npz


class CarriedStates:
    """Boards that a training goes on with, each from the state that its last step left.

    At the age, in iterations, of its life, drawn log-uniformly from ``lives``, a board retires, and a
    fresh one takes its place. So the training sees states up to the longest life at the cost of a few
    iterations a step, and an update that leaves what it has found is shown its error. Carried states get
    Gaussian noise, of deviation ``noise`` times a uniform number a board.

    Source: states carried from step to step as in Anil et al., "Path independent equilibrium models
    can better exploit test-time computation" (2022), https://arxiv.org/abs/2211.09961, who ask for the
    same end from every start; the pool is that of Mordvintsev et al., "Growing neural cellular
    automata" (2020), https://distill.pub/2020/growing-ca.
    """

    def __init__(
        self, size: int = 48, lives: tuple[int, int] = (48, 1024), noise: float = 0.1
    ) -> None:
        self.size, self.lives, self.noise = size, lives, noise
        self.rows: tuple[Tensor, ...] = ()  # puzzles, solutions, states, ages, lives

    def __len__(self) -> int:
        return len(self.rows[0]) if self.rows else 0

    def join(self, inputs: Tensor, targets: Tensor, generator: torch.Generator) -> Any:
        """The batch with as many carried boards behind it, once there are as many.

        Returns:
            Indices of the carried boards in the pool (C,), C = B or 0; inputs and targets (B + C, N);
            states (C, N, q, m), or (0,) where C = 0.
        """
        number = len(inputs) if len(self) >= len(inputs) else 0
        draw: Any = {"generator": generator, "device": inputs.device}
        index = torch.randperm(len(self), **draw)[:number]
        if number == 0:
            return index, inputs, targets, torch.empty(0, device=inputs.device)
        puzzles, solutions, states = (rows[index] for rows in self.rows[:3])
        strength = self.noise * torch.rand(number, *[1] * (states.dim() - 1), **draw)
        states = states + (strength * torch.randn(states.shape, **draw)).to(states)
        return index, torch.cat([inputs, puzzles]), torch.cat([targets, solutions]), states

    def put(
        self, index: Tensor, inputs: Tensor, targets: Tensor, states: Tensor, iterations: int,
        generator: torch.Generator,
    ) -> None:  # fmt: skip
        """Keep what a step of so many ``iterations`` left of the batch that :meth:`join` made."""
        number, carried = len(inputs) - len(index), len(index)
        least, most = (math.log(life) for life in self.lives)
        drawn = torch.rand(number, generator=generator, device=inputs.device)
        ages = torch.full((number,), iterations, device=inputs.device)
        lives = torch.exp(least + (most - least) * drawn)
        fresh = inputs[:number], targets[:number], states[:number], ages, lives
        rows = self.rows or tuple(new[:0].clone() for new in fresh)
        if carried:  # every shape is known to the host, which need not wait for the device
            rows[2][index], rows[3][index] = states[number:], rows[3][index] + iterations
            retired = rows[3][index] >= rows[4][index]
            for kept, new in zip(rows, fresh, strict=True):
                where = retired.view(-1, *[1] * (new.dim() - 1))
                kept[index] = torch.where(where, new[:carried], kept[index])
        room = self.size - len(rows[0])
        self.rows = tuple(
            torch.cat([kept, new[:room]]) for kept, new in zip(rows, fresh, strict=True)
        )


class Completion(Task):
    """Cross-entropy of the unknown cells of Sudoku boards.

    Args:
        data: puzzles with their solutions.
        symmetries: apply a random one to every training puzzle.
        givens: fewest and most. Each time a puzzle is seen, further cells of its solution are revealed,
            up to a number drawn between them. None: puzzles stay as they are.
        carried: a pool, of which every batch has as many boards as fresh ones.
    """

    size = 100

    def __init__(
        self, data: SudokuData, *, symmetries: bool = False, givens: tuple[int, int] | None = None,
        carried: CarriedStates | None = None,
    ) -> None:  # fmt: skip
        self.inputs, self.targets = data.train_puzzles, data.train_solutions
        self.tests = data.test_puzzles, data.test_solutions
        self.symmetries, self.givens, self.carried = symmetries, givens, carried

    def augmented(
        self, inputs: Tensor, targets: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        if self.givens is not None:
            least, most = self.givens
            size, device = (len(inputs), 1), generator.device
            number = torch.randint(least, most + 1, size, generator=generator, device=device)
            inputs = reveal_up_to(inputs, targets, number, generator)
        return (
            SudokuSymmetries()(inputs, targets, generator) if self.symmetries else (inputs, targets)
        )

    def state(self) -> dict[str, Any]:
        return {} if self.carried is None else {"rows": self.carried.rows}

    def restore(self, state: dict[str, Any]) -> None:
        if self.carried is not None:
            self.carried.rows = tuple(row.to(self.inputs.device) for row in state["rows"])

    def run(
        self, forward: Any, inputs: Tensor, targets: Tensor, generator: Any, **options: Any
    ) -> Any:
        if self.carried is None:
            return super().run(forward, inputs, targets, generator, **options)
        index, inputs, targets, states = self.carried.join(inputs, targets, generator)
        outputs, states = forward(inputs, **options, state=states)
        self.carried.put(index, inputs, targets, states, options["iterations"], generator)
        # The mean is taken over the terms of the fresh boards and the carried ones.
        return self.loss(outputs, inputs, targets)

    def loss(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Of logits (B, 81, 9), or the mean over K answers (K, B, 81, 9)."""
        answers = outputs if outputs.dim() == 4 else outputs.unsqueeze(0)
        unknown = inputs == 0
        wanted = torch.where(unknown, targets - 1, -1).expand(answers.shape[:-1]).flatten()
        total = F.cross_entropy(answers.flatten(0, 2), wanted, reduction="sum", ignore_index=-1)
        return total / len(answers), unknown.sum()

    def measures(
        self, outputs: Tensor, inputs: Tensor, targets: Tensor
    ) -> dict[str, tuple[float, int]]:
        right, unknown = board_counts(outputs.argmax(-1) + 1, inputs, targets)
        cells = int(unknown.sum())
        return {
            "test_loss": (self.loss(outputs, inputs, targets)[0].item(), cells),
            "cell_accuracy": (float(right.sum()), cells),
            "solved_boards": (float((right == unknown).sum()), len(inputs)),
        }


def by_givens(
    boards: Boards, numbers: Sequence[int], generator: torch.Generator, option: str, most: int | None = None
) -> dict[int, Boards]:  # fmt: skip
    """Return up to ``most`` puzzles for each number of givens, with further cells of their solutions.

    Puzzles that have more givens to begin with are left out; generated ones have about 24.
    """
    (puzzles, solutions), sets = boards, dict[int, Boards]()
    for number in sorted(set(numbers)):
        few = ((puzzles != 0).sum(1) <= number).nonzero()[:most, 0]
        if len(few):
            revealed = reveal_up_to(puzzles[few], solutions[few], number, generator)
            sets[number] = revealed, solutions[few]
    if not sets:
        least = int((puzzles != 0).sum(1).min())
        raise SystemExit(
            f"--{option} must be at least {least} for these puzzles, got {max(numbers)}"
        )
    return sets


def hard_puzzles(names: Sequence[str]) -> dict[str, Boards]:
    """Public sets of hard puzzles by name, and their solutions."""
    path = find("sudoku", "hard.npz")
    if path is None:
        raise SystemExit(str(missing("sudoku/hard.npz")))
    return {name: read_list(path, f"{name}_") for name in names}


def hard_sets(most: int) -> dict[str, Boards]:
    """Up to ``most`` evenly spaced puzzles of each public test set, and their solutions."""
    sets = hard_puzzles(HARD)
    chosen = {
        k: torch.linspace(0, len(p) - 1, min(most, len(p))).long() for k, (p, _) in sets.items()
    }
    return {name: (p[chosen[name]], s[chosen[name]]) for name, (p, s) in sets.items()}


def solved(digits: Tensor, boards: Boards) -> Tensor:
    """(B,) bool: all unknown cells are as in the solutions."""
    right, unknown = board_counts(digits, *boards)
    return right == unknown


@torch.no_grad()
def solved_after(model: Any, boards: Boards, marks: Sequence[int], size: int = 100) -> list[float]:
    """Shares of the boards that are solved after each number of iterations in ``marks``."""
    found: dict[int, list[Tensor]] = {number: [] for number in marks}
    for puzzles, solutions in zip(*(part.split(size) for part in boards), strict=True):
        steps = model.trajectory(puzzles, max(marks))
        for number, logits in enumerate(
            tqdm(steps, "iterations", max(marks), False, disable=None), 1
        ):
            if number in found:
                found[number].append(solved(logits.argmax(-1) + 1, (puzzles, solutions)))
    return [torch.cat(found[number]).double().mean().item() for number in marks]


@torch.no_grad()
def row_of(
    name: str, model: Any, boards: Boards, marks: Sequence[int], guesses: int
) -> dict[str, Any]:
    """Percentages solved by logic, after numbers of iterations, and where each board stops by itself."""
    singles = solve_by_singles(boards[0].cpu())
    row: dict[str, Any] = {"boards": name, "number": len(singles)}
    row["singles"] = (
        100 * solved(singles, (boards[0].cpu(), boards[1].cpu())).double().mean().item()
    )
    device = next(model.parameters()).device
    here = boards[0].to(device), boards[1].to(device)
    row |= {str(n): 100 * x for n, x in zip(marks, solved_after(model, here, marks), strict=True)}
    end = model.solve(here[0], guesses=guesses, slots=100, on_failure="ignore")
    right = solved(end.digits, here)
    row["stops by itself"] = 100 * right.double().mean().item()
    wrong, evaluations = (
        int((end.consistent & ~right).sum()),
        end.evaluations.double().mean().item(),
    )
    return row | {"wrong": wrong, "evaluations": evaluations}
