"""What fixed points buy, and where they buy nothing: ``implicit-attn demo``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from implicit_attn.data import HELP, load_sudoku, load_text, solve_by_singles
from implicit_attn.models import EquilibriumLanguageModel, LanguageModel
from implicit_attn.programs.boards import Frame, draw_frame, frames_of, solved_after
from implicit_attn.programs.images import Classify
from implicit_attn.studies.study import (
    BLUE,
    DPI,
    GREY,
    ORANGE,
    Table,
    format_table,
    new_figure,
    write_table,
)
from implicit_attn.training import NextToken, Recipe, Training
from implicit_attn.weights import load_pretrained

BOARD_MARKS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # numbers of iterations
TEXT_MARKS = (1, 2, 3, 4, 6, 8, 12, 24, 48)
FRAMES = (1, 4, 16, 32, 64)
DRAWN = (4, 20)  # iterations of the language model in training
REPEATED = "one block, repeated"
LANGUAGE = {"one block, once": 1, "three blocks": 3, REPEATED: 0}  # layers of each


@dataclass(kw_only=True)
class Demo(Classify):
    """Boards filled in by a shipped solver, one transformer block at its fixed point, digits (two minutes).

    A solver of Sudoku boards, which was told no rule, is repeated for up to 256 iterations. A transformer
    block learns the characters of Python's help texts, once as a usual layer and once repeated to its
    fixed point, with equal parameters; three usual layers stand beside them. Then digits as implicit-attn
    train classify reads them, a task on which an equilibrium is no more accurate than simpler layers.
    Results of the last time are replaced.
    """

    boards: int = 100
    """puzzles that the shipped solver fills in"""
    steps: int = 300
    """of the training of each language model"""

    def run(self) -> None:
        self.overwrite = not self.resume
        folder = (self.out or Path("runs")) / "fixed-points"
        folder.mkdir(parents=True, exist_ok=True)
        torch.set_num_threads(1)  # small models: a second thread would wait more than it computes
        fixed_points(folder, self.boards, self.steps, self.seed)
        print("\nDigits, where simpler layers are as accurate:\n")
        super().run()


def fixed_points(folder: Path, boards: int, steps: int, seed: int) -> dict[str, Table]:
    """Both tables as CSV and text, and the picture ``fixed-points.png``, written to ``folder``."""
    print(f"Sudoku: {boards} puzzles by the shipped solver ...", flush=True)
    board_table, singles, puzzle, solution, frames = fill_boards(boards)
    print(f"\n{format_table(board_table)}\nnaked and hidden singles alone solve {singles:.1f} %")
    text_table = learn_text(folder, steps, seed)
    print(f"\n{format_table(text_table)}\n(validation loss in nats a character)")
    tables = {"boards": board_table, "text": text_table}
    for name, table in tables.items():
        write_table(folder / f"{name}.csv", table)
    path = folder / "fixed-points.png"
    title = "What iterating to a fixed point buys"
    figure = new_figure((13.0, 6.8), title)
    above, below = figure.subfigures(2, 1, height_ratios=[1, 1.15])
    for axes, frame in zip(above.subplots(1, len(frames)), frames, strict=True):
        draw_frame(axes, puzzle, solution, frame)
    left, right = below.subplots(1, 2)
    _draw_boards(left, board_table, singles)
    _draw_text(right, text_table)
    figure.savefig(path, dpi=DPI)
    print(f"picture: {path}", flush=True)
    return tables


@torch.no_grad()
def fill_boards(number: int) -> tuple[Table, float, Tensor, Tensor, list[Frame]]:
    """The share of puzzles solved (%) after each of BOARD_MARKS iterations, that of singles, and a board."""
    data = load_sudoku(1, number, source="generated", seed=17)
    puzzles, solutions = data.test_puzzles, data.test_solutions
    model: Any = load_pretrained("sudoku-solver")
    shares = solved_after(model, puzzles, solutions, BOARD_MARKS)
    pairs = zip(BOARD_MARKS, shares, strict=True)
    table = [{"iterations": count, "boards solved (%)": 100 * share} for count, share in pairs]
    singles = 100 * (solve_by_singles(puzzles) == solutions).all(1).float().mean().item()
    hardest = int((puzzles > 0).sum(1).argmin())
    frames = frames_of(model, puzzles[hardest], FRAMES)
    return table, singles, puzzles[hardest], solutions[hardest], frames


def learn_text(folder: Path, steps: int, seed: int) -> Table:
    """Validation losses after TEXT_MARKS iterations of one block that was trained to be repeated, beside
    those of the same block as a usual layer and of three such layers, all at the best rate of four."""
    data = load_text(HELP)
    sizes: dict[str, Any] = {"dim": 64, "heads": 4, "length": 64, "dropout": 0.0}
    task = NextToken(data, sizes["length"], 128, samples=16 * steps)
    words = len(data.alphabet)
    recipe = Recipe(
        epochs=1, batch=16, rate=1e-2, warmup=0.1, floor=0.0, betas=(0.9, 0.95), seed=seed,
        decay="linear", decayed="matrices",
    )  # fmt: skip
    losses: dict[str, dict[int, float]] = {}
    for name, layers in LANGUAGE.items():
        torch.manual_seed(seed)
        model: Any
        if layers:
            model = LanguageModel(words, layers=layers, initial="torch", **sizes)
        else:
            model = EquilibriumLanguageModel(words, iterations=DRAWN, gradient=4, **sizes)
        parameters = sum(each.numel() for each in model.parameters())
        print(f"\n{name}, {parameters:,} parameters, {steps} steps on {data.name}:", flush=True)
        path = folder / f"{name.replace(', ', '-').replace(' ', '-')}.safetensors"
        training = Training(model, task, recipe, path, {})
        training.run(overwrite=True)
        marks = (1,) if layers else TEXT_MARKS
        losses[name] = {mark: training.evaluate(mark)["validation_loss"] for mark in marks}
    repeated = losses.pop(REPEATED)
    others = {name: found[1] for name, found in losses.items()}
    return [{"iterations": mark, REPEATED: loss, **others} for mark, loss in repeated.items()]


def _draw_boards(axes: Any, table: Table, singles: float) -> None:
    solved = [row["boards solved (%)"] for row in table]
    label = "learned update, 42,193 weights, repeated"
    axes.plot(BOARD_MARKS, solved, color=BLUE, marker="o", label=label)
    axes.axhline(singles, color=GREY, linestyle="--", label="naked and hidden singles, by rule")
    axes.set(ylabel="boards solved (%)", ylim=(-3, 103), title="Sudoku, generated puzzles")
    _finish(axes, BOARD_MARKS, "upper left")


def _draw_text(axes: Any, table: Table) -> None:
    losses = [row[REPEATED] for row in table]
    axes.plot(TEXT_MARKS, losses, color=BLUE, marker="o", label=REPEATED)
    for name, color in zip(list(table[0])[2:], (ORANGE, GREY), strict=True):
        axes.axhline(table[0][name], color=color, linestyle="--", label=name)
    axes.axvspan(*DRAWN, color=GREY, alpha=0.15, linewidth=0, label="drawn in training")
    axes.set(ylabel="validation loss, nats a character", title="Characters of Python's help texts")
    _finish(axes, TEXT_MARKS, "upper right")


def _finish(axes: Any, marks: tuple[int, ...], place: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(marks), [str(mark) for mark in marks])
    axes.minorticks_off()
    axes.set_xlabel("iterations")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc=place)
