"""Sudoku by belief propagation, alone and with decimation, on the graph of the rules or a learned one."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.data.sudoku_boards import CELLS, SIDE, solved
from implicit_attn.models import (
    SudokuPotts,
    fit_pseudolikelihood,
    random_symmetries,
    sudoku_pairs,
)
from implicit_attn.models.potts.sudoku_potts import PAIRS
from implicit_attn.studies.experiments.boards.graph import RECIPES, build
from implicit_attn.studies.experiments.boards.singles import solve_by_singles
from implicit_attn.studies.experiments.boards.solving import L2, SINGLES, Method
from implicit_attn.studies.spins.measures import contact_scores
from solvers import Solution, Tolerance, belief_propagation, decimate

HEAD = "factored, softmax head"
GRAPHS = ("rules", "learned")  # whose couplings
BETA = 4.0  # of learned couplings
ALONE, BETWEEN = 100, 15  # steps of belief propagation alone, and before each cell is fixed
BOUND = 30.0  # of the logarithms of a message: certainty is a probability of 1e-13 from 1
RTOL = 1e-3
CERTAIN = 0.999  # cells that are fixed together
FORBIDDEN = (
    -0.5
)  # couplings below it are forbidden pairs of digits; those of the rules are -8/9 and 1/9


class DigitPairs(NamedTuple):
    """A Potts model of the board: pairs of cells (E, 2) and their couplings (E, 9, 9)."""

    edges: Tensor
    couplings: Tensor

    @classmethod
    def of_rules(cls) -> DigitPairs:
        """Equal digits are forbidden in rows, columns and boxes."""
        edges = torch.nonzero(sudoku_pairs().triu(1))
        repel = torch.zeros(SIDE, SIDE).fill_diagonal_(-torch.inf)
        return cls(edges, repel.expand(len(edges), SIDE, SIDE).contiguous())

    @classmethod
    def of_couplings(cls, couplings: Tensor, beta: float | None) -> DigitPairs:
        """The 810 strongest pairs of learned couplings (81, 81, 9, 9), scaled as :class:`SudokuPotts` does.

        Args:
            beta: inverse temperature of the couplings. None: a hard constraint, pairs of digits with a
                coupling below -1/2 are forbidden and all others alike.
        """
        rows, columns = torch.triu_indices(CELLS, CELLS, 1)
        strongest = contact_scores(couplings)[rows, columns].topk(PAIRS).indices.sort().values
        edges = torch.stack([rows[strongest], columns[strongest]], 1)
        found = couplings[edges[:, 0], edges[:, 1]].detach()
        if beta is None:
            return cls(edges, torch.where(found < FORBIDDEN, -torch.inf, torch.zeros_like(found)))
        return cls(edges, beta * found)

    @classmethod
    def of_solver(cls, solver: SudokuPotts, beta: float | None) -> DigitPairs:
        return cls.of_couplings(solver.couplings, beta)


def learned_pairs(boards: Tensor, steps: int, beta: float, seed: int) -> dict[str, DigitPairs]:
    """Couplings of a factored head fitted to solved boards (N, 81), as they are and made hard."""
    model = build(RECIPES[HEAD], seed)
    fit_pseudolikelihood(
        model, boards - 1, L2, "adam", steps=steps, rate=RECIPES[HEAD].rate, schedule="constant",
        batch=128, augment=random_symmetries, seed=seed,
    )  # fmt: skip
    solver = SudokuPotts.from_model(model)
    hard, rules = DigitPairs.of_solver(solver, None), DigitPairs.of_rules()
    found = {f"learned couplings, beta {beta:g}": DigitPairs.of_solver(solver, beta)}
    if all(torch.equal(one, other) for one, other in zip(hard, rules, strict=True)):
        return found  # the same constraints need not be solved twice
    return found | {"learned couplings made hard": hard}


def belief_methods(models: dict[str, DigitPairs], alone: int, between: int) -> dict[str, Method]:
    """Each alone and with decimation, and simple logic, by name."""
    ways: dict[str, Method] = {}
    for name, model in models.items():
        ways[f"{name}: belief propagation"] = partial(propagated, model, steps=alone)
        ways[f"{name}: with decimation"] = partial(decimated, model, steps=between)
    return ways | {SINGLES: solve_by_singles}


def propagated(model: DigitPairs, puzzles: Tensor, steps: int) -> Tensor:
    """Boards (B, 81) of the most probable digits after at most ``steps`` of belief propagation."""
    given, field = _given(puzzles)
    value = _solve(model, field, given, None, steps).value
    return _filled(puzzles, value.mean.argmax(2))


def decimated(model: DigitPairs, puzzles: Tensor, steps: int) -> Tensor:
    """Boards (B, 81): the surest cell is fixed, and at most ``steps`` follow, until a rule is broken.

    A board that keeps the rules is done; that it is asked for does not change the others.
    """
    given, field = _given(puzzles)

    def solve(rows: Tensor, known: tuple[Tensor, Tensor], start: Any) -> Solution:
        return _solve(model, field[rows], known, start, steps)

    found = decimate(solve, given, certain=CERTAIN, accept=lambda rows, states: solved(states + 1))
    return _filled(puzzles, found.states)


def _solve(
    model: DigitPairs, field: Tensor, given: tuple[Tensor, Tensor], start: Any, steps: int
) -> Solution:
    return belief_propagation(
        model.couplings, field, edges=model.edges, given=given, start=start, max_steps=steps,
        bound=BOUND, tolerance=Tolerance(RTOL), adjoint=None, on_failure="ignore",
    )  # fmt: skip


def _given(puzzles: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Clues as given sites, and fields of zero, (B, 81, 9)."""
    values = F.one_hot((puzzles - 1).clamp_min(0), SIDE).float()
    return (values, puzzles > 0), torch.zeros_like(values)


def _filled(puzzles: Tensor, states: Tensor) -> Tensor:
    return torch.where(puzzles > 0, puzzles, states + 1)
