"""Figures of spins in time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from implicit_attn.studies.figures.canvas import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    draw_band,
    drawing,
    legend_below,
)
from implicit_attn.studies.tables import Table

COLORS = {"naive": ORANGE, "tap": GREEN, "plefka": GREEN, "gaussian": BLUE, "exact": "black"}
NAMES = {
    "naive": "naive mean field",
    "tap": "TAP",
    "plefka": "TAP (Plefka)",
    "gaussian": "Gaussian closure",
    "exact": "simulation",
}


CRITICAL = "$β_c$"


def ising_figure(
    path: str | Path,
    title: str,
    *,
    histories: dict[str, Tensor],
    errors: Table,
    starts: dict[float, Tensor],
    sweep: Table,
    critical: float,
    models: str,
) -> None:
    """Every spin in time, the mean of each closure, many starts, and the mean against beta over
    ``models``."""
    with drawing(path, title, (11, 8.2), dpi=92) as figure:
        panels = figure.subplots(2, 2)
        _draw_spins(figure, panels[0, 0], histories["gaussian"])
        _draw_means(panels[0, 1], histories, errors)
        _draw_starts(panels[1, 0], starts)
        _draw_sweep(panels[1, 1], sweep, critical)
        panels[1, 1].set_title(f"the transition: closures only,\n{models}")


def _draw_spins(figure: Any, axes: Any, means: Tensor) -> None:
    order = means[-1].argsort()
    image = axes.imshow(
        means[:, order].T.numpy(), vmin=-1, vmax=1, cmap="coolwarm", aspect="auto", origin="lower"
    )
    axes.set(
        title="mean of every spin at the critical β", xlabel="time step", ylabel="spin, sorted"
    )
    figure.colorbar(image, ax=axes, label="mean of a spin")
    over = axes.twinx()
    over.plot(means.mean(1), color="black", linewidth=1.8, label="mean over all spins, -1 to 1")
    over.set(ylim=(-1, 1), yticks=[])
    over.legend(loc="lower right", fontsize=9)


def _draw_means(axes: Any, histories: dict[str, Tensor], errors: Table) -> None:
    for name in ("naive", "tap", "gaussian", "exact"):
        # TAP and the Gaussian closure nearly agree: one is dashed.
        style: Any = {"linestyle": "--"} if name == "gaussian" else {}
        axes.plot(histories[name].mean(1), color=COLORS[name], label=NAMES[name], **style)
    axes.set(title="mean over all spins at the critical β", xlabel="time step", ylabel="mean")
    axes.legend(loc="upper right", fontsize=9)
    rows = [f"{NAMES[row['closure']]}: {row['error']:.3f}" for row in errors]
    note = "\n".join(
        ["r.m.s. error of the sites at the end", *rows, f"noise: {errors[0]['noise']:.3f}"]
    )
    axes.text(0.97, 0.62, note, fontsize=9, transform=axes.transAxes, ha="right", va="top")


def _draw_starts(axes: Any, starts: dict[float, Tensor]) -> None:
    for (factor, means), color in zip(starts.items(), (GREY, ORANGE, BLUE), strict=True):
        lines = axes.plot(means, color=color, linewidth=0.7, alpha=0.8)
        lines[0].set_label(f"β = {factor:g} {CRITICAL}")
    axes.set(
        title="many starts, Gaussian closure", xlabel="time step", ylabel="mean over all spins"
    )
    legend = axes.legend(loc="lower right", bbox_to_anchor=(1, 0.12), fontsize=9)
    for line in legend.get_lines():
        line.set_linewidth(2)


def _draw_sweep(axes: Any, sweep: Table, critical: float) -> None:
    for closure in ("naive", "gaussian"):
        rows = [
            row | {"scaled": row["beta"] / critical} for row in sweep if row["closure"] == closure
        ]
        style: Any = {"linestyle": "--"} if closure == "gaussian" else {}
        draw_band(axes, rows, "scaled", "mean", COLORS[closure], NAMES[closure], **style)
    axes.axvline(1, color=RED, linewidth=1, label=f"formula: {CRITICAL} = {critical:.4f}")
    axes.set(
        xlabel=f"β / {CRITICAL}",
        ylabel="|mean| at the end, median and middle 80 %",
    )
    axes.legend(loc="lower right", fontsize=9)


def vectors_figure(path: str | Path, title: str, *, histories: Table, errors: Table) -> None:
    """A column for each setting (cosines above, lengths below), and the errors at the right."""
    settings = list(dict.fromkeys(row["setting"] for row in histories))
    closures = list(dict.fromkeys(row["closure"] for row in histories))
    with drawing(path, title, (14, 7)) as figure:
        panels = figure.subplots(2, len(settings) + 1)
        for column, setting in enumerate(settings):
            above, below = panels[:, column]
            for closure in closures:
                rows = [r for r in histories if (r["setting"], r["closure"]) == (setting, closure)]
                color = COLORS[closure]
                draw_band(above, rows, "step", "to_field", color, NAMES[closure], alpha=0.15)
                steps = [row["step"] for row in rows[1:]]
                above.plot(
                    steps, [row["to_previous"] for row in rows[1:]], color=color, linestyle=":"
                )
                draw_band(below, rows, "step", "length", color, None, alpha=0.15)
            above.set(title=setting.replace("beta", "β"), ylim=(-0.2, 1.05))
            below.set(xlabel="time step", ylim=(0, 0.75))
        panels[0, 0].set_ylabel("cosine with the field (solid),\nwith the step before (dotted)")
        panels[1, 0].set_ylabel("length of the mean / radius\n(bands: middle 80 % of the spins)")
        for axes, steps in zip(
            panels[:, -1], sorted({row["steps"] for row in errors}), strict=True
        ):
            _draw_errors(axes, [row for row in errors if row["steps"] == steps], steps)
        legend_below(figure, panels[0, 0])


def _draw_errors(axes: Any, rows: Table, steps: int) -> None:
    betas = sorted({row["beta"] for row in rows})
    closures = list(dict.fromkeys(row["closure"] for row in rows))
    width = 0.8 / len(closures)
    for offset, closure in enumerate(closures):
        found = [next(r for r in rows if (r["beta"], r["closure"]) == (b, closure)) for b in betas]
        places = [index + (offset - (len(closures) - 1) / 2) * width for index in range(len(betas))]
        pale: Any = {"hatch": "//", "alpha": 0.6} if closure == "tap" else {}
        bars = axes.bar(places, [r["error"] for r in found], width, color=COLORS[closure], **pale)
        labels = [f"{r['error']:.2f}{'*' * bool(r['unsolved'])}" for r in found]
        axes.bar_label(bars, labels, fontsize=7)
        if closure == "tap":
            axes.plot(
                [], [], color=COLORS["tap"], linewidth=5, alpha=0.5, label="TAP of the exact sphere"
            )
            axes.legend(fontsize=8, loc="upper left")
    noise = [max(r["noise"] for r in rows if r["beta"] == beta) for beta in betas]
    for index, level in enumerate(noise):
        axes.plot([index - 0.42, index + 0.42], [level, level], color="black", linestyle="--")
    what = "one step" if steps == 1 else f"{steps} steps"
    of = "exact sphere; Plefka: many dimensions" if steps == 1 else "closures of many dimensions"
    star = "; *: not solved" if any(row["unsolved"] for row in rows) else ""
    axes.set(
        xticks=range(len(betas)),
        xticklabels=[f"β = {beta:g}" for beta in betas],
    )
    axes.set_title(
        f"relative error after {what}\n{of}\ndashed: simulation noise{star}", fontsize=10
    )
    axes.margins(y=0.2)
