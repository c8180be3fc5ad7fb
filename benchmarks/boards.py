"""Sudoku boards: every method on the same ones, a board solver at its fixed points, boards that are hard.

    python benchmarks/boards.py sudoku [--weights sudoku-solver] [--boards 200] [--test 1000]
    python benchmarks/boards.py fixed-points [--weights sudoku-solver] [--hard hard.npz] [--boards 200]
    python benchmarks/boards.py hard [--boards 200] [--rounds 2000] [--seed 0] [--out hard.npz]

Boards are held out ones of ``examples/train_boards.py``, and those that ``hard`` breeds. Without the list of
17-clue puzzles they are generated, and have more givens.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
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
from implicit_attn.data.sudoku import CELLS, SIDE, read_list, sudoku_pairs, unique_puzzles, units
from implicit_attn.models import BoardSolver

# --- boards that are hard for a search ---------------------------------------------------------------

BINS = {"0": 0, "1-2": 1, "3-10": 3, "11-50": 11, "51+": 51}  # least number of guesses of each
ORDERS, DROPPED = 10, 3
ALL = (1 << CELLS) - 1  # a bit a cell; a board is nine such numbers: where each digit may be
UNITS = [sum(1 << cell for cell in unit) for unit in units().tolist()]
OTHERS = [  # all cells but those that share a row, column or box with this one
    ALL & ~sum(1 << other for other, near in enumerate(row) if near)
    for row in sudoku_pairs().tolist()
]
Planes = list[int]


def place(planes: Planes, cell: int, digit: int) -> None:
    """Put a digit, 0 .. 8, into a cell."""
    bit = 1 << cell
    for other in range(SIDE):
        planes[other] &= OTHERS[cell] if other == digit else ~bit


def fill(planes: Planes) -> tuple[int, int] | None:
    """Fill in singles; the cells with one digit and with two left, None where there is a contradiction."""
    known = 0
    while True:
        one = two = three = 0
        for plane in planes:
            three |= two & plane
            two |= one & plane
            one |= plane
        if one != ALL:
            return None
        fresh = one & ~two & ~known
        known |= fresh
        for digit in range(SIDE):
            found = planes[digit] & fresh
            while found:
                bit = found & -found
                found ^= bit
                place(planes, bit.bit_length() - 1, digit)
        if fresh:
            continue
        for digit in range(SIDE):  # no naked single was left: hidden ones
            if not planes[digit] & two:
                if planes[digit].bit_count() < SIDE:
                    return None
                continue
            for unit in UNITS:
                left = planes[digit] & unit
                if not left:
                    return None
                if not left & (left - 1) and left & two & ~fresh:
                    place(planes, left.bit_length() - 1, digit)
                    fresh |= left
        if not fresh:
            return known, two & ~three


def search(puzzle: list[int], most: int, chooser: random.Random) -> tuple[list[list[int]], int]:
    """Up to ``most`` solutions, and the guesses that were made until then, in a random order."""
    planes = [ALL] * SIDE
    for cell, digit in enumerate(puzzle):
        if digit:
            if not planes[digit - 1] >> cell & 1:
                return [], 0
            place(planes, cell, digit - 1)
    found: list[list[int]] = []
    guesses = 0

    def visit(planes: Planes) -> None:
        nonlocal guesses
        left = fill(planes)
        if left is None:
            return
        known, pairs = left
        if known == ALL:
            found.append(
                [next(d + 1 for d in range(SIDE) if planes[d] >> c & 1) for c in range(CELLS)]
            )
            return
        cells = [cell for cell in range(CELLS) if (pairs or ALL & ~known) >> cell & 1]
        if not pairs:
            counts = {cell: sum(plane >> cell & 1 for plane in planes) for cell in cells}
            cells = [cell for cell in cells if counts[cell] == min(counts.values())]
        cell = chooser.choice(cells)
        digits = [digit for digit in range(SIDE) if planes[digit] >> cell & 1]
        chooser.shuffle(digits)
        for number, digit in enumerate(digits):
            guesses += number < len(digits) - 1  # the last digit left is no guess
            branch = planes.copy()
            place(branch, cell, digit)
            visit(branch)
            if len(found) >= most:
                return

    visit(planes)
    return found, guesses


def score(puzzle: list[int], chooser: random.Random) -> float:
    """Mean of log(1 + guesses) over ten random orders of the search."""
    return sum(math.log1p(search(puzzle, 1, chooser)[1]) for _ in range(ORDERS)) / ORDERS


def bred(puzzle: list[int], chooser: random.Random) -> tuple[list[int], list[int]]:
    """A minimal board with one solution from another one, and its solution."""
    board = puzzle.copy()
    for cell in chooser.sample([cell for cell in range(CELLS) if puzzle[cell]], DROPPED):
        board[cell] = 0
    solution = search(board, 1, chooser)[0][0]
    while other := [each for each in search(board, 2, chooser)[0] if each != solution]:
        cell = chooser.choice([cell for cell in range(CELLS) if solution[cell] != other[0][cell]])
        board[cell] = solution[cell]
    for cell in chooser.sample(
        [cell for cell in range(CELLS) if board[cell]], sum(map(bool, board))
    ):
        board[cell] = 0
        if len(search(board, 2, chooser)[0]) > 1:
            board[cell] = solution[cell]
    return board, solution


def hard_boards(number: int, rounds: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Puzzles and solutions (number, 81) int64, easiest first, and their guesses (number,)."""
    chooser = random.Random(seed)
    puzzles, solutions = (boards.tolist() for boards in unique_puzzles(number, seed))
    pool = [
        (score(each, chooser), each, done) for each, done in zip(puzzles, solutions, strict=True)
    ]
    pool.sort()
    for _ in range(rounds):
        board, solution = bred(chooser.choice(pool)[1], chooser)
        pool[0] = max(pool[0], (score(board, chooser), board, solution))
        pool.sort()
    scores, boards, answers = (list(each) for each in zip(*pool, strict=True))
    return torch.tensor(boards), torch.tensor(answers), torch.tensor(scores).expm1().round().long()


