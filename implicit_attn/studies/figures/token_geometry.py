"""The figure of the geometry study: energies, effective ranks and angles along the iterations."""

from __future__ import annotations

from pathlib import Path

from implicit_attn.studies.figures.canvas import BLUE, GREY, ORANGE, draw_band, drawing
from implicit_attn.studies.tables import Table


def geometry_figure(
    path: str | Path, title: str, energies: Table, heads: Table, trained: int
) -> None:
    """Four panels: attention energy, feed-forward energy, effective rank and angle per head."""
    with drawing(path, title, (12, 8.5)) as figure:
        axes = figure.subplots(2, 2)
        for panel, key, name, color in (
            (axes[0, 0], "attention_energy", "Attention energy", BLUE),
            (axes[0, 1], "feedforward_energy", "Feed-forward energy", ORANGE),
        ):
            look = {"marker": "o", "markersize": 3.5, "band_label": "10 % to 90 % of samples"}
            draw_band(panel, energies, "iteration", key, color, "mean", **look)
            panel.set(xlabel="iteration", ylabel="energy", title=name)
        for panel, key, label, name in (
            (axes[1, 0], "effective_rank", "effective rank", "Effective rank of a head's tokens"),
            (axes[1, 1], "angle", "average angle, degrees", "Average angle of a head's tokens"),
        ):
            for head in sorted({row["head"] for row in heads}):
                rows = [row for row in heads if row["head"] == head]
                steps = [row["iteration"] for row in rows]
                values = [row[key] for row in rows]
                panel.plot(steps, values, marker="o", markersize=3, label=f"head {head + 1}")
            panel.set(xlabel="iteration", ylabel=label, title=name)
        for panel in axes.flat:
            if energies[-1]["iteration"] > trained:
                panel.axvline(trained, color=GREY, linestyle=":", label="iterations in training")
            panel.xaxis.get_major_locator().set_params(integer=True)
            panel.legend(frameon=False, fontsize=8)
