"""Which probability density does a continuous memory define, and can its patterns be learned from samples?

    python examples/memory_density.py        # half a minute

At temperature 1 / beta the energy of a Hopfield memory is a mixture of Gaussians around its patterns, here
five patterns in two dimensions. The density integrates to 1, one attention step removes noise from a state,
and maximum likelihood finds the patterns from samples. The trapezoidal rule checks the normaliser at
temperature 1 / (k beta).
"""

import math

import matplotlib.pyplot as plt
import torch
from runner import Result, Table, run

from implicit_attn.energies import Hopfield
from implicit_attn.models import fit_patterns

REACH = 3.2  # half the width of the picture
COUNT, BETA, COOLING = 5, 4.0, 3  # patterns, inverse temperature; the second one is COOLING BETA


def ring_memory(generator: torch.Generator) -> Hopfield:
    """Patterns (COUNT, 2) around the origin, at random angles, with norms from 1.4 to 1.7."""
    angles = torch.arange(COUNT) + 0.5 * torch.rand(COUNT, generator=generator)
    angles = (2 * torch.pi / COUNT * angles).double()
    norms = torch.linspace(1.4, 1.7, COUNT, dtype=torch.float64)
    norms = norms[torch.randperm(COUNT, generator=generator)]
    return Hopfield(norms[:, None] * torch.stack([angles.cos(), angles.sin()], 1), beta=BETA)


def temperature(memory: Hopfield, cooling: int) -> dict[str, float]:
    """``log Z`` and the integral of the density at 1 / (cooling beta).

    At half a width ``1 / sqrt(k beta)`` the rule is exact to rounding; 9 widths beyond the patterns nothing
    is left.
    """
    width = (cooling * memory.beta) ** -0.5
    reach = memory.patterns.abs().max().item() + 9 * width
    count = 1 + math.ceil(4 * reach / width)
    line = torch.linspace(-reach, reach, count, dtype=torch.float64)
    area = (line[1] - line[0]).item() ** 2
    density = memory.log_prob(torch.cartesian_prod(line, line), cooling).exp()
    integral = density.sum().item() * area
    row = {"cooling": cooling, "temperature": 1 / (cooling * memory.beta)}
    row |= {"log_partition": memory.log_partition(cooling).item(), "integral": integral}
    return row | {"error": abs(integral - 1)}


def memory_density(
    samples: int = 600,  # number of samples of each density
    starts: int = 5,  # number of starts of the fits
    steps: int = 200,  # training steps of a fit
    seed: int = 0,  # random seed of patterns and samples
) -> Result:
    generator = torch.Generator().manual_seed(seed)
    memory = ring_memory(generator)
    figure, panels = plt.subplots(2, 2, figsize=(9.5, 8))
    figure.suptitle("The continuous memory as a density")
    for axes, k in zip(panels[0], (1, COOLING), strict=True):
        draw_density(axes, memory, k)
        x, y = memory.sample(samples, generator, k).mT.tolist()
        axes.scatter(x, y, s=3, color="white", alpha=0.5, linewidths=0, label="samples")
        factor = "β" if k == 1 else f"({k} β)"
        axes.set_title(f"temperature 1 / {factor}: log density, {samples} samples", fontsize=10)
        axes.legend(fontsize=8, loc="lower left", facecolor="0.6")
    data = memory.sample(samples, generator)
    curves: list[list[float]] = []
    for _ in range(starts):
        first = data[torch.randperm(samples, generator=generator)[:COUNT]]
        fit = fit_patterns(data, COUNT, BETA, start=first, steps=steps, tolerance=0.0)
        curves.append(fit.log_likelihood)
    noisy = memory.sample(60, generator)
    axes, look = panels[1, 0], {"width": 0.004, "headwidth": 5, "color": "white", "angles": "xy"}
    draw_density(axes, memory, 1)
    axes.quiver(*noisy.T, *-memory.grad(noisy).T, scale_units="xy", scale=1, **look)
    axes.set_title("attention step = mean of the pattern behind a noisy state", fontsize=10)

    axes, best = panels[1, 1], memory.log_prob(data).mean().item()
    for start, values in enumerate(curves):
        label = None if start else "fits from random starts"
        axes.plot(range(1, len(values) + 1), values, color="C0", label=label, linewidth=1.2)
    axes.axhline(best, color="black", linewidth=0.8, linestyle="--", label="true patterns")
    axes.set(xscale="log", xlabel="step", ylabel="mean log-likelihood of the samples, nats")
    axes.set_title("maximum likelihood from random starts: no step lowers it", fontsize=10)
    axes.legend(fontsize=8)
    fits: Table = [{"start": n, "log_likelihood": values[-1]} for n, values in enumerate(curves)]
    table = [temperature(memory, k) for k in (1, 2, COOLING)]
    fits.append({"start": "true patterns", "log_likelihood": best})
    return {"temperatures": table, "fits": fits}, figure


def draw_density(axes, memory: Hopfield, cooling: int) -> None:
    """The log density as filled contours down to 8 below its top, and the patterns."""
    line = torch.linspace(-REACH, REACH, 241, dtype=torch.float64)
    y, x = torch.meshgrid(line, line, indexing="ij")
    log_prob = memory.log_prob(torch.stack([x, y], dim=-1), cooling)
    top = log_prob.max().item()
    levels = [top - 8 + n / 3 for n in range(25)]
    axes.contourf(line, line, log_prob.clamp_min(top - 8), levels=levels, cmap="viridis")
    axes.plot(*memory.patterns.T, "x", color="C3", markersize=8, mew=2, label="patterns")
    axes.set(aspect="equal", xlim=(-REACH, REACH), ylim=(-REACH, REACH), xlabel="z1", ylabel="z2")


if __name__ == "__main__":
    run(memory_density)
