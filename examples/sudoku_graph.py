"""Can a model learn from solved boards alone which cells of Sudoku constrain each other?

    python examples/sudoku_graph.py        # half a minute

Factored attention and a Potts model predict every cell of a board from the other 80. Their 810 strongest
pairs of cells are compared with the 810 pairs that share a row, a column or a box. Left: with random
symmetries of many boards, one softmax head finds all pairs in 7 steps of training. Middle: without
symmetries it needs twenty boards, fewer than counting how often two cells contain the same digit. Right:
its couplings of one cell.
"""

import random
from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import torch
from runner import Result, Table, columns, legend_below, run
from torch import Tensor

from implicit_attn.data import (
    SudokuSymmetries,
    load_sudoku,
    resolve_source,
    solve_sudoku,
    sudoku_pairs,
)
from implicit_attn.energies.spins import zero_sum
from implicit_attn.models import FactoredAttention, PottsModel, fit_pseudolikelihood

HEAD, POTTS, COUNTING = "factored, softmax head", "Potts", "counting equal pairs"
# Rows of the factored head, or None for the Potts model; learning rate; are fields learned? All digits
# are alike everywhere: fields learn the chance of the boards.
RECIPES: dict[str, tuple[str | None, float, bool]] = {
    HEAD: ("softmax", 0.1, False),
    f"{HEAD}, with fields": ("softmax", 0.1, True),
    "factored, linear head": ("linear", 0.1, False),
    POTTS: (None, 0.01, False),
}


def solved_boards(number: int, source: str, seed: int) -> tuple[str, Tensor]:
    """Where they come from, and different solved boards (number, 81): of the list, or random ones."""
    if resolve_source(source) == "list":
        data = load_sudoku(number, 1, source="list", seed=seed)
        return data.name, data.train_solutions
    # Not Random(seed), from which puzzles are generated: those to learn from must not be among them.
    chooser = random.Random(f"solved boards, {seed}")
    boards = [solve_sudoku([0] * 81, most=1, chooser=chooser)[0] for _ in range(number)]
    return "generated boards", torch.tensor(boards)


def random_symmetries(boards: Tensor, generator: torch.Generator) -> Tensor:
    """A random symmetry of each solved board, colours (B, 81) in 0 .. 8: ``augment`` of a fit."""
    return SudokuSymmetries()(boards + 1, boards + 1, generator)[1] - 1


def fitted(
    name: str, boards: Tensor, steps: int, seed: int, l2: float = 0.0, watch: Any = None, **options: Any
) -> FactoredAttention | PottsModel:  # fmt: skip
    """The model of a recipe, fitted to boards (N, 81) by Adam; ``watch(model, step, loss)`` on the way."""
    rows, rate, fields = RECIPES[name]
    torch.manual_seed(seed)
    model = PottsModel(81, 9) if rows is None else FactoredAttention(81, 9, rows=rows)
    model.field.requires_grad_(fields)
    options = {"batch": 128, "augment": random_symmetries, "schedule": "constant"} | options
    options |= {"steps": steps, "rate": rate, "seed": seed}
    if watch is not None:
        options["watch"] = partial(watch, model)
    fit_pseudolikelihood(model, boards - 1, l2, "adam", **options)
    return model


def couplings_of(model: FactoredAttention | PottsModel) -> Tensor:
    """(81, 81, 9, 9), in the gauge where every pair's rows and columns sum to zero."""
    found = model.couplings.weight if isinstance(model, PottsModel) else model.couplings()
    return zero_sum(found.detach())


def strengths(model: FactoredAttention | PottsModel) -> Tensor:
    """Of every pair of cells, (81, 81)."""
    return torch.linalg.matrix_norm(couplings_of(model))


def precision_of(scores: Tensor) -> float:
    """Share of true pairs among the 810 largest scores (81, 81), equal ones at the limit by their mean."""
    rows, columns = torch.triu_indices(81, 81, 1)
    values, true = scores[rows, columns], sudoku_pairs()[rows, columns]
    number = int(true.sum())
    limit = values.sort(descending=True).values[number - 1]
    above, at = values > limit, values == limit
    left = number - int(above.sum())
    return (float(true[above].sum()) + left * float(true[at].double().mean())) / number


def sudoku_graph(
    steps: int = 100,  # training steps of the fits with symmetries
    train: int = 5000,  # number of boards of the fits with symmetries
    boards: tuple[int, ...] = (5, 10, 20, 40, 80, 160, 1000),  # numbers without symmetries
    few_steps: int = 150,  # training steps of the fits without symmetries
    source: str = "auto",  # boards: list (sudoku17.npz), generated, or auto (list if available)
    seed: int = 0,  # random seed of the boards, the fits and the symmetries
) -> Result:
    name, every = solved_boards(max(train, *boards), source, seed)
    by_steps, by_boards, ends = Table(), Table(), {}
    watched = {1, *(round(steps ** (k / 12)) for k in range(13))}
    for recipe in (HEAD, POTTS):

        def watch(model: Any, step: int, loss: float, recipe: str = recipe) -> None:
            if step in watched:
                row = {"precision": precision_of(strengths(model)), "loss": loss}
                by_steps.append({"model": recipe, "steps": step} | row)

        ends[recipe] = strengths(fitted(recipe, every, steps, seed, watch=watch))
    for number in sorted(set(boards)):
        few = every[:number]
        digits = torch.nn.functional.one_hot(few - 1, 9).double()
        equal = torch.einsum("nia,nja->ij", digits, digits) / number
        for recipe in (COUNTING, *RECIPES):
            scores = -equal
            if recipe != COUNTING:
                scores = strengths(fitted(recipe, few, few_steps, seed, batch=32, augment=None))
            row = {"model": recipe, "boards": number, "precision": precision_of(scores)}
            by_boards.append(row)

    figure, (left, right, cell) = plt.subplots(1, 3, figsize=(14, 4.8), width_ratios=(1, 1.2, 0.9))
    figure.suptitle(f"The graph of Sudoku, learned from solved boards ({name})")
    looks = zip(("C0", "C3", "C2", "C1", "C4"), "os^Dv", strict=True)
    looks = dict(zip((COUNTING, *RECIPES), looks, strict=True))
    for axes, table, key in ((left, by_steps, "steps"), (right, by_boards, "boards")):
        for recipe, (color, marker) in looks.items():
            points = columns(table, key, "precision", model=recipe)
            if points[0]:
                axes.plot(*points, label=recipe, c=color, marker=marker, ms=5)
        axes.set(xscale="log", ylim=(0, 1.05))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
    left.set_xlabel("steps of training (128 boards each, random symmetries)")
    left.set_ylabel("share of true pairs among the 810 strongest")
    right.set_xlabel("different boards, no symmetries")
    right.axhline(0.25, color="black", lw=0.8, ls=":", label="chance")
    legend_below(figure, right, 3, fontsize=9)
    cell.imshow(
        ends[HEAD][40].view(9, 9).numpy(), cmap="Blues", vmin=0
    )  # of the cell in the middle
    cell.plot(4, 4, marker="x", color="C3", markersize=8)
    for line in (2.5, 5.5):
        cell.axhline(line, color="black", lw=0.8)
        cell.axvline(line, color="black", lw=0.8)
    cell.set(xticks=[], yticks=[])
    cell.set_title("softmax head: couplings\nof the cell × to the others", fontsize=10)
    return {"steps": by_steps, "boards": by_boards}, figure


if __name__ == "__main__":
    run(sudoku_graph)
