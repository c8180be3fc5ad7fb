"""Boards: groups that are learned, the solver that repeats one update, Sudoku as a Potts model."""

from __future__ import annotations

import random
from typing import Any

import networkx
import pytest
import torch
from torch import Tensor

import solvers
from cases.spin_models import coupling_error
from implicit_attn.data import solve_sudoku
from implicit_attn.data.sudoku import CELLS, SudokuSymmetries, solved, unique_puzzles, units
from implicit_attn.models import (
    BoardSolver,
    BoardStatus,
    BoardUpdate,
    FactoredAttention,
    SudokuPotts,
    fit_pseudolikelihood,
    learn_groups,
    random_symmetries,
    sudoku_pairs,
)
from implicit_attn.models.boards import maximal_cliques, strong_pairs

# Groups of cells: from boards to couplings to a graph to its cliques.


def pairs_of(edges: list[tuple[int, int]], nodes: int) -> Tensor:
    pairs = torch.zeros(nodes, nodes, dtype=torch.bool)
    for a, b in edges:
        pairs[a, b] = pairs[b, a] = True
    return pairs


def test_the_groups_of_sudoku_are_its_units() -> None:
    assert maximal_cliques(sudoku_pairs()) == sorted(sorted(unit.tolist()) for unit in units())


@pytest.mark.parametrize("seed", range(6))
def test_cliques_of_random_graphs(seed: int) -> None:
    graph = networkx.gnp_random_graph(12, 0.2 + 0.12 * seed, seed=seed)
    expected = sorted(sorted(clique) for clique in networkx.find_cliques(graph) if len(clique) > 1)
    assert maximal_cliques(pairs_of(list(graph.edges), 12)) == expected


def test_strong_pairs_lie_above_the_widest_gap() -> None:
    colours = torch.eye(3, dtype=torch.float64) - 1 / 3
    weights = torch.tensor(
        [[0, 5.0, 0.2, 0.1], [4.8, 0, 4.0, 0.3], [0.2, 4.4, 0, 0.2], [0.3, 0.1, 0, 0]]
    )
    found, gap = strong_pairs(weights.double()[..., None, None] * colours)
    assert torch.equal(found, pairs_of([(0, 1), (1, 2)], 4))
    assert gap == pytest.approx((4.2 - 0.2) / 4.2)  # means of both directions
    assert strong_pairs(torch.zeros(4, 4, 3, 3))[1] == 0


def latin_squares(number: int, side: int, generator: torch.Generator | None = None) -> Tensor:
    """Random ones, (number, side * side): the cyclic one, its lines and colours permuted."""
    generator = generator or torch.Generator().manual_seed(0)
    orders = [torch.rand(number, side, generator=generator).argsort(1) for _ in range(3)]
    cyclic = (torch.arange(side)[:, None] + torch.arange(side)) % side
    squares = cyclic.expand(number, side, side)
    squares = squares.gather(1, orders[0][:, :, None].expand_as(squares))
    squares = squares.gather(2, orders[1][:, None, :].expand_as(squares))
    return orders[2].gather(1, squares.flatten(1))


def test_rows_and_columns_are_learned_from_latin_squares() -> None:
    """Any group structure, and no symmetry of the boards is used but that of the colours."""
    side, boards = 4, latin_squares(100, 4)
    rows = [list(range(side * k, side * k + side)) for k in range(side)]
    columns = [list(range(k, side * side, side)) for k in range(side)]
    state = torch.random.get_rng_state()
    assert learn_groups(boards, side, steps=50) == sorted(rows + columns)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_groups_of_sudoku_are_learned_from_boards() -> None:
    puzzles, solutions = unique_puzzles(8, 0)
    index = torch.arange(600) % 8
    generator = torch.Generator().manual_seed(0)
    boards = SudokuSymmetries()(puzzles[index], solutions[index], generator)[1]
    found = learn_groups(boards[:500] - 1, 9, steps=40)
    assert found == sorted(unit.tolist() for unit in units())


def test_groups_that_the_boards_do_not_show_are_refused() -> None:
    """Too few boards, too few steps, and cells that are alike instead of different."""
    boards = latin_squares(50, 4)
    with pytest.raises(ValueError, match=r"at least 33 to learn groups of 16 cells .* got 32"):
        learn_groups(boards[:32], 4)
    with pytest.raises(ValueError, match=r"the widest gap .* give more boards or steps"):
        learn_groups(boards, 4, steps=2)
    alike = boards[:, [0, 5, 10, 0]]
    with pytest.raises(ValueError, match=r"at most once in a group, .* in the cells \[0, 3\]"):
        learn_groups(alike, 4, steps=20)


