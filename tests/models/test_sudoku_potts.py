"""Sudoku as a Potts model: couplings, clues, statuses, learned graphs."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.potts import coupling_error
from implicit_attn.data import solve_sudoku
from implicit_attn.data.sudoku import CELLS, solved
from implicit_attn.models import (
    BoardStatus,
    FactoredAttention,
    PottsModel,
    SudokuPotts,
    fit_pseudolikelihood,
    random_symmetries,
    sudoku_pairs,
)


def full_boards(number: int, seed: int = 0) -> Tensor:
    chooser = random.Random(seed)
    boards = [solve_sudoku([0] * CELLS, most=1, chooser=chooser)[0] for _ in range(number)]
    return torch.tensor(boards)


def puzzles(number: int, clues: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random clues of random boards; with few, there may be several solutions."""
    solutions = full_boards(number, seed)
    generator = torch.Generator().manual_seed(seed)
    place = torch.rand(solutions.shape, generator=generator).argsort(1).argsort(1)
    return torch.where(place < clues, solutions, 0), solutions


@pytest.fixture(scope="module")
def rules() -> SudokuPotts:
    return SudokuPotts.from_rules()


@pytest.fixture(scope="module")
def learned() -> FactoredAttention:
    """A softmax head fitted to twenty boards, without fields and without symmetries."""
    model = FactoredAttention(81, 9, rows="softmax")
    model.field.requires_grad_(False)
    fit_pseudolikelihood(
        model, full_boards(20) - 1, solver="adam", steps=150, rate=0.1, batch=32,
        schedule="constant",
    )  # fmt: skip
    return model


def test_symmetries_show_the_graph_in_a_few_steps() -> None:
    model = FactoredAttention(81, 9, rows="softmax")
    fit_pseudolikelihood(
        model, full_boards(30) - 1, solver="adam", steps=15, rate=0.1, batch=128,
        schedule="constant", augment=random_symmetries,
    )  # fmt: skip
    scores = torch.linalg.matrix_norm(model.couplings()).triu(1)
    assert bool(sudoku_pairs().flatten()[scores.flatten().topk(810).indices].all())


def test_couplings_are_scaled_to_those_of_the_rules(
    rules: SudokuPotts, learned: FactoredAttention
) -> None:
    found, seven = SudokuPotts.from_model(learned), SudokuPotts(7 * learned.couplings())
    torch.testing.assert_close(found.couplings, seven.couplings, atol=1e-5, rtol=1e-4)
    on_graph = found.couplings[sudoku_pairs()].diagonal(dim1=1, dim2=2)
    assert float(on_graph.mean()) == pytest.approx(-8 / 9, abs=1e-5)
    torch.testing.assert_close(found.matrix, found.matrix.mT)
    assert coupling_error(rules.couplings, -3 * pair_identity()) == pytest.approx(2 / 3)


@pytest.mark.parametrize("scale", [1e-38, 1e38])
def test_the_scale_of_the_couplings_has_no_effect(learned: FactoredAttention, scale: float) -> None:
    found = SudokuPotts(learned.couplings() / learned.couplings().abs().max() * scale)
    torch.testing.assert_close(
        found.couplings, SudokuPotts.from_model(learned).couplings, atol=1e-5, rtol=1e-4
    )


def pair_identity() -> Tensor:
    return sudoku_pairs().float()[..., None, None] * torch.eye(9)


@pytest.mark.parametrize("how", ["solve", "decimate"])
def test_puzzles_with_many_clues_are_solved(
    rules: SudokuPotts, learned: FactoredAttention, how: str
) -> None:
    asked, _ = puzzles(6, 50)
    for model in (rules, SudokuPotts.from_model(learned)):
        answer = getattr(model, how)(asked)
        assert bool(answer.solved.all())
        assert bool(solved(answer.boards).all())  # there may be several solutions
        assert bool((answer.steps < 600).all())  # a finished board leaves


