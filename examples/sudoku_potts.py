"""Solve Sudoku with the couplings of a Potts model, learned from solved boards only.

    python examples/sudoku_potts.py --boards 500       # the table of the gallery

Clues are clamped. The probabilities of the other cells follow the mean field of the couplings while the
temperature decreases ("annealed"), or the most certain cell is fixed repeatedly ("decimated"). Baselines are
the couplings of the rules and two rules of logic. Puzzles come from the list with 17 clues (Gordon Royle,
CC BY 2.5) in $IMPLICIT_ATTN_DATA/sudoku, with random additional clues; without the list they are generated.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
from board_tasks import by_givens
from matplotlib.figure import Figure
from runner import Result, Table, columns, legend_below, run
from sudoku_graph import HEAD, POTTS, couplings_of, fitted, solved_boards
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.data import sudoku
from implicit_attn.demo.boards import draw_board

MIXED = "mixed"  # puzzles with the package's own distribution of clues
LEARNED, BARE = "learned, factored", "learned, factored, no penalty"
RULES, SINGLES = "the rules", "naked and hidden singles"
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


class MeanField:
    """Means (B, 81, 9) of puzzles (B, 81), those of the clues fixed; solved boards are not updated any more.

    A step is ``m <- (1 - eta) m + eta softmax(beta J m)`` with eta = DAMPING.
    """

    def __init__(self, couplings: Tensor, puzzles: Tensor) -> None:
        self.matrix = couplings.transpose(1, 2).reshape(729, 729)
        noise = torch.randn(81, 9, generator=torch.Generator().manual_seed(0))
        clues = F.one_hot(puzzles, 10)[..., 1:].float()
        self.puzzles, self.known = puzzles, clues.any(2)  # clues, and cells that are fixed
        self.means = torch.where(self.known.unsqueeze(2), clues, (NOISE * noise).softmax(-1))
        self.going = torch.arange(len(puzzles))

    def step(self, beta: float) -> None:
        means, known = self.means[self.going], self.known[self.going].unsqueeze(2)
        field = (means.flatten(1) @ self.matrix).view(means.shape)  # the matrix is symmetric
        moved = means.lerp((beta * field).softmax(-1), DAMPING)
        self.means[self.going] = torch.where(known, means, moved)

    def finish(self) -> bool:
        """Leave solved boards alone; whether all are."""
        self.going = self.going[~sudoku.solved(self.means[self.going].argmax(2) + 1)]
        return len(self.going) == 0

    def fix_surest(self) -> None:
        """Make the most certain unknown cell one-hot; a board without one is not updated any more."""
        rows = self.going = self.going[~self.known[self.going].all(1)]
        cells = self.means[rows].amax(2).masked_fill(self.known[rows], -1.0).argmax(1)
        self.means[rows, cells] = F.one_hot(self.means[rows, cells].argmax(1), 9).float()
        self.known[rows, cells] = True

    @property
    def boards(self) -> Tensor:
        """The most probable digits (B, 81)."""
        return torch.where(self.puzzles == 0, self.means.argmax(2) + 1, self.puzzles)


def annealed(couplings: Tensor, puzzles: Tensor, steps: int = 600) -> Tensor:
    """Boards (B, 81) after at most so many steps, in which beta grows geometrically."""
    field = MeanField(couplings, puzzles)
    for step in range(steps):
        field.step(FIRST * (LAST / FIRST) ** (step / max(steps - 1, 1)))
        if step % 25 == 24 and field.finish():
            break
    return field.boards


def decimated(couplings: Tensor, puzzles: Tensor, beta: float = 2.0, steps: int = 10) -> Tensor:
    """Boards (B, 81): the surest unknown cell is fixed, the others take so many steps, and again."""
    field = MeanField(couplings, puzzles)
    for _ in range(10 * steps):
        field.step(beta)
    while not field.finish() and not field.known[field.going].all():
        field.fix_surest()
        for _ in range(steps):
            field.step(beta)
    return field.boards


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
        # A puzzle takes 25 ms to find: 200 at most, then symmetries of them.
        minimal, solutions = sudoku.unique_puzzles(min(test, 200), seed)
        if test > 200:
            index, symmetric = torch.arange(200, test) % 200, torch.Generator().manual_seed(seed)
            further = sudoku.SudokuSymmetries()(minimal[index], solutions[index], symmetric)
            minimal = torch.cat([minimal, further[0]])
            solutions = torch.cat([solutions, further[1]])
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
    l2: float = 1e-4,  # L2 penalty of the factored head (both models are also fitted without it)
    anneal: int = 600,  # maximum number of annealing steps
    source: str = "auto",  # puzzles: list (sudoku17.npz), generated, or auto (list if available)
    seed: int = 0,  # random seed of the boards, the fits and the symmetries
) -> Result:
    data = load_boards(train, boards, clues, source, seed)
    couplings, fits, held_out = {RULES: rules()}, Table(), data.test[MIXED][1]
    recipes = ((LEARNED, HEAD, l2), (BARE, HEAD, 0.0), (f"learned, {POTTS}", POTTS, 0.0))
    for name, recipe, weight in recipes:
        model = fitted(recipe, data.train, steps, seed, weight)
        couplings[name] = scaled(couplings_of(model))
        with torch.no_grad():  # nats a cell
            loss = model.pseudo_likelihood(held_out - 1).item()
        fits.append({"model": name, "l2": weight, "held_out": loss})
    ways: dict[str, Solve] = {}
    for name in (LEARNED, BARE, RULES, f"learned, {POTTS}"):
        ways[f"{name}, annealed"] = partial(annealed, couplings[name], steps=anneal)
        if name == BARE:
            ways[f"{LEARNED}, decimated"] = partial(decimated, couplings[LEARNED])
    ways[SINGLES] = sudoku.solve_by_singles
    table = compare(data.test, ways)
    there = [number for number in sorted(set(clues)) if str(number) in data.test]
    counts = {number: len(data.test[str(number)][0]) for number in there}
    few = [number for number in sorted(set(clues)) if counts.get(number, 0) < boards]
    note = "".join(f"; {counts.get(number, 'none')} with {number} clues" for number in few)
    title = f"Sudoku solved by a Potts model learned from solved boards ({data.name}{note})"
    figure, board = draw_shares(title, table, panels=3, size=(13, 4.8), legend=3)
    shown = there[(len(there) - 1) // 2]
    puzzles, solutions = data.test[str(shown)]
    filled = ways[f"{LEARNED}, annealed"](puzzles)
    one = int((filled == solutions).all(1).long().argmax())  # the first solved one, or the first
    draw_board(board, puzzles[one], filled[one], solutions[one])
    found = "solved" if torch.equal(filled[one], solutions[one]) else "not solved"
    text = f"a puzzle of {shown} clues, {found} by the learned couplings"
    board.set_title(f"{text}\nbold: clues; blue: found; red: wrong", fontsize=9)
    return {"table": table, "fits": fits}, figure


def draw_shares(
    title: str, table: Table, panels: int, size: tuple[float, float], legend: int
) -> tuple[Figure, Any]:
    """Shares of boards and cells against the number of clues; the last panel is left to the caller."""
    figure, axes = plt.subplots(1, panels, figsize=size)
    figure.suptitle(title)
    table = [row for row in table if row["clues"] != MIXED]
    measures = (("solved", "boards solved (%)"), ("cells", "unknown cells right (%)"))
    for panel, (key, label) in zip(axes, measures, strict=False):
        names = dict.fromkeys(row["method"] for row in table)
        for name, color, marker in zip(names, COLOURS, "os^DvPX", strict=False):
            clues, shares = columns(table, "clues", key, method=name)
            points = [int(each) for each in clues], [100 * share for share in shares]
            panel.plot(*points, label=name, c=color, marker=marker, ms=5)
        panel.set_xticks(sorted({int(row["clues"]) for row in table}))
        panel.set(xlabel="clues of the puzzle", ylabel=label, ylim=(-3, 103))
        panel.grid(alpha=0.3)
    legend_below(figure, axes[0], legend)
    return figure, axes[-1]


if __name__ == "__main__":
    run(sudoku_potts)
