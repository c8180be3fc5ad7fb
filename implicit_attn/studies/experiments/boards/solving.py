"""Learned couplings as solvers of Sudoku, against the rules as couplings and simple logic."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from implicit_attn.data import board_counts
from implicit_attn.models import SudokuPotts, fit_pseudolikelihood, random_symmetries
from implicit_attn.studies.experiments.boards.graph import RECIPES, build
from implicit_attn.studies.experiments.boards.puzzles import Puzzles
from implicit_attn.studies.experiments.boards.singles import solve_by_singles
from implicit_attn.studies.experiments.experiment import Advance
from implicit_attn.studies.tables import Table

L2 = 1e-4  # of the factored head
LEARNED, POTTS, RULES = "learned, factored", "learned, Potts", "the rules"
BARE = "learned, factored, no penalty"
SINGLES = "naked and hidden singles"

Method = Callable[[Tensor], Tensor]  # puzzles (B, 81) -> boards (B, 81)


class Example(NamedTuple):
    """A puzzle of the test and what became of it, (81,) each."""

    puzzle: Tensor
    filled: Tensor
    solution: Tensor


class Learned(NamedTuple):
    """Solvers by the name of their couplings, and how well those that are learned fit boards."""

    couplings: dict[str, SudokuPotts]
    fits: Table


def train_couplings(
    boards: Tensor, held_out: Tensor, steps: int, l2: float, seed: int, advance: Advance
) -> Learned:
    """Solvers with couplings learned from boards (N, 81) in 1 .. 9, and with those of the rules.

    The penalty ``l2`` is that of the first factored head alone: the second one and the Potts model have
    none, so that the two are compared on equal terms.

    Returns:
        The solvers; and rows ``model``, ``l2`` and ``held_out``, the negative log pseudo-likelihood of
        boards that were not trained on, without the penalty, in nats a cell.
    """
    found, table = {}, []
    head = RECIPES["factored, softmax head"]
    recipes = ((LEARNED, head, l2), (BARE, head, 0.0), (POTTS, RECIPES["Potts"], 0.0))
    for name, recipe, weight in recipes:
        advance(f"training, {name}")
        model = build(recipe, seed)
        fit_pseudolikelihood(
            model, boards - 1, weight, "adam", steps=steps, rate=recipe.rate, schedule="constant",
            batch=128, augment=random_symmetries, seed=seed,
        )  # fmt: skip
        with torch.no_grad():
            loss = model.pseudo_likelihood(held_out - 1).item()
        table.append({"model": name, "l2": weight, "held_out": loss})
        found[name] = SudokuPotts.from_model(model)
    return Learned(found | {RULES: SudokuPotts.from_rules()}, table)


def methods(couplings: dict[str, SudokuPotts], steps: int) -> dict[str, Method]:
    """The ways to solve that are compared, by name."""

    def annealed(name: str) -> Method:
        return lambda puzzles: couplings[name].solve(puzzles, steps=steps).boards

    return {
        f"{LEARNED}, annealed": annealed(LEARNED),
        f"{BARE}, annealed": annealed(BARE),
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
