"""The task of boards with random givens, its training, and the measures by iterations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from implicit_attn.data import board_counts, load_sudoku
from implicit_attn.data.sudoku_boards import SudokuSymmetries, solved, units
from implicit_attn.models import BoardSolver
from implicit_attn.training import BoardCompletion, Recipe, SudokuCompletion, Training
from implicit_attn.training.boards.completion import reveal_up_to
from implicit_attn.training.boards.measures import solved_by_iterations, solved_when_converged

for module in ("safetensors", "tqdm", "lightning_fabric"):
    pytest.importorskip(module, reason="needs the extra [training]")

DATA = load_sudoku(6, 5, source="generated", more=0, seed=0)
SIZES: dict[str, Any] = {"features": 8, "width": 16, "iterations": 6, "window": 3}


def solver() -> BoardSolver:
    torch.manual_seed(0)
    return BoardSolver(units().tolist(), layer={"on_failure": "ignore"}, **SIZES)


def test_the_loss_is_the_mean_over_the_answers() -> None:
    task = BoardCompletion(DATA)
    puzzles, solutions = task.inputs, task.targets
    logits = torch.randn(3, len(puzzles), 81, 9, generator=torch.Generator().manual_seed(0))
    plain = SudokuCompletion(DATA)
    expected = sum(plain.loss(each, puzzles, solutions) for each in logits) / 3
    torch.testing.assert_close(task.loss(logits, puzzles, solutions), expected)
    torch.testing.assert_close(
        task.loss(logits[0], puzzles, solutions), plain.loss(logits[0], puzzles, solutions)
    )
    assert task.terms(puzzles, solutions) == plain.terms(puzzles, solutions)


def test_givens_are_drawn_anew_for_every_batch() -> None:
    task = BoardCompletion(DATA, givens=(30, 34))
    generator = torch.Generator().manual_seed(0)
    drawn = [task.augmented(task.inputs, task.targets, generator)[0] for _ in range(40)]
    numbers = torch.cat([(each != 0).sum(1) for each in drawn])
    assert set(numbers.tolist()) == {30, 31, 32, 33, 34}
    assert not torch.equal(drawn[0], drawn[1])
    for each in drawn:
        assert ((each == task.inputs) | (task.inputs == 0)).all()
        assert ((each == task.targets) | (each == 0)).all()
    again = task.augmented(task.inputs, task.targets, torch.Generator().manual_seed(0))[0]
    assert torch.equal(again, drawn[0])


def test_symmetries_are_drawn_after_the_givens() -> None:
    task = BoardCompletion(DATA, SudokuSymmetries(), givens=(30, 34)).to(torch.device("cpu"))
    assert isinstance(task, BoardCompletion) and task.givens == (30, 34)
    puzzles, solutions = task.augmented(task.inputs, task.targets, torch.Generator())
    assert solved(solutions).all() and not torch.equal(solutions, task.targets)
    assert ((puzzles == solutions) | (puzzles == 0)).all()
    assert ((puzzles != 0).sum(1) >= 30).all()


def test_a_puzzle_with_more_givens_keeps_them() -> None:
    few = reveal_up_to(DATA.train_puzzles, DATA.train_solutions, 5, torch.Generator())
    assert torch.equal(few, DATA.train_puzzles)


@pytest.mark.parametrize("givens", [(20, 19), (17, 81), (-1, 3)])
def test_bad_givens(givens: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="givens must"):
        BoardCompletion(DATA, givens=givens)


class StopAt:
    """A log that ends a training by an error after a step, as a bug in it would."""

    def __init__(self, at: int) -> None:
        self.at = at

    def start(self, step: int, epochs: int) -> None:
        """Nothing to do."""

    def step(self, step: int, values: dict[str, float]) -> None:
        if step == self.at:
            raise RuntimeError("stopped")

    def epoch(self, step: int, values: dict[str, float]) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


def test_training_with_random_iterations_resumes_exactly(tmp_path: Path) -> None:
    def training(name: str, at: int = 0) -> Training:
        recipe = Recipe(3, 3, 1e-2, iterations=(3, 6))
        task = BoardCompletion(DATA, givens=(40, 70))
        return Training(solver(), task, recipe, tmp_path / name, save_every=1, logs=[StopAt(at)])

    whole = training("whole")
    whole.run()
    assert whole.history[-1]["loss"] < whole.history[0]["loss"]
    assert set(whole.history[0]) >= {"loss", "test_loss", "cell_accuracy", "solved_boards"}
    with pytest.raises(RuntimeError, match="stopped"):
        training("parts", at=4).run()
    parts = training("parts")
    parts.resume()
    assert (parts.epoch, parts.batch) == (1, 1)
    parts.run()
    for one, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert torch.equal(one, other)


def nearly_solved() -> tuple[Tensor, Tensor]:
    """Puzzles with one to three unknown cells."""
    generator = torch.Generator().manual_seed(0)
    number = torch.tensor([[78], [79], [80], [80], [80]])
    return reveal_up_to(
        DATA.test_puzzles, DATA.test_solutions, number, generator
    ), DATA.test_solutions


def test_measures_are_those_of_the_answers() -> None:
    model = solver().eval()
    puzzles, solutions = nearly_solved()
    shares = solved_by_iterations(model, puzzles, solutions, (1, 4), batch=2)
    for number, boards, cells in zip((1, 4), *shares, strict=True):
        answer = model(puzzles, iterations=number).argmax(-1) + 1
        right, unknown = board_counts(answer, puzzles, solutions)
        assert boards == pytest.approx((right == unknown).float().mean().item())
        assert cells == pytest.approx((right.sum() / unknown.sum()).item())
    solution = model.solve(puzzles, max_steps=9, on_failure="ignore")
    own = solved_when_converged(
        model, puzzles, solutions, batch=2, max_steps=9, on_failure="ignore"
    )
    assert own.converged == pytest.approx(solution.converged.float().mean().item())
    assert own.mean_evaluations == pytest.approx(solution.evaluations.float().mean().item())
    right, unknown = board_counts(solution.value.argmax(-1) + 1, puzzles, solutions)
    both = (right == unknown)[solution.converged].float().mean().nan_to_num().item()
    assert own.solved == pytest.approx((right == unknown).float().mean().item())
    assert own.solved_of_converged == pytest.approx(both)
    with pytest.raises(ValueError, match="at and puzzles must not be empty"):
        solved_by_iterations(model, puzzles, solutions, ())
    with pytest.raises(ValueError, match="puzzles must not be empty"):
        solved_when_converged(model, puzzles[:0], solutions[:0])
    with pytest.raises(ValueError, match="batch must be >= 1, got 0"):
        solved_by_iterations(model, puzzles, solutions, (1,), batch=0)
