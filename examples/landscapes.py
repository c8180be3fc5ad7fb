"""What does attention do to its queries? They move down the landscape of their energy.

    python examples/landscapes.py        # a few seconds

The steps ``q <- q - eta dE/dq`` descend ``E(q) = |q|^2 / 2 - log(sum_j exp(beta q.k_j)) / beta``; eta = 1 is
softmax attention. With maps, q = W_q x, k = W_k c, v = W_v c for random 2 x 2 matrices. No step raises an
energy; at a low temperature every key has a valley of its own. Source: Bal (2021),
https://mcbal.github.io/post/attention-as-energy-minimization-visualizing-energy-landscapes/
"""

import math
from itertools import pairwise
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
from runner import Result, Table, run

from implicit_attn.updates import QueryDescent

RED, YELLOW = "C3", "#f2c230"
PATTERNS: dict[str, Any] = {"color": "C0", "fillstyle": "none", "ms": 6, "mew": 1.3, "zorder": 3}
STATES: dict[str, Any] = {"color": RED, "markersize": 4.5, "zorder": 4}
UPDATED: dict[str, Any] = {"color": "black", "ms": 6, "mew": 1.8, "zorder": 6}
ARROWS: dict[str, Any] = {"angles": "xy", "scale_units": "xy", "scale": 1, "alpha": 0.8}
ARROWS |= {"width": 0.004, "headwidth": 4, "zorder": 2}


class Picture(NamedTuple):
    """One way of attending: ``beta = scale / sqrt 2``, and how many steps of which size."""

    name: str
    meaning: str
    scale: float = 1.0
    step_size: float = 1.0
    steps: int = 1
    keys: str = "patterns"  # "maps": of the patterns, with queries and values; "states" themselves


PICTURES = (
    Picture("bare cross-attention", "one big step"),
    Picture("small steps", "hardly anything moves", step_size=0.1),
    Picture("many steps", "every state ends in a minimum", steps=10),
    Picture("small scale", "smooth, one minimum near the mean", scale=0.1),
    Picture("large scale", "separate valleys, single patterns attract", scale=10.0, steps=5),
    Picture("queries, keys and values", "values may point uphill", scale=2.0, keys="maps"),
    Picture("bare self-attention", "the states are the keys, and move", keys="states"),
)


def landscapes(
    states: int = 16,  # number of queries, drawn from N(0, I)
    patterns: int = 32,  # number of stored patterns, drawn from N(0, I)
    points: int = 81,  # number of background grid points on each axis
    seed: int = 2,  # random seed of queries and patterns
) -> Result:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(states, 2, generator=generator, dtype=torch.float64)
    stored = torch.randn(patterns, 2, generator=generator, dtype=torch.float64)
    maps = torch.randn(3, 2, 2, generator=generator, dtype=torch.float64)
    figure, panels = plt.subplots(2, 4, figsize=(16.4, 8.4), dpi=80)
    figure.suptitle("Attention as descent: queries on the landscape of their energy")
    summary = Table()
    for picture, axes in zip(PICTURES, panels.flat, strict=False):
        beta, query, key, values = picture.scale / math.sqrt(2), x, stored, None
        if picture.keys == "maps":
            query, key = x @ maps[0].T, stored @ maps[1].T
            values = torch.softmax(beta * query @ key.T, dim=-1) @ (stored @ maps[2].T)
        elif picture.keys == "states":
            key = x
        descent = QueryDescent(2, beta=beta, step_size=picture.step_size)
        path, energies = descent.trajectory(query[None], key[None], picture.steps)
        path, energies = path[:, 0], energies[:, 0, 0]
        first, last, moves = energies[0], energies[-1], (path[-1] - path[0]).norm(dim=1)
        row = {"picture": picture.name, "energy_before": first.mean().item()}
        row |= {"energy_after": last.mean().item(), "largest_rise": (last - first).max().item()}
        summary.append(row | {"distance_moved": moves.mean().item()})
        # The energy of a query as filled contours, over twice the range of what is shown.
        every = torch.cat([each for each in (query, key, path[-1], values) if each is not None])
        low, high = every.amin(0), every.amax(0)
        places = torch.linspace(-1, 1, points, dtype=torch.float64)
        grid = (low + high)[:, None] / 2 + (high - low).max() * places
        plane = torch.stack(torch.meshgrid(grid[0], grid[1], indexing="xy"), -1).view(1, -1, 2)
        surface = descent.energy.each(plane, key[None]).view(points, points)
        height = surface - surface.min()
        shade = (height / height.max()).sqrt()  # brings out the bottom
        axes.contourf(*grid, shade, levels=22, cmap="Greys_r", vmin=-0.8, vmax=1, zorder=0)
        for before, after in pairwise(path):
            axes.quiver(*before.T, *(after - before).T, color=RED, **ARROWS)
        if values is not None:
            axes.quiver(*path[-1].T, *(values - path[-1]).T, color=YELLOW, **ARROWS)
            axes.plot(*values.T, ".", color=YELLOW, markersize=5, zorder=5)
        if picture.keys != "states":
            axes.plot(*key.T, "o", **PATTERNS)
        axes.plot(*path[0].T, "o", **STATES)
        axes.plot(*path[-1].T, "x", **UPDATED)
        steps = f"{picture.steps} step" + "s" * (picture.steps > 1)
        text = f"β√2 = {picture.scale:g}, η = {picture.step_size:g}, {steps}"
        axes.set_title(picture.name, fontsize=12)
        axes.set_xlabel(f"{text}:\n{picture.meaning}", fontsize=10)
        axes.set(aspect="equal", xticks=[], yticks=[])
    axes = panels.flat[-1]
    axes.set_axis_off()
    axes.plot([], [], "o", label="stored patterns, the keys", **PATTERNS)
    axes.plot([], [], "o", label="states before, the queries", **STATES)
    axes.plot([], [], "x", label="states after the steps", **UPDATED)
    axes.plot([], [], color=RED, label="a step down the energy")
    axes.plot([], [], color=YELLOW, label="from there to what attention\nreturns with values")
    axes.legend(loc="upper left", fontsize=11, frameon=False)
    text = (
        "Background: the energy of a query (its\nroot above the minimum), dark is low.\n\n"
        "$E(q) = |q|^2 / 2 - β^{-1} \\log \\sum_j e^{β q·k_j}$\n\n"
        "$q ← q - η\\, ∇E(q)$; with η = 1 this is\nsoftmax attention."
    )
    axes.text(0.03, 0.3, text, fontsize=11, va="center", transform=axes.transAxes)
    return {"pictures": summary}, figure


if __name__ == "__main__":
    run(landscapes)
