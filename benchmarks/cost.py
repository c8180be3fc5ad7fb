"""What layers cost: time and memory against their sizes, and what is kept for a backward pass.

python benchmarks/cost.py curves [--repeats 5] [--out docs/gallery/scaling-curves.png]
python benchmarks/cost.py memory [--out docs/gallery/activation-memory.png]
python benchmarks/cost.py block [--rounds 40]
python benchmarks/cost.py verify [--rounds 60]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import solvers
from benchmarks.measure import interleaved, peak_bytes, table
from implicit_attn import DEQ, DEQTransformer, EquilibriumBlock
from implicit_attn.energies import BiSoftmaxAttention, Quadratic, ReLUFeedForward
from implicit_attn.studies.study import BLUE, GREEN, GREY, ORANGE, new_figure
from implicit_attn.updates import MeanFieldAttention

Row = dict[str, Any]

# --- curves: a training step against batch, tokens and width ---------------------------------------

BASE = {"B": 8, "N": 64, "d": 64}
SWEEPS = {"B": (1, 2, 4, 8, 16, 32), "N": (16, 32, 64, 128, 256, 512), "d": (16, 32, 64, 128, 256)}
MEANINGS = {"B": "samples", "N": "tokens", "d": "features of a token"}
HEADS = 4
LABELS = {"ms": "CPU ms", "evaluations": "evaluations\n(dotted: backward)"}
COLORS = {"bi-softmax layer": BLUE, "equilibrium block": ORANGE, "transformer layer": GREY}


def encoder_layer(dim: int, heads: int, norm_first: bool = False) -> nn.Module:
    return nn.TransformerEncoderLayer(
        dim, heads, 2 * dim, dropout=0.0, batch_first=True, norm_first=norm_first
    )


def layers(dim: int) -> dict[str, nn.Module]:
    """Layers of one width, of about as many parameters, with their default solvers and tolerances."""
    torch.manual_seed(0)
    attention = 0.4 * BiSoftmaxAttention(dim, HEADS, bound=1.0)
    energy = attention + 0.4 * ReLUFeedForward(dim, 2 * dim, bound=1.0) + Quadratic()
    return {
        "bi-softmax layer": DEQ(energy),
        "equilibrium block": EquilibriumBlock(dim, HEADS),
        "transformer layer": encoder_layer(dim, HEADS),
    }


def step(model: nn.Module, x: Tensor) -> Callable[[], object]:
    def run() -> None:
        model.zero_grad()
        model(x).square().sum().backward()

    return run


def measure_curves(repeats: int, sweeps: dict[str, tuple[int, ...]]) -> list[Row]:
    """A row for each size and each layer."""
    rows: list[Row] = []
    for axis, values in sweeps.items():
        for value in values:
            size = BASE | {axis: value}
            generator = torch.Generator().manual_seed(1)
            x = torch.randn(*size.values(), generator=generator, requires_grad=True)
            made = layers(size["d"])
            runs = {name: step(model, x) for name, model in made.items()}
            seconds = interleaved(runs, repeats, time.process_time)
            for name, model in made.items():
                row = {"axis": axis, "value": value, "layer": name, "ms": 1e3 * seconds[name]}
                row |= {"peak MB": peak_bytes(runs[name]) / 1e6}
                rows.append(row | _counts(getattr(model, "last", None)))
    return rows


def _counts(last: solvers.Solution | None) -> Row:
    """Median evaluations of a sample, and products with the Jacobian in the backward pass."""
    if last is None:
        return {"evaluations": 1.0, "backward": 1.0, "converged": 1.0}
    adjoint = last.adjoint.solution
    back = [] if adjoint is None else adjoint.evaluations.tolist()
    return {
        "evaluations": float(statistics.median(last.evaluations.tolist())),
        "backward": float(statistics.median(back or [0])),
        "converged": float(last.converged.float().mean()),
    }


def draw_curves(path: Path, rows: list[Row]) -> None:
    sizes = ", ".join(f"{name} {value}" for name, value in BASE.items())
    figure = new_figure((10.0, 7.6), f"One training step of a layer, around {sizes}")
    axes_of = list(dict.fromkeys(row["axis"] for row in rows))
    panels = figure.subplots(3, len(axes_of), squeeze=False, sharey="row")
    for column, axis in enumerate(axes_of):
        given = list(dict.fromkeys(row["value"] for row in rows if row["axis"] == axis))
        for place_, key in enumerate(("ms", "peak MB", "evaluations")):
            axes = panels[place_][column]
            for name, color in COLORS.items():
                own = [r for r in rows if r["axis"] == axis and r["layer"] == name]
                axes.plot(given, [r[key] for r in own], "o-", color=color, label=name, markersize=4)
                if key == "evaluations" and name != "transformer layer":
                    axes.plot(given, [r["backward"] for r in own], ":", color=color)
            axes.set_xscale("log", base=2)
            if key != "evaluations":
                axes.set_yscale("log")
            axes.set_xticks(given, [str(value) for value in given])
            axes.grid(alpha=0.3)
            if column == 0:
                axes.set_ylabel(LABELS.get(key, key))
        panels[2][column].set_xlabel(f"{axis}, {MEANINGS[axis]}")
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
    figure.savefig(path, dpi=90)


def curves(repeats: int = 5, out: Path | None = None) -> None:
    """Time, memory and evaluations of a training step of one layer; ``out`` a PNG."""
    torch.set_num_threads(1)
    rows = measure_curves(repeats, SWEEPS)
    print(table(rows))
    if out is not None:
        draw_curves(out, rows)


# --- memory: what is kept for the backward pass, against the number of iterations ------------------

ITERATIONS = (1, 2, 4, 8, 16, 32)
STYLES = {
    "implicit": (BLUE, "o-"),
    "unrolled": (ORANGE, "o-"),
    "transformer layers": (GREY, "o-"),
    "DEQ transformer, implicit": (BLUE, "s:"),
    "DEQ transformer, all": (ORANGE, "s:"),
    "DEQ transformer, last 4": (GREEN, "s:"),
}
Way = tuple[Callable[[Tensor], Tensor], nn.Module]


def saved_bytes(run: Callable[[], Tensor], parameters: Sequence[Tensor]) -> int:
    """Bytes of the storages that autograd holds after ``run``, those of parameters left out."""
    weights = {p.untyped_storage()._cdata for p in parameters}
    held: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            held[storage._cdata] = storage  # kept alive, so that no other takes its number
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        _kept = run()
        return sum(storage.nbytes() for storage in held.values())


def ways(iterations: int, dim: int, heads: int) -> dict[str, Way]:
    """Maps with as many evaluations, of a block or a stack of layers, each with the module that it runs."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"tolerance": solvers.Tolerance(0.0), "on_failure": "ignore"}
    options["max_steps"] = iterations + 1
    block = EquilibriumBlock(dim, heads, layer=options)

    def by(adjoint: solvers.Adjoint) -> Way:
        def run(x: Tensor) -> Tensor:
            return block.solve(x, adjoint=adjoint, solver=solvers.Anderson(5)).value

        return run, block

    stack = nn.Sequential(*(encoder_layer(dim, heads) for _ in range(iterations)))
    ignore = solvers.Implicit(on_failure="ignore", max_steps=iterations)
    found: dict[str, Way] = {
        "implicit": by(ignore),
        "unrolled": by(solvers.Unrolled()),
        "transformer layers": (stack, stack),
    }
    for gradient, name in (("implicit", "implicit"), ("all", "all"), (4, "last 4")):
        adjoint = {"adjoint": ignore} if gradient == "implicit" else None
        way: Any = {"iterations": iterations, "gradient": gradient, "layer": adjoint}
        made = DEQTransformer(dim, heads, 2 * dim, **way)
        found[f"DEQ transformer, {name}"] = (made, made)
    return found


