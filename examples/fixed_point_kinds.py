"""Does attention over stored patterns settle on one pattern, on the mean of a cluster, or on the mean of all?

    python examples/fixed_point_kinds.py        # half a minute

The iteration ``z <- X^T softmax(beta X z)`` starts from each pattern. The effective number of patterns is the
exponential of the entropy of the softmax at the fixed point: 1, the size of a cluster, or the number of all
patterns. As the temperature falls, random patterns go from all to one suddenly, and clustered patterns settle
on a cluster in between.
"""

import itertools
import math
from typing import Any

import matplotlib.pyplot as plt
import torch
from runner import Result, Table, run
from torch import Tensor

import solvers
from implicit_attn.energies import Hopfield

BETAS = (
    *(1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 12.0, 15.0, 20.0, 25.0, 30.0),
    *(40.0, 50.0, 60.0, 80.0, 100.0, 150.0),
)
BINS = 46  # of the histograms


def clustered_patterns(
    clusters: int, members: int, dim: int, spread: float, generator: torch.Generator
) -> Tensor:
    """Unit vectors as centres, each plus ``spread`` times unit vectors, (clusters members, dim)."""
    options: Any = {"generator": generator, "dtype": torch.float64}
    drawn = [torch.randn(count, dim, **options) for count in (clusters, clusters * members)]
    centers, around = (x / x.norm(dim=1, keepdim=True) for x in drawn)
    return centers.repeat_interleave(members, dim=0) + spread * around


def settle(patterns: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return the effective number where each pattern ends, and whether it converged: (M,) each."""
    memory = Hopfield(patterns, beta=beta)
    # Plain iteration alone keeps to the basin that a start lies in.
    solution = solvers.fixed_point(
        lambda z: z - memory.grad(z), patterns, solver=solvers.Forward(), max_steps=20_000,
        tolerance=solvers.Tolerance(rtol=1e-10, atol=1e-10), adjoint=None, on_failure="ignore",
    )  # fmt: skip
    share = (beta * solution.value @ patterns.mT).softmax(1)
    return torch.special.entr(share).sum(1).exp(), solution.converged


def summary(numbers: Tensor, converged: Tensor, sizes: tuple[int, ...]) -> dict[str, float]:
    """Of one beta: least, median, largest, and the share of the starts within 5 % of each size."""
    low, middle, high = numbers.min(), numbers.quantile(0.5), numbers.max()
    found = {"least": low.item(), "median": middle.item(), "largest": high.item()}
    for size in sizes:
        near = (numbers / size).log().abs() <= math.log(1.05)
        found[f"share at {size}"] = near.double().mean().item()
    return found | {"converged": converged.double().mean().item()}


def fixed_point_kinds(
    clusters: int = 10,  # number of clusters of patterns
    members: int = 20,  # number of patterns in a cluster
    dim: int = 64,  # number of features of a pattern
    betas: tuple[float, ...] = BETAS,  # inverse temperatures
    seed: int = 0,  # random seed of the patterns
) -> Result:
    count, ordered = clusters * members, sorted(betas)
    draws = {
        "random": (count, 1, 0.0, (1, count), f"{count} random patterns"),
        "clusters": (clusters, members, 0.3, (1, members, count),
                     f"{clusters} clusters of {members} patterns"),
    }  # fmt: skip
    figure, panels = plt.subplots(1, 2, figsize=(12, 5), sharey=True)
    figure.suptitle("What attention over stored patterns settles on")
    tables: dict[str, Table] = {}
    mesh: Any = None
    for axes, (name, draw_of) in zip(panels, draws.items(), strict=True):
        groups, each, apart, sizes, heading = draw_of
        generator = torch.Generator().manual_seed(seed)
        patterns = clustered_patterns(groups, each, dim, apart, generator)
        found = [settle(patterns, beta) for beta in ordered]
        tables[name] = [
            {"beta": beta, **summary(*ends, sizes)}
            for beta, ends in zip(ordered, found, strict=True)
        ]
        mesh = draw(axes, [numbers.float() for numbers, _ in found], ordered, sizes)
        axes.set_title(heading, fontsize=10)
    panels[0].set_ylabel("effective number of patterns at the fixed point")
    figure.colorbar(mesh, ax=list(panels), label="share of the starts, %")
    return tables, figure


def draw(axes, numbers: list[Tensor], betas: list[float], sizes: tuple[int, ...]):
    """A histogram of the effective numbers for each beta, with the sizes marked."""
    # Equal bins on a logarithmic scale: 1, 20 and 200, the sizes of the picture, are in their middle.
    most, half = max(*sizes, 2), 0.5 / BINS
    edges = most ** torch.linspace(-half, 1 + half, BINS + 2)
    counts = [100 * torch.histogram(each, edges).hist / len(each) for each in numbers]
    image = torch.stack(counts, dim=1)
    middles = [(before * after) ** 0.5 for before, after in itertools.pairwise(betas)]
    borders = [betas[0] ** 2 / middles[0], *middles, betas[-1] ** 2 / middles[-1]]
    look: dict[str, Any] = {"vmin": 0, "vmax": 100, "cmap": "viridis_r"}
    shown = image.masked_fill(image == 0, torch.nan).numpy()
    mesh = axes.pcolormesh(borders, edges.numpy(), shown, **look)
    meanings = (*("one pattern", "a whole cluster")[: len(sizes) - 1], "all patterns")
    for size, meaning in zip(sizes, meanings, strict=True):
        axes.axhline(size, color="black", linewidth=0.7, linestyle=":")
        low = size < most
        x, offset, ha, va = (0.02, 3, "left", "bottom") if low else (0.98, -3, "right", "top")
        axes.annotate(
            meaning, (x, size), (0, offset), xycoords=("axes fraction", "data"),
            textcoords="offset points", ha=ha, va=va, fontsize=8,
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="inverse temperature beta")
    axes.set_yticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    return mesh


if __name__ == "__main__":
    run(fixed_point_kinds)
