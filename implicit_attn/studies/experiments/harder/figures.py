"""The figure of easy to hard on rings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from implicit_attn.studies.experiments.harder.contenders import (
    ALWAYS,
    EQUILIBRIUM,
    MAJORITY,
    ONCE,
    SAME_DEPTH,
    SAME_PARAMETERS,
    Settings,
)
from implicit_attn.studies.experiments.harder.found import Found
from implicit_attn.studies.experiments.harder.runs import (
    ANDERSON,
    ANNEALED,
    DAMPED,
    FORWARD,
    LONG,
)
from implicit_attn.studies.figures.canvas import BLUE, GREEN, GREY, ORANGE, RED, drawing
from implicit_attn.studies.harder.curves import multiples
from implicit_attn.studies.harder.figures import draw_seeds, mark_training
from implicit_attn.studies.harder.seeds import over_seeds
from implicit_attn.studies.tables import Table

SIZES = (GREEN, BLUE, RED)
METHODS = {FORWARD: BLUE, DAMPED: GREEN, ANDERSON: ORANGE, ANNEALED: RED}


def easy_to_hard_figure(path: str | Path, title: str, found: Found, settings: Settings) -> None:
    """Solved share against size, iterations, method and tolerance; what is needed; one ring."""
    with drawing(path, title, (15, 8.6), dpi=80) as figure:
        axes = figure.subplots(2, 3)
        _draw_sizes(axes[0, 0], found.sizes, settings)
        _draw_iterations(axes[0, 1], found.curves, settings)
        _draw_methods(axes[0, 2], found, settings)
        _draw_needed(axes[1, 0], found.needed, settings)
        _draw_adaptive(axes[1, 1], found, settings)
        _draw_unfolding(axes[1, 2], found, settings)


def _draw_sizes(axes: Any, table: Table, settings: Settings) -> None:
    once, long = settings.trained, LONG * settings.trained
    labels = {
        f"{EQUILIBRIUM}, {long} iterations": (BLUE, "-"),
        f"{EQUILIBRIUM}, {once} iterations as in training": (BLUE, ":"),
        f"{ALWAYS}, {long} iterations": (GREEN, "--"),
        SAME_DEPTH: (RED, "-"),
        SAME_PARAMETERS: (ORANGE, "-"),
        ONCE: (GREY, "--"),
        MAJORITY: ("black", ":"),
    }
    for label, (color, style) in labels.items():
        rows = [row for row in table if row["model"] == label]
        draw_seeds(axes, rows, "size", "solved", color, label, marker="o", linestyle=style)
    axes.axvspan(settings.least, settings.size, color=GREY, alpha=0.15, linewidth=0)
    sizes = sorted({row["size"] for row in table})
    axes.set_xticks(sizes)
    axes.set(xlabel="positions of the ring (grey: in training)", ylabel="rings solved")
    axes.set(ylim=(-0.03, 1.85), yticks=[0.0, 0.2, 0.4, 0.6, 0.8, 1.0])  # the legend stands above
    axes.set_title("larger rings than in training")
    axes.legend(fontsize=8, loc="upper right")


def _draw_iterations(axes: Any, table: Table, settings: Settings) -> None:
    forward = [row for row in table if row["method"] == FORWARD]
    sizes = sorted({row["size"] for row in forward})
    for color, size in zip(SIZES, sizes, strict=False):
        rows = [row for row in forward if row["size"] == size]
        label = f"{size} positions ({size / settings.size:g}x)"
        draw_seeds(axes, rows, "iterations", "solved", color, label, marker="o")
    mark_training(axes, settings.trained, multiples(settings.trained))
    axes.set(xlabel="iterations; multiples of training's most", ylim=_SHARE)
    axes.set_ylabel("rings solved")
    axes.set_title("equilibrium: more iterations, larger rings")
    axes.legend(fontsize=9, loc="lower right")


def _draw_methods(axes: Any, found: Found, settings: Settings) -> None:
    size = next(row["size"] for row in found.curves if row["method"] == ANDERSON)
    for name, color in METHODS.items():
        rows = [row for row in found.curves if row["method"] == name and row["size"] == size]
        style = "--" if name == ANNEALED else "-"  # it often lies on the first
        draw_seeds(axes, rows, "iterations", "solved", color, name, marker="o", linestyle=style)
    for name in (FORWARD, ANDERSON):
        rows = [row for row in found.adaptive if row["method"] == name and row["size"] == size]
        merged = over_seeds(rows, ["rtol"], ["evaluations", "solved"])
        means = [[row[key] for row in merged] for key in ("evaluations", "solved")]
        label = f"{name}, each ring stops by itself"
        axes.plot(*means, "s--", color=METHODS[name], markerfacecolor="white", label=label)
    mark_training(axes, settings.trained, multiples(settings.trained))
    axes.set(ylabel="rings solved", ylim=_SHARE)
    axes.set_xlabel("evaluations at most; squares: mean, tolerances 0.1 to 1e-4")
    axes.set_title(f"equilibrium: ways of solving, {size} positions")
    axes.legend(fontsize=8, loc="lower right")


def _draw_needed(axes: Any, table: Table, settings: Settings) -> None:
    sizes = sorted({row["size"] for row in table})
    for color, size in zip(SIZES, sizes, strict=False):
        rows = [row for row in table if row["size"] == size and row["iterations"] is not None]
        places = [row["difficulty"] for row in rows]
        needed = [row["iterations"] for row in rows]
        label = f"{size} positions"
        axes.plot(places, needed, "o", color=color, markersize=4, alpha=0.5, label=label)
    end = max(row["difficulty"] for row in table)
    axes.plot([1, end], [1, end], color="black", linewidth=1, label="one position an iteration")
    axes.axvspan(1, settings.size, color=GREY, alpha=0.15, linewidth=0)
    axes.set(xlabel="difficulty: longest run between marks (grey: in training)")
    axes.set_ylabel("iterations until solved for good")
    axes.set_title("what an instance needs, forward")
    axes.legend(fontsize=9, loc="upper left")


def _draw_adaptive(axes: Any, found: Found, settings: Settings) -> None:
    sizes = sorted({row["size"] for row in found.adaptive})
    rtol = 1e-3
    rows = [row for row in found.stops if row["rtol"] == rtol and row["method"] == FORWARD]
    for color, size in zip(SIZES, sizes, strict=False):
        some = [row for row in rows if row["size"] == size]
        places, taken = ([row[key] for row in some] for key in ("difficulty", "evaluations"))
        axes.plot(
            places, taken, "o", color=color, markersize=4, alpha=0.5, label=f"{size} positions"
        )
    end = max(row["difficulty"] for row in rows)
    axes.plot([1, end], [1, end], color="black", linewidth=1, label="one position an iteration")
    axes.axvspan(1, settings.size, color=GREY, alpha=0.15, linewidth=0)
    axes.set(xlabel="difficulty (grey: in training)", ylabel="evaluations until it stops")
    axes.set_title(f"each instance stops at a residual of {rtol:g}")
    axes.legend(fontsize=9, loc="upper left")


def _draw_unfolding(axes: Any, found: Found, settings: Settings) -> None:
    assert found.picture is not None
    most, size = found.picture.shape
    axes.imshow(
        found.picture.numpy(), cmap="Greys", vmin=-0.5, vmax=1.6, aspect="auto", origin="lower",
        extent=(0, size, 0.5, most + 0.5), interpolation="nearest",
    )  # fmt: skip
    axes.axhline(settings.trained, color="black", linestyle=":", linewidth=1)
    axes.text(
        size, settings.trained, "training's most ", fontsize=8, ha="right", va="bottom",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
    )  # fmt: skip
    axes.set(xlabel="position, from a mark on", ylabel="iteration")
    axes.set_title(f"the hardest ring of {size}: right answers are dark")


_SHARE = (-0.03, 1.03)