def measure_memory(batch: int, tokens: int, dim: int, heads: int) -> list[Row]:
    """A row for each number of iterations and each way: bytes saved by forward, peak of a step."""
    rows: list[Row] = []
    for iterations in ITERATIONS:
        for name, (run, module) in ways(iterations, dim, heads).items():
            generator = torch.Generator().manual_seed(1)
            x = torch.randn(batch, tokens, dim, generator=generator, requires_grad=True)
            saved = saved_bytes(lambda run=run, x=x: run(x), list(module.parameters()))
            peak = peak_bytes(lambda run=run, x=x: run(x).square().sum().backward())
            row = {"iterations": iterations, "way": name}
            rows.append(row | {"saved MB": saved / 1e6, "peak MB": peak / 1e6})
    return rows


def draw_memory(path: Path, rows: list[Row], title: str) -> None:
    figure = new_figure((9.0, 3.8), title)
    panels = figure.subplots(1, 2)
    labels = ("saved MB", "peak MB")
    titles = ("kept for the backward pass", "peak of forward and backward")
    for axes, key, what in zip(panels, labels, titles, strict=True):
        for name, (color, style) in STYLES.items():
            own = [row for row in rows if row["way"] == name]
            axes.plot([r["iterations"] for r in own], [r[key] for r in own], style, color=color,
                      label=name, markersize=4)  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ITERATIONS, [str(number) for number in ITERATIONS])
        axes.set(xlabel="iterations (transformer: layers)", ylabel="MB", title=what)
        axes.grid(alpha=0.3)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=100)