@pytest.mark.parametrize(
    ("how", "options"), [("solve", {"steps": 100}), ("decimate", {"steps": 2})]
)
def test_clues_stand_and_the_status_is_true(
    rules: SudokuPotts, how: str, options: dict[str, Any]
) -> None:
    asked, _ = puzzles(5, 22)
    asked = torch.cat([asked, torch.zeros(1, 81, dtype=torch.long), puzzles(1, 60)[0]])
    asked[0, :2] = 5  # two clues that contradict each other
    answer = getattr(rules, how)(asked, **options)
    assert torch.equal(answer.boards[asked != 0], asked[asked != 0])
    assert torch.equal(answer.solved, solved(answer.boards))
    assert bool(answer.solved[-1]) and not bool(answer.solved[0])
    undecided = (answer.probabilities.amax(2) < 0.5).any(1)
    wanted = torch.where(undecided, int(BoardStatus.UNDECIDED), int(BoardStatus.BROKEN))
    assert torch.equal(answer.status[~answer.solved], wanted[~answer.solved])
    torch.testing.assert_close(answer.probabilities.sum(2), torch.ones(7, 81))


@pytest.mark.parametrize("how", ["solve", "decimate"])
def test_probabilities_that_are_not_finite_are_told(how: str) -> None:
    huge = SudokuPotts.from_rules()
    huge.matrix.mul_(1e38)
    asked = torch.cat([puzzles(1, 22)[0], full_boards(1)])
    answer = getattr(huge, how)(asked)
    assert answer.status.tolist() == [int(BoardStatus.NONFINITE), int(BoardStatus.SOLVED)]
    assert not bool(answer.residual[0].isfinite()) and int(answer.steps[0]) < 600  # it left
    assert torch.equal(answer.boards[0][asked[0] != 0], asked[0][asked[0] != 0])


def test_a_puzzle_without_clues_is_decimated_to_the_end(rules: SudokuPotts) -> None:
    answer = rules.decimate(torch.zeros(1, 81, dtype=torch.long), steps=1)
    assert int(answer.steps) == 10 + 80  # the last cell is what the others leave
    torch.testing.assert_close(answer.probabilities.sum(2), torch.ones(1, 81))
    assert torch.equal((answer.probabilities.amax(2) < 1).sum(1), torch.tensor([1]))


def test_the_residual_is_that_of_the_means(rules: SudokuPotts) -> None:
    asked, _ = puzzles(3, 22)
    answer = rules.solve(asked, steps=20, beta=(0.5, 2.0))
    response = torch.softmax(2.0 * rules.field(answer.probabilities), -1)
    change = (response - answer.probabilities).abs().amax(2)
    torch.testing.assert_close(answer.residual, change.masked_fill(asked != 0, 0).amax(1))
    assert answer.steps.tolist() == [20, 20, 20]
    assert float(answer.residual.min()) > 1e-3
    # At one small beta the mean field has one fixed point, which the damped steps reach.
    still = rules.solve(asked, steps=400, beta=(0.5, 0.5))
    assert float(still.residual.max()) < 1e-4


def test_a_potts_model_is_taken_too() -> None:
    model = PottsModel(81, 9)
    with pytest.raises(ValueError, match="repel"):
        SudokuPotts.from_model(model)
    with torch.no_grad():
        model.couplings.weight = -pair_identity()
    torch.testing.assert_close(
        SudokuPotts.from_model(model).couplings, SudokuPotts.from_rules().couplings
    )


def test_wrong_couplings() -> None:
    with pytest.raises(TypeError, match="model"):
        SudokuPotts.from_model(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="81, 81, 9, 9"):
        SudokuPotts(torch.zeros(81, 81, 9, 8))
    with pytest.raises(TypeError, match="floating"):
        SudokuPotts(pair_identity().long())
    with pytest.raises(ValueError, match="repel"):
        SudokuPotts(pair_identity())
    with pytest.raises(ValueError, match="finite"):
        SudokuPotts(float("nan") * pair_identity())


@pytest.mark.parametrize(
    ("asked", "options", "kind", "message"),
    [
        (torch.zeros(1, 80, dtype=torch.long), {}, ValueError, "B, 81"),
        (torch.zeros(0, 81, dtype=torch.long), {}, ValueError, "B >= 1"),
        (torch.zeros(1, 81), {}, TypeError, "int64"),
        (torch.full((1, 81), 10), {}, ValueError, "10"),
        (torch.zeros(1, 81, dtype=torch.long), {"beta": (2.0, 1.0)}, ValueError, "beta"),
        (torch.zeros(1, 81, dtype=torch.long), {"beta": 0.5}, ValueError, "beta"),
        (torch.zeros(1, 81, dtype=torch.long), {"damping": 0.0}, ValueError, "damping"),
    ],
)
def test_mistakes(
    rules: SudokuPotts, asked: Tensor, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        rules.solve(asked, **options)
