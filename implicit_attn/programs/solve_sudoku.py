"""Learn to solve Sudoku at equilibrium: from boards, without being told a rule.

    implicit-attn train solve-sudoku                              # an hour on two cores
    implicit-attn train solve-sudoku --resume                     # go on where a run stopped
    implicit-attn train solve-sudoku --weights sudoku-solver
    implicit-attn train solve-sudoku --givens 26 34 --iterations 12 --window 12 --epochs 3 \\
        --out runs/solve-easy                                    # trained on easy boards only

Which cells constrain each other is learned first, in seconds: a head of factored attention predicts
every cell of complete boards from the other 80. Its strong pairs form a graph, whose maximal cliques
are the groups of the model, 27 for Sudoku. The model then repeats one update, in which cells and groups
exchange features of each digit; all its weights are shared by all cells and digits. Training puzzles
have numbers of iterations and of givens drawn at random. In the end boards are solved with 1/4 to 16
times the iterations of training, and with as many as each of them needs.

The puzzles have 17 to 34 givens, made from the list of 17-clue puzzles (Gordon Royle, CC BY 2.5) in
$IMPLICIT_ATTN_DATA/sudoku; without it they are generated.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import solvers
from implicit_attn.checkpoint.files import RunLock
from implicit_attn.command_line import (
    Parser,
    command,
    count,
    learning_rate,
    make_folder,
    mistakes,
    place,
    refuse_huge,
    repeats,
    size,
    whole,
)
from implicit_attn.data import SudokuData, board_counts, load_sudoku, resolve_source
from implicit_attn.models import BoardSolver, build_model, learn_groups, load_model
from implicit_attn.optional import require
from implicit_attn.studies.experiments.boards.filling import (
    filling_animation,
    filling_figure,
    frames_of,
)
from implicit_attn.studies.experiments.boards.singles import solve_by_singles
from implicit_attn.training import BoardCompletion, run_script
from implicit_attn.training.boards.completion import reveal_up_to
from implicit_attn.training.boards.measures import solved_by_iterations, solved_when_converged
from implicit_attn.training.options import (
    add_process_options,
    add_result_options,
    add_training_options,
    settings,
)
from implicit_attn.training.script import build_training, claim, save_weights, start
from implicit_attn.weights import weights_file

CELLS, DIGITS = 81, 9
GIVENS = (17, 20, 25, 30, 34)  # of the puzzles in the table at the end
TIMES = (0.25, 0.5, 1, 2, 4, 8, 16)  # the iterations of training
RTOL = 1e-3
PICTURES = 100  # of an animation, at most


def command_line() -> Parser:
    parser = Parser(description=__doc__.split("\n")[0] if __doc__ else None)
    add, puzzles = parser.add_argument, whole(1, 40_000)
    add("--train", type=puzzles, default=9000, help="puzzles to train on")
    add("--test", type=puzzles, default=1000, help="puzzles to test on")
    add("--source", choices=("auto", "list", "generated"), default="auto", help="of the puzzles")
    add(
        "--givens", type=whole(1, 80), nargs=2, default=[17, 34], metavar=("LEAST", "MOST"),
        help="of the training puzzles, drawn anew each time",
    )  # fmt: skip
    add("--features", type=size, default=24, help="of the state of a cell and digit")
    add("--width", type=size, default=48, help="hidden units of the update")
    add("--iterations", type=repeats, default=32, help="of the update, at most, in training")
    add("--window", type=repeats, default=10, help="last iterations that are trained")
    add("--epochs", type=count, default=20)
    add_training_options(parser, batch=36, rate=3e-3)
    add("--weight-decay", type=learning_rate, default=1e-3)
    add_process_options(parser, save_every=100)
    add_result_options(parser, "folder of the results (default runs/solve-sudoku)")
    text = "file, or name of shipped weights: only test them"
    add("--weights", type=weights_file, help=text)
    add("--figure", type=place, help="PNG of the solved shares and a board; .gif: its animation")
    add("--boards", type=puzzles, default=200, help="puzzles of each number of givens in the table")
    return parser


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command_line()
    options = parser.parse_args(words)
    if options.givens[0] > options.givens[1]:
        parser.error("--givens must be LEAST <= MOST, got {} {}".format(*options.givens))
    if options.window > options.iterations:
        parser.error(f"--window must be <= --iterations, got {options.window}")
    if options.figure is not None:  # before an hour of training
        if options.figure.suffix not in (".png", ".gif"):
            parser.error(f"argument --figure: must end in .png or .gif, got {options.figure}")
        with mistakes("--figure"):
            require("matplotlib", extra="examples")
            make_folder(options.figure.parent)
    options.random_iterations = (options.window, options.iterations)  # of each batch
    options.out = options.out or Path("runs/solve-sudoku")
    return options


def puzzles(options: argparse.Namespace, first: bool) -> tuple[SudokuData, SudokuData]:
    """The puzzles without further givens, and with 0 to 17 more, as the program ``sudoku`` has them."""
    with mistakes("--source", first=first):
        source = resolve_source(options.source)
    with mistakes("--train", first=first):
        few, mixed = (
            load_sudoku(options.train, options.test, source=source, more=more, seed=options.seed)
            for more in (0, None)
        )
    return few, mixed


def specification(options: argparse.Namespace, groups: list[list[int]]) -> dict[str, Any]:
    """From which ``build_model`` builds the model, and ``load_model`` builds it again."""
    sizes = {name: getattr(options, name) for name in ("features", "width", "iterations", "window")}
    return {
        "kind": "board-solver", "groups": groups, "cells": CELLS, "colours": DIGITS, **sizes,
    }  # fmt: skip


def main(words: Sequence[str] | None = None) -> None:
    with command(command_line()):
        run(arguments(words))


def run(options: argparse.Namespace) -> None:
    if options.weights is not None:
        with mistakes("--weights"):
            model, _ = load_model(options.weights)
            if not isinstance(model, BoardSolver):
                raise ValueError(f"must be of a board solver, got a {type(model).__name__}")
        report(model, *puzzles(options, True), options)
        return
    with mistakes():
        refuse_huge(lambda: build_model(specification(options, [[0]])), name="--features")
        fabric = start(options)
    with claim(options, fabric) as lock:
        train(options, fabric, lock)


def train(options: argparse.Namespace, fabric: Any, lock: RunLock) -> None:
    first = fabric.global_rank == 0
    few, mixed = puzzles(options, first)
    with mistakes("--train", first=first):
        groups = learn_groups(few.train_solutions - 1, DIGITS, seed=options.seed)
    if first:
        print(f"data: {mixed.name}, {options.train} training and {options.test} test puzzles")
        sizes = " or ".join(map(str, sorted({len(group) for group in groups})))
        print(f"learned from their solutions: {len(groups)} groups of {sizes} cells")
    built = specification(options, groups)
    torch.manual_seed(options.seed)
    model: Any = build_model(built, layer={"on_failure": "ignore"})
    data = replace(mixed, train_puzzles=few.train_puzzles)
    with mistakes(first=first):
        training = build_training(
            options,
            model,
            BoardCompletion(data, givens=tuple(options.givens)),
            {
                **settings(options, "weights", "boards", "figure", "source"),
                "data": data.name,
                "model": built,
            },
            fabric=fabric,
        )
    run_script(training, resume=options.resume, overwrite=options.overwrite, lock=lock)
    if first:
        save_weights(training)
        print(f"{training.summary()}; tables, checkpoint and weights: {options.out}")
        report(model.eval(), few, mixed, options)


def report(
    model: BoardSolver, few: SudokuData, mixed: SudokuData, options: argparse.Namespace
) -> None:
    """Print the solved boards by givens and by iterations, beside those that logic solves."""
    device = next(model.parameters()).device
    few, mixed, trained = few.to(device), mixed.to(device), model.iterations
    marks = [max(1, round(times * trained)) for times in TIMES]
    number = sum(parameter.numel() for parameter in model.parameters())
    print(f"\n{mixed.name}, {number} parameters, trained with up to {trained} iterations")
    print(
        "boards solved, %: by naked and hidden singles (logic), after so many iterations, and with"
    )
    print(f"as many as each takes to a residual of {RTOL:g}, at most {max(marks)}")
    heads = [
        "givens",
        "boards",
        "singles",
        *map(str, marks),
        "adaptive",
        "converged",
        "evaluations",
    ]
    print("  ".join(f"{head:>7}" for head in heads))
    curves = {}
    for name, boards, answers in test_sets(few, mixed, options):
        singles = solved_share(solve_by_singles(boards.cpu()), boards.cpu(), answers.cpu())
        shares = solved_by_iterations(model, boards, answers, marks).boards
        curves[name] = shares
        own = solved_when_converged(
            model, boards, answers, solver=solvers.Forward(), max_steps=max(marks),
            tolerance=solvers.Tolerance(rtol=RTOL), on_failure="ignore",
        )  # fmt: skip
        values = [f"{100 * share:.1f}" for share in (singles, *shares, own.solved, own.converged)]
        cells = [name, str(len(boards)), *values, f"{own.mean_evaluations:.0f}"]
        print("  ".join(f"{cell:>{max(7, len(h))}}" for cell, h in zip(cells, heads, strict=True)))
    if options.figure is not None:
        with mistakes("--figure"):
            draw(model, options.figure, test_sets(few, mixed, options)[0], curves, marks)


@torch.no_grad()
def draw(
    model: BoardSolver,
    path: Path,
    boards: tuple[str, Tensor, Tensor],
    curves: dict[str, list[float]],
    marks: list[int],
) -> None:
    """The figure or the animation, of the first of the boards that is solved, or else the first."""
    _, puzzles, solutions = boards
    found = (model(puzzles, iterations=max(marks)).argmax(-1) + 1 == solutions) | (puzzles > 0)
    index = int(found.all(1).int().argmax())
    puzzle, solution = puzzles[index], solutions[index]
    every = frames_of(model, puzzle, range(1, max(marks) + 1))
    done = [((frame.digits == solution) | (puzzle > 0)).all().item() for frame in every]
    last = len(done) if True not in done else done.index(True) + 1
    if path.suffix == ".gif":
        rare = -(-last // PICTURES)
        filling_animation(path, puzzle, solution, every[last - 1 :: -rare][::-1])
        return
    shown = sorted({max(1, round(share * last)) for share in (0.1, 0.4, 0.8, 1)})
    frames = [every[number - 1] for number in shown]
    trained = model.iterations
    filling_figure(path, curves, marks, trained, puzzle, solution, frames)


def test_sets(
    few: SudokuData, mixed: SudokuData, options: argparse.Namespace
) -> list[tuple[str, Tensor, Tensor]]:
    """Puzzles and solutions by their number of givens, and all test puzzles as they are."""
    generator = torch.Generator().manual_seed(options.seed)
    sets = []
    for number in GIVENS:
        there = (few.test_puzzles != 0).sum(1) <= number
        boards = few.test_puzzles[there][: options.boards]
        answers = few.test_solutions[there][: options.boards]
        if len(boards) > 0:  # generated puzzles have more than 17
            boards = reveal_up_to(boards, answers, number, generator)
            sets.append((str(number), boards, answers))
    least, most = (mixed.test_puzzles != 0).sum(1).aminmax()
    return [*sets, (f"{least}-{most}", mixed.test_puzzles, mixed.test_solutions)]


def solved_share(boards: Tensor, puzzles: Tensor, solutions: Tensor) -> float:
    right, unknown = board_counts(boards, puzzles, solutions)
    return (right == unknown).double().mean().item()


if __name__ == "__main__":
    main()
