"""Groups of cells: from boards to couplings to a graph to its cliques."""

from __future__ import annotations

import networkx
import pytest
import torch
from torch import Tensor

from implicit_attn.data.sudoku import SudokuSymmetries, unique_puzzles, units
from implicit_attn.models import learn_groups, sudoku_pairs
from implicit_attn.models.boards import maximal_cliques, strong_pairs


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


def latin_squares(number: int, side: int) -> Tensor:
    """Random ones, (number, side * side): the cyclic one, its lines and colours permuted."""
    generator = torch.Generator().manual_seed(0)
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


def test_bad_pairs() -> None:
    with pytest.raises(TypeError, match="pairs must be bool"):
        maximal_cliques(torch.zeros(3, 3))
    with pytest.raises(ValueError, match="pairs must be a symmetric matrix"):
        maximal_cliques(torch.ones(3, 3, dtype=torch.bool).triu())
    parts = torch.arange(30) // 3  # 3^10 cliques
    with pytest.raises(ValueError, match="at most 10000 maximal cliques"):
        maximal_cliques(parts[:, None] != parts)
