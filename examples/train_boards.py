"""Learn to solve Sudoku from boards alone, without being told a rule; or complete boards by a backbone.

    python examples/train_boards.py --minutes 20        # an update that is repeated; later with --resume
    python examples/train_boards.py --givens 26 34 --iterations 16 --window 5 --epochs 4    # easy boards
    python examples/train_boards.py --evaluate list --weights sudoku-solver    # no training, only the table
    python examples/train_boards.py --evaluate hard --weights sudoku-solver    # public sets of hard puzzles
    python examples/train_boards.py --task complete     # Hyper-SET, or a baseline by --model transformer
    python examples/train_boards.py --features 96 --width 192 --iterations 48 --batch 192 --carried 768
        --train 36864 --precision tf32 --compile --minutes 4    # a larger update, on a card

The script first learns which cells constrain each other, in seconds: a head of factored attention predicts
every cell of complete boards from the other 80. The maximal cliques of its strong pairs are the groups of
the model, 27 for Sudoku. The model then repeats one update, in which cells and groups exchange features of
each digit. The numbers of iterations and of givens are random. --start NAME continues from other weights.
--carried N also trains on states that earlier steps left, so that the model learns to keep its answers. A
training that stops after --minutes leaves its weights in unfinished.safetensors, for --evaluate.

The puzzles have 17 to 34 givens, made from the list of 17-clue puzzles (Gordon Royle, CC BY 2.5) in
$IMPLICIT_ATTN_DATA/sudoku; without it they are generated. sudoku/hard.npz has the public sets of hard
puzzles of the Sudoku players' forum, as the tdoku benchmark collects them.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import lightning_fabric
import matplotlib.pyplot as plt
import torch
import tyro
from board_tasks import (
    Boards,
    CarriedStates,
    Completion,
    by_givens,
    hard_puzzles,
    hard_sets,
    row_of,
)
from options import Backbone, refuse
from runner import STYLE, Table
from training import Training

from implicit_attn.data import load_sudoku, resolve_source
from implicit_attn.models import BoardSolver, build_model, learn_groups, load_model
from implicit_attn.studies import write_table
from implicit_attn.weights import weights_file

GIVENS = (17, 20, 25, 30, 34)  # of the puzzles in the table
TIMES = (0.25, 0.5, 1, 2, 4, 8)  # the iterations of training
HARD_TRAINING = "hardest_1905_train"
SOLVE: dict[str, Any] = {
    "features": 24, "width": 48, "iterations": 32, "epochs": 20, "batch": 36, "rate": 3e-3,
    "weight_decay": 1e-3,
}  # fmt: skip
# In "paper" the dropout, the warm-up and the floor of the rate are ours: we found none published.
COMPLETE: dict[str, dict[str, Any]] = {
    "small": {
        "dim": 128, "heads": 4, "width": 512, "iterations": 16, "initial_step": 0.1, "batch": 16,
        "random_iterations": (12, 20), "epochs": 8, "rate": 1e-3, "weight_decay": 0.1, "floor": 0.02,
    },
    "paper": {
        "dim": 768, "heads": 12, "width": 3072, "iterations": 24, "initial_step": 0.0, "batch": 16,
        "epochs": 200, "rate": 1e-4, "weight_decay": 0.1, "warmup": 0.02, "floor": 0.1,
    },
}  # fmt: skip
SOLVED: dict[str, Any] = {"iterations": 50, "random_iterations": None}


@dataclass(kw_only=True)
class Sudoku(Backbone):
    """What is trained, and how; or what is evaluated."""

    task: Literal["solve", "complete"] = "solve"
    """an update that learns to solve, or a backbone that completes boards"""
    model: Literal[
        "hyperset", "hyperset-equilibrium", "equilibrium", "transformer", "deq-transformer",
        "energy-transformer", "spin-transformer",
    ] = "hyperset"  # fmt: skip
    """the backbone that completes boards"""
    evaluate: Literal["list", "hard"] | None = None
    """train nothing; test weights on held-out puzzles of the list, or on public sets of hard puzzles"""
    weights: str = "sudoku-solver"
    """file, or name of shipped weights, to evaluate"""
    boards: int = 200
    """puzzles of each row of the table"""
    guesses: int = 0
    """for a board whose answer has a digit twice in a group"""
    train: int = 9000
    """puzzles to train on"""
    test: int = 1000
    """puzzles to test on"""
    source: Literal["auto", "list", "generated"] = "auto"
    """of the puzzles"""
    givens: tuple[int, int] = (17, 34)
    """of the training puzzles, least and most, drawn anew each time"""
    hard: bool = False
    """train also on 20,000 puzzles of the forum's hardest, none of which is in a test set"""
    features: int | None = None
    """of a cell and digit"""
    window: int = 10
    """last iterations that are trained"""
    carried: int = 0
    """boards of the pool of carried states, of which a batch has as many as of fresh ones; 0: none"""
    start: str | None = None
    """file, or name of shipped weights: train these on, with their puzzles and seed"""


