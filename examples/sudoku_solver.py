"""How many iterations does a learned update need to solve Sudoku, and what does it do on the way?

    python examples/sudoku_solver.py        # two to three minutes

The weights come with the package. After the 16 iterations of its training the update solves no board with 17
givens, after 128 iterations it solves 78 %; the picture also shows one board that fills in. Puzzles come from
the list with 17 clues (Gordon Royle, CC BY 2.5) in $IMPLICIT_ATTN_DATA/sudoku, with additional clues; without
the list they are generated.
"""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from board_tasks import by_givens, solved_after
from matplotlib.animation import FuncAnimation
from runner import Result, Table, run
from torch import Tensor
from train_boards import load_solver

from implicit_attn.data import board_counts, load_sudoku, resolve_source
from implicit_attn.demo.boards import Frame, draw_frame, frames_of

TIMES = (0.25, 0.5, 1, 2, 4, 8, 16)  # multiples of the iterations of training
SHARES = (0.1, 0.4, 0.8, 1.0)  # of the iterations that the board takes, at which it is drawn
PICTURES = 100  # of an animation, at most


@torch.no_grad()
def first_solved(
    model: Any, puzzles: Tensor, solutions: Tensor, most: int
) -> tuple[int, list[Frame]]:
    """The first puzzle that is solved in the end, or else the first, at each of its iterations until then."""
    ends = model(puzzles, iterations=most).argmax(-1) + 1
    right, unknown = board_counts(ends, puzzles, solutions)
    index = int((right == unknown).int().argmax())
    frames = frames_of(model, puzzles[index], range(1, most + 1))
    done = [bool((frame.digits == solutions[index]).all()) for frame in frames]
    return index, frames[: done.index(True) + 1 if any(done) else None]


def animate(path: Path, puzzle: Tensor, solution: Tensor, frames: list[Frame]) -> None:
    """A GIF of the board; its last picture stays for two seconds."""
    stride = -(-len(frames) // PICTURES)
    shown = frames[::-stride][::-1] + frames[-1:] * 11
    figure, axes = plt.subplots(figsize=(3.6, 4.0), dpi=80)

    def draw(frame: Frame) -> list[Any]:
        axes.clear()
        draw_frame(axes, puzzle, solution, frame)
        return []

    FuncAnimation(figure, draw, shown, init_func=list).save(path, writer="pillow", fps=6)
    plt.close(figure)


def sudoku_solver(
    weights: str = "sudoku-solver-easy",  # board solver: a file or the name of shipped weights
    givens: tuple[int, ...] = (17, 20, 25, 30, 34),  # numbers of givens
    boards: int = 200,  # number of puzzles for each number of givens
    seed: int = 0,  # random seed of additional givens and generated puzzles
    animation: Path | None = None,  # GIF file for an animation of the board over the iterations
) -> Result:
    model, settings = load_solver(weights)
    if animation is not None:
        if animation.suffix != ".gif":
            raise SystemExit(f"--animation must end in .gif, got {animation}")
        animation.parent.mkdir(parents=True, exist_ok=True)
    source = resolve_source("auto")
    counts, drawn = (1, boards), seed
    if source == "list":  # what the training of the weights has held out
        counts, drawn = (settings["train"], 1000), settings["seed"]
    data = load_sudoku(*counts, source=source, more=0, seed=drawn)
    generator, table = torch.Generator().manual_seed(seed), Table()
    marks = [max(1, round(times * model.iterations)) for times in TIMES]
    found = by_givens((data.test_puzzles, data.test_solutions), givens, generator, "givens", boards)
    sets = [(number, *pair) for number, pair in found.items()]
    for number, puzzles, solutions in sets:
        shares = solved_after(model, (puzzles, solutions), marks)
        pairs = zip(marks, shares, strict=True)
        table += [{"givens": number, "iterations": n, "solved": share} for n, share in pairs]
    _, puzzles, solutions = sets[0]
    index, frames = first_solved(model, puzzles, solutions, max(marks))
    if animation is not None:
        animate(animation, puzzles[index], solutions[index], frames)
    shown = sorted({max(1, round(share * len(frames))) for share in SHARES})
    figure, (curve, *axes) = plt.subplots(
        1, 1 + len(shown), figsize=(4.6 + 2.9 * len(shown), 3.9),
        width_ratios=[1.5] + [1] * len(shown),
    )  # fmt: skip
    figure.suptitle("Sudoku by a learned update, repeated")
    for number, *_ in sets:
        solved = [100 * row["solved"] for row in table if row["givens"] == number]
        curve.plot(marks, solved, marker="o", markersize=4, label=f"{number} givens")
    curve.axvline(model.iterations, color="black", linewidth=0.8, linestyle=":")
    curve.text(model.iterations, 2, " most in training", fontsize=8)
    curve.set_xscale("log", base=2)
    curve.set_xticks(marks, [str(mark) for mark in marks])
    curve.set(xlabel="iterations", ylabel="boards solved (%)", ylim=(-3, 103))
    curve.grid(alpha=0.3)
    curve.legend(fontsize=8, loc="lower right")
    for panel, number in zip(axes, shown, strict=True):
        panel.set_anchor("S")  # leaves room for titles
        draw_frame(panel, puzzles[index], solutions[index], frames[number - 1])
    return {"solved": table}, figure


if __name__ == "__main__":
    run(sudoku_solver)
