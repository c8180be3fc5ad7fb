"""Figures of landscapes."""

from __future__ import annotations

from pathlib import Path

import torch

from implicit_attn.studies.figures.canvas import drawing
from implicit_attn.studies.tables import Table


def norms_figure(path: str | Path, title: str, table: Table) -> None:
    """The norm of the step over dimension and scale, in logarithmic colours."""
    dimensions = sorted({row["dimension"] for row in table})
    scales = sorted({row["scale"] for row in table})
    norms = {(row["dimension"], row["scale"]): row["norm"] for row in table}
    image = torch.tensor([[norms[d, c] for d in dimensions] for c in scales])
    with drawing(path, title, (8, 5)) as figure:
        axes = figure.subplots()
        exponents = image.clamp(1e-8, 1e2).log10().numpy()
        mesh = axes.pcolormesh(dimensions, scales, exponents, vmin=-8, vmax=2, shading="nearest")
        axes.set_xscale("log", base=2)
        axes.axhline(1, color="white", linewidth=0.8, linestyle="--")
        for dim in (2, 512):
            axes.axvline(dim, color="white", linewidth=0.8, linestyle=":")
        axes.set(xlabel="dimension d of a token", ylabel="scale c, beta = c / √d")
        figure.colorbar(mesh, label="log10 of the norm of the step")