def load_solver(name: str, option: str = "weights") -> tuple[BoardSolver, dict[str, Any]]:
    """A board solver by a file or by the name of shipped weights, and the settings of its training."""
    try:
        model, settings = load_model(weights_file(name))
    except ValueError as error:
        raise refuse(option, name, error) from None
    if not isinstance(model, BoardSolver):
        raise SystemExit(f"--{option} must be a board solver, got a {type(model).__name__}")
    return model, settings


def puzzles_of(options: Sudoku, more: int | None) -> Any:
    """Puzzles with no further givens (``more`` = 0), or with up to 17."""
    counts = options.train, options.test
    try:
        source = resolve_source(options.source)
        return load_sudoku(*counts, source=source, more=more, seed=options.seed)
    except FileNotFoundError as error:
        raise refuse("source", options.source, error) from None
    except ValueError as error:
        raise refuse("train", options.train, error) from None


def held_out(options: Sudoku) -> dict[str, Boards]:
    """Test puzzles and solutions by their number of givens, and mixed."""
    few, mixed = puzzles_of(options, 0), puzzles_of(options, None)
    generator = torch.Generator().manual_seed(options.seed)
    few_boards = few.test_puzzles, few.test_solutions
    found = by_givens(few_boards, GIVENS, generator, "givens", options.boards)
    sets = {f"{number} givens": boards for number, boards in found.items()}
    least, most = (mixed.test_puzzles != 0).sum(1).aminmax()
    mixed_part = mixed.test_puzzles[: options.boards], mixed.test_solutions[: options.boards]
    return sets | {f"{least} to {most} givens": mixed_part}


def evaluate(model: BoardSolver, sets: dict[str, Boards], options: Sudoku, folder: Path) -> Table:
    """Print, write and draw the shares of solved boards."""
    marks = [max(1, round(times * model.iterations)) for times in TIMES]
    print(f"boards solved, %, after iterations ({model.iterations} in training), and with")
    print(
        f"{options.guesses} guesses where each board stops by itself at an answer without contradiction"
    )
    rows: Table = []
    for name, boards in sets.items():
        rows.append(row_of(name, model, boards, marks, options.guesses))
        shown = (
            f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in rows[-1].items()
        )
        print("  ".join(shown), flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    write_table(folder / "boards.csv", rows)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(5.5, 3.8))
        for row in rows:
            axes.plot(marks, [row[str(n)] for n in marks], "o-", markersize=3, label=row["boards"])
        axes.set_xscale("log", base=2)
        axes.set_xticks(marks, [str(mark) for mark in marks])
        axes.set(xlabel="iterations", ylabel="boards solved (%)", ylim=(-3, 103))
        axes.legend(frameon=False)
        figure.savefig(folder / "boards.png")
        plt.close(figure)
    return rows


