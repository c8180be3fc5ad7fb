"""Figures of mean-field theories and samplers."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from implicit_attn.optional import require
from implicit_attn.studies.figures.canvas import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    drawing,
    legend_below,
)
from implicit_attn.studies.figures.spins import LOG_PARTITIONS, ORDER_MEANS, draw_errors
from implicit_attn.studies.tables import Table

GRAPH_COLOURS = {"er-kron": RED, "er-general": ORANGE, "tree": GREEN, "ring4": BLUE}
FLOOR = 0.1  # standard errors, drawn in place of less


def free_energy_figure(path: str | Path, title: str, tables: Mapping[str, Table]) -> None:
    """Errors of log Z and of the means against the strength of the couplings, a row for each family."""
    with drawing(path, title, (10.5, 1.4 + 3.4 * len(tables))) as figure:
        axes = figure.subplots(len(tables), 2, squeeze=False, sharex="col")
        for (logs, means), (name, table) in zip(axes, tables.items(), strict=True):
            draw_errors(logs, table, LOG_PARTITIONS)
            logs.set(ylabel=f"{name}\n\n$|\\log Z - $ exact$|$", title="Free energy of the model")
            draw_errors(means, table, ORDER_MEANS)
            means.set(ylabel="relative error", title="Means $\\langle S_i\\rangle$")
        for panel in axes[-1]:
            panel.set_xlabel("strength s of the couplings")
        legend_below(figure, axes[0, 0])


def mixing_figure(path: str | Path, title: str, table: Table, allowed: float) -> None:
    """How far the mean energy is from that of the longest run, in standard errors."""
    with drawing(path, title, (7.5, 4.8)) as figure:
        axes = figure.subplots()
        for graph, color in GRAPH_COLOURS.items():
            rows = [row for row in table if row["graph"] == graph][:-1]
            if not rows:
                continue
            sweeps = [row["sweeps"] for row in rows]
            apart = [max(row["apart"], FLOOR) for row in rows]
            first = next((row["sweeps"] for row in rows if row["mixed"]), None)
            when = "not mixed" if first is None else f"mixed after {first}"
            axes.plot(sweeps, apart, "o-", color=color, label=f"{graph}: {when}", markersize=4)
        axes.axhspan(FLOOR / 2, allowed, color=GREY, alpha=0.15, linewidth=0)
        axes.text(0.02, 0.03, "noise: chains have mixed", color=GREY, transform=axes.transAxes)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_ylim(bottom=FLOOR / 2)
        axes.set(
            xlabel="sweeps from independent colours",
            ylabel="mean energy: distance from the last,\nin standard errors",
        )
        axes.legend(frameon=False)


def saddle_figure(path: str | Path, title: str, parts: Mapping[str, Any]) -> None:
    """One multiplier: phi and its derivatives; over the temperature; two multipliers.

    Args:
        path, title: of the figure, a PNG.
        parts: of the upper row ``curve`` (a table), ``root``, ``border`` and ``lowest`` (largest and
            smallest eigenvalue of J), ``beta``, ``uncoupled`` (root without couplings); of the lower row
            ``frames`` (beta -> table), ``sweep`` (a table), ``values`` (of a grid), ``plane``, ``pair``
            (both multipliers of the root) and ``product`` (of the two at the border).
    """
    with drawing(path, title, (13.0, 8.0), dpi=85) as figure:
        upper, lower = figure.subplots(2, 3)
        _draw_curves(upper, parts)
        _draw_frames(figure, lower[0], parts["frames"], parts["border"])
        _draw_sweep(lower[1], parts["sweep"], parts["border"])
        _draw_plane(lower[2], parts)


def _draw_curves(axes: Any, parts: Mapping[str, Any]) -> None:
    """phi, phi' and phi'' over the one multiplier, also left of all eigenvalues of J."""
    curve, root, border = parts["curve"], parts["root"], parts["border"]
    inside = [row for row in curve if row["t"] > border]
    outside = [row for row in curve if row["t"] < parts["lowest"]]
    names = (("phi", "$\\phi$"), ("slope", "$\\phi'$"), ("curvature", "$\\phi''$"))
    for panel, (name, label) in zip(axes, names, strict=True):
        for rows, color, style in ((outside, GREY, ":"), (inside, BLUE, "-")):
            panel.plot([r["t"] for r in rows], [r[name] for r in rows], style, color=color)
        at_root = min(inside, key=lambda row: abs(row["t"] - root))[name]
        low = {"phi": at_root - 1.6, "slope": -3.0, "curvature": -4.0}[name]
        panel.set_ylim(low, {"phi": at_root + 1.6, "slope": 2.0, "curvature": 8.0}[name])
        panel.axvspan(curve[0]["t"], border, color=RED, alpha=0.1, linewidth=0)
        panel.plot([root], [at_root], "o", color=ORANGE, label=f"root t = {root:.3f}")
        panel.set(xlim=(curve[0]["t"], curve[-1]["t"]), xlabel="multiplier t")
        panel.set_title(f"{label} per site, $\\beta$ = {parts['beta']:g}")
    axes[1].axhline(0, color=GREY, linewidth=0.8)
    wrong = [b["t"] for a, b in pairwise(outside) if a["slope"] * b["slope"] < 0]
    axes[1].plot(wrong, [0] * len(wrong), "x", color=RED, label="root outside of the domain")
    for panel in axes:
        panel.legend(frameon=False, loc="lower right")
    note = "red: outside of the domain,\nt - J not positive definite"
    axes[0].text(0.03, 0.04, note, transform=axes[0].transAxes, fontsize=8, color=RED)
    _draw_zoom(axes[1].inset_axes((0.56, 0.3, 0.4, 0.24)), inside, parts)


