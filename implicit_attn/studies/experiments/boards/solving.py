"""Learned couplings as solvers of Sudoku, against the rules as couplings and simple logic."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from implicit_attn.data import board_counts
from implicit_attn.models import SudokuPotts, fit_pseudolikelihood, random_symmetries
from implicit_attn.studies.experiments.boards.graph import RECIPES, build
from implicit_attn.studies.experiments.boards.puzzles import Puzzles
from implicit_attn.studies.experiments.boards.singles import solve_by_singles
from implicit_attn.studies.experiments.experiment import Advance
from implicit_attn.studies.tables import Table

L2 = 1e-4  # sets the scale of the factored couplings
LEARNED, POTTS, RULES = "learned, factored", "learned, Potts", "the rules"
SINGLES = "naked and hidden singles"

Method = Callable[[Tensor], Tensor]  # puzzles (B, 81) -> boards (B, 81)


class Example(NamedTuple):
    """A puzzle of the test and what became of it, (81,) each."""

    puzzle: Tensor
    filled: Tensor
    solution: Tensor


def train_couplings(
    boards: Tensor, steps: int, seed: int, advance: Advance
) -> dict[str, SudokuPotts]:
    """Solvers with couplings learned from boards (N, 81) in 1 .. 9, and with those of the rules."""
    found = {}
    for name, recipe, l2 in (
        (LEARNED, RECIPES["factored, softmax head"], L2),
        (POTTS, RECIPES["Potts"], 0.0),
    ):
        advance(f"training, {name}")
        model = build(recipe, seed)
        fit_pseudolikelihood(
            model, boards - 1, l2, "adam", steps=steps, rate=recipe.rate, schedule="constant",
            batch=128, augment=random_symmetries, seed=seed,
        )  # fmt: skip
        found[name] = SudokuPotts.from_model(model)
    return found | {RULES: SudokuPotts.from_rules()}


def methods(couplings: dict[str, SudokuPotts], steps: int) -> dict[str, Method]:
    """The ways to solve that are compared, by name."""

    def annealed(name: str) -> Method:
        return lambda puzzles: couplings[name].solve(puzzles, steps=steps).boards

    return {
        f"{LEARNED}, annealed": annealed(LEARNED),
        f"{LEARNED}, decimated": lambda puzzles: couplings[LEARNED].decimate(puzzles).boards,
        f"{RULES}, annealed": annealed(RULES),
        f"{POTTS}, annealed": annealed(POTTS),
        SINGLES: solve_by_singles,
    }


def compare(sets: dict[str, Puzzles], ways: dict[str, Method], advance: Advance) -> Table:
    """Rows ``clues``, ``method``, ``boards``, ``solved`` and ``cells`` (shares of both)."""
    table: Table = []
    for clues, (puzzles, solutions) in sets.items():
        for name, solve in ways.items():
            advance(f"{clues} clues, {name}")
            right, unknown = board_counts(solve(puzzles), puzzles, solutions)
            row = {"clues": clues, "method": name, "boards": len(puzzles)}
            solved = (right == unknown).double().mean().item()
            table.append(row | {"solved": solved, "cells": (right.sum() / unknown.sum()).item()})
    return table


def one_solved(puzzles: Puzzles, solve: Method) -> Example:
    """The first puzzle that is solved, or the first one."""
    filled = solve(puzzles.puzzles)
    right = (filled == puzzles.solutions).all(1)
    index = int(right.long().argmax()) if bool(right.any()) else 0
    return Example(puzzles.puzzles[index], filled[index], puzzles.solutions[index])
