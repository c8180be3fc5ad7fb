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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import solvers
from benchmarks.measure import table
from implicit_attn.command_line import Parser, command, mistakes, seed_number, whole
from implicit_attn.models import BoardSolver, load_model
from implicit_attn.studies.experiments.boards.belief import (
    ALONE,
    BETWEEN,
    DigitPairs,
    belief_methods,
)
from implicit_attn.studies.experiments.boards.puzzles import Puzzles, boards_and_puzzles
from implicit_attn.studies.experiments.boards.solving import (
    L2,
    LEARNED,
    SINGLES,
    Method,
    compare,
    methods,
    train_couplings,
)
from implicit_attn.weights import weights_file, weights_path

GIVENS = [17, 20, 25, 30, 34]
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


def learned_methods(model: BoardSolver) -> dict[str, Method]:
    """The board solver with fixed numbers of iterations, and until each board has converged."""
    ways: dict[str, Method] = {}
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
    def advance(stage: str) -> None:
        print(stage, file=sys.stderr, flush=True)

    boards = boards_and_puzzles(options.train, options.test, GIVENS, "auto", options.seed)
    few = {
        name: Puzzles(each.puzzles[: options.boards], each.solutions[: options.boards])
        for name, each in boards.test.items()
    }
    # The fits are judged on boards of the training set: the test is for the solving alone.
    learned = train_couplings(
        boards.train, boards.train[:1000], options.fit_steps, L2, options.seed, advance
    )
    annealed = f"{LEARNED}, annealed"
    slow = {
        **belief_methods({"true graph": DigitPairs.of_rules()}, ALONE, BETWEEN),
        annealed: methods(learned.couplings, 600)[annealed],
    }
    logic = {SINGLES: slow.pop(SINGLES)}
    found = compare(boards.test, logic | learned_methods(model), advance)
    found += compare(few, slow, advance)
    rows: dict[str, dict[str, Any]] = {}
    for each in found:
        row = rows.setdefault(each["method"], {"method": each["method"], "boards": each["boards"]})
        row[each["clues"]] = f"{100 * each['solved']:.1f}"
    print(f"{boards.name}, {sum(each.numel() for each in model.parameters()):,} parameters")
    print(table(list(rows.values())))


if __name__ == "__main__":
    main()