def build_solver(options: Sudoku) -> tuple[Any, dict[str, Any], Completion]:
    """The model, the settings of its weights, and the task."""
    options.fill(SOLVE)
    before = None
    if options.start is not None:
        before, settings = load_solver(options.start, "start")
        options.train, options.seed = settings["train"], settings["seed"]
        options.features, options.width = before.update.features, before.update.width
    few, mixed = puzzles_of(options, 0), puzzles_of(options, None)
    groups = learn_groups(few.train_solutions - 1, 9, seed=options.seed)
    iterations: Any = options.iterations
    options.random_iterations = (options.window, iterations)
    built = {"kind": "board-solver", "groups": groups, "cells": 81, "colours": 9}
    built |= {"iterations": iterations, "window": options.window}
    built |= {"features": options.features, "width": options.width, **options.further()}
    torch.manual_seed(options.seed)
    model = build_model(built, layer={"on_failure": "ignore"})
    if before is not None:
        model.load_state_dict(before.state_dict())
    puzzles, solutions = few.train_puzzles, few.train_solutions
    if options.hard:
        hard = hard_puzzles([HARD_TRAINING])[HARD_TRAINING]
        puzzles, solutions = torch.cat([puzzles, hard[0]]), torch.cat([solutions, hard[1]])
    data = replace(mixed, train_puzzles=puzzles, train_solutions=solutions)
    carried = CarriedStates(options.carried) if options.carried else None
    kept = {
        "data": data.name,
        "train": options.train,
        "test": options.test,
        "givens": options.givens,
    }
    kept |= {"model": built} | {n: getattr(options, n) for n in ("hard", "carried", "start")}
    return model, kept, Completion(data, givens=options.givens, carried=carried)


def build_completer(options: Sudoku) -> tuple[Any, dict[str, Any], Completion]:
    """The model, the settings of its weights, and the task."""
    small = options.preset == "small"
    options.fill_for(options.model, COMPLETE[options.preset], SOLVED)
    backbone, layer = options.specification(options.model, "conditioned-input")
    around = {"start": "units", "dropout": 0.0} if small else {"start": "random", "dropout": 0.1}
    built = {"kind": "sudoku", **around, "backbone": backbone}
    torch.manual_seed(options.seed)
    model = build_model(built, layer=layer)
    data = puzzles_of(options, None)
    kept = {"data": data.name, "train": options.train, "test": options.test, "model": built}
    return model, kept, Completion(data, symmetries=small)


def main(options: Sudoku) -> Table:
    """Evaluate, or train and report; the rows of the table, or of the history."""
    folder = options.out or Path("runs") / f"sudoku-{options.evaluate}"
    if options.evaluate is not None:
        solver, settings = load_solver(options.weights)
        place = lightning_fabric.Fabric(accelerator=options.accelerator, devices=1)
        solver.to(place.device)
        if options.evaluate == "list":  # the puzzles that the training has held out
            options.train, options.seed = settings["train"], settings["seed"]
        sets = held_out(options) if options.evaluate == "list" else hard_sets(options.boards)
        return evaluate(solver, sets, options, folder)
    solve = options.task == "solve"
    if not solve and (options.hard or options.carried or options.start):
        raise SystemExit("--hard, --carried and --start belong to --task solve")
    model, settings, task = build_solver(options) if solve else build_completer(options)
    name = "solve-sudoku" if solve else f"sudoku-{options.model}"
    training = Training(options, model, task, settings, Path("runs") / name)
    training.fabric.print(f"{settings['data']}: {options.train} + {options.test} puzzles")
    if training.run():
        iterations: Any = options.iterations
        training.report([max(1, round(times * iterations)) for times in (0.5, 1, 2, 4)])
        if solve and training.fabric.global_rank == 0:
            vars(training.model.update).pop("advance", None)  # a compiled one, of one size of batch
            evaluate(training.model.eval(), held_out(options), options, training.folder)
    return training.history


if __name__ == "__main__":
    main(tyro.cli(Sudoku, description=__doc__))
