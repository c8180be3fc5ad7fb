"""Pictures of more and fewer iterations: extrapolation, geometry, trade-off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from implicit_attn.studies.extrapolation import Extrapolation
from implicit_attn.studies.figures.report import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    WINDOW,
    pyplot_without_screen,
    say_nothing,
)
from implicit_attn.studies.tables import Table

SPREAD = 20.0  # ratio of losses from which a logarithm shows more
APART = 0.09  # of a panel's width, between numbers beside a curve


def extrapolation_figure(path: str | Path, title: str, found: Extrapolation, trained: int) -> None:
    """Six panels: accuracy, loss, residual, energy, adaptive stopping, its depths.

    Args:
        path: of the PNG.
        title: of the figure.
        found: of :func:`implicit_attn.studies.test_time.extrapolate`.
        trained: iterations in training, drawn as a line.
    """
    pyplot = pyplot_without_screen()
    figure, axes = pyplot.subplots(2, 3, figsize=(16, 9), layout="constrained")
    figure.suptitle(title, fontsize=13)
    curves = found.curves
    panels = (axes[0, 0], axes[0, 1], axes[0, 2], axes[1, 0])
    for panel, key in zip(panels, ("accuracy", "loss", "residual", "energy"), strict=True):
        _draw_curves(panel, curves, key, trained)
    axes[0, 0].set(ylabel="test accuracy, %", title="Accuracy")
    axes[0, 1].set(ylabel="test loss (cross-entropy)", title="Loss")
    name = "Residual of a solve, last relative change of a recurrence"
    axes[0, 2].set(ylabel="relative residual (median)", yscale="log", title=name)
    axes[1, 0].set(ylabel="energy (mean)", title="Energy")
    _draw_adaptive(axes[1, 1], found, trained)
    _draw_depths(axes[1, 2], found)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(Path(path), dpi=110)
    pyplot.close(figure)


def _draw_curves(axes: Any, curves: Table, key: str, trained: int) -> None:
    methods = list(dict.fromkeys(row["method"] for row in curves))
    marks = "osv^DP*"
    seen: list[float] = []
    for number, name in enumerate(methods):
        rows = [row for row in curves if row["method"] == name and row.get(key) is not None]
        if not rows:
            continue
        values = [(100.0 if key == "accuracy" else 1.0) * row[key] for row in rows]
        steps = [row["evaluations"] for row in rows]
        look: Any = {"marker": marks[number % len(marks)], "markersize": 4, "linewidth": 1.2}
        axes.plot(steps, values, color=f"C{number}", label=name, **look)
        seen += values
    axes.set_xlabel("iterations (evaluations) at test time")
    if not seen:
        say_nothing(axes, f"no {key} is defined")
        return
    _mark_training(axes, curves, trained)
    if key == "accuracy":
        extrapolated = [100 * r["accuracy"] for r in curves if r["method"] in methods[:2]
                        and r["evaluations"] >= trained]  # fmt: skip
        _look_at_the_top(axes, seen, extrapolated)
    elif key == "loss" and max(seen) > SPREAD * min(seen):
        axes.set_yscale("log")


def _mark_training(axes: Any, curves: Table, trained: int) -> None:
    most = max(row["evaluations"] for row in curves)
    for multiple in range(1, most // trained + 1):
        name = f"1x, 2x, ... training ({trained})" if multiple == 1 else None
        axes.axvline(multiple * trained, color=GREY, linestyle=":", linewidth=1, label=name)


def _look_at_the_top(axes: Any, values: list[float], needed: list[float]) -> None:
    """The first iterations are far below the rest, whose differences are what the figure is about."""
    top = max(values)
    height = max(WINDOW, 1.05 * (top - min(needed)))
    if top - min(values) > height:
        axes.set_ylim(top - height, top + 0.05 * height)
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5}
        text = f"cut off below\n(lowest {min(values):.1f} %)"
        axes.text(0.02, 0.03, text, fontsize=8, transform=axes.transAxes, va="bottom", bbox=box)


def _draw_adaptive(axes: Any, found: Extrapolation, trained: int) -> None:
    first = found.curves[0]["method"]
    fixed = [row for row in found.curves if row["method"] == first]
    steps = [row["evaluations"] for row in fixed]
    values = [100 * row["accuracy"] for row in fixed]
    axes.plot(steps, values, color=GREY, marker="o", markersize=3, label=f"fixed depth ({first})")
    mean = [row["evaluations"] for row in found.adaptive]
    accuracy = [100 * row["accuracy"] for row in found.adaptive]
    axes.plot(
        mean, accuracy, color=ORANGE, marker="s", markersize=4, label="each sample stops itself"
    )
    last = -float("inf")
    for row in found.adaptive:
        place = (row["evaluations"], 100 * row["accuracy"])
        if place[0] - last < APART * steps[-1]:
            continue
        last = place[0]
        text: Any = {"textcoords": "offset points", "xytext": (4, -11), "fontsize": 8}
        axes.annotate(f"{row['rtol']:g}", place, **text)
    axes.axvline(trained, color=GREY, linestyle=":", linewidth=1, label=f"training ({trained})")
    extrapolated = [100 * row["accuracy"] for row in fixed if row["evaluations"] >= trained]
    _look_at_the_top(axes, values + accuracy, extrapolated)
    axes.set(
        xlabel="mean iterations per sample",
        ylabel="test accuracy, %",
        title="Adaptive stopping (numbers: tolerance) and fixed depth",
    )
    axes.legend(frameon=False, fontsize=8)


def _draw_depths(axes: Any, found: Extrapolation) -> None:
    """The middle tolerances that most samples meet, so that the bars are no mere limit."""
    met = [row["rtol"] for row in found.adaptive if row["stopped"] >= 0.5]
    shown = met[:: max(1, len(met) // 3)][-3:] if met else [found.adaptive[0]["rtol"]]
    total = sum(row["samples"] for row in found.depths if row["rtol"] == shown[0])
    most = max(row["evaluations"] for row in found.depths if row["rtol"] in shown)
    for rtol, color in zip(shown, (BLUE, ORANGE, GREEN), strict=False):
        count = {r["evaluations"]: r["samples"] for r in found.depths if r["rtol"] == rtol}
        share = [100 * count.get(k, 0) / total for k in range(1, most + 1)]
        edges = [k + 0.5 for k in range(most + 1)]
        name = f"tolerance {rtol:g}"
        axes.stairs(share, edges, color=color, fill=True, alpha=0.45, label=name)
    axes.set(
        xlabel="iterations until the sample stops",
        ylabel="share of samples, %",
        title="Depth per sample under adaptive stopping",
    )
    axes.legend(frameon=False)


def geometry_figure(
    path: str | Path, title: str, energies: Table, heads: Table, trained: int
) -> None:
    """Four panels: attention energy, feed-forward energy, effective rank and angle per head.

    Args:
        path: of the PNG.
        title: of the figure.
        energies, heads: of :func:`implicit_attn.studies.geometry.geometry`.
        trained: iterations in training, drawn as a line where more are shown.
    """
    pyplot = pyplot_without_screen()
    figure, axes = pyplot.subplots(2, 2, figsize=(12, 8.5), layout="constrained")
    figure.suptitle(title, fontsize=13)
    steps = [row["iteration"] for row in energies]
    for panel, key, name, color in (
        (axes[0, 0], "attention", "Attention energy", BLUE),
        (axes[0, 1], "feedforward", "Feed-forward energy", ORANGE),
    ):
        low, high = ([row[f"{key}_energy_{k}"] for row in energies] for k in (10, 90))
        panel.fill_between(
            steps, low, high, color=color, alpha=0.2, label="10 % to 90 % of samples"
        )
        mean = [row[f"{key}_energy"] for row in energies]
        panel.plot(steps, mean, color=color, marker="o", markersize=3.5, label="mean")
        panel.set(xlabel="iteration", ylabel="energy", title=name)
    for panel, key, label, name in (
        (axes[1, 0], "effective_rank", "effective rank", "Effective rank of the tokens in a head"),
        (axes[1, 1], "angle", "average angle, degrees", "Average angle between tokens in a head"),
    ):
        for head in sorted({row["head"] for row in heads}):
            rows = [row for row in heads if row["head"] == head]
            places = [row["iteration"] for row in rows]
            values = [row[key] for row in rows]
            panel.plot(places, values, marker="o", markersize=3, label=f"head {head + 1}")
        panel.set(xlabel="iteration", ylabel=label, title=name)
    for panel in axes.flat:
        if steps[-1] > trained:
            panel.axvline(trained, color=GREY, linestyle=":", label="end of training's iterations")
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.legend(frameon=False, fontsize=8)
    figure.savefig(Path(path), dpi=110)
    pyplot.close(figure)


def seed_means(table: Table) -> Table:
    """A row for each (layers, iterations): the mean over the seeds, fewest layers first.

    Args:
        table: rows of :func:`implicit_attn.studies.trade_off.trade_off_row`.

    Returns:
        layers, iterations, parameters, seeds (rows that were averaged), accuracy and loss.
    """
    means: Table = []
    for layers, iterations in sorted({(row["layers"], row["iterations"]) for row in table}):
        group = [r for r in table if (r["layers"], r["iterations"]) == (layers, iterations)]
        row = {"layers": layers, "iterations": iterations, "parameters": group[0]["parameters"]}
        row["seeds"] = len(group)
        for key in ("accuracy", "loss"):
            row[key] = sum(each[key] for each in group) / len(group)
        means.append(row)
    return means


def trade_off_figure(path: str | Path, title: str, table: Table) -> None:
    """Accuracy, loss and parameters of the same depth made of more layers or of more iterations.

    Args:
        path: of the PNG.
        title: of the figure.
        table: rows of :func:`implicit_attn.studies.trade_off.trade_off_row`, several of the same
            layers and iterations are averaged.
    """
    pyplot = pyplot_without_screen()
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    figure.suptitle(title, fontsize=13)
    means = seed_means(table)
    pairs = [(row["layers"], row["iterations"]) for row in means]
    label = "mean of the seeds" if any(row["seeds"] > 1 for row in means) else "one seed"
    for panel, key, color in ((axes[0], "accuracy", ORANGE), (axes[1], "loss", BLUE)):
        factor = 100 if key == "accuracy" else 1
        places = [pairs.index((row["layers"], row["iterations"])) for row in table]
        panel.plot(places, [factor * row[key] for row in table], "o", color=color, alpha=0.5)
        panel.plot([factor * row[key] for row in means], color=color, label=label)
        panel.legend(frameon=False)
    axes[0].set(ylabel="test accuracy, %", title="Accuracy at constant depth")
    axes[1].set(ylabel="test loss (cross-entropy)", title="Loss at constant depth")
    thousands = [row["parameters"] / 1000 for row in means]
    axes[2].bar_label(axes[2].bar(range(len(pairs)), thousands, color=GREEN), fmt="%.1f")
    axes[2].set(ylabel="parameters, thousands", title="What the layers cost")
    for panel in axes:
        panel.set_xticks(
            range(len(pairs)), [f"{layers} x {iterations}" for layers, iterations in pairs]
        )
        panel.set_xlabel("layers x iterations of each")
    figure.savefig(Path(path), dpi=110)
    pyplot.close(figure)
