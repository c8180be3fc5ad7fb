"""Does belief propagation solve Sudoku, with the rules and with couplings learned from solved boards?

    python examples/sudoku_belief.py        # half a minute

Messages along 810 pairs of cells give every cell's digit probabilities. Without decimation most boards remain
unsolved. Decimation repeatedly fixes the most certain cell and updates the messages, until the board is
full or a rule is violated.
"""

from functools import partial
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
from runner import Result, run
from sudoku_graph import HEAD, couplings_of, fitted
from sudoku_potts import MIXED, SINGLES, Solve, compare, draw_shares, load_boards, scaled
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.data import solve_by_singles, sudoku_pairs
from implicit_attn.data.sudoku import solved
from implicit_attn.energies.spins import zero_sum
from solvers import Solution, Tolerance, belief_propagation, decimate

BETA = 4.0  # inverse temperature of learned couplings
ALONE, BETWEEN = 100, 15  # steps of belief propagation alone, and before each cell is fixed
BOUND = 30.0  # of the logarithms of a message: certainty is a probability of 1e-13 from 1
CERTAIN = 0.999  # cells that are fixed together


class Pairs(NamedTuple):
    """A Potts model of the board: pairs of cells (E, 2) and their couplings (E, 9, 9)."""

    edges: Tensor
    couplings: Tensor

    def solve(
        self, puzzles: Tensor, steps: int, rows: Any = slice(None), given: Any = None, start: Any = None
    ) -> Solution:  # fmt: skip
        """At most so many steps; ``given`` in place of the clues: values and where they are known."""
        digits, known = known_digits(puzzles)
        return belief_propagation(
            self.couplings, torch.zeros_like(digits)[rows], edges=self.edges, start=start,
            given=(digits, known) if given is None else given, max_steps=steps, bound=BOUND,
            tolerance=Tolerance(1e-3), adjoint=None, on_failure="ignore",
        )  # fmt: skip


def pairs_of_rules() -> Pairs:
    """Equal digits are forbidden in rows, columns and boxes."""
    edges = torch.nonzero(sudoku_pairs().triu(1))
    repel = torch.zeros(9, 9).fill_diagonal_(-torch.inf)
    return Pairs(edges, repel.expand(len(edges), 9, 9).contiguous())


def strongest_pairs(couplings: Tensor) -> Pairs:
    """The 810 strongest of couplings (81, 81, 9, 9)."""
    rows, columns = torch.triu_indices(81, 81, 1)
    scores = torch.linalg.matrix_norm(zero_sum(couplings))[rows, columns]
    strongest = scores.topk(810).indices.sort().values
    edges = torch.stack([rows[strongest], columns[strongest]], 1)
    return Pairs(edges, couplings[edges[:, 0], edges[:, 1]])


def known_digits(puzzles: Tensor) -> tuple[Tensor, Tensor]:
    """Digits of puzzles (B, 81) as one-hot values, and which cells they are known of."""
    return F.one_hot((puzzles - 1).clamp_min(0), 9).float(), puzzles > 0


def propagated(pairs: Pairs, puzzles: Tensor) -> Tensor:
    """Boards (B, 81) of the most probable digits."""
    digits = pairs.solve(puzzles, ALONE).value.mean.argmax(2) + 1
    return torch.where(puzzles > 0, puzzles, digits)


def decimated(pairs: Pairs, puzzles: Tensor) -> Tensor:
    """Boards (B, 81): the surest cell is fixed, and BETWEEN steps follow, until a rule is broken."""
    found = decimate(
        partial(pairs.solve, puzzles, BETWEEN), known_digits(puzzles), certain=CERTAIN,
        accept=lambda rows, states: solved(states + 1),
    )  # fmt: skip
    return torch.where(puzzles > 0, puzzles, found.states + 1)


def sudoku_belief(
    clues: tuple[int, ...] = (17, 25, 30, 36),  # numbers of clues
    boards: int = 25,  # maximum number of puzzles for each number of clues
    fit_steps: int = 300,  # number of training steps
    train: int = 5000,  # number of solved boards for training
    source: str = "auto",  # puzzles: list (sudoku17.npz), generated, or auto (list if available)
    seed: int = 0,  # random seed of the boards, the fits and the symmetries
) -> Result:
    data = load_boards(train, boards, clues, source, seed)
    test = {number: each for number, each in data.test.items() if number != MIXED}
    model = fitted(HEAD, data.train, fit_steps, seed, 1e-4)
    learned = strongest_pairs(scaled(couplings_of(model)))
    models = {"the rules": pairs_of_rules()}
    models[f"learned couplings, beta {BETA:g}"] = learned._replace(
        couplings=BETA * learned.couplings
    )
    ways: dict[str, Solve] = {}
    for name, pairs in models.items():
        ways[f"{name}: belief propagation"] = partial(propagated, pairs)
        ways[f"{name}: with decimation"] = partial(decimated, pairs)
    table = compare(test, ways | {SINGLES: solve_by_singles})
    figure, axes = plt.subplots(figsize=(7, 5))
    axes.set_title(f"Sudoku by belief propagation ({data.name})")
    draw_shares(axes, table)
    return {"table": table}, figure


if __name__ == "__main__":
    run(sudoku_belief)
