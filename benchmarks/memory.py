"""What a layer keeps for its backward pass, against the number of iterations.

python benchmarks/memory.py [--out docs/gallery/activation-memory.png]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import solvers
from benchmarks.measure import peak_bytes, table
from implicit_attn import DEQTransformer, EquilibriumBlock
from implicit_attn.studies.tables import BLUE, GREEN, GREY, ORANGE, drawing

ITERATIONS = (1, 2, 4, 8, 16, 32)
STYLES = {
    "implicit": (BLUE, "o-"),
    "unrolled": (ORANGE, "o-"),
    "unrolled, checkpointed": (GREEN, "o-"),
    "transformer layers": (GREY, "o-"),
    "DEQ transformer, implicit": (BLUE, "s:"),
    "DEQ transformer, all": (ORANGE, "s:"),
    "DEQ transformer, last 4": (GREEN, "s:"),
}
Row = dict[str, Any]
Way = tuple[Callable[[Tensor], Tensor], nn.Module]


def saved_bytes(run: Callable[[], Tensor], parameters: Sequence[Tensor]) -> tuple[int, Tensor]:
    """Bytes that autograd holds after ``run``, those of parameters left out, and what it returned.

    Storages count once, whatever views of them are saved.
    """
    weights = {p.untyped_storage()._cdata for p in parameters}
    held: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            held[storage._cdata] = storage  # kept alive, so that no other takes its number
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    return sum(storage.nbytes() for storage in held.values()), result


def models(iterations: int, dim: int, heads: int) -> dict[str, Way]:
    """Maps with as many evaluations: of one block by its adjoint, or a stack of transformer layers.

    Each with the module that it runs.
    """
    torch.manual_seed(0)
    options: dict[str, Any] = {"tolerance": solvers.Tolerance(0.0), "on_failure": "ignore"}
    options["max_steps"] = iterations + 1
    block = EquilibriumBlock(dim, heads, layer=options)
    layers = [
        nn.TransformerEncoderLayer(dim, heads, 2 * dim, dropout=0.0, batch_first=True)
        for _ in range(iterations)
    ]

    def by(adjoint: solvers.Adjoint) -> Way:
        def run(x: Tensor) -> Tensor:
            return block.solve(x, adjoint=adjoint, solver=solvers.Anderson(5)).value

        return run, block

    stack = nn.Sequential(*layers)
    ignore = solvers.Implicit(on_failure="ignore", max_steps=iterations)
    found: dict[str, Way] = {
        "implicit": by(ignore),
        "unrolled": by(solvers.Unrolled()),
        "unrolled, checkpointed": by(solvers.Unrolled(checkpoint=True)),
        "transformer layers": (stack, stack),
    }
    for gradient, name in (("implicit", "implicit"), ("all", "all"), (4, "last 4")):
        adjoint = {"adjoint": ignore} if gradient == "implicit" else None
        made = DEQTransformer(
            dim, heads, 2 * dim, iterations=iterations, gradient=gradient, layer=adjoint
        )
        found[f"DEQ transformer, {name}"] = (made, made)
    return found


def measure(batch: int, tokens: int, dim: int, heads: int) -> list[Row]:
    """A row for each number of iterations and each way: bytes saved by forward, peak of a step."""
    rows: list[Row] = []
    for iterations in ITERATIONS:
        for name, (run, module) in models(iterations, dim, heads).items():
            x = torch.randn(
                batch, tokens, dim, generator=torch.Generator().manual_seed(1), requires_grad=True
            )

            def forward(run: Callable[[Tensor], Tensor] = run, x: Tensor = x) -> Tensor:
                return run(x)

            saved, _ = saved_bytes(forward, list(module.parameters()))
            peak = peak_bytes(lambda forward=forward: forward().square().sum().backward())
            row = {"iterations": iterations, "way": name}
            rows.append(row | {"saved MB": saved / 1e6, "peak MB": peak / 1e6})
    return rows


def draw(path: Path, rows: list[Row], title: str) -> None:
    with drawing(path, title, (9.0, 3.8), dpi=100) as figure:
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


def main(
    batch: int = 8, tokens: int = 128, dim: int = 64, heads: int = 4, out: Path | None = None
) -> None:
    """Bytes kept for the backward pass, of an equilibrium block and of what it stands for; ``out`` a PNG."""
    torch.set_num_threads(1)
    rows = measure(batch, tokens, dim, heads)
    print(table(rows))
    if out is not None:
        size = f"batch {batch}, {tokens} tokens of {dim}, float32"
        draw(out, rows, f"Memory of an equilibrium block, {size}")


if __name__ == "__main__":
    tyro.cli(main)