def bins(guesses: Tensor) -> dict[str, Tensor]:
    """(N,) bool of every bin of guesses."""
    ends = [*BINS.values(), 1 << 62][1:]
    return {
        name: (guesses >= low) & (guesses < high)
        for (name, low), high in zip(BINS.items(), ends, strict=True)
    }


def hard(
    boards: int = 200, rounds: int = 2000, seed: int = 0, out: Path = Path("hard.npz")
) -> None:
    """Sudoku boards that are hard for a search, made offline.

    Most boards of 17 givens fall to singles; a board is hard where a search has to guess. The search here
    fills in naked and hidden singles and guesses in a cell with the fewest digits left. Its guesses depend on
    the order in which it tries cells and digits: a board's score is the mean of log(1 + guesses) over ten
    random orders, and its "guesses" are exp(score) - 1, rounded.

    A pool of minimal boards with one solution each is bred: a board is drawn, three of its givens are
    dropped, the rest is completed in another way, givens are added until the solution is the only one,
    those that are not needed are taken away, and the easiest board of the pool makes room if it is easier.
    The result is the same for equal seeds. The file has ``puzzle``, ``solution`` (uint8, (N, 81)) and
    ``guesses``, so that ``implicit_attn.data.sudoku.read_list`` reads it.

    Args:
        boards: of the pool.
        rounds: of breeding.
        seed: of all that is drawn.
        out: file to write.
    """
    puzzles, solutions, guesses = hard_boards(boards, rounds, seed)
    parts = (puzzles.byte().numpy(), solutions.byte().numpy(), guesses.numpy())
    np.savez_compressed(out, puzzle=parts[0], solution=parts[1], guesses=parts[2])
    print(f"{len(puzzles)} boards, {int((puzzles > 0).sum()) / len(puzzles):.1f} givens")
    print("  ".join(f"{name}: {int(each.sum())}" for name, each in bins(guesses).items()))