def _draw_zoom(axes: Any, curve: Table, parts: Mapping[str, Any]) -> None:
    """phi' near its root."""
    near = [row for row in curve if abs(row["t"] - parts["root"]) < 0.05]
    axes.plot([row["t"] for row in near], [row["slope"] for row in near], color=BLUE)
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.plot([parts["root"]], [0], "o", color=ORANGE)
    axes.axvline(parts["uncoupled"], color=GREEN, linestyle=":")
    axes.set_title("near the root; green: without J", fontsize=8)
    axes.tick_params(labelsize=7)


def _draw_frames(figure: Any, axes: Any, frames: Mapping[float, Table], border: float) -> None:
    """phi' at several temperatures, with their roots on the axis."""
    matplotlib = require("matplotlib", extra="examples")
    norm = matplotlib.colors.LogNorm(min(frames), max(frames))
    colors = matplotlib.colormaps["viridis"]
    for beta, table in frames.items():
        rows = [row for row in table if row["t"] > border]
        slopes = [row["slope"] / beta for row in rows]
        axes.plot([row["t"] for row in rows], slopes, color=colors(norm(beta)), linewidth=1)
        crossing = next((a["t"] for a, s in zip(rows, slopes, strict=True) if s > 0), None)
        if crossing is not None:
            axes.plot([crossing], [0], "o", color=colors(norm(beta)), markersize=4)
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.axvspan(0, border, color=RED, alpha=0.1, linewidth=0)
    axes.set(xlim=(0, 3), ylim=(-3, 1), xlabel="multiplier t", title="$\\phi' / \\beta$ per site")
    scale = axes.inset_axes((0.42, 0.16, 0.5, 0.05))
    mapped = matplotlib.cm.ScalarMappable(norm, colors)
    figure.colorbar(mapped, cax=scale, orientation="horizontal")
    scale.set_title("inverse temperature $\\beta$", fontsize=8)
    scale.xaxis.set_major_locator(matplotlib.ticker.FixedLocator([0.3, 1.0, 3.0]))
    scale.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    scale.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())


def _draw_sweep(axes: Any, table: Table, border: float) -> None:
    """Roots, free energy and magnetisation over the temperature."""
    betas = [row["beta"] for row in table]
    low, high = ([row[name] for row in table] for name in ("smallest", "largest"))
    axes.fill_between(betas, low, high, color=BLUE, alpha=0.3, label="t of each spin: range")
    axes.plot(betas, [row["root"] for row in table], color=ORANGE, label="one t for all")
    axes.plot(
        betas,
        [row["length"] for row in table],
        color=GREEN,
        label="$|\\langle S_i\\rangle| / \\sqrt{d}$",
    )
    axes.plot(
        betas,
        [row["free_energy"] for row in table],
        color=RED,
        label="free energy per site and component",
    )
    axes.axhline(border, color=GREY, linestyle=":", label="border of the domain of t")
    axes.set_xscale("log")
    axes.set(xlabel="inverse temperature", title="Over the temperature")
    axes.legend(frameon=False, fontsize=8)


def _draw_plane(axes: Any, parts: Mapping[str, Any]) -> None:
    """phi of two multipliers as contours, with the root and the border."""
    values, image = parts["values"], parts["plane"]
    lowest = image[~image.isnan()].min().item()
    levels = [lowest + 0.02 * 1.5**k for k in range(14)]
    axes.contourf(values, values, image, levels=[lowest, *levels], cmap="viridis", extend="max")
    axes.contour(values, values, image, levels=levels, colors="white", linewidths=0.4)
    at_border = [parts["product"] / t for t in values.tolist()]
    axes.fill_between(values, 0, at_border, color=RED, linewidth=0, label="outside of the domain")
    first, second = parts["pair"]
    label = f"root ({first:.2f}, {second:.2f})"
    axes.plot([first], [second], "o", color=ORANGE, markeredgecolor="black", label=label)
    top = values[-1].item()
    axes.set(xlim=(0, top), ylim=(0, top), xlabel="$t_1$", ylabel="$t_2$")
    axes.set_title("$\\phi(t_1, t_2)$ of two spins: dark is low")
    axes.legend(loc="upper right", fontsize=8)
