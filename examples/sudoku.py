"""Train a recurrent attention model to solve Sudoku: Hyper-SET, or one of its rivals.

    python examples/sudoku.py                          # reduced model, half an hour on one core
    python examples/sudoku.py --model transformer
    python examples/sudoku.py --attention softmax --layers 2
    python examples/sudoku.py --preset paper --compile --precision bf16-mixed    # for a GPU
    python examples/sudoku.py --resume                 # go on where a run stopped

The 81 cells are tokens; one layer is applied to them again and again; a linear readout names the
digit of every unknown cell. Puzzles have 17 to 34 clues, made from the list of 17-clue puzzles
(Gordon Royle, CC BY 2.5) in $IMPLICIT_ATTN_DATA/sudoku; without it, puzzles are generated.
``--preset paper`` takes what is published of Hyper-SET (Hu, Zou, Xu, arXiv 2502.11646): 9,000 and
1,000 puzzles, width 768, 12 heads, 24 iterations, 200 epochs of AdamW in batches of 16.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn

import solvers
from implicit_attn.checkpoint import read_progress, save_checkpoint
from implicit_attn.data import SudokuSymmetries, load_sudoku, resolve_source
from implicit_attn.energies.hyperset_energy import ATTENTIONS, FEEDFORWARDS
from implicit_attn.models import BACKBONES, build_model
from implicit_attn.models.backbones import build_backbone
from implicit_attn.models.recurrent import ORDERS
from implicit_attn.training import (
    ACCELERATORS,
    PRECISIONS,
    CsvLog,
    Recipe,
    SudokuCompletion,
    TensorBoardLog,
    Training,
    describe,
    run_script,
    start_processes,
)
from implicit_attn.training.options import (
    VARIANTS,
    add_variants,
    amount,
    check_model_options,
    count,
    fill_in,
    given,
)
from implicit_attn.updates.step_sizes import STEP_SIZES

# What an option is where the command line does not say. Of "paper" the dropout, the warm-up and
# the floor of the learning rate are ours: we found none published.
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
# An equilibrium is solved for: its iterations are evaluations, at most.
SOLVED = {"iterations": 50, "random_iterations": None}
# How a run is carried out, not what it computes: may change when it is resumed.
RUNNING = ("out", "resume", "devices", "accelerator", "save_every", "log_every", "tensorboard")


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    add = parser.add_argument
    add("--preset", choices=sorted(PRESETS), default="small", help="defaults of what follows")
    add("--model", choices=sorted(BACKBONES), default="hyperset")
    add("--dim", type=count, help="features of a cell")
    add("--heads", type=count)
    add("--width", type=count, help="of the feed-forward part")
    add("--initial-step", type=float, help="step sizes of Hyper-SET at the start")
    add("--start", choices=("random", "units"), help="where the positions of the cells start")
    add("--dropout", type=float, help="share of the embeddings set to 0 in training")
    add("--iterations", type=count, help="of the layer")
    add(
        "--random-iterations", type=count, nargs=2, metavar=("LEAST", "MOST"),
        help="train each batch with a random number of iterations (preset small: 12 20)",
    )  # fmt: skip
    add("--train", type=count, default=9000, help="puzzles to train on")
    add("--test", type=count, default=1000, help="puzzles to test on")
    add("--source", choices=("auto", "list", "generated"), default="auto", help="of the puzzles")
    add(
        "--symmetries", action=argparse.BooleanOptionalAction,
        help="see every puzzle through a random symmetry each time",
    )  # fmt: skip
    add("--epochs", type=count)
    add("--batch", type=count, default=16, help="puzzles at once, of all processes")
    add("--rate", type=amount, help="peak learning rate (warm-up, cosine decay)")
    add("--weight-decay", type=amount)
    add("--seed", type=int, default=0)
    add("--devices", type=count, default=1, help="processes, one per card or sharing the CPU")
    add("--accelerator", choices=ACCELERATORS, default="auto")
    add("--precision", choices=PRECISIONS, default="32-true")
    add("--compile", action="store_true", help="compile the repeated layer (a minute at the start)")
    add("--save-every", type=count, default=100, help="a checkpoint every so many steps")
    add("--log-every", type=count, default=10, help="a row in steps.csv every so many steps")
    add("--tensorboard", action="store_true", help="write events for TensorBoard, too")
    add("--out", type=Path, help="folder of the results (default runs/sudoku-MODEL)")
    add("--resume", action="store_true", help="continue from the checkpoint in that folder")
    kinds: dict[str, Any] = {"attention": ATTENTIONS, "feedforward": FEEDFORWARDS}
    add_variants(parser, **kinds, step_size=STEP_SIZES, order=ORDERS)
    return parser


def arguments() -> argparse.Namespace:
    parser = command_line()
    options = parser.parse_args()
    check_model_options(parser, options, build_backbone)
    preset = PRESETS[options.preset]
    if options.model == "hyperset-equilibrium":
        preset = preset | SOLVED
    if options.iterations is not None:  # asked for: no random numbers unless these are, too
        preset = {name: value for name, value in preset.items() if name != "random_iterations"}
    fill_in(options, preset)
    options.out = options.out or Path("runs") / f"sudoku-{options.model}"
    return options


def specification(options: argparse.Namespace) -> dict[str, Any]:
    """From which ``build_model`` builds the model, and ``load_model`` builds it again."""
    width = None if options.model == "crate" else options.width  # of the preset: CRATE has none
    backbone = {"name": options.model, "dim": options.dim, "heads": options.heads}
    backbone |= {"width": width, "iterations": options.iterations}
    if options.model == "hyperset":
        backbone |= {"step_size": "conditioned-input", "initial_step": options.initial_step}
    backbone |= given(options, *VARIANTS)
    cells = {"start": options.start, "dropout": options.dropout}
    return {"kind": "sudoku", **cells, "backbone": backbone}


def build(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(options.seed)
    layer = None
    if options.model == "hyperset-equilibrium":
        # Failures are counted and shown with the loss instead of warned about.
        layer = {"on_failure": "ignore", "adjoint": solvers.Implicit(on_failure="ignore")}
    return build_model(specification(options), layer=layer)


def recipe(options: argparse.Namespace) -> Recipe:
    names = ("epochs", "batch", "rate", "warmup", "floor", "weight_decay", "seed")
    random = options.random_iterations
    chosen = {name: getattr(options, name) for name in names}
    return Recipe(**chosen, iterations=tuple(random) if random else None)  # AdamW, clipped at 1


def report(training: Training, options: argparse.Namespace) -> None:
    """The weights alone, and the test measures at 1, 2 and 4 times the trained iterations.

    Called by every process, because the test puzzles are split among them; the first one writes.
    """
    trained, model = options.iterations, training.model
    found = {k * trained: training.evaluate(k * trained) for k in (1, 2, 4)}
    if training.fabric.global_rank != 0:
        return
    number = sum(parameter.numel() for parameter in model.parameters())
    kept = {"settings": training.settings, "history": training.history}
    save_checkpoint(options.out / "weights.safetensors", model, progress=kept)
    print(f"\n{training.data.name}, {options.model}, {number} parameters; {training.summary()}")
    print(f"{len(training.data.test_puzzles)} test puzzles by iterations:")
    for iterations, measures in found.items():
        print(f"  {iterations:3d}  " + "  ".join(describe(*each) for each in measures.items()))
    print(f"tables, checkpoint and weights: {options.out}")


def source_to_keep(options: argparse.Namespace, found: str, path: Path) -> str:
    """Which puzzles these are, for the settings: none others may take their place later."""
    if options.resume and options.source == "auto" and path.is_file():
        kept = read_progress(path)["settings"].get("source")
        return "auto" if kept == "auto" else found  # older checkpoints know no more than "auto"
    return found


def main() -> None:
    options = arguments()
    fabric = start_processes(
        options.devices, options.accelerator, options.precision,
        unused_parameters=options.random_iterations is not None,
    )  # fmt: skip
    source = resolve_source(options.source)
    data = load_sudoku(options.train, options.test, source=source, seed=options.seed)
    if fabric.global_rank == 0:
        print(f"data: {data.name}, {options.train} training and {options.test} test puzzles")
    apart = (*RUNNING, *VARIANTS)  # variants that are given are in the model's specification
    settings = {name: value for name, value in vars(options).items() if name not in apart}
    settings |= {"data": "sudoku", "model": specification(options)}
    path = options.out / "checkpoint.safetensors"
    settings["source"] = source_to_keep(options, source, path)
    logs: list[Any] = [CsvLog(options.out, options.log_every)]
    if options.tensorboard:
        logs.append(TensorBoardLog(options.out / "tensorboard", options.log_every))
    training = Training(
        build(options),
        SudokuCompletion(data, SudokuSymmetries() if options.symmetries else None),
        recipe(options),
        path,
        settings,
        fabric=fabric,
        save_every=options.save_every,
        logs=logs,
        compile=options.compile,
    )
    run_script(training, resume=options.resume)
    report(training, options)


if __name__ == "__main__":
    main()