# --- a board solver at its fixed points -----------------------------------------------------------------

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
    """Boards with one and ten blank cells: the answer after so many iterations."""
    order = torch.rand(boards[1].shape, generator=torch.Generator().manual_seed(0)).argsort(1)
    rows = []
    for number in (1, 10):
        puzzles = boards[1].scatter(1, order[:, :number], 0)
        digits = torch.cat(chunks(lambda p: model(p, iterations).argmax(-1) + 1, puzzles))
        row = {"blank cells": number, "number": len(puzzles)}
        rows.append({**row, f"{iterations} iterations": percent((digits == boards[1]).all(1))})
    return rows


def solved_by(model: BoardSolver, puzzles: Tensor, stop: str, **options: Any) -> list[Tensor]:
    """Of ``solve``: digits, which boards have converged, are consistent, evaluations, guesses."""
    options["on_failure"] = "ignore"
    found = chunks(lambda part: model.solve(part, stop=stop, **options), puzzles)
    names = ("digits", "converged", "consistent", "evaluations", "guesses")
    return [torch.cat([getattr(each, name) for each in found]) for name in names]


def answered(name: str, model: BoardSolver, boards: Boards) -> list[dict[str, Any]]:
    """Shares of boards that are answered, and the number of wrong answers."""
    rows = []
    for stop in ("converged", "consistent"):
        digits, said, agree, spent, _ = solved_by(model, boards[0], stop)
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
    found = solved_by(model, boards[0], "consistent", guesses=max(GUESSES))
    digits, _, agree, spent, made = found
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
        found, seconds = timed(lambda p, s=stop: model.solve(p, stop=s, on_failure="ignore"))
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
def fixed_points(
    weights: str = "sudoku-solver",
    hard: Path | None = None,
    boards: int = 200,
    answers: int = 2000,
    longest: int = 64,
    seed: int = 0,
) -> None:
    """A board solver at its fixed points: solved and kept, stopping early, silence, guesses.

    Boards with 17 givens, with 17 to 34, and those of ``--hard``; ``--boards`` of each. Printed are

    - solved boards by iterations, at any time, and how many of those solved at 4x are lost at the end; the
      same by the guesses that a search needs;
    - boards with one blank cell and with ten;
    - where ``solve`` stops by itself: who is answered, and how many of the answers are wrong, beside an
      answer that is given where the least certain cell's largest probability is large enough;
    - what guesses add;
    - evaluations and time of stopping each board by itself, beside the least fixed number that solves as
      many.

    Args:
        weights: of the solver.
        hard: boards that ``hard`` has made.
        boards: of each kind.
        answers: boards that solve is to answer.
        longest: times the iterations of training.
        seed: of the search's orders. The boards are those that the training of the weights held out.
    """
    model, settings = load_solver(weights)
    few, mixed = (
        load_sudoku(settings["train"], max(boards, answers), more=more, seed=settings["seed"])
        for more in (0, None)
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
    weights: str = "sudoku-solver",
    boards: int = 200,
    test: int = 1000,
    train: int = 9000,
    fit_steps: int = 300,
    seed: int = 0,
) -> None:
    """Sudoku by every method of this package on the same boards, by their number of givens.

    Boards with the givens of the list of 17-clue puzzles, with further cells revealed up to 20, 25, 30 and
    34, and "mixed", 17 to 34. Belief propagation and mean fields take minutes on all of them, so they see the
    first ``--boards`` of each number of givens. What each method is told:

    - naked and hidden singles, belief propagation: the rules of the game;
    - couplings: nothing but 9,000 solved boards, from which a Potts model is fitted within this command;
    - board solver: nothing but the puzzles of its training with their solutions.

    Each cell: the share of solved boards in per cent.

    Args:
        weights: of a board solver; a name of shipped weights, or a file.
        boards: of each number, for slow methods.
        test: of each number, for the others.
        train: boards to which couplings are fitted, at most as many as the weights have seen.
        fit_steps: of this fit.
        seed: of this fit. The boards are those that the training of the weights held out.
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
    programs = {"sudoku": sudoku, "fixed-points": fixed_points, "hard": hard}
    tyro.extras.subcommand_cli_from_dict(programs)
