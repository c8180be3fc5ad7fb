"""Figures of memories as densities, and of RBMs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from implicit_attn.energies import Hopfield
from implicit_attn.studies.experiments.memories.density import RATE, REACH, DensityMap
from implicit_attn.studies.experiments.memories.digit_density import MEMORIES, Gallery
from implicit_attn.studies.figures.canvas import BLUE, GREEN, GREY, ORANGE, RED, drawing
from implicit_attn.studies.tables import Table

FLOOR = 8.0  # powers of e below the highest density that are drawn
STYLES = {
    "noisy": (GREY, ":"),
    "mean image": (GREY, "--"),
    "nearest neighbour": (ORANGE, "-"),
    "best linear": (GREEN, "-"),
    MEMORIES[0]: (BLUE, "-"),
    MEMORIES[1]: (RED, "-"),
}


def density_figure(
    path: str | Path,
    title: str,
    memory: Hopfield,
    maps: Sequence[DensityMap],
    noisy: Tensor,
    fits: Table,
    best: float,
) -> None:
    """Densities at two temperatures, the denoising step, and the likelihood during two fits."""
    with drawing(path, title, (9.5, 8)) as figure:
        panels = figure.subplots(2, 2)
        for axes, found in zip(panels[0], maps, strict=True):
            _draw_density(axes, memory, found)
            x, y = found.samples.mT.tolist()
            axes.scatter(x, y, s=3, color="white", alpha=0.5, linewidths=0, label="samples")
            _draw_patterns(axes, memory)
            factor = "β" if found.cooling == 1 else f"({found.cooling} β)"
            axes.set_title(f"temperature 1 / {factor}: log density, {len(x)} samples", fontsize=10)
            axes.legend(fontsize=8, loc="lower left", facecolor="0.6")
        _draw_steps(panels[1, 0], memory, maps[0], noisy)
        _draw_fits(panels[1, 1], fits, best)


def _draw_density(axes: Any, memory: Hopfield, found: DensityMap) -> None:
    log_prob, line = found.log_prob, found.line.numpy()
    top = log_prob.max().item()
    levels = [top - FLOOR + FLOOR * n / 24 for n in range(25)]
    shown = log_prob.clamp_min(top - FLOOR).numpy()
    axes.contourf(line, line, shown, levels=levels, cmap="viridis")
    axes.set(aspect="equal", xlim=(-REACH, REACH), ylim=(-REACH, REACH), xlabel="z1", ylabel="z2")


def _draw_patterns(axes: Any, memory: Hopfield) -> None:
    x, y = memory.patterns.mT.tolist()
    axes.plot(x, y, "x", color=RED, markersize=8, markeredgewidth=2, label="patterns")


def _draw_steps(axes: Any, memory: Hopfield, found: DensityMap, noisy: Tensor) -> None:
    _draw_density(axes, memory, found)
    step = -memory.grad(noisy)
    (x, y), (right, up) = noisy.mT.tolist(), step.mT.tolist()
    axes.quiver(
        *(x, y, right, up),
        angles="xy",
        scale_units="xy",
        scale=1,
        width=0.004,
        headwidth=5,
        color="white",
    )
    _draw_patterns(axes, memory)
    axes.set_title("attention step = mean of the pattern behind a noisy state", fontsize=10)


def _draw_fits(axes: Any, fits: Table, best: float) -> None:
    for method, color in (("gradient", ORANGE), ("fit_patterns", BLUE)):
        rows = [row for row in fits if row["method"] == method]
        for start in dict.fromkeys(row["start"] for row in rows):
            steps, values = zip(
                *((r["step"] + 1, r["log_likelihood"]) for r in rows if r["start"] == start),
                strict=True,
            )
            label = f"gradient ascent, step {RATE:g}" if method == "gradient" else method
            axes.plot(steps, values, color=color, label=None if start else label, linewidth=1.2)
    axes.axhline(best, color="black", linewidth=0.8, linestyle="--", label="true patterns")
    axes.set_xscale("log")
    axes.set(xlabel="step", ylabel="mean log-likelihood of the samples, nats")
    axes.set_title("maximum likelihood from random starts: no step lowers it", fontsize=10)
    axes.legend(fontsize=8)


def digits_figure(path: str | Path, title: str, table: Table, gallery: Gallery) -> None:
    """Images and what methods make of them, samples, and errors against the noise."""
    rows = gallery.rows | gallery.samples
    with drawing(path, title, (13, 7.5)) as figure:
        left, right = figure.subfigures(1, 2, width_ratios=[3, 2])
        panels = left.subplots(len(rows), 1)
        for axes, (name, images) in zip(panels, rows.items(), strict=True):
            tiles = images.reshape(len(images), -1, gallery.side).permute(1, 0, 2)
            axes.imshow(tiles.reshape(tiles.shape[0], -1).numpy(), cmap="gray_r", vmin=0, vmax=0.4)
            axes.set(xticks=[], yticks=[])
            axes.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)
        left.suptitle(
            f"held-out digits, noise {gallery.noise:g}; last three rows: the fitted memory",
            fontsize=10,
        )
        above, below = right.subplots(2, 1, sharex=True)
        for name, (color, line) in STYLES.items():
            found = [row for row in table if row["method"] == name]
            noises = [row["noise"] for row in found]
            style: Any = {"color": color, "linestyle": line, "marker": "o", "ms": 3.5}
            above.plot(noises, [row["error"] for row in found], label=name, **style)
            linear = {
                r["noise"]: r["log_likelihood"] for r in table if r["method"] == "best linear"
            }
            gains = [row["log_likelihood"] - linear[row["noise"]] for row in found]
            below.plot(noises, gains, **style)
        above.set(ylabel="rms error of a pixel / noise", ylim=(0, 1.6), xscale="log")
        above.legend(fontsize=8)
        ticks = sorted({row["noise"] for row in table})
        below.set_xticks(ticks, [f"{noise:g}" for noise in ticks])
        below.minorticks_off()
        below.set(xlabel="noise, standard deviation of a pixel (images of norm 1)", ylim=(-12, 4))
        below.set_ylabel("log-likelihood above best linear,\nnats an image")


def machines_figure(
    path: str | Path, title: str, curves: Table, orders: Sequence[int], histograms: Sequence[Table]
) -> None:
    """``K(t)`` with Taylor sums for each law; below, Gibbs frequencies against exact probabilities."""
    names = list(dict.fromkeys(row["hidden"] for row in curves))
    with drawing(path, title, (13, 9)) as figure:
        upper, lower = figure.subfigures(2, 1, height_ratios=[3, 2])
        panels = upper.subplots(2, -(-len(names) // 2))
        for axes, name in zip(panels.flat, names, strict=False):
            _draw_cumulants(axes, name, [row for row in curves if row["hidden"] == name], orders)
        for axes in panels.flat[len(names) :]:
            axes.set_axis_off()
        handles, labels = panels.flat[0].get_legend_handles_labels()
        panels.flat[-1].legend(handles, labels, fontsize=9, loc="center")
        shared = lower.subplots(1, len(histograms), sharey=True, squeeze=False)[0]
        for axes, table in zip(shared, histograms, strict=True):
            _draw_histogram(axes, table)
        shared[0].set_ylabel("probability of a state")
        shared[0].legend(fontsize=8)


def _draw_cumulants(axes: Any, name: str, rows: Table, orders: Sequence[int]) -> None:
    t, exact = [row["t"] for row in rows], [row["K"] for row in rows]
    for order, color in zip(orders, (ORANGE, GREEN, RED), strict=False):
        taylor = [row[f"order {order}"] for row in rows]
        axes.plot(t, taylor, color=color, linewidth=1, label=f"Taylor sum, order {order}")
    axes.plot(t, exact, color=BLUE, linewidth=2.2, label="K(t), exact", zorder=0)
    low, high = min(exact), max(exact)
    margin = 0.15 * (high - low)
    axes.set(title=f"{name} units", xlabel="field t", ylim=(low - margin, high + margin))


def _draw_histogram(axes: Any, table: Table) -> None:
    places = range(len(table))
    axes.bar(
        places, [row["exact"] for row in table], color=BLUE, alpha=0.4, label="exact, exp(-E) / Z"
    )
    axes.errorbar(
        places,
        [row["found"] for row in table],
        yerr=[2 * row["error"] for row in table],
        fmt=".",
        color="black",
        ms=4,
        elinewidth=0.8,
        label="Gibbs, 2 standard errors",
    )
    axes.set(title=f"{table[0]['hidden']} hidden units", xlabel="state, by falling probability")
    axes.set_yscale("log")
