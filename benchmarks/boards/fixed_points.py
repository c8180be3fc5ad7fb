"""A board solver at its fixed points: solved and kept, stopping early, silence, guesses.

python benchmarks/boards/fixed_points.py [--weights sudoku-solver] [--hard hard.npz]
    [--boards 200] [--answers 2000] [--longest 64] [--seed 0]

Boards are held out ones of ``train solve-sudoku``, with 17 givens and with 17 to 34, and those of
``--hard``, which ``hard_boards.py`` makes; ``--boards`` of each. Printed are

- solved boards by iterations, at any time, and how many of those solved at 4x are lost at the end; the
  same by the guesses that a search needs;
- boards with one blank cell and complete ones;
- where ``solve`` stops by itself: who is answered, and how many of the answers are wrong, beside an answer
  that is given where the least certain cell's largest probability is large enough;
- what guesses add;
- evaluations and time of stopping each board by itself, beside the least fixed number that solves as many.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.boards.hard_boards import bins, score
from benchmarks.measure import table
from implicit_attn.data import load_sudoku
from implicit_attn.data.sudoku import read_list
from implicit_attn.models import BoardSolver, load_model
from implicit_attn.weights import weights_file

Boards = tuple[Tensor, Tensor]  # puzzles and solutions
CHUNK = 40  # boards at once
GUESSES = (0, 1, 2, 4, 8)


def chunks(call: Callable[[Tensor], Any], puzzles: Tensor) -> list[Any]:
    return [call(part) for part in puzzles.split(CHUNK)]


def right(digits: Tensor, boards: Boards) -> Tensor:
    """(B,) bool: all unknown cells are as in the solutions."""
    return ((digits == boards[1]) | (boards[0] > 0)).all(1)


def percent(share: Tensor) -> str:
    return f"{100 * share.double().mean().item():.1f}" if len(share) else "-"


def trajectories(model: BoardSolver, boards: Boards, longest: int) -> Tensor:
    """(iterations, B) bool: solved after each."""
    found = []
    for puzzles, solutions in zip(*(part.split(CHUNK) for part in boards), strict=True):
        steps = model.trajectory(puzzles, longest)
        found.append(torch.stack([right(z.argmax(-1) + 1, (puzzles, solutions)) for z in steps]))
    return torch.cat(found, 1)


def curve(name: str, solved: Tensor, trained: int) -> dict[str, Any]:
    row: dict[str, Any] = {"boards": name, "number": solved.shape[1]}
    times = [t for t in (0.5, 1, 2, 4, 8, 16, 32, 64) if t * trained <= len(solved)]
    for each in times:
        row[f"{each:g}x"] = percent(solved[int(each * trained) - 1])
    row["any time"] = percent(solved.any(0))
    row["lost since 4x"] = int((solved[4 * trained - 1] & ~solved[-1]).sum())
    return row


def kept(model: BoardSolver, boards: Boards, iterations: int) -> list[dict[str, Any]]:
    """Boards with one blank cell and none: the answer after so many iterations."""
    blank = boards[1].clone()
    blank[torch.arange(len(blank)), torch.arange(len(blank)) % 81] = 0
    rows = []
    for name, puzzles in (("one blank cell", blank), ("complete", boards[1])):
        digits = torch.cat(chunks(lambda p: model(p, iterations).argmax(-1) + 1, puzzles))
        share = percent((digits == boards[1]).all(1))
        rows.append({"boards": name, "number": len(puzzles), f"{iterations} iterations": share})
    return rows


def answered(name: str, model: BoardSolver, boards: Boards) -> list[dict[str, Any]]:
    """Shares of boards that are answered, and the number of wrong answers."""
    rows = []
    for stop in ("converged", "consistent"):
        options: dict[str, Any] = {"on_failure": "ignore"} if stop == "converged" else {}
        found = chunks(lambda p, s=stop, o=options: model.solve(p, stop=s, **o), boards[0])
        digits, said, agree, spent = (
            torch.cat([getattr(each, what) for each in found])
            for what in ("digits", "converged", "consistent", "evaluations")
        )
        good, mean = right(digits, boards), f"{spent.double().mean():.0f}"
        ways = {stop: said} if stop == "consistent" else {stop: said, "both": said & agree}
        for way, shown in ways.items():
            rows.append({"boards": name, "number": len(good), "answered where": way,
                         "solved": percent(good), "answered": percent(shown),
                         "wrong": int((shown & ~good).sum()), "evaluations": mean})  # fmt: skip
    logits = torch.cat(chunks(model, boards[0]))
    sure = logits.softmax(-1).amax(-1).masked_fill(boards[0] > 0, 1.0).amin(1)
    good = right(logits.argmax(-1) + 1, boards)
    row = {"boards": name, "number": len(good), "solved": percent(good)}
    row["evaluations"] = model.iterations
    for least in (0.9, 0.99, 0.999):
        said = sure > least
        rows.append({**row, "answered where": f"largest softmax > {least}", "answered": percent(said),
                     "wrong": int((said & ~good).sum())})  # fmt: skip
    return rows


def guessed(name: str, model: BoardSolver, boards: Boards) -> dict[str, Any]:
    """Solved shares with up to so many guesses, each within the budget of the layer."""
    options: dict[str, Any] = {"stop": "consistent", "guesses": max(GUESSES)}
    found = chunks(lambda puzzles: model.solve(puzzles, **options), boards[0])
    digits, agree, made, spent = (
        torch.cat([getattr(each, what) for each in found])
        for what in ("digits", "consistent", "guesses", "evaluations")
    )
    good = right(digits, boards)
    row: dict[str, Any] = {"boards": name, "number": len(good)}
    row |= {f"{number} guesses": percent(good & (made <= number)) for number in GUESSES}
    row |= {"wrong": int((agree & ~good).sum()), "evaluations": f"{spent.double().mean():.0f}"}
    return row


def adaptive(name: str, model: BoardSolver, boards: Boards, solved: Tensor) -> list[dict[str, Any]]:
    """Processor time of one thread by stopping, and by the least fixed number that solves as many."""

    def timed(call: Callable[[Tensor], Any]) -> tuple[list[Any], float]:
        call(boards[0][:CHUNK])
        start = time.process_time()
        return chunks(call, boards[0]), time.process_time() - start

    rows = []
    for stop in ("consistent", "converged"):
        options: dict[str, Any] = {"on_failure": "ignore"} if stop == "converged" else {}
        found, seconds = timed(lambda p, s=stop, o=options: model.solve(p, stop=s, **o))
        good = right(torch.cat([each.digits for each in found]), boards)
        spent = torch.cat([each.evaluations for each in found]).double().mean()
        row = {"boards": name, "number": len(good)}
        rows.append({**row, "stop": stop, "solved": percent(good), "evaluations": f"{spent:.0f}",
                     "ms a board": f"{1e3 * seconds / len(good):.1f}"})  # fmt: skip
        enough = (solved.double().mean(1) >= good.double().mean() - 1e-3).nonzero()
        fixed = int(enough[0]) + 1 if len(enough) else len(solved)
        found, seconds = timed(lambda p, n=fixed: model(p, n))
        good = right(torch.cat(found).argmax(-1) + 1, boards)
        rows.append({**row, "stop": "fixed number", "solved": percent(good), "evaluations": fixed,
                     "ms a board": f"{1e3 * seconds / len(good):.1f}"})  # fmt: skip
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print(table(rows), flush=True)
    print(flush=True)


@torch.no_grad()
def main(
    weights: str = "sudoku-solver",
    hard: Path | None = None,
    boards: int = 200,
    answers: int = 2000,
    longest: int = 64,
    seed: int = 0,
) -> None:
    """A board solver at its fixed points.

    Args:
        weights: of the solver.
        hard: boards of hard_boards.py.
        boards: of each kind.
        answers: boards that solve is to answer.
        longest: times the iterations of training.
        seed: of the boards.
    """
    model, _ = load_model(weights_file(weights))
    if not isinstance(model, BoardSolver):
        raise SystemExit(f"--weights must be of a board solver, got a {type(model).__name__}")
    model.eval()
    few, mixed = (
        load_sudoku(9000, max(boards, answers), more=more, seed=seed) for more in (0, None)
    )
    sets = {
        "17 givens": (few.test_puzzles, few.test_solutions),
        "17 to 34": (mixed.test_puzzles, mixed.test_solutions),
    }
    trained = model.iterations
    part = {name: (p[:boards], s[:boards]) for name, (p, s) in sets.items()}
    if hard is not None:
        puzzles, solutions = read_list(hard)
        chosen = torch.linspace(0, len(puzzles) - 1, min(boards, len(puzzles))).round().long()
        part["extreme-like"] = puzzles[chosen], solutions[chosen]
    print(f"{few.name}, {sum(each.numel() for each in model.parameters()):,} parameters\n")
    solved = {name: trajectories(model, each, longest * trained) for name, each in part.items()}
    rows = [curve(name, each, trained) for name, each in solved.items()]
    names = [name for name in part if name != "17 to 34"]
    chooser = random.Random(seed)
    scores = [score(each, chooser) for name in names for each in part[name][0].tolist()]
    guesses = torch.tensor(scores).expm1().round()
    together = torch.cat([solved[name] for name in names], 1)
    for name, chosen in bins(guesses).items():
        if chosen.any():
            title = f"{' and '.join(names)}: {name} guesses"
            rows.append(curve(title, together[:, chosen], trained))
    show(rows)
    show(kept(model, part["17 givens"], 8 * trained))
    show([row for name, each in part.items() for row in adaptive(name, model, each, solved[name])])
    show([guessed(name, model, each) for name, each in part.items()])
    asked = {name: (p[:answers], s[:answers]) for name, (p, s) in sets.items()}
    asked |= {name: each for name, each in part.items() if name not in asked}
    show([row for name, each in asked.items() for row in answered(name, model, each)])


if __name__ == "__main__":
    tyro.cli(main)
