"""Sudoku boards: every method on the same ones, and a board solver at its fixed points.

    python benchmarks/boards.py sudoku [--weights sudoku-solver] [--boards 200] [--test 1000]
    python benchmarks/boards.py fixed-points [--weights sudoku-solver] [--boards 200]

The boards are those that the training of the weights held out.
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

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from sudoku_belief import decimated, pairs_of_rules, propagated
from sudoku_graph import HEAD, couplings_of, fitted
from sudoku_potts import LEARNED, SINGLES, Solve, annealed, compare, load_boards, scaled
from train_boards import load_solver

import solvers
from benchmarks.measure import table
from implicit_attn.data import load_sudoku, solve_by_singles
from implicit_attn.models import BoardSolver

# --- a board solver at its fixed points -----------------------------------------------------------------

Boards = tuple[Tensor, Tensor]  # puzzles and solutions
CHUNK = 40  # boards at once
GUESSES = (0, 1, 2, 4, 8)


def right(digits: Tensor, boards: Boards) -> Tensor:
    """(B,) bool: all unknown cells are as in the solutions."""
    return ((digits == boards[1]) | (boards[0] > 0)).all(1)


def percent(share: Tensor) -> str:
    return f"{100 * share.double().mean().item():.1f}"


def curve(model: BoardSolver, name: str, boards: Boards, longest: int) -> dict[str, Any]:
    """Solved boards after each multiple of the iterations of training."""
    found = []
    for puzzles, solutions in zip(*(part.split(CHUNK) for part in boards), strict=True):
        steps = model.trajectory(puzzles, longest * model.iterations)
        found.append(torch.stack([right(z.argmax(-1) + 1, (puzzles, solutions)) for z in steps]))
    solved = torch.cat(found, 1)
    row: dict[str, Any] = {"boards": name, "number": solved.shape[1]}
    for times in (t for t in (0.5, 1, 2, 4, 8, 16, 32, 64) if t <= longest):
        row[f"{times:g}x"] = percent(solved[int(times * model.iterations) - 1])
    return row


def solved_by(model: BoardSolver, puzzles: Tensor, stop: str, **options: Any) -> list[Tensor]:
    """Of ``solve``: digits, which boards have converged, are consistent, evaluations, guesses."""
    options["on_failure"] = "ignore"
    found = [model.solve(part, stop=stop, **options) for part in puzzles.split(CHUNK)]
    names = ("digits", "converged", "consistent", "evaluations", "guesses")
    return [torch.cat([getattr(each, name) for each in found]) for name in names]


def answered(name: str, model: BoardSolver, boards: Boards) -> list[dict[str, Any]]:
    """Shares of boards that are answered, and the number of wrong answers."""
    rows = []
    for stop in ("converged", "consistent"):
        digits, converged, consistent, spent, _ = solved_by(model, boards[0], stop)
        good, said = right(digits, boards), converged if stop == "converged" else consistent
        rows.append({"boards": name, "number": len(good), "answered where": stop,
                     "solved": percent(good), "answered": percent(said),
                     "wrong": int((said & ~good).sum()),
                     "evaluations": f"{spent.double().mean():.0f}"})  # fmt: skip
    return rows


def guessed(name: str, model: BoardSolver, boards: Boards) -> dict[str, Any]:
    """Solved shares with up to so many guesses, each within the budget of the layer."""
    found = solved_by(model, boards[0], "consistent", guesses=max(GUESSES))
    digits, _, consistent, spent, made = found
    good = right(digits, boards)
    row: dict[str, Any] = {"boards": name, "number": len(good)}
    row |= {f"{number} guesses": percent(good & (made <= number)) for number in GUESSES}
    row["wrong"] = int((consistent & ~good).sum())
    return row | {"evaluations": f"{spent.double().mean():.0f}"}


@torch.no_grad()
def fixed_points(
    weights: str = "sudoku-solver", boards: int = 200, answers: int = 2000, longest: int = 64
) -> None:
    """A board solver at its fixed points, on boards with 17 givens and with 17 to 34.

    Printed are solved boards by iterations up to ``longest`` times those of training, what guesses add, and,
    where ``solve`` stops by itself, who is answered and how many of the answers are wrong.
    """
    model, settings = load_solver(weights)
    sets: dict[str, Boards] = {}
    for name, more in (("17 givens", 0), ("17 to 34", None)):
        data = load_sudoku(
            settings["train"], max(boards, answers), more=more, seed=settings["seed"]
        )
        sets[name] = data.test_puzzles, data.test_solutions
    print(f"{data.name}, {sum(each.numel() for each in model.parameters()):,} parameters\n")
    part = {name: (p[:boards], s[:boards]) for name, (p, s) in sets.items()}
    asked = {name: (p[:answers], s[:answers]) for name, (p, s) in sets.items()}
    for rows in (
        [curve(model, name, each, longest) for name, each in part.items()],
        [guessed(name, model, each) for name, each in part.items()],
        [row for name, each in asked.items() for row in answered(name, model, each)],
    ):
        print(table(rows), end="\n\n", flush=True)


# --- every method, by the number of givens --------------------------------------------------------------

GIVENS = (17, 20, 25, 30, 34)
TIMES = (0.25, 1, 4, 16)  # the iterations of training
RTOL = 1e-3


def learned_methods(model: BoardSolver) -> dict[str, Solve]:
    """The board solver with fixed numbers of iterations, and until each board has converged."""
    most = round(TIMES[-1] * model.iterations)
    options: dict[str, Any] = {
        "solver": solvers.Forward(), "max_steps": most, "tolerance": solvers.Tolerance(rtol=RTOL),
        "on_failure": "ignore", "stop": "converged",
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


def sudoku(
    weights: str = "sudoku-solver",  # a name of shipped weights, or a file
    boards: int = 200,  # of each number of givens, for slow methods
    test: int = 1000,  # of each number, for the others
    train: int = 9000,  # to which couplings are fitted, at most as many as the weights have seen
    fit_steps: int = 300,
    seed: int = 0,  # of this fit
) -> None:
    """Sudoku by every method of this package on the same boards, by their number of givens.

    The table has shares of solved boards in per cent, with 17 givens, with more cells revealed, and "mixed",
    17 to 34. Singles and belief propagation know the rules of the game; couplings are fitted to solved boards
    within this command; the board solver knows the puzzles of its training with their solutions.
    """
    model, settings = load_solver(weights)
    drawn = load_boards(settings["train"], test, GIVENS, "auto", settings["seed"])
    few = {name: (each[0][:boards], each[1][:boards]) for name, each in drawn.test.items()}
    head = fitted(HEAD, drawn.train[:train], fit_steps, seed, 1e-4)
    learned, rules = scaled(couplings_of(head)), pairs_of_rules()
    slow: dict[str, Solve] = {
        "true graph: belief propagation": partial(propagated, rules),
        "true graph: with decimation": partial(decimated, rules),
    }
    logic = {SINGLES: solve_by_singles}
    slow[f"{LEARNED}, annealed"] = partial(annealed, learned)
    found = compare(drawn.test, logic | learned_methods(model))
    found += compare(few, slow)
    rows: dict[str, dict[str, Any]] = {}
    for each in found:
        row = rows.setdefault(each["method"], {"method": each["method"], "boards": each["boards"]})
        row[each["clues"]] = f"{100 * each['solved']:.1f}"
    print(f"{drawn.name}, {sum(each.numel() for each in model.parameters()):,} parameters")
    print(table(list(rows.values())))


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"sudoku": sudoku, "fixed-points": fixed_points})