def memory(
    batch: int = 8, tokens: int = 128, dim: int = 64, heads: int = 4, out: Path | None = None
) -> None:
    """Bytes kept for the backward pass, of an equilibrium block and of what it stands for; ``out`` a PNG."""
    torch.set_num_threads(1)
    rows = measure_memory(batch, tokens, dim, heads)
    print(table(rows))
    if out is not None:
        size = f"batch {batch}, {tokens} tokens of {dim}, float32"
        draw_memory(out, rows, f"Memory of an equilibrium block, {size}")


# --- the block beside an encoder layer, and the check of the returned value ---------------------------


def use(layer: Any, x: Tensor, training: bool, **options: Any) -> None:
    """A training step, or a call without gradients."""
    with torch.set_grad_enabled(training):
        y = layer.train(training)(x, **options)
    if training:
        layer.zero_grad()
        y.square().mean().backward()


def block(rounds: int = 40) -> None:
    """Times of a training step and an evaluation of the block, and their ratios to an encoder layer's."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, rows = torch.randn(32, 16, 64), list[Row]()
    made = {"encoder layer": encoder_layer(64, HEADS, True), "block": EquilibriumBlock(64, HEADS)}
    for training, what in ((True, "training step"), (False, "evaluation")):
        runs = {name: partial(use, layer, x, training) for name, layer in made.items()}
        times = interleaved(runs, rounds, time.process_time)
        rows += [
            {"what": f"{name}, {what}", "ms": 1e3 * took, "ratio": took / times["encoder layer"]}
            for name, took in times.items()
        ]
    print(table(rows))


def verify(rounds: int = 60) -> None:
    """What evaluating f at the returned value costs: the ratio to the time of ``verify=False``."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    block, field = EquilibriumBlock(64, heads=4), DEQ(MeanFieldAttention(16, 16, bound=0.9))
    made: Any = (("equilibrium block", block, 64), ("mean-field layer", field, 16))
    rows, modes = list[Row](), {"without": False, "with": True}
    for name, layer, width in made:
        x = torch.randn(16, 16, width)
        for training in (True, False):
            runs = {m: partial(use, layer, x, training, verify=v) for m, v in modes.items()}
            times = interleaved(runs, rounds, time.process_time)
            row = {"layer": name, "what": "training step" if training else "inference"}
            row |= {"evaluations": int(layer.last.evaluations.max())}
            row |= {"ms without": 1e3 * times["without"]}
            rows.append(row | {"with / without": times["with"] / times["without"]})
    print(table(rows))


if __name__ == "__main__":
    programs = {"curves": curves, "memory": memory, "block": block, "verify": verify}
    tyro.extras.subcommand_cli_from_dict(programs)
