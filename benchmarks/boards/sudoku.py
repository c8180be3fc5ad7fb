"""Sudoku by every method of this package on the same boards, by their number of givens.

python benchmarks/boards/sudoku.py [--weights sudoku-solver] [--boards 200]
    [--test 1000] [--train 9000] [--fit-steps 300] [--seed 0]

Boards are the 1,000 held-out ones of ``train solve-sudoku``: with the givens of the list of 17-clue
puzzles, with further cells revealed up to 20, 25, 30 and 34, and "mixed", 17 to 34 (without the list they
are generated, and have more). Belief propagation and mean fields take minutes on all of them, so they see
the first ``--boards`` of each number of givens. What each method is told:

- naked and hidden singles, belief propagation: the rules of the game;
- couplings: nothing but 9,000 solved boards, from which a Potts model is fitted within this command;
- board solver: nothing but 9,000 puzzles with their solutions.

Each cell: the share of solved boards in per cent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from sudoku_belief import Pairs, belief_methods
from sudoku_graph import HEAD, fitted
from sudoku_potts import LEARNED, SINGLES, Solve, compare, load_boards

import solvers
from benchmarks.measure import table
from implicit_attn.models import BoardSolver, SudokuPotts, load_model
from implicit_attn.weights import weights_file

GIVENS = (17, 20, 25, 30, 34)
TIMES = (0.25, 1, 4, 16)  # the iterations of training
RTOL = 1e-3


def learned_methods(model: BoardSolver) -> dict[str, Solve]:
    """The board solver with fixed numbers of iterations, and until each board has converged."""
    most = round(TIMES[-1] * model.iterations)
    options: dict[str, Any] = {
        "solver": solvers.Forward(), "max_steps": most, "tolerance": solvers.Tolerance(rtol=RTOL),
        "on_failure": "ignore",
    }  # fmt: skip

    @torch.no_grad()
    def filled(puzzles: Tensor, logits: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.cat([logits(part).argmax(-1) + 1 for part in puzzles.split(100)])

    ways: dict[str, Solve] = {}
    for times in TIMES:
        number = max(1, round(times * model.iterations))
        name = f"board solver, {number} iterations ({times:g}x)"
        ways[name] = partial(filled, logits=partial(model, iterations=number))
    until = partial(filled, logits=lambda part: model.solve(part, **options).value)
    return ways | {f"board solver, to {RTOL:g}, at most {most}": until}


def main(
    weights: str = "sudoku-solver",
    boards: int = 200,
    test: int = 1000,
    train: int = 9000,
    fit_steps: int = 300,
    seed: int = 0,
) -> None:
    """Sudoku by every method, by the number of givens.

    Args:
        weights: of a board solver; a name of shipped weights, or a file.
        boards: of each number, for slow methods.
        test: of each number, for the others.
        train: boards that are not for the test.
        fit_steps: of the fit of couplings to them.
        seed: of the boards.
    """
    model, _ = load_model(weights_file(weights))
    if not isinstance(model, BoardSolver):
        raise SystemExit(f"--weights must be of a board solver, got a {type(model).__name__}")
    drawn = load_boards(train, test, GIVENS, "auto", seed)
    few = {name: (each[0][:boards], each[1][:boards]) for name, each in drawn.test.items()}
    head = fitted(HEAD, drawn.train, fit_steps, seed, 1e-4)
    learned = SudokuPotts.from_model(head)
    slow = belief_methods({"true graph": Pairs.of_rules()})
    logic = {SINGLES: slow.pop(SINGLES)}
    slow[f"{LEARNED}, annealed"] = lambda puzzles: learned.solve(puzzles).boards
    found = compare(drawn.test, logic | learned_methods(model.eval()))
    found += compare(few, slow)
    rows: dict[str, dict[str, Any]] = {}
    for each in found:
        row = rows.setdefault(each["method"], {"method": each["method"], "boards": each["boards"]})
        row[each["clues"]] = f"{100 * each['solved']:.1f}"
    print(f"{drawn.name}, {sum(each.numel() for each in model.parameters()):,} parameters")
    print(table(list(rows.values())))


if __name__ == "__main__":
    tyro.cli(main)
