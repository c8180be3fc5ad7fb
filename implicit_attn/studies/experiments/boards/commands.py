"""The sub-commands about Sudoku as a Potts model."""

from __future__ import annotations

import argparse
from functools import partial

from implicit_attn.command_line import number, seed_number, whole
from implicit_attn.studies.experiments.boards.belief import (
    ALONE,
    BETA,
    BETWEEN,
    GRAPHS,
    DigitPairs,
    belief_methods,
    learned_pairs,
)
from implicit_attn.studies.experiments.boards.figures import (
    belief_figure,
    graph_figure,
    solving_figure,
)
from implicit_attn.studies.experiments.boards.graph import graph_by_boards, graph_by_steps
from implicit_attn.studies.experiments.boards.puzzles import (
    MIXED,
    boards_and_puzzles,
    solved_boards,
)
from implicit_attn.studies.experiments.boards.solving import (
    L2,
    LEARNED,
    compare,
    methods,
    one_solved,
    train_couplings,
)
from implicit_attn.studies.experiments.experiment import Advance, Experiment, Option
from implicit_attn.studies.tables import Result

SOURCES = ("auto", "list", "generated")
FEWEST, MOST = 17, 80  # clues of a puzzle
MOST_BOARDS = 40_000
LARGEST_L2 = 1e6


def source(text: str) -> str:
    """``type=`` of an option: where boards come from."""
    if text not in SOURCES:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(SOURCES)}, got {text!r}")
    return text


SOURCE: Option = (
    "--source",
    source,
    "auto",
    "list (sudoku17.npz), generated, or auto: the list where it is found",
)


def run_graph(options: argparse.Namespace, advance: Advance) -> Result:
    """which cells constrain each other, learned from solved boards: against steps and boards"""
    advance("boards")
    number = max(options.train, *options.boards)
    name, boards = solved_boards(number, options.source, options.seed)
    steps, strengths = graph_by_steps(boards, options.steps, seed=options.seed, advance=advance)
    numbers = sorted(set(options.boards))
    few = graph_by_boards(boards, numbers, options.few_steps, seed=options.seed, advance=advance)
    draw = partial(graph_figure, steps=steps, boards=few, strengths=strengths)
    return Result({"steps": steps, "boards": few}, ("steps", "boards"), draw, f" ({name})")


def run_solving(options: argparse.Namespace, advance: Advance) -> Result:
    """solved puzzles by couplings learned from solved boards, against the rules and logic"""
    advance("boards")
    clues = sorted(set(options.clues))
    boards = boards_and_puzzles(options.train, options.boards, clues, options.source, options.seed)
    held_out = boards.test[MIXED].solutions
    learned = train_couplings(
        boards.train, held_out, options.steps, options.l2, options.seed, advance
    )
    ways = methods(learned.couplings, options.anneal)
    table = compare(boards.test, ways, advance)
    there = [number for number in clues if str(number) in boards.test]
    shown = str(there[(len(there) - 1) // 2])
    example = one_solved(boards.test[shown], ways[f"{LEARNED}, annealed"])
    draw = partial(solving_figure, table=table, example=example, clues=shown)
    counts = {number: len(boards.test[str(number)].puzzles) for number in there}
    few = [number for number in clues if counts.get(number, 0) < options.boards]
    note = "".join(f"; {counts.get(number, 'none')} with {number} clues" for number in few)
    tables = {"table": table, "fits": learned.fits}
    return Result(tables, ("table", "fits"), draw, f" ({boards.name}{note})")


def graph(text: str) -> str:
    """``type=`` of an option: whose couplings."""
    if text not in GRAPHS:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(GRAPHS)}, got {text!r}")
    return text


def run_belief(options: argparse.Namespace, advance: Advance) -> Result:
    """solved puzzles by belief propagation on the rules and on learned couplings, with decimation"""
    advance("boards")
    clues = sorted(set(options.clues))
    boards = boards_and_puzzles(
        options.train, options.boards, clues, options.source, options.seed, mixed=False
    )
    models = {"the rules": DigitPairs.of_rules()} if "rules" in options.graph else {}
    if "learned" in options.graph:
        advance("training")
        models |= learned_pairs(boards.train, options.fit_steps, options.beta, options.seed)
    table = compare(boards.test, belief_methods(models, options.alone, options.between), advance)
    draw = partial(belief_figure, table=table)
    return Result({"table": table}, ("table",), draw, f" ({boards.name})")


EXPERIMENTS: dict[str, Experiment] = {
    "sudoku-graph": Experiment(
        run_graph,
        "The graph of Sudoku, learned from solved boards by pseudo-likelihood",
        (
            ("--steps", whole(1, 100_000), 100, "of the fits to boards under symmetries"),
            ("--train", whole(1, MOST_BOARDS), 5000, "boards for them"),
            (
                "--boards",
                whole(1, MOST_BOARDS),
                (5, 10, 20, 40, 80, 160, 1000),
                "numbers of boards of the fits without symmetries",
            ),
            ("--few-steps", whole(1, 100_000), 150, "of the fits without symmetries"),
            SOURCE,
            ("--seed", seed_number, 0, "of the boards, the fits and the symmetries"),
        ),
        quick=(
            "--steps", "4", "--train", "20", "--boards", "5", "--few-steps", "5",
            "--source", "generated",
        ),
    ),
    "sudoku-potts": Experiment(
        run_solving,
        "Sudoku solved by a Potts model learned from solved boards",
        (
            ("--clues", whole(FEWEST, MOST), (17, 25, 30, 36), "numbers of clues"),
            ("--boards", whole(1, 10_000), 100, "puzzles of each; fewer may have so few clues"),
            ("--steps", whole(1, 100_000), 300, "of training"),
            ("--train", whole(1, MOST_BOARDS), 5000, "solved boards to learn from"),
            (
                "--l2",
                number(0.0, LARGEST_L2),
                L2,
                "penalty of the factored head; it is fitted without one too, the Potts model only so",
            ),
            ("--anneal", whole(1, 100_000), 600, "steps of an annealing at most"),
            SOURCE,
            ("--seed", seed_number, 0, "of the boards, the fits and the symmetries"),
        ),
        quick=(
            "--clues", "50", "--boards", "3", "--steps", "10", "--train", "20", "--anneal", "60",
            "--source", "generated",
        ),
    ),
    "sudoku-belief": Experiment(
        run_belief,
        "Sudoku by belief propagation and decimation",
        (
            ("--clues", whole(FEWEST, MOST), (17, 25, 30, 36), "numbers of clues"),
            ("--boards", whole(1, 10_000), 25, "puzzles of each; fewer may have so few clues"),
            ("--graph", graph, GRAPHS, "rules: hard constraints of the true graph; learned: couplings"),
            ("--alone", whole(1, 100_000), ALONE, "steps of belief propagation alone at most"),
            ("--between", whole(1, 100_000), BETWEEN, "steps before each cell is fixed at most"),
            ("--beta", number(0.01, 100.0), BETA, "inverse temperature of learned couplings"),
            ("--fit-steps", whole(1, 100_000), 300, "of training"),
            ("--train", whole(1, MOST_BOARDS), 5000, "solved boards to learn from"),
            SOURCE,
            ("--seed", seed_number, 0, "of the boards, the fits and the symmetries"),
        ),
        quick=(
            "--clues", "50", "--boards", "3", "--fit-steps", "10", "--train", "20",
            "--source", "generated",
        ),
    ),
}  # fmt: skip
