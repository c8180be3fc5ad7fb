"""Train a recurrent attention model to solve Sudoku: Hyper-SET, or a baseline; or a board solver.

    implicit-attn train sudoku                          # reduced model, half an hour on one core
    implicit-attn train sudoku --model transformer
    implicit-attn train sudoku --attention softmax --layers 2
    implicit-attn train sudoku --preset paper --compile --precision bf16-mixed    # for a GPU
    implicit-attn train sudoku --resume                 # go on where a run stopped
    implicit-attn train sudoku --model board-solver     # all further options: of solve-sudoku

The 81 cells are tokens. One layer is applied to them repeatedly. A linear readout gives the logits of
the nine digits in every cell. Puzzles have 17 to 34 clues, made from the list of 17-clue puzzles
(Gordon Royle, CC BY 2.5) in $IMPLICIT_ATTN_DATA/sudoku; without it, puzzles are generated.
``--preset paper`` takes what is published of Hyper-SET (Hu, Zou, Xu, https://arxiv.org/abs/2502.11646):
9,000 and 1,000 puzzles, width 768, 12 heads, 24 iterations, 200 epochs of AdamW in batches of 16.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import solvers
from implicit_attn.checkpoint import read_progress
from implicit_attn.checkpoint.files import RunLock
from implicit_attn.command_line import (
    Parser,
    command,
    count,
    learning_rate,
    mistakes,
    refuse_huge,
    share,
    whole,
)
from implicit_attn.data import SudokuSymmetries, load_sudoku, resolve_source
from implicit_attn.models import BACKBONES, build_backbone, build_model
from implicit_attn.models.registry import CHOICES, SOLVED, WITHOUT_WIDTH
from implicit_attn.models.sudoku import FINAL_NORMS, POSITIONS
from implicit_attn.programs import solve_sudoku
from implicit_attn.training import SudokuCompletion, Training, describe, run_script
from implicit_attn.training.options import (
    add_model_options,
    add_process_options,
    add_result_options,
    add_training_options,
    backbone_specification,
    complete,
    given,
    layer_options,
    settings,
)
from implicit_attn.training.script import (
    build_training,
    checkpoint_path,
    claim,
    save_weights,
    start,
)

# Defaults of the options. In "paper" the dropout, the warm-up and the floor of the learning rate are
# ours: we found none published.
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "dim": 768, "heads": 12, "width": 3072, "iterations": 24, "initial_step": 0.0,
        "epochs": 200, "rate": 1e-4, "weight_decay": 0.1, "warmup": 0.02, "floor": 0.1,
        "symmetries": False, "start": "random", "dropout": 0.1,
    },
    "small": {
        "dim": 128, "heads": 4, "width": 512, "iterations": 16, "initial_step": 0.1,
        "random_iterations": [12, 20], "epochs": 8, "rate": 1e-3, "weight_decay": 0.1,
        "warmup": 0.05, "floor": 0.02, "symmetries": True, "start": "units", "dropout": 0.0,
    },
}  # fmt: skip
BOARD_SOLVER = "board-solver"
# The iterations of an equilibrium are the most evaluations of a solve.
EQUILIBRIA = {name: {"iterations": 50, "random_iterations": None} for name in SOLVED}


def command_line() -> Parser:
    parser = Parser(
        description=__doc__.split("\n")[0] if __doc__ else None,
        epilog=f"--model {BOARD_SOLVER} has the options of solve-sudoku, which it runs.",
    )
    add, puzzles = parser.add_argument, whole(1, 1_000_000)
    add_model_options(
        parser, presets=PRESETS, backbones=BACKBONES, choices=CHOICES, token="cell", random="12 20"
    )
    add("--start", choices=("random", "units"), help="where the positions of the cells start")
    add("--positions", choices=POSITIONS, help="of the cells (default: learned)")
    add("--final-norm", choices=tuple(FINAL_NORMS), help="before the readout (default: layer)")
    add("--dropout", type=share, help="share of the embeddings set to 0 in training")
    add("--train", type=puzzles, default=9000, help="puzzles to train on")
    add("--test", type=puzzles, default=1000, help="puzzles to test on")
    add("--source", choices=("auto", "list", "generated"), default="auto", help="of the puzzles")
    add(
        "--symmetries", action=argparse.BooleanOptionalAction,
        help="see every puzzle through a random symmetry each time",
    )  # fmt: skip
    add("--epochs", type=count)
    add_training_options(parser, batch=16)
    add("--weight-decay", type=learning_rate)
    add_process_options(parser, save_every=100)
    add_result_options(parser, "folder of the results (default runs/sudoku-MODEL)")
    return parser


def arguments(
    words: Sequence[str] | None = None, parser: Parser | None = None
) -> argparse.Namespace:
    parser = parser or command_line()
    options = parser.parse_args(words)
    preset = PRESETS[options.preset]
    if options.positions == "sincos":
        if options.start == "units":
            parser.error("--start units is for learned positions, got --positions sincos")
        preset = preset | {"start": "random"}
    complete(parser, options, preset, build=build_backbone, equilibria=EQUILIBRIA)
    options.out = options.out or Path("runs") / f"sudoku-{options.model}"
    return options


def specification(options: argparse.Namespace) -> dict[str, Any]:
    """From which ``build_model`` builds the model, and ``load_model`` builds it again."""
    backbone = backbone_specification(options, step_size="conditioned-input")
    if options.model in WITHOUT_WIDTH:
        backbone["width"] = None  # it takes none, the presets have one
    cells = {"start": options.start, "dropout": options.dropout}
    cells |= given(options, "positions", "final_norm")
    return {"kind": "sudoku", **cells, "backbone": backbone}


def build(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(options.seed)
    layer = None
    if options.model in SOLVED:
        layer = layer_options(options, tolerance=solvers.Tolerance, adjoint=solvers.Implicit)
    return build_model(specification(options), layer=layer)


def report(training: Training, options: argparse.Namespace) -> None:
    """The weights alone, and the test measures at 1, 2 and 4 times the trained iterations.

    Called by every process, because the test puzzles are split among them; the first one writes.
    """
    trained, model = options.iterations, training.model
    found = {k * trained: training.evaluate(k * trained) for k in (1, 2, 4)}
    if training.fabric.global_rank != 0:
        return
    number = sum(parameter.numel() for parameter in model.parameters())
    save_weights(training)
    print(f"\n{training.data.name}, {options.model}, {number} parameters; {training.summary()}")
    print(f"{len(training.data.test_puzzles)} test puzzles by iterations:")
    for iterations, measures in found.items():
        print(f"  {iterations:3d}  " + "  ".join(describe(*each) for each in measures.items()))
    print(f"tables, checkpoint and weights: {options.out}")


def source_to_keep(options: argparse.Namespace, found: str, path: Path) -> str:
    """Which puzzles these are, for the settings: none others may take their place later."""
    if options.resume and options.source == "auto" and path.is_file():
        kept = read_progress(path)["settings"].get("source")
        return "auto" if kept == "auto" else found  # older checkpoints say no more than "auto"
    return found


def board_solver_words(words: Sequence[str]) -> list[str] | None:
    """The further words of a command line with ``--model board-solver``; None: another model."""
    reader = Parser(add_help=False, allow_abbrev=False)
    reader.add_argument("--model", nargs="?")
    found, others = reader.parse_known_args(words)
    return others if found.model == BOARD_SOLVER else None


def main(words: Sequence[str] | None = None) -> None:
    others = board_solver_words(sys.argv[1:] if words is None else words)
    if others is not None:  # trained and tested by a program of its own
        solve_sudoku.main(others)
        return
    parser = command_line()
    with command(parser):
        run(arguments(words, parser))


def run(options: argparse.Namespace) -> None:
    with mistakes():
        refuse_huge(lambda: build(options))
        fabric = start(options)
    with claim(options, fabric) as lock:
        train(options, fabric, lock)


def train(options: argparse.Namespace, fabric: Any, lock: RunLock) -> None:
    first = fabric.global_rank == 0
    with mistakes("--source", first=first):
        source = resolve_source(options.source)
    with mistakes("--train", first=first):
        data = load_sudoku(options.train, options.test, source=source, seed=options.seed)
    if first:
        print(f"data: {data.name}, {options.train} training and {options.test} test puzzles")
    path = checkpoint_path(options)
    with mistakes("--resume", first=first):
        kept = {"data": "sudoku", "source": source_to_keep(options, source, path)}
    with mistakes(first=first):
        training = build_training(
            options,
            build(options),
            SudokuCompletion(data, SudokuSymmetries() if options.symmetries else None),
            {
                **settings(options, "positions", "final_norm"),
                **kept,
                "model": specification(options),
            },
            fabric=fabric,
        )
    run_script(training, resume=options.resume, overwrite=options.overwrite, lock=lock)
    report(training, options)


if __name__ == "__main__":
    main()
