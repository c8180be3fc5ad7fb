"""Do couplings learned from solved boards solve puzzles?

    python examples/sudoku_potts.py --boards 500       # the table of the gallery

Clues are clamped, and the probabilities of the other cells follow the mean field of the couplings while the
temperature decreases. Learned couplings solve as many boards as those of the rules if the fit has a penalty,
and fewer without one. All solve fewer than two rules of logic. Puzzles come from the list with 17 clues
(Gordon Royle, CC BY 2.5) in $IMPLICIT_ATTN_DATA/sudoku, with random additional clues; without the list they
are generated.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
from board_tasks import by_givens
from runner import Result, Table, columns, run
from sudoku_graph import HEAD, couplings_of, fitted, solved_boards
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.data import sudoku
from implicit_attn.demo.boards import draw_board

MIXED = "mixed"  # puzzles with the package's own distribution of clues
LEARNED, BARE = "learned couplings", "learned couplings, no penalty"
RULES, SINGLES = "couplings of the rules", "naked and hidden singles"
COLOURS = ("C0", "C3", "C2", "C1", "C4", "#7d4fa3", "black")
Solve = Callable[[Tensor], Tensor]  # puzzles (B, 81) -> boards (B, 81)
FIRST, LAST = 0.5, 8.0  # inverse temperatures of an annealing
DAMPING = 0.3  # share of the new means in a step
NOISE = 1e-3  # of the start, relative to 1/9: parts digits that no clue tells apart


def rules() -> Tensor:
    """Couplings (81, 81, 9, 9) of the rules, ``-(delta_ab - 1/9)`` in rows, columns and boxes."""
    return sudoku.sudoku_pairs().float()[..., None, None] * (1 / 9 - torch.eye(9))


def scaled(couplings: Tensor) -> Tensor:
    """Couplings as strong as those of the rules: of the 810 strongest pairs the mean diagonal is -8/9.

    The likelihood of solved boards, where a cell is certain given the 80 others, grows with the scale of the
    couplings and has no maximum: the scale is set here.
    """
    rows, columns = torch.triu_indices(81, 81, 1)
    blocks = couplings[rows, columns]
    strongest = torch.linalg.matrix_norm(blocks).topk(810).indices
    mean = blocks[strongest].diagonal(dim1=1, dim2=2).mean()
    if not mean < 0:
        raise ValueError(f"couplings must repel equal digits, got a mean diagonal of {mean:.3g}")
    return couplings * (-8 / 9 / mean)


def annealed(couplings: Tensor, puzzles: Tensor, steps: int = 600) -> Tensor:
    """Boards (B, 81) after at most so many steps, in which beta grows geometrically.

    A step of the means m (B, 81, 9) is ``m <- (1 - eta) m + eta softmax(beta J m)`` with eta = DAMPING; those
    of clues are fixed, and solved boards are not updated any more.
    """
    matrix = couplings.transpose(1, 2).reshape(729, 729)  # symmetric
    noise = torch.randn(81, 9, generator=torch.Generator().manual_seed(0))
    clues = F.one_hot(puzzles, 10)[..., 1:].float()
    known = clues.any(2, keepdim=True)
    means = torch.where(known, clues, (NOISE * noise).softmax(-1))
    going = torch.arange(len(puzzles))
    for step in range(steps):
        beta, now = FIRST * (LAST / FIRST) ** (step / max(steps - 1, 1)), means[going]
        moved = (beta * (now.flatten(1) @ matrix).view(now.shape)).softmax(-1)
        means[going] = torch.where(known[going], now, now.lerp(moved, DAMPING))
        if step % 25 == 24:
            going = going[~sudoku.solved(means[going].argmax(2) + 1)]
            if len(going) == 0:
                break
    return torch.where(puzzles == 0, means.argmax(2) + 1, puzzles)


class Boards(NamedTuple):
    """Solved boards to learn from, and (puzzles, solutions) of the test by their number of clues.

    No solution is in both parts as it is; the same board up to a symmetry may be.
    """

    name: str
    train: Tensor
    test: dict[str, tuple[Tensor, Tensor]]


def load_boards(train: int, test: int, clues: tuple[int, ...], source: str, seed: int) -> Boards:
    """``train`` solved boards, and up to ``test`` puzzles for each number of clues and of mixed numbers.

    Puzzles get further cells of their solutions until they have so many clues. Minimal ones that have more
    to begin with are left out: generated ones have about 24.
    """
    generator = torch.Generator().manual_seed(seed)
    if sudoku.resolve_source(source) == "list":
        data = sudoku.load_sudoku(train, test, source="list", more=0, seed=seed)
        name, learned, more = data.name, data.train_solutions, 17
        minimal, solutions = data.test_puzzles, data.test_solutions
    else:
        name, more = "generated Sudoku", 11
        learned = solved_boards(train, source, seed)[1]
        minimal, solutions = sudoku.unique_puzzles(test, seed)
    found = by_givens((minimal, solutions), clues, generator, "clues")
    sets = {str(number): boards for number, boards in found.items()}
    sets[MIXED] = sudoku.reveal(minimal, solutions, more, generator), solutions
    return Boards(name, learned, sets)


def compare(sets: dict[str, tuple[Tensor, Tensor]], ways: dict[str, Solve]) -> Table:
    """The shares of solved boards and of right cells, for each number of clues and each way."""
    table = []
    for clues, (puzzles, solutions) in sets.items():
        for name, solve in ways.items():
            right, unknown = sudoku.board_counts(solve(puzzles), puzzles, solutions)
            solved = (right == unknown).double().mean().item()
            row = {"clues": clues, "method": name, "boards": len(puzzles), "solved": solved}
            table.append(row | {"cells": (right.sum() / unknown.sum()).item()})
    return table


def sudoku_potts(
    clues: tuple[int, ...] = (17, 25, 30, 36),  # numbers of clues
    boards: int = 100,  # maximum number of puzzles for each number of clues
    steps: int = 300,  # number of training steps
    train: int = 5000,  # number of solved boards for training
    l2: float = 1e-4,  # L2 penalty of the fit, which is repeated without it
    anneal: int = 600,  # maximum number of annealing steps
    source: str = "auto",  # puzzles: list (sudoku17.npz), generated, or auto (list if available)
    seed: int = 0,  # random seed of the boards, the fits and the symmetries
) -> Result:
    data = load_boards(train, boards, clues, source, seed)
    couplings, fits = {RULES: rules()}, Table()
    for name, penalty in ((LEARNED, l2), (BARE, 0.0)):
        model = fitted(HEAD, data.train, steps, seed, penalty)
        couplings[name] = scaled(couplings_of(model))
        with torch.no_grad():  # nats a cell
            loss = model.pseudo_likelihood(data.test[MIXED][1] - 1).item()
        fits.append({"model": name, "l2": penalty, "held_out": loss})
    ways: dict[str, Solve] = {
        name: partial(annealed, couplings[name], steps=anneal) for name in (LEARNED, BARE, RULES)
    }
    table = compare(data.test, ways | {SINGLES: sudoku.solve_by_singles})
    figure, (shares, board) = plt.subplots(1, 2, figsize=(10.5, 4.8), width_ratios=(1.3, 1))
    figure.suptitle(f"Sudoku by couplings learned from solved boards ({data.name})")
    draw_shares(shares, table)
    there = sorted(int(number) for number in data.test if number != MIXED)
    shown = there[(len(there) - 1) // 2]
    puzzles, solutions = data.test[str(shown)]
    filled = ways[LEARNED](puzzles)
    one = int((filled == solutions).all(1).long().argmax())  # the first solved one, or the first
    draw_board(board, puzzles[one], filled[one], solutions[one])
    found = "solved" if torch.equal(filled[one], solutions[one]) else "not solved"
    text = f"a puzzle of {shown} clues, {found} by the learned couplings"
    board.set_title(f"{text}\nbold: clues; blue: found; red: wrong", fontsize=9)
    return {"table": table, "fits": fits}, figure


def draw_shares(axes: Any, table: Table) -> None:
    """Shares of solved boards against the number of clues, a line for each method."""
    table = [row for row in table if row["clues"] != MIXED]
    names = dict.fromkeys(row["method"] for row in table)
    for name, color, marker in zip(names, COLOURS, "os^DvPX", strict=False):
        clues, shares = columns(table, "clues", "solved", method=name)
        points = [int(each) for each in clues], [100 * share for share in shares]
        axes.plot(*points, label=name, c=color, marker=marker, ms=5)
    axes.set_xticks(sorted({int(row["clues"]) for row in table}))
    axes.set(xlabel="clues of the puzzle", ylabel="boards solved (%)", ylim=(-3, 103))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9, ncols=2, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.13))


if __name__ == "__main__":
    run(sudoku_potts)
