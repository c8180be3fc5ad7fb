"""The Sudoku task: its loss, its measures, and a training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.data import SudokuSymmetries, load_sudoku
from implicit_attn.models import HyperSET, SudokuModel
from implicit_attn.training import Recipe, SudokuCompletion, Training

for module in ("safetensors", "tqdm", "lightning_fabric"):
    pytest.importorskip(module, reason="needs the extra [training]")

DATA = load_sudoku(6, 5, source="generated", seed=0)
TASK = SudokuCompletion(DATA, batch=2)


def test_the_loss_is_summed_over_unknown_cells() -> None:
    puzzles, solutions = TASK.inputs, TASK.targets
    logits = torch.randn(len(puzzles), 81, 9, generator=torch.Generator().manual_seed(0))
    single = F.cross_entropy(logits.flatten(0, 1), solutions.flatten() - 1, reduction="none")
    expected = single[(puzzles == 0).flatten()].sum()
    torch.testing.assert_close(TASK.loss(logits, puzzles, solutions), expected)
    assert TASK.terms(puzzles, solutions) == int((puzzles == 0).sum())


class Oracle(nn.Module):
    """Knows all solutions of the test puzzles but for the given cells."""

    def __init__(self, wrong: list[tuple[int, int]]) -> None:
        super().__init__()
        self.answers = DATA.test_solutions.clone()
        for board, cell in wrong:
            self.answers[board, cell] = self.answers[board, cell] % 9 + 1

    def forward(self, puzzles: Tensor) -> Tensor:
        board = (puzzles[:, None] == DATA.test_puzzles).all(2).int().argmax(1)
        return F.one_hot(self.answers[board] - 1, 9).float() * 20


def test_measures_of_a_model_whose_mistakes_are_known() -> None:
    unknown = DATA.test_puzzles == 0
    cells = [(board, int(unknown[board].nonzero()[k])) for board, k in ((1, 0), (1, 3), (4, 2))]
    model = Oracle([*cells, (2, int((~unknown[2]).nonzero()[0]))])  # the last one is a clue
    whole = TASK.evaluate(model, 0, 1)
    number = int(unknown.sum())
    assert whole["cell_accuracy"] == (number - 3, number)
    assert whole["solved_boards"] == (3, 5)
    parts = [TASK.evaluate(model, rank, 7) for rank in range(7)]  # more processes than boards
    for name, (top, below) in whole.items():
        assert sum(part[name][0] for part in parts) == pytest.approx(top)
        assert sum(part[name][1] for part in parts) == below


def test_a_small_model_trains(tmp_path: Path) -> None:
    torch.manual_seed(0)
    backbone = HyperSET(
        16, 2, 32, iterations=4, step_size="conditioned-input", initial_step=0.1, time_dim=8
    )
    task = SudokuCompletion(DATA, SudokuSymmetries())
    training = Training(SudokuModel(backbone), task, Recipe(8, 3, 1e-2), tmp_path / "checkpoint")
    training.run()
    first, last = training.history[0], training.history[-1]
    assert set(first) == {
        "epoch", "loss", "seconds", "test_loss", "cell_accuracy", "solved_boards",
    }  # fmt: skip
    assert last["loss"] < first["loss"]
    assert "converged" not in training.status()
    assert training.summary().startswith("training ")


def test_symmetries_are_drawn_from_the_generator() -> None:
    task = SudokuCompletion(DATA, SudokuSymmetries())
    first = task.augmented(task.inputs, task.targets, torch.Generator().manual_seed(1))
    again = task.augmented(task.inputs, task.targets, torch.Generator().manual_seed(1))
    other = task.augmented(task.inputs, task.targets, torch.Generator().manual_seed(2))
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])
    assert TASK.augmented(task.inputs, task.targets, torch.Generator())[0] is task.inputs


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


def test_dropout_is_resumed_exactly(tmp_path: Path) -> None:
    """The masks of a batch are its own, whatever torch's generators went through before.

    On a CUDA device they are not in the checkpoint, and start anew in a new process.
    """

    def training(name: str, at: int = 0) -> Training:
        torch.manual_seed(0)
        backbone = HyperSET(8, 2, 8, iterations=2, initial_step=0.1, time_dim=8)
        model = SudokuModel(backbone, dropout=0.3)
        recipe = Recipe(2, 2, 1e-2)
        return Training(model, TASK, recipe, tmp_path / name, save_every=2, logs=[StopAt(at)])

    whole = training("whole")
    whole.run()
    with pytest.raises(RuntimeError, match="stopped"):
        training("parts", at=5).run()
    parts = training("parts")
    torch.rand(7)
    parts.resume()
    assert (parts.epoch, parts.batch) == (1, 1)  # in mid-epoch, of three batches
    torch.manual_seed(123)
    parts.run()
    for first, second in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert torch.equal(first, second)