@pytest.mark.parametrize(
    ("error", "boards", "message"),
    [
        (TypeError, torch.zeros(2, 4), "boards must be an int64 tensor, got torch.float32"),
        (TypeError, [[0, 1]], "boards must be an int64 tensor, got list"),
        (ValueError, torch.zeros(4, dtype=torch.int64), r"boards must be \(M, N\)"),
        (ValueError, torch.full((20, 4), 5), "colours in 0 .. 2"),
    ],
)
def test_bad_boards(error: type[Exception], boards: Tensor, message: str) -> None:
    with pytest.raises(error, match=message):
        learn_groups(boards, 3, steps=1)


# The board solver: its formula, its symmetries, its gradients, its solves.


UNITS = units().tolist()
LATIN = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8]]
SMALL: dict[str, Any] = {"cells": 9, "colours": 3, "features": 4, "width": 6, "iterations": 5}
PUZZLES = torch.tensor([[1, 0, 0, 0, 0, 2, 0, 3, 0], [0, 2, 0, 0, 0, 0, 0, 0, 1]])


def solver(groups: list[list[int]] = LATIN, **options: Any) -> Any:
    torch.manual_seed(0)
    return BoardSolver(groups, **(SMALL | options)).double().eval()


def test_the_update_is_its_formula() -> None:
    """Groups of unequal sizes, cells in no group, in one and in several."""
    groups = [[0, 1, 2], [2, 3]]
    model = solver(groups, cells=5, colours=3)
    update = model.update
    z = torch.randn(2, 5, 3, 4, dtype=torch.float64).tanh()
    marks = model.marks(torch.tensor([[0, 1, 0, 3, 0], [2, 0, 0, 0, 0]]))
    found = update(z, marks)
    relu, linear = torch.relu, torch.nn.functional.linear
    for b in range(2):
        for i in range(5):
            for a in range(3):
                cell = relu(update.to_cell(z[b, i].sum(0) / 3**0.5))
                total = linear(cell, update.from_cell.weight)
                for group in (group for group in groups if i in group):
                    member = relu(update.to_group(z[b, group, a].sum(0) / len(group) ** 0.5))
                    total = total + linear(member, update.from_group.weight)
                total = total + linear(z[b, i, a], update.own.weight)
                total = total + update.embedding(marks[b, i, a])
                r, s = update.output(relu(total)).split(4)
                expected = z[b, i, a] + s.sigmoid() * (r.tanh() - z[b, i, a])
                torch.testing.assert_close(found[b, i, a], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(update(z, update.prepare(marks)), found, rtol=0, atol=0)


def test_gradients_of_the_update() -> None:
    model = solver()
    marks = model.marks(PUZZLES[:1])
    z = torch.rand(1, 9, 3, 4, dtype=torch.float64, requires_grad=True)
    for parameter in model.update.parameters():  # no kink of a relu near the points
        torch.nn.init.normal_(parameter, std=0.5)
    assert torch.autograd.gradcheck(lambda z: model.update(z, marks), (z,))


def test_symmetries_of_sudoku_are_kept() -> None:
    """Exactly those: a permutation of cells that breaks the groups changes the answer."""
    model = solver(UNITS, cells=81, colours=9)
    puzzles, solutions = unique_puzzles(3, 0)
    # What moves the puzzle must move the answer: follow it by numbered digits of the cells.
    moved, _ = SudokuSymmetries()(puzzles, solutions, torch.Generator().manual_seed(1))
    before, after = (model(boards).amax(2).sort(1).values for boards in (puzzles, moved))
    torch.testing.assert_close(before, after, rtol=1e-9, atol=1e-10)
    other = model(puzzles[:, torch.randperm(81, generator=torch.Generator().manual_seed(0))])
    assert (other.amax(2).sort(1).values - before).abs().max() > 1e-6


def test_colours_are_alike() -> None:
    model = solver()
    swapped = torch.tensor([0, 3, 1, 2])[PUZZLES]
    torch.testing.assert_close(model(swapped)[..., [2, 0, 1]], model(PUZZLES), rtol=0, atol=1e-12)


def test_iterations_in_evaluation_and_in_training() -> None:
    model = solver(window=2)
    states = list(model.trajectory(PUZZLES, 7))
    torch.testing.assert_close(model(PUZZLES), states[4], rtol=0, atol=0)
    torch.testing.assert_close(model(PUZZLES, iterations=7), states[6], rtol=0, atol=0)
    model.train()
    kept = model(PUZZLES, iterations=7)
    assert kept.shape == (2, 2, 9, 3)
    torch.testing.assert_close(kept.detach(), torch.stack(states[5:]).detach(), rtol=0, atol=0)
    with pytest.raises(ValueError, match="iterations must be >= the window, 2, got 1"):
        model(PUZZLES, iterations=1)


def test_gradients_reach_back_through_the_window_alone() -> None:
    wide, narrow = solver(window=4).train(), solver(window=1).train()
    wide(PUZZLES, 4)[-1].square().sum().backward()
    narrow(PUZZLES, 4)[-1].square().sum().backward()
    gradients = [model.update.own.weight.grad for model in (wide, narrow)]
    assert (gradients[0] - gradients[1]).abs().max() > 1e-6
    one = solver()
    marks = one.update.prepare(one.marks(PUZZLES))
    state = one.update.initial(marks)
    for _ in range(3):
        state = one.update.advance(state, marks).detach()
    one.classify(one.update.advance(state, marks)).square().sum().backward()
    torch.testing.assert_close(one.update.own.weight.grad, gradients[1], rtol=1e-10, atol=1e-12)


def latin_puzzles(number: int, unknown: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    boards = latin_squares(number, 4, generator) + 1
    hidden = torch.rand(boards.shape, generator=generator).argsort(1) < unknown
    return boards.masked_fill(hidden, 0), boards


LINES = [list(range(4 * k, 4 * k + 4)) for k in range(4)] + [
    list(range(k, 16, 4)) for k in range(4)
]


@pytest.fixture(scope="module")
def trained() -> Any:
    """A solver of Latin squares of side 4 after 100 steps on seven unknown cells."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = BoardSolver(LINES, 16, 4, features=12, width=24, iterations=4)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(100):
        given, wanted = latin_puzzles(32, 7, generator)
        unknown = given == 0
        answers = model(given)[:, unknown].flatten(0, 1)
        targets = (wanted[unknown] - 1).repeat(4)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(answers, targets).backward()
        optimizer.step()
    return model.eval()


def test_it_learns_to_complete_boards_that_it_has_not_seen(trained: Any) -> None:
    """Latin squares: whole boards right, more of them after four iterations than after one."""
    given, wanted = latin_puzzles(300, 7, torch.Generator().manual_seed(1))
    found = [trained(given, iterations=n).argmax(-1) + 1 for n in (1, 4)]
    shares = [((one == wanted) | (given > 0)).all(1).double().mean() for one in found]
    assert shares[0] < 0.5 and shares[1] > 0.7, shares


def test_guesses_are_taken_only_where_they_agree_with_the_groups(trained: Any) -> None:
    given, _ = latin_puzzles(60, 11, torch.Generator().manual_seed(2))
    with torch.no_grad():
        plain = trained.solve(given, stop="consistent", max_steps=8)
        found = trained.solve(given, stop="consistent", max_steps=8, guesses=4)
    assert not plain.guesses.any() and not plain.consistent.all()
    assert found.consistent.sum() > plain.consistent.sum()
    assert torch.equal(found.guesses == 0, plain.consistent) and found.guesses.max() == 4
    assert (found.guesses[~found.consistent] == 4).all()
    assert (found.evaluations > plain.evaluations)[found.guesses > 0].all()
    assert ((found.digits == given) | (given == 0)).all()
    whole = found.digits[:, LINES].sort(-1).values == torch.arange(1, 5)
    assert torch.equal(whole.flatten(1).all(1), found.consistent)
    kept = found.guesses.bool() & ~found.consistent  # no guess agreed: the first answer stays
    for name in ("digits", "value", "status", "residual", "steps"):
        for same in (kept, plain.consistent):
            assert torch.equal(getattr(found, name)[same], getattr(plain, name)[same]), name


def test_a_board_without_a_cell_to_guess() -> None:
    full = torch.full((1, 9), 1)  # contradicts itself
    assert solver().solve(full, stop="consistent", guesses=2).guesses.item() == 0
    for wrong in ({"guesses": -1}, {"guesses": 1}):
        with pytest.raises(ValueError, match="guesses"):
            solver().solve(full, **wrong)


def test_boards_go_on_from_carried_states() -> None:
    """The last boards of a batch from given states, the others from zero."""
    model = solver(window=2).train()
    _, half = model(PUZZLES[1:], 3, torch.empty(0))
    logits, states = model(PUZZLES, 3, half)
    assert logits.shape == (2, 2, 9, 3) and not states.requires_grad
    torch.testing.assert_close(logits[:, :1], model(PUZZLES[:1], 3), rtol=0, atol=1e-12)
    torch.testing.assert_close(logits[:, 1:], model(PUZZLES[1:], 6), rtol=0, atol=1e-12)
    torch.testing.assert_close(model.classify(states), logits[-1], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups": []}, "groups must hold at least one group"),
        ({"groups": [[0, 9]]}, r"groups must hold different cells in 0 .. 8 each, got \[0, 9\]"),
        ({"groups": [[0, 0]]}, "groups must hold different cells"),
        ({"width": 3}, "width must not be 3"),
        ({"window": 6}, "window must be <= iterations, 5, got 6"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BoardSolver(**({"groups": LATIN, **SMALL} | changes))


@pytest.mark.parametrize(
    ("puzzles", "message"),
    [
        (PUZZLES[:, :8], r"puzzles must be integers \(B, 9\)"),
        (PUZZLES.double(), "puzzles must be integers"),
        (PUZZLES + 1, r"puzzles must be in 0 .. 3, got \[4\]"),
        (PUZZLES - 1, "puzzles must be in 0 .. 3, got"),
    ],
)
def test_bad_puzzles(puzzles: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        solver()(puzzles)


def test_no_boards_have_no_answers() -> None:
    """As in a last batch of nothing; a solve, which has no equation then, says so."""
    model = solver(window=2)
    assert model(PUZZLES[:0]).shape == (0, 9, 3)
    assert model.train()(PUZZLES[:0]).shape == (2, 0, 9, 3)
    with pytest.raises(ValueError, match="at least one sample"):
        model.solve(PUZZLES[:0])


SOLVED_BOARD = "".join(str(digit) for digit in unique_puzzles(1, 0)[1][0].tolist())


def test_boards_are_read_and_answered_in_the_shape_they_have() -> None:
    model = solver(UNITS, cells=81, colours=9).float()
    text = SOLVED_BOARD[:-1] + "."
    board = torch.tensor([int(sign) for sign in SOLVED_BOARD[:-1] + "0"])
    forms: list[Any] = [text, text.replace(".", "0"), [text] * 2, board, board.view(9, 9)]
    forms += [board[None], board.view(1, 9, 9).to(torch.uint8)]
    shapes = [(81,), (81,), (2, 81), (81,), (9, 9), (1, 81), (1, 9, 9)]
    for form, shape in zip(forms, shapes, strict=True):
        found = model.solve(form, max_steps=2, on_failure="ignore")
        assert found.digits.shape == shape and found.digits.dtype == torch.int64
        assert torch.equal(found.digits.view(-1, 81)[0, :80], board[:80])
        assert found.value.shape == (found.digits.numel() // 81, 81, 9)
    for wrong in (text[:80], "x" + text[1:], [text, text + "."]):
        with pytest.raises(ValueError, match="puzzles must be strings of 81 digits or dots"):
            model.solve(wrong)
    with pytest.raises(TypeError, match="puzzles must be a tensor, a string or a list"):
        model.solve(board.tolist())


def test_a_board_ends_at_its_first_answer_that_agrees_with_the_groups() -> None:
    model = solver(UNITS, cells=81, colours=9)
    one = "." + SOLVED_BOARD[1:]
    wrong = SOLVED_BOARD[:80] + SOLVED_BOARD[79]  # twice in the last row
    answer = model.solve([SOLVED_BOARD, wrong], stop="consistent", max_steps=4)
    assert answer.consistent.tolist() == answer.converged.tolist() == [True, False]
    assert answer.steps.tolist() == [1, 4] and answer.evaluations.tolist() == [2, 5]
    state = [model.update.initial(model.update.prepare(model.marks(answer.digits[:1])))]
    prepared = model.update.prepare(model.marks(answer.digits[:1]))
    for _ in range(2):
        state.append(model.update.advance(state[-1], prepared))
    residual = (state[2] - state[1]).norm() / state[2].norm()
    torch.testing.assert_close(answer.residual[0], residual.detach(), rtol=1e-10, atol=0)
    torch.testing.assert_close(answer.value[:1], model.classify(state[1]), rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="stop must be one of"):
        model.solve(one, stop="never")
    with pytest.raises(TypeError, match="tolerance"):
        model.solve(one, stop="consistent", tolerance=solvers.Tolerance())


def test_bad_calls_of_the_update() -> None:
    update = BoardUpdate(LATIN, 9, 3)
    z = torch.zeros(1, 9, 3, 24)
    with pytest.raises(ValueError, match="x must be the marks"):
        update(z)
    with pytest.raises(ValueError, match="mask must be None"):
        update(z, torch.zeros(1, 9, 3, 3), mask=torch.ones(1, 9, dtype=torch.bool))


# Sudoku as a Potts model: couplings, clues, statuses, learned graphs.


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
