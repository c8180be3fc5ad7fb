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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "boards")]

from sudoku_belief import Pairs, belief_methods
from sudoku_graph import HEAD, fitted
from sudoku_potts import LEARNED, SINGLES, Solve, compare, load_boards

import solvers
from benchmarks.measure import table
from implicit_attn.command_line import Parser, command, mistakes, seed_number, whole
from implicit_attn.models import BoardSolver, SudokuPotts, load_model
from implicit_attn.weights import weights_file, weights_path

GIVENS = (17, 20, 25, 30, 34)
TIMES = (0.25, 1, 4, 16)  # the iterations of training
RTOL = 1e-3
WEIGHTS = weights_path("sudoku-solver")


def parser() -> Parser:
    made = Parser(description="Sudoku by every method, by the number of givens.")
    add = made.add_argument
    add("--weights", type=weights_file, default=WEIGHTS, help="of a board solver")
    add("--boards", type=whole(1, 10_000), default=200, help="of each number, for slow methods")
    add("--test", type=whole(1, 10_000), default=1000, help="of each number, for the others")
    add("--train", type=whole(1, 40_000), default=9000, help="boards that are not for the test")
    add("--fit-steps", type=whole(1, 100_000), default=300, help="of the fit of couplings to them")
    add("--seed", type=seed_number, default=0, help="of the boards")
    return made


def learned_methods(model: BoardSolver) -> dict[str, Solve]:
    """The board solver with fixed numbers of iterations, and until each board has converged."""
    ways: dict[str, Solve] = {}
    for times in TIMES:
        number = max(1, round(times * model.iterations))
        ways[f"board solver, {number} iterations ({times:g}x)"] = partial(
            filled_after, model, iterations=number
        )
    most = round(TIMES[-1] * model.iterations)
    ways[f"board solver, to {RTOL:g}, at most {most}"] = partial(filled, model, most=most)
    return ways


@torch.no_grad()
def filled_after(model: BoardSolver, puzzles: Tensor, iterations: int) -> Tensor:
    parts = [model(part, iterations=iterations).argmax(-1) + 1 for part in puzzles.split(100)]
    return torch.cat(parts)


@torch.no_grad()
def filled(model: BoardSolver, puzzles: Tensor, most: int) -> Tensor:
    options: dict[str, Any] = {
        "solver": solvers.Forward(), "max_steps": most, "tolerance": solvers.Tolerance(rtol=RTOL),
        "on_failure": "ignore",
    }  # fmt: skip
    return torch.cat(
        [model.solve(part, **options).value.argmax(-1) + 1 for part in puzzles.split(100)]
    )


def main(arguments: list[str] | None = None) -> None:
    reader = parser()
    with command(reader):
        options = reader.parse_args(arguments)
        with mistakes("--weights"):
            model, _ = load_model(options.weights)
            if not isinstance(model, BoardSolver):
                raise ValueError(f"must be of a board solver, got a {type(model).__name__}")
        run(model.eval(), options)


def run(model: BoardSolver, options: Any) -> None:
    boards = load_boards(options.train, options.test, GIVENS, "auto", options.seed)
    few = {
        name: (puzzles[: options.boards], solutions[: options.boards])
        for name, (puzzles, solutions) in boards.test.items()
    }
    head = fitted(HEAD, boards.train, options.fit_steps, options.seed, 1e-4)
    learned = SudokuPotts.from_model(head)
    slow = belief_methods({"true graph": Pairs.of_rules()})
    logic = {SINGLES: slow.pop(SINGLES)}
    slow[f"{LEARNED}, annealed"] = lambda puzzles: learned.solve(puzzles).boards
    found = compare(boards.test, logic | learned_methods(model))
    found += compare(few, slow)
    rows: dict[str, dict[str, Any]] = {}
    for each in found:
        row = rows.setdefault(each["method"], {"method": each["method"], "boards": each["boards"]})
        row[each["clues"]] = f"{100 * each['solved']:.1f}"
    print(f"{boards.name}, {sum(each.numel() for each in model.parameters()):,} parameters")
    print(table(list(rows.values())))


if __name__ == "__main__":
    main()
