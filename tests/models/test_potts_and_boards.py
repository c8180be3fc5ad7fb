"""Potts models and factored attention; learned groups; the board solver."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import networkx
import pytest
import torch
from torch import Tensor

import solvers
from cases.spin_models import all_colours
from cases.spin_models import couplings as random_couplings
from implicit_attn.data.sudoku import SudokuSymmetries, solve_sudoku, unique_puzzles, units
from implicit_attn.models import (
    BoardSolver,
    FactoredAttention,
    PottsModel,
    fit_pseudolikelihood,
    learn_groups,
)
from implicit_attn.models.boards import maximal_cliques
from implicit_attn.models.potts import ROWS
from implicit_attn.weights import load_pretrained

# The Potts model: its conditionals by enumeration, its gradient by the formula, its gauge.


SITES, COLOURS = 4, 3


def test_logits_are_the_conditionals_of_the_joint_distribution() -> None:
    model, generator = PottsModel(SITES, COLOURS).double(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.couplings.weight = random_couplings(SITES, COLOURS, 1.0, generator)
        model.field.copy_(torch.randn(SITES, COLOURS, generator=generator))
    states = all_colours(SITES, COLOURS)
    weight = (-model.energy(states)).exp().view((COLOURS,) * SITES)
    conditional = torch.softmax(model.logits(states), -1)
    for site in range(SITES):
        wanted = (weight / weight.sum(site, keepdim=True)).movedim(site, -1)
        # Entry [s] of the others, then every colour of the site.
        found = conditional[:, site].view(*(COLOURS,) * SITES, COLOURS).select(site, 0)
        torch.testing.assert_close(found, wanted)


# Factored attention as a Potts model: rank, row sums, three sites, gradients.


def drawn(sites: int, colours: int, heads: int, rows: str, power: int = 1) -> FactoredAttention:
    """A model with all parameters at random, float64."""
    generator = torch.Generator().manual_seed(0)
    model = FactoredAttention(sites, colours, heads, rows, power).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def drawn_colours(model: FactoredAttention, samples: int = 4) -> Tensor:
    shape = (samples, model.sites)
    return torch.randint(model.colours, shape, generator=torch.Generator().manual_seed(1))


# With 9 heads of 4 sites and 3 colours the product with J is cheaper than the heads.
@pytest.mark.parametrize("heads", [1, 9])
@pytest.mark.parametrize("rows", ROWS)
def test_logits_are_those_of_the_couplings(rows: str, heads: int) -> None:
    model = drawn(4, 3, heads, rows)
    s = drawn_colours(model)
    couplings = model.couplings()
    wanted = model.field.expand(len(s), -1, -1).clone()
    for i in range(4):
        for j in range(4):
            wanted[:, i] += couplings[i, j].T[s[:, j]]
    torch.testing.assert_close(model.logits(s), wanted)
    assert bool((couplings.diagonal() == 0).all())
    torch.testing.assert_close(model.penalty(), 0.5 * couplings.square().sum())
    others = 1 - torch.eye(4, dtype=torch.float64)
    weights = model.scores * others
    if rows != "linear":
        strength = model.scores.exp() * others
        weights = strength / (strength.sum(-1, keepdim=True) + (rows == "sink"))
    torch.testing.assert_close(model.attention(), weights)


# Fits by pseudo-likelihood: what the record says, and that it is true.


def data(samples: int = 60) -> Tensor:
    """Four sites of three colours; the second follows the first, nine times in ten."""
    generator = torch.Generator().manual_seed(0)
    s = torch.randint(3, (samples, 4), generator=generator)
    follow = torch.rand(samples, generator=generator) < 0.9
    s[:, 1] = torch.where(follow, s[:, 0], s[:, 1])
    return s


def test_a_converged_fit_is_at_the_minimum() -> None:
    model = PottsModel(4, 3).double()
    fit = fit_pseudolikelihood(model, data(), 0.01, steps=200, tolerance=1e-6)
    assert fit.status == "converged" and fit.gradient <= 1e-6
    objective = model.pseudo_likelihood(data()) + 0.01 * model.penalty()
    gradients = torch.autograd.grad(objective, list(model.parameters()))
    assert max(float(each.abs().max()) for each in gradients) < 1e-6
    assert math.isclose(fit.losses[-1], float(objective.detach()), rel_tol=1e-9)
    assert fit.losses[0] == pytest.approx(math.log(3))
    assert all(parameter.grad is None for parameter in model.parameters())


# Groups of cells: from boards to couplings to a graph to its cliques.


def pairs_of(edges: list[tuple[int, int]], nodes: int) -> Tensor:
    pairs = torch.zeros(nodes, nodes, dtype=torch.bool)
    for a, b in edges:
        pairs[a, b] = pairs[b, a] = True
    return pairs


@pytest.mark.parametrize("seed", [1, 4])
def test_cliques_of_random_graphs(seed: int) -> None:
    graph = networkx.gnp_random_graph(12, 0.2 + 0.12 * seed, seed=seed)
    expected = sorted(sorted(clique) for clique in networkx.find_cliques(graph) if len(clique) > 1)
    assert maximal_cliques(pairs_of(list(graph.edges), 12)) == expected


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


# The board solver: its formula, its symmetries, its gradients, its solves.


UNITS = units().tolist()
LATIN = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8]]
SMALL: dict[str, Any] = {"cells": 9, "colours": 3, "features": 4, "width": 6, "iterations": 5}


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
        options: Any = {"max_steps": 8, "on_failure": "ignore"}
        plain = trained.solve(given, **options)
        found = trained.solve(given, guesses=4, **options)
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


SOLVED_BOARD = "".join(str(digit) for digit in unique_puzzles(1, 0)[1][0].tolist())


def test_a_board_ends_at_its_first_answer_that_agrees_with_the_groups() -> None:
    model = solver(UNITS, cells=81, colours=9)
    one = "." + SOLVED_BOARD[1:]
    wrong = SOLVED_BOARD[:80] + SOLVED_BOARD[79]  # twice in the last row
    with pytest.warns(solvers.SolveWarning):
        answer = model.solve([SOLVED_BOARD, wrong], max_steps=4)
    with pytest.raises(solvers.SolveError) as caught:
        model.solve([SOLVED_BOARD, wrong], max_steps=4, on_failure="raise")
    assert torch.equal(caught.value.solution.digits, answer.digits)  # type: ignore[attr-defined]
    assert answer.consistent.tolist() == [True, False] and not answer.converged.any()
    assert answer.statuses == ["STOPPED", "MAX_STEPS"]
    assert answer.evaluations.tolist() == [1, 4]  # a complete board is consistent at the start
    prepared = model.update.prepare(model.marks(answer.digits))
    state = [model.update.start(prepared, prepared)]
    for _ in range(4):
        state.append(model.update.advance(state[-1], prepared))
    residual = (state[4] - state[3])[1].norm() / state[4][1].norm()
    torch.testing.assert_close(answer.residual[1], residual.detach(), rtol=1e-10, atol=0)
    found = model.classify(state[3])[1:][answer.value[1:].isfinite()]  # other colours are excluded
    torch.testing.assert_close(answer.value[1].amax(-1), found, rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="stop"):
        model.solve(one, stop="never")
    with pytest.raises(TypeError, match="iterations"):
        model.solve(one, iterations=3)


def test_a_rule_is_asked_up_to_max_steps_and_the_value_is_the_last_iterate() -> None:
    """A rotation: its residual never decreases."""
    never: Any = {"stop": lambda z: torch.zeros(1, dtype=torch.bool), "solver": "forward"}
    turn = lambda z: torch.stack((-1.1 * z[:, 1], z[:, 0]), 1)  # noqa: E731
    found = solvers.fixed_point(
        turn, torch.ones(1, 2), max_steps=121, tolerance=0.0, on_failure="ignore", **never
    )
    assert found.statuses == ["MAX_STEPS"] and found.evaluations.item() == 121
    z = torch.ones(1, 2)
    for _ in range(120):
        z = turn(z)
    torch.testing.assert_close(found.value, z)


HARD = "8..........36......7..9.2...5...7.......457.....1...3...1....68..85...1..9....4.."


def test_a_hard_board_is_solved_or_drawn_as_what_it_is() -> None:
    """The drawing of a board is itself a board."""
    model: Any = load_pretrained("sudoku-solver")
    right = torch.tensor(solve_sudoku([int(sign) for sign in HARD.replace(".", "0")])[0])
    with pytest.warns(solvers.SolveWarning):
        answer = model.solve(HARD)
    assert not answer.consistent.any() and answer.statuses == ["MAX_STEPS"]
    drawn, _, state = str(answer).rpartition("\n")
    assert len(drawn.splitlines()) == 9 + 2 and "NOT CONSISTENT" in state
    assert torch.equal(model._read(drawn), answer.digits)
    answer = model.solve(HARD, guesses=8)
    assert answer.consistent.all() and answer.statuses == ["STOPPED"]
    assert torch.equal(answer.digits[0], right)
    assert len(repr(answer)) <= 300 and "NOT" not in str(answer)
    assert len(str(model.solve([HARD] * 9, max_steps=1, on_failure="ignore"))) < 2000


def test_a_board_with_one_blank_cell_is_solved() -> None:
    model: Any = load_pretrained("sudoku-solver")
    for cell in (0, 40, 80):
        answer = model.solve(SOLVED_BOARD[:cell] + "." + SOLVED_BOARD[cell + 1 :])
        assert answer.statuses == ["STOPPED"]
        assert "".join(map(str, answer.digits[0].tolist())) == SOLVED_BOARD


# Mistakes, by what the error says.


def fit(**options: Any) -> object:
    return fit_pseudolikelihood(PottsModel(4, 3), data(), **options)


MISTAKES: list[tuple[Callable[[], object], str]] = [
    *[(lambda s=s: PottsModel(SITES, COLOURS).logits(s), message) for s, message in (  # type: ignore[arg-type]
        (torch.zeros(2, 5, dtype=torch.long), r"\bs\b"),
        (torch.full((2, 4), 3), r"\bs\b"),
    )],
    (lambda: FactoredAttention(4, 3, rows="none"), "rows"),
    (lambda: FactoredAttention(4, 3, power=3), "power"),
    *[(lambda options=options: fit(**options), message) for options, message in (
        ({"l2": -1.0}, "l2"),
        ({"solver": "newton"}, "solver"),
        ({"solver": "adam", "rate": 0.0}, "rate"),
        ({"solver": "adam", "schedule": "none"}, "schedule"),
    )],
    (lambda: fit_pseudolikelihood(torch.nn.Linear(2, 2), data()), "model"),  # type: ignore[arg-type]
    *[(lambda boards=boards: learn_groups(boards, 3, steps=1), message) for boards, message in (  # type: ignore[arg-type]
        (torch.zeros(2, 4), "boards"),
        (torch.full((20, 4), 5), "boards"),
    )],
    *[(lambda changes=changes: solver(**changes), message) for changes, message in (  # type: ignore[arg-type]
        ({"groups": []}, "groups"),
        ({"groups": [[0, 9]]}, "groups"),
        ({"width": 3}, "width"),
        ({"window": 6}, "window"),
    )],
    *[(lambda board=board: solver()(board), message) for board, message in (
        (torch.zeros(2, 8, dtype=torch.long), "puzzles"),
        (torch.full((2, 9), 4), "puzzles"),
    )],
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), MISTAKES)
def test_mistakes(call: Callable[[], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()
