"""Sudoku boards: a backbone completes them, an update learns to solve them; how they are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

import solvers
from implicit_attn.data import (
    SudokuData,
    SudokuSymmetries,
    board_counts,
    load_sudoku,
    resolve_source,
    solve_by_singles,
)
from implicit_attn.data.sudoku import reveal_up_to
from implicit_attn.models import BoardSolver, build_model, learn_groups, load_model
from implicit_attn.optional import progress
from implicit_attn.programs import (
    Job,
    Program,
    Values,
    choose_threads,
    mistakes,
    save_weights,
    take_recipe,
)
from implicit_attn.programs.images import SOLVES, BackboneProgram, take
from implicit_attn.studies.study import BLUE, RED, format_table
from implicit_attn.training import CarriedStates, SudokuCompletion, Training
from implicit_attn.weights import weights_file

FAINTEST = 0.15  # of a digit that has hardly any probability more than the others


class Frame(NamedTuple):
    """A board after some iterations: most probable digits and their probabilities, (81,) each."""

    iterations: int
    digits: Tensor
    certainty: Tensor


@torch.no_grad()
def frames_of(model: BoardSolver, puzzle: Tensor, at: Sequence[int]) -> list[Frame]:
    """The board (81,) after each of the numbers of iterations ``at``, rising."""
    frames, wanted = [], set(at)
    for number, logits in enumerate(model.trajectory(puzzle.unsqueeze(0), max(at)), start=1):
        if number in wanted:
            certainty, digits = logits[0].softmax(-1).max(-1)
            frames.append(Frame(number, digits + 1, certainty))
    return frames


def draw_frame(axes: Any, puzzle: Tensor, solution: Tensor, frame: Frame) -> None:
    """The nine by nine cells, found digits the fainter the less certain."""
    more = (frame.certainty - 1 / 9) / (1 - 1 / 9)  # than none
    draw_board(axes, puzzle, frame.digits, solution, 11, more.clamp(FAINTEST, 1.0))
    right, unknown = board_counts(frame.digits[None], puzzle[None], solution[None])
    word = "iteration" if frame.iterations == 1 else "iterations"
    title = f"after {frame.iterations} {word}\n{int(right)} of {int(unknown)} unknown right"
    axes.set_title(title, fontsize=10)


def draw_board(
    axes: Any,
    puzzle: Tensor,
    filled: Tensor,
    solution: Tensor,
    size: float = 13,
    strengths: Tensor | None = None,
) -> None:
    """The nine by nine cells of a puzzle (81,), 0 = unknown, clues bold, found digits blue or red.

    ``strengths`` (81,) in 0 .. 1 make digits the fainter the less they are; None: all alike.
    """
    for line in range(10):
        width = 1.6 if line % 3 == 0 else 0.4
        axes.plot([line, line], [0, 9], color="black", linewidth=width)
        axes.plot([0, 9], [line, line], color="black", linewidth=width)
    shown = torch.ones(81) if strengths is None else strengths
    cells = zip(*(values.tolist() for values in (puzzle, filled, solution, shown)), strict=True)
    for index, (clue, digit, right, strength) in enumerate(cells):
        axes.text(
            index % 9 + 0.5, 8.5 - index // 9, str(clue or digit), ha="center", va="center",
            fontsize=size, weight="bold" if clue else "normal",
            color="black" if clue else BLUE if digit == right else RED,
            alpha=1.0 if clue else strength,
        )  # fmt: skip
    axes.set_aspect("equal")
    axes.axis("off")


CELLS, DIGITS = 81, 9
GIVENS = (17, 20, 25, 30, 34)  # of the puzzles in the table at the end
TIMES = (0.25, 0.5, 1, 2, 4, 8, 16)  # the iterations of training
RTOL = 1e-3
PRESET: Values = {
    "features": 24, "width": 48, "epochs": 20, "batch": 36, "rate": 3e-3, "weight_decay": 1e-3,
}  # fmt: skip


@dataclass(kw_only=True)
class SolveSudoku(Program):
    """Learn to solve Sudoku at equilibrium: from boards, without being told a rule.

    implicit-attn train solve-sudoku: an hour on two cores. With --weights sudoku-solver no training,
    only the table; --givens 26 34 --iterations 12 --window 12 --epochs 3: easy boards only. --carried 48
    --batch 16 --start NAME trains weights on with states that earlier steps left, so that what is found
    stays.

    Which cells constrain each other is learned first, in seconds: a head of factored attention
    predicts every cell of complete boards from the other 80. Its strong pairs form a graph, whose
    maximal cliques are the groups of the model, 27 for Sudoku. The model then repeats one update, in
    which cells and groups exchange features of each digit; all its weights are shared by all cells and
    digits. Training puzzles have numbers of iterations and of givens drawn at random. In the end boards
    are solved with 1/4 to 16 times the iterations of training, and with as many as each needs.

    The puzzles have 17 to 34 givens, made from the list of 17-clue puzzles (Gordon Royle, CC BY 2.5) in
    $IMPLICIT_ATTN_DATA/sudoku; without it they are generated.
    """

    folder = "solve-sudoku"
    train: int = 9000
    """puzzles to train on"""
    test: int = 1000
    """puzzles to test on"""
    source: Literal["auto", "list", "generated"] = "auto"
    """of the puzzles"""
    givens: tuple[int, int] = (17, 34)
    """of the training puzzles, least and most, drawn anew each time"""
    iterations: int = 32
    """of the update, at most, in training"""
    window: int = 10
    """last iterations that are trained"""
    carried: int = 0
    """boards of the pool of carried states, of which a batch has as many as of fresh ones; 0: none"""
    start: str | None = None
    """file, or name of shipped weights: train these on, with their puzzles and seed"""
    weights: str | None = None
    """file, or name of shipped weights: only test them, on puzzles of the list that they have not seen"""
    boards: int = 200
    """puzzles of each number of givens in the table"""

    def run(self) -> None:
        with mistakes():
            self._check()
        if self.weights is None:
            super().run()
            return
        with mistakes():
            model, settings = load_solver("weights", self.weights)
            self._take_split(settings)
            few, mixed = self._puzzles()
        choose_threads(model)
        show(model, few, mixed, self)

    def _check(self) -> None:
        least, most = self.givens
        if not least <= most <= CELLS - 1:
            raise ValueError(f"givens must be LEAST <= MOST <= {CELLS - 1}, got {least} {most}")
        if self.window > self.iterations:
            raise ValueError(f"window must be <= iterations, got {self.window}")

    def _take_split(self, settings: Values) -> None:
        """Tests are made on puzzles of the list that these weights have not seen in their training."""
        if resolve_source(self.source) != "list":
            return
        if "list" not in settings["data"]:
            if settings.get("start") is not None:
                raise ValueError(
                    "source must be generated: weights trained on do not tell what they have seen"
                )
            return
        for name in ("train", "seed"):
            if getattr(self, name) not in (getattr(SolveSudoku, name), settings[name]):
                raise ValueError(
                    f"{name} must be left out, or {settings[name]} as in the training of the weights, "
                    f"which has seen the other puzzles, got {getattr(self, name)}"
                )
            setattr(self, name, settings[name])

    def _puzzles(self) -> tuple[SudokuData, SudokuData]:
        """Without further givens, and with 0 to 17 more, as the program ``sudoku`` has them."""
        options: Any = {"source": resolve_source(self.source), "seed": self.seed}
        few, mixed = (load_sudoku(self.train, self.test, more=n, **options) for n in (0, None))
        return few, mixed

    def defaults(self) -> Values:
        return PRESET

    def job(self, first: bool) -> Job:
        start = None
        if self.start is not None:
            start, settings = load_solver("start", self.start)
            self._take_split(settings)
        self.few, self.mixed = self._puzzles()
        try:
            groups = learn_groups(self.few.train_solutions - 1, DIGITS, seed=self.seed)
        except ValueError as error:  # of the argument "boards", whose number is the option "train"
            raise ValueError(str(error).replace("boards must be at", "train must be at")) from None
        if first:
            print(f"data: {self.mixed.name}, {self.train} training and {self.test} test puzzles")
            sizes = " or ".join(map(str, sorted({len(group) for group in groups})))
            print(f"learned from their solutions: {len(groups)} groups of {sizes} cells")
        values = self.values() | {"random_iterations": (self.window, self.iterations)}
        if start is not None:
            values |= {"features": start.update.features, "width": start.update.width}
        recipe = take_recipe(values, self.seed)
        built = {"kind": "board-solver", "groups": groups, "cells": CELLS, "colours": DIGITS}
        built |= {"iterations": self.iterations, "window": self.window, **values}
        torch.manual_seed(self.seed)
        model = build_model(built, layer={"on_failure": "ignore"})
        if start is not None:
            model.load_state_dict(start.state_dict())
        task = SudokuCompletion(
            replace(self.mixed, train_puzzles=self.few.train_puzzles), givens=self.givens,
            carried=CarriedStates(self.carried) if self.carried else None,
        )  # fmt: skip
        kept = {"data": self.mixed.name, "train": self.train, "test": self.test, "model": built}
        kept |= {"givens": self.givens, "carried": self.carried, "start": self.start}
        return Job(model, task, recipe, kept)

    def report(self, training: Training) -> None:
        if training.fabric.global_rank == 0:
            save_weights(training)
            print(f"{training.summary()}; tables, checkpoint and weights: {self.place}")
            # The compiled step would be compiled again as boards leave their batch.
            vars(training.model.update).pop("advance", None)
            show(training.model.eval(), self.few, self.mixed, self)


def load_solver(option: str, name: str) -> tuple[BoardSolver, Values]:
    """A board solver by a file or by the name of shipped weights, and the settings of its training."""
    model, progress = load_model(weights_file(name))
    if not isinstance(model, BoardSolver):
        raise ValueError(f"{option} must be of a board solver, got a {type(model).__name__}")
    settings = progress["settings"]
    missing = [each for each in ("data", "train", "seed") if each not in settings]
    if missing:
        raise ValueError(
            f"{option} must tell of its training {', '.join(missing)}, {name} does not"
        )
    return model, settings


def show(model: BoardSolver, few: SudokuData, mixed: SudokuData, options: SolveSudoku) -> None:
    """Print the solved boards by givens and by iterations, beside those that logic solves."""
    device = next(model.parameters()).device
    few, mixed, trained = few.to(device), mixed.to(device), model.iterations
    marks = [max(1, round(times * trained)) for times in TIMES]
    number = sum(parameter.numel() for parameter in model.parameters())
    print(f"\n{mixed.name}, {number} parameters, trained with up to {trained} iterations")
    print("boards solved, %: by naked and hidden singles (logic), after so many iterations, and")
    print(f"with as many as each takes to a residual of {RTOL:g}, at most {max(marks)}")
    table = []
    for name, boards, answers in test_sets(few, mixed, options):
        singles = _share(_solved(solve_by_singles(boards.cpu()), boards.cpu(), answers.cpu()))
        shares = solved_after(model, boards, answers, marks)
        *own, evaluations = solved_when_converged(model, boards, answers, max(marks))
        heads = ("singles", *map(str, marks), "adaptive", "converged")
        shown = zip(heads, (singles, *shares, *own), strict=True)
        row = {"givens": name, "boards": len(boards)}
        row |= {head: f"{100 * share:.1f}" for head, share in shown}
        table.append(row | {"evaluations": f"{evaluations:.0f}"})
    print(format_table(table))


def test_sets(
    few: SudokuData, mixed: SudokuData, options: SolveSudoku
) -> list[tuple[str, Tensor, Tensor]]:
    """Puzzles and solutions by their number of givens, and all test puzzles as they are."""
    generator = torch.Generator().manual_seed(options.seed)
    sets = []
    for number in GIVENS:
        there = ((few.test_puzzles != 0).sum(1) <= number).nonzero()[: options.boards, 0]
        boards, answers = few.test_puzzles[there], few.test_solutions[there]
        if len(boards) > 0:  # generated puzzles have more than 17
            boards = reveal_up_to(boards, answers, number, generator)
            sets.append((str(number), boards, answers))
    least, most = (mixed.test_puzzles != 0).sum(1).aminmax()
    return [*sets, (f"{least}-{most}", mixed.test_puzzles, mixed.test_solutions)]


@torch.no_grad()
def solved_after(
    model: BoardSolver, puzzles: Tensor, solutions: Tensor, at: Sequence[int], batch: int = 100
) -> list[float]:
    """Shares of boards (B, 81) that are solved after each number of iterations ``at``."""
    found: dict[int, list[Tensor]] = {number: [] for number in at}
    for part, answers in zip(puzzles.split(batch), solutions.split(batch), strict=True):
        numbers = progress(range(1, max(at) + 1), "iterations")
        for number, logits in zip(numbers, model.trajectory(part, max(at)), strict=True):
            if number in found:
                found[number].append(_solved(logits.argmax(-1) + 1, part, answers))
    return [_share(torch.cat(found[number])) for number in at]


@torch.no_grad()
def solved_when_converged(
    model: BoardSolver, puzzles: Tensor, solutions: Tensor, most: int, batch: int = 100
) -> tuple[float, float, float]:
    """Where each board stops by itself: shares solved and converged, and the mean of the evaluations."""
    rows = []
    pairs = list(zip(puzzles.split(batch), solutions.split(batch), strict=True))
    for part, answers in progress(pairs, "solves"):
        found = model.solve(
            part, stop="converged", solver=solvers.Forward(), max_steps=most,
            tolerance=solvers.Tolerance(rtol=RTOL), on_failure="ignore",
        )  # fmt: skip
        right = _solved(found.value.argmax(-1) + 1, part, answers)
        rows.append(torch.stack([right, found.converged, found.evaluations], 1).double())
    solved, converged, evaluations = torch.cat(rows).mean(0).tolist()
    return solved, converged, evaluations


def _solved(boards: Tensor, puzzles: Tensor, solutions: Tensor) -> Tensor:
    right, unknown = board_counts(boards, puzzles, solutions)
    return right == unknown


def _share(solved: Tensor) -> float:
    return solved.double().mean().item()


# In "paper" the dropout, the warm-up and the floor of the learning rate are ours: we found none published.
SUDOKU: dict[str, Values] = {
    "paper": {
        "dim": 768, "heads": 12, "width": 3072, "iterations": 24, "initial_step": 0.0, "batch": 16,
        "epochs": 200, "rate": 1e-4, "weight_decay": 0.1, "warmup": 0.02, "floor": 0.1,
        "symmetries": False, "start": "random", "dropout": 0.1,
    },
    "small": {
        "dim": 128, "heads": 4, "width": 512, "iterations": 16, "initial_step": 0.1, "batch": 16,
        "random_iterations": [12, 20], "epochs": 8, "rate": 1e-3, "weight_decay": 0.1,
        "warmup": 0.05, "floor": 0.02, "symmetries": True, "start": "units", "dropout": 0.0,
    },
}  # fmt: skip


@dataclass(kw_only=True)
class Sudoku(BackboneProgram):
    """Train a recurrent attention model to complete Sudoku boards: Hyper-SET, or a baseline.

    implicit-attn train sudoku: a reduced model, half an hour on one core. With --model transformer a
    baseline; --preset paper --compile --precision bf16-mixed: for a GPU.

    The 81 cells are tokens. One layer is applied to them repeatedly. A linear readout gives the logits
    of the nine digits in every cell. Puzzles have 17 to 34 clues, made from the list of 17-clue puzzles
    (Gordon Royle, CC BY 2.5) in $IMPLICIT_ATTN_DATA/sudoku; without it, puzzles are generated. --preset
    paper takes what is published of Hyper-SET (Hu, Zou, Xu, https://arxiv.org/abs/2502.11646).
    """

    folder = "sudoku-{model}"
    train: int = 9000
    """puzzles to train on"""
    test: int = 1000
    """puzzles to test on"""
    source: Literal["auto", "list", "generated"] = "auto"
    """of the puzzles"""

    def defaults(self) -> Values:
        preset = SUDOKU[self.preset]
        if self.further().get("positions") == "sincos":
            preset = preset | {"start": "random"}
        return self.adjusted(preset, {**SOLVES, "rtol": None})

    def job(self, first: bool) -> Job:
        source = resolve_source(self.source)
        puzzles = {"train": self.train, "test": self.test, "source": source, "seed": self.seed}
        data = load_sudoku(**puzzles)
        values = self.values("iterations", "layers")
        symmetries = values.pop("symmetries")
        recipe = take_recipe(values, self.seed)
        around = {"kind": "sudoku", **take(values, "start", "dropout", "positions", "final_norm")}
        specification, model = self.build(around, values, "conditioned-input")
        if first:
            print(f"data: {data.name}, {self.train} training and {self.test} test puzzles")
        task = SudokuCompletion(data, SudokuSymmetries() if symmetries else None)
        kept = {"data": "sudoku", **puzzles, "symmetries": symmetries, "model": specification}
        return Job(model, task, recipe, kept)
