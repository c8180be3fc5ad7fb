"""Learn the rules of Sudoku from solved boards, as couplings of a Potts model, and solve puzzles.

    implicit-attn run sudoku-potts                                  # half a minute on one core
    implicit-attn run sudoku-potts --train 20                       # twenty boards are enough
    implicit-attn run sudoku-potts --weights runs/sudoku-potts/weights.safetensors    # no training
    implicit-attn run sudoku-potts --solver belief-propagation      # messages instead of means
    implicit-attn run sudoku-potts --solver belief-propagation --graph true    # the rules

One head of factored attention, whose weights know only the cells and whose values know only the
digits, is fitted to predict every cell of a solved board from the other 80. Its couplings then solve
puzzles: clues are held fixed, the probabilities of the other cells follow the mean field while the
temperature falls. Or belief propagation finds them, the surest cell is fixed, and so on. The puzzles
have 17 to 34 clues, made from the list of 17-clue puzzles (Gordon Royle, CC BY 2.5) in
$IMPLICIT_ATTN_DATA/sudoku; without it they are generated.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from implicit_attn.checkpoint import load_checkpoint, save_checkpoint
from implicit_attn.command_line import (
    Parser,
    command,
    folder,
    make_folder,
    mistakes,
    place,
    seed_number,
    whole,
)
from implicit_attn.data import SudokuData, board_counts, load_sudoku
from implicit_attn.models import (
    FactoredAttention,
    SudokuPotts,
    fit_pseudolikelihood,
    random_symmetries,
    sudoku_pairs,
)
from implicit_attn.studies.experiments.boards.belief import BETA, BETWEEN, DigitPairs, decimated
from implicit_attn.studies.spins.measures import contact_precision, contact_scores

RATE, BATCH, L2 = 0.1, 128, 1e-4
SOLVERS = ("mean-field", "belief-propagation")


def command_line() -> Parser:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    add, puzzles = parser.add_argument, whole(1, 40_000)
    add("--train", type=puzzles, default=5000, help="solved boards to learn from")
    add("--test", type=puzzles, default=200, help="puzzles to solve")
    add("--source", choices=("auto", "list", "generated"), default="auto", help="of the boards")
    add("--steps", type=whole(1, 100_000), default=300, help="of training")
    add("--anneal", type=whole(1, 100_000), default=600, help="steps of an annealing at most")
    add("--solver", choices=SOLVERS, default=SOLVERS[0], help="of the puzzles")
    add(
        "--graph",
        choices=("learned", "true"),
        default="learned",
        help="true: the rules, no training",
    )
    add("--seed", type=seed_number, default=0)
    add("--weights", type=place, help="weights that were trained earlier, instead of training")
    add("--out", type=folder, default=Path("runs/sudoku-potts"), help="folder of the weights")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line()
    with command(parser):
        options = parser.parse_args(arguments)
        if options.graph == "true" and options.weights is not None:
            parser.error("argument --weights: not allowed with --graph true, which learns nothing")
        run(options)


def run(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    with mistakes("--source"):
        data = load_sudoku(options.train, options.test, source=options.source, seed=options.seed)
    if options.graph == "true":
        solver, pairs = SudokuPotts.from_rules(), DigitPairs.of_rules()
    else:
        solver = learned(data, options)
        pairs = DigitPairs.of_solver(solver, BETA)
    if options.solver == "belief-propagation":
        boards = decimated(pairs, data.test_puzzles, BETWEEN)
    else:
        boards = solver.solve(data.test_puzzles, steps=options.anneal).boards
    right, unknown = board_counts(boards, data.test_puzzles, data.test_solutions)
    solved = (right == unknown).double().mean()
    print(f"{data.name}: {len(right)} puzzles, {solved:.1%} solved,", end=" ")
    print(f"{right.sum() / unknown.sum():.1%} of the unknown cells right")
    best = int(right.double().div(unknown).argmax())
    print(drawing(data.test_puzzles[best].tolist(), boards[best].tolist()))


def learned(data: SudokuData, options: argparse.Namespace) -> SudokuPotts:
    """A solver with couplings learned from boards, now or earlier."""
    model = FactoredAttention(81, 9, rows="softmax")
    model.field.requires_grad_(False)  # all digits are alike in every cell
    if options.weights is not None:
        with mistakes("--weights"):
            load_checkpoint(options.weights, model)
    else:
        train(model, data, options)
    scores = contact_scores(model.couplings())
    found = contact_precision(scores, sudoku_pairs())
    print(f"{found:.1%} of the 810 strongest pairs of cells share a row, a column or a box")
    with mistakes("--weights"):
        return SudokuPotts.from_model(model)


def train(model: FactoredAttention, data: SudokuData, options: argparse.Namespace) -> None:
    """Fit the model to the solved boards and save its weights."""
    with mistakes("--out"):
        make_folder(options.out)

    def show(step: int, loss: float) -> None:
        # What is minimised is this with the penalty, which would say nothing about the boards.
        if step in (1, options.steps) or step % 50 == 0:
            with torch.no_grad():
                found = model.pseudo_likelihood(data.train_solutions[:BATCH] - 1).item()
            print(f"step {step:5d}  pseudo-likelihood {found:.3f} nats a cell", flush=True)

    # Digits 1 .. 9 are the colours 0 .. 8. Every batch is seen through random symmetries. The penalty
    # keeps the couplings from growing for ever.
    fit_pseudolikelihood(
        model, data.train_solutions - 1, L2, "adam", steps=options.steps, rate=RATE, batch=BATCH,
        schedule="constant", augment=random_symmetries, seed=options.seed, watch=show,
    )  # fmt: skip
    path = options.out / "weights.safetensors"
    save_checkpoint(path, model)
    print(f"weights: {path}")


def drawing(puzzle: list[int], filled: list[int]) -> str:
    """The puzzle and the filled board side by side; unknown cells are dots."""
    lines = []
    for row in range(9):
        sides = []
        for board in (puzzle, filled):
            digits = [str(digit) if digit else "." for digit in board[9 * row : 9 * row + 9]]
            sides.append(" | ".join(" ".join(digits[k : k + 3]) for k in (0, 3, 6)))
        lines.append("     ".join(sides))
        if row in (2, 5):
            lines.append("     ".join(["------+-------+------"] * 2))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
