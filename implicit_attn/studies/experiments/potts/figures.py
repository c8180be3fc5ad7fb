"""Figures of recovered couplings and of learning rules."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from implicit_attn.studies.experiments.potts.methods import Recovered, describe_method
from implicit_attn.studies.experiments.potts.recovery import Recovery
from implicit_attn.studies.figures.canvas import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    draw_band,
    drawing,
    leave_empty,
)
from implicit_attn.studies.spins.measures import contact_scores
from implicit_attn.studies.tables import Table

COLORS = (BLUE, ORANGE, GREEN, RED, "#7b4fa3", "#8c6d46", GREY)
MARKERS = "os^D"
STYLES = ("-", "--", ":", "-.")


def recovery_figure(path: str | Path, title: str, recovery: Recovery) -> None:
    """Block norms, true and learned; error against samples, ROC, loss against recycles."""
    with drawing(path, title, (13, 8)) as figure:
        panels = figure.subplots(2, 3)
        _draw_norms(figure, panels[0], recovery)
        looks = _looks(recovery)
        _draw_few(panels[1, 0], recovery, looks)
        _draw_roc(panels[1, 1], recovery, looks)
        _draw_recycles(panels[1, 2], recovery, looks)


def learning_figure(path: str | Path, title: str, by_samples: Table, by_step: Table) -> None:
    """Errors of the couplings against samples and, with the most of them, against steps."""
    with drawing(path, title, (11, 4.5)) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        for number, rule in enumerate(_names(by_samples, "rule")):
            rows = [row for row in by_samples if row["rule"] == rule]
            look: Any = {
                "marker": MARKERS[number],
                "markersize": 12 - 2 * number,  # hollow and of falling size: none hides another
                "markerfacecolor": "none",
                "linestyle": STYLES[number % len(STYLES)],
                "alpha": 0.12,
            }
            draw_band(left, rows, "samples", "error", COLORS[number], rule, **look)
            trace = [row for row in by_step if row["rule"] == rule]
            if trace:
                draw_band(right, trace, "step", "error", COLORS[number], rule, alpha=0.12)
            else:
                right.axhline(rows[-1]["error"], color=COLORS[number], linestyle="--", label=rule)
        left.set(xscale="log", yscale="log", xlabel="samples", ylabel="error of the couplings")
        most = max(row["samples"] for row in by_samples)
        right.set(
            xlabel=f"steps of Gibbs sampling, {most} samples", title="rules that learn by sampling"
        )
        left.set_title("median over models, 10 to 90 %")
        left.legend(frameon=False)


def _names(table: Table, key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in table))


def _looks(recovery: Recovery) -> dict[str, dict[str, Any]]:
    """Colour and line of every method, the same in all panels."""
    tables = (recovery.rows, recovery.few)
    names = list(dict.fromkeys(row["method"] for table in tables for row in table))
    return {
        name: {"color": COLORS[n % len(COLORS)], "linestyle": STYLES[n % len(STYLES)]}
        for n, name in enumerate(names)
    }


def _shown(recovery: Recovery) -> Sequence[Recovered]:
    """The method with the least error, and the one with the largest."""
    errors = torch.tensor([row["coupling_error"] for row in recovery.rows])
    order = errors.argsort().tolist()
    return [recovery.found[number] for number in dict.fromkeys((order[0], order[-1]))]


def _draw_norms(figure: Any, panels: Any, recovery: Recovery) -> None:
    """All three in the colours of the true couplings."""
    true = contact_scores(recovery.data.truth)
    pictures = [("true couplings", true)]
    errors = {row["method"]: row["coupling_error"] for row in recovery.rows}
    for each in _shown(recovery):
        label = describe_method(each.method)
        pictures.append((f"{label}\nerror {errors[label]:.2f}", contact_scores(each.couplings)))
    meshes = []
    for axes, (label, norms) in zip(panels, pictures, strict=False):
        meshes.append(axes.imshow(norms.numpy(), vmin=0, vmax=float(true.max()), cmap="viridis"))
        axes.set_title(label, fontsize=10)
        axes.set(xlabel="site j", ylabel="site i")
        axes.locator_params(integer=True)
    figure.colorbar(meshes[0], ax=list(panels), label="strength of a pair: norm of its block")
    for axes in panels[len(pictures) :]:
        leave_empty(axes, "one method only")


def _draw_few(axes: Any, recovery: Recovery, looks: dict[str, Any]) -> None:
    if not recovery.few:
        leave_empty(axes, "no fits to fewer samples")
        return
    samples = sorted({row["samples"] for row in recovery.few})
    for method in _names(recovery.few, "method"):
        rows = [row for row in recovery.few if row["method"] == method]
        color = looks[method]["color"]
        errors, precision = ([row[k] for row in rows] for k in ("coupling_error", "precision"))
        axes.plot(samples, errors, color=color, marker="o", label=method)
        axes.plot(samples, precision, color=color, marker="s", linestyle=":")
    highest = max(1.0, *(row["coupling_error"] for row in recovery.few))
    axes.set(xscale="log", xlabel="training samples", ylim=(0, 1.3 * highest))
    axes.set_xticks(samples, [str(number) for number in samples])
    axes.minorticks_off()
    axes.set_title("error of the couplings ●, precision of the pairs ■", fontsize=10)
    axes.legend(fontsize=8, loc="upper center")


def _draw_roc(axes: Any, recovery: Recovery, looks: dict[str, Any]) -> None:
    for method in _names(recovery.curves, "method"):
        rows = [row for row in recovery.curves if row["method"] == method]
        false_share, true_share = ([row[k] for row in rows] for k in ("false_share", "true_share"))
        axes.plot(false_share, true_share, label=method, linewidth=2, **looks[method])
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=0.8)
    axes.set(xlabel="share of false pairs found", ylabel="share of true pairs found")
    axes.set_title("ROC of the pairs, ranked by strength", fontsize=10)
    axes.legend(fontsize=8, loc="lower right")


def _draw_recycles(axes: Any, recovery: Recovery, looks: dict[str, Any]) -> None:
    """Recycled models as curves, the others as lines."""
    if not recovery.recycles:
        leave_empty(axes, "no recycled transformer among the methods")
        return
    curves = _names(recovery.recycles, "method")
    for method in curves:
        rows = [row for row in recovery.recycles if row["method"] == method]
        points = [row["recycles"] for row in rows], [max(row["excess"], 1e-4) for row in rows]
        axes.plot(*points, marker="o", color=looks[method]["color"], label=method)
    for row in recovery.rows:
        if row["method"] not in curves:
            look = {**looks[row["method"]], "label": row["method"]}
            axes.axhline(max(row["excess"], 1e-4), **look)
    axes.set(xlabel="recycles T of the layer", ylabel="loss above that of the truth (nats a site)")
    axes.set(yscale="log")
    axes.set_title("loss of masked sites against recycles", fontsize=10)
    axes.set_ylim(bottom=axes.get_ylim()[0] / 20)  # room for the legend below all lines
    axes.legend(fontsize=7, loc="lower center", ncols=2)
