"""Time, memory and evaluations of a training step of one layer, against batch, tokens and width.

python benchmarks/curves.py [--repeats 5] [--out docs/gallery/scaling-curves.png]

Seconds are those of the process on one thread, so that other programs disturb them little.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import solvers
from benchmarks.measure import interleaved, peak_bytes, table
from implicit_attn import DEQ, EquilibriumBlock
from implicit_attn.energies import BiSoftmaxAttention, Quadratic, ReLUFeedForward
from implicit_attn.studies.tables import BLUE, GREY, ORANGE, drawing

BASE = {"B": 8, "N": 64, "d": 64}
SWEEPS = {"B": (1, 2, 4, 8, 16, 32), "N": (16, 32, 64, 128, 256, 512), "d": (16, 32, 64, 128, 256)}
HEADS = 4
COLORS = {"bi-softmax layer": BLUE, "equilibrium block": ORANGE, "transformer layer": GREY}
Row = dict[str, Any]


def models(dim: int) -> dict[str, nn.Module]:
    """Layers of one width, of about as many parameters, with their default solvers and tolerances."""
    torch.manual_seed(0)
    attention = 0.4 * BiSoftmaxAttention(dim, HEADS, bound=1.0)
    energy = attention + 0.4 * ReLUFeedForward(dim, 2 * dim, bound=1.0) + Quadratic()
    return {
        "bi-softmax layer": DEQ(energy),
        "equilibrium block": EquilibriumBlock(dim, HEADS),
        "transformer layer": nn.TransformerEncoderLayer(
            dim, HEADS, 2 * dim, dropout=0.0, batch_first=True
        ),
    }


def step(model: nn.Module, x: Tensor) -> Callable[[], object]:
    def run() -> None:
        model.zero_grad()
        model(x).square().sum().backward()

    return run


def measure(repeats: int, sweeps: dict[str, tuple[int, ...]]) -> list[Row]:
    """A row for each size and each layer."""
    rows: list[Row] = []
    for axis, values in sweeps.items():
        for value in values:
            size = BASE | {axis: value}
            generator = torch.Generator().manual_seed(1)
            x = torch.randn(
                size["B"], size["N"], size["d"], generator=generator, requires_grad=True
            )
            made = models(size["d"])
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


def draw(path: Path, rows: list[Row]) -> None:
    sizes = ", ".join(f"{name} {value}" for name, value in BASE.items())
    with drawing(
        path, f"One training step of a layer, around {sizes}", (10.0, 7.6), dpi=90
    ) as figure:
        axes_of = list(dict.fromkeys(row["axis"] for row in rows))
        panels = figure.subplots(3, len(axes_of), squeeze=False, sharey="row")
        for column, axis in enumerate(axes_of):
            given = list(dict.fromkeys(row["value"] for row in rows if row["axis"] == axis))
            for place_, key in enumerate(("ms", "peak MB", "evaluations")):
                axes = panels[place_][column]
                for name, color in COLORS.items():
                    own = [r for r in rows if r["axis"] == axis and r["layer"] == name]
                    axes.plot(
                        given, [r[key] for r in own], "o-", color=color, label=name, markersize=4
                    )
                    if key == "evaluations" and name != "transformer layer":
                        axes.plot(given, [r["backward"] for r in own], ":", color=color)
                axes.set_xscale("log", base=2)
                if key != "evaluations":
                    axes.set_yscale("log")
                axes.set_xticks(given, [str(value) for value in given])
                axes.grid(alpha=0.3)
                if column == 0:
                    axes.set_ylabel({"ms": "CPU ms", "evaluations": "evaluations\n(dotted: backward)"}
                                    .get(key, key))  # fmt: skip
            panels[2][column].set_xlabel(f"{axis}")
        handles, names = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)


def main(repeats: int = 5, few: bool = False, out: Path | None = None) -> None:
    """Time, memory and evaluations of a training step of one layer.

    Args:
        repeats: timed steps of each layer.
        few: the two smallest sizes of each axis.
        out: a PNG file.
    """
    torch.set_num_threads(1)
    chosen = {k: v[:2] for k, v in SWEEPS.items()} if few else SWEEPS
    rows = measure(repeats, chosen)
    print(table(rows))
    if out is not None:
        draw(out, rows)


if __name__ == "__main__":
    tyro.cli(main)
