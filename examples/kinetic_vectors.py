"""Which closure predicts the means of vector spins over time, compared with a simulation?

    python examples/kinetic_vectors.py        # half a minute

Fields have uniform directions, couplings J_ij ~ N(0, 1/N) are asymmetric, and spins have length
R = sqrt(d / 2). The Gaussian closure stays accurate at beta = 2, where the second-order expansion (Plefka's
TAP) is worse than naive mean field.
"""

import math
from typing import Any

import matplotlib.pyplot as plt
import torch
from runner import Result, Table, columns, draw_band, legend_below, run
from torch import Generator, Tensor

from solvers import SphericalSite, glauber, kinetic_trajectory

CLOSURES = {
    "naive": ("C1", "naive mean field"),
    "plefka": ("C2", "TAP (Plefka)"),
    "gaussian": ("C0", "Gaussian closure"),
}
BETAS = (1.0, 2.0)
SIMULATED = (64, 32, 6)  # spins, dimensions and steps of the comparison


def draw_network(
    spins: int, dim: int, beta: float, generator: Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the means at the start (1, N, d), fields (1, N, d) and couplings (N, N), beta in both."""
    noise = torch.randn(spins, spins, generator=generator)
    field = torch.randn(1, spins, dim, generator=generator)
    field = beta * math.sqrt(dim / 2) * field / field.norm(dim=-1, keepdim=True)
    return torch.full_like(field, 1 / math.sqrt(dim)), field, beta / math.sqrt(spins) * noise


def follow(network: tuple[Tensor, Tensor, Tensor], closure: str, steps: int) -> Tensor:
    """Return the means (steps + 1, N, d) of a closure for many dimensions."""
    site = SphericalSite(math.sqrt(network[1].shape[-1] / 2), large_dimension=True)
    return kinetic_trajectory(*network, steps=steps, site=site, closure=closure)[:, 0]


def lengths(spins: int, dim: int, beta: float, steps: int, seed: int) -> Table:
    """Return the mean length of the means over time, in units of the radius, and the middle 80 %."""
    network, table = draw_network(spins, dim, beta, Generator().manual_seed(seed)), Table()
    for closure in CLOSURES:
        for step, mean in enumerate(follow(network, closure, steps)):
            values = mean.norm(dim=-1) / math.sqrt(dim / 2)
            low, high = values.quantile(torch.tensor([0.1, 0.9])).tolist()
            row = {"beta": beta, "closure": closure, "step": step, "length": values.mean().item()}
            table.append(row | {"length_10": low, "length_90": high})
    return table


def errors(chains: int, beta: float, seed: int) -> Table:
    """Return ``|m - exact| / |exact|`` of each closure after the steps of a simulation on the exact sphere.

    The error contains the ``noise`` of the simulation.
    """
    (spins, dim, steps), generator = SIMULATED, Generator().manual_seed(seed)
    network = draw_network(spins, dim, beta, generator)
    start, field, couplings = network
    found = glauber(
        start.expand(chains, -1, -1), field[0], couplings, steps=steps,
        site=SphericalSite(math.sqrt(dim / 2)), generator=generator,
    )  # fmt: skip
    exact = found.means[-1]
    noise = (found.spins.var(0).sum().sqrt() / math.sqrt(chains) / exact.norm()).item()
    table: Table = []
    for closure in CLOSURES:
        error = ((follow(network, closure, steps)[-1] - exact).norm() / exact.norm()).item()
        table.append({"beta": beta, "closure": closure, "error": error, "noise": noise})
    return table


def kinetic_vectors(
    spins: int = 256,  # number of spins N (1024 in the source)
    dim: int = 128,  # number of dimensions d, at least 3 (512 in the source)
    steps: int = 20,  # number of time steps
    chains: int = 3000,  # number of simulated chains for the errors
    seed: int = 0,  # random seed of models and simulations
) -> Result:
    history, table = Table(), Table()
    figure, panels = plt.subplots(1, 3, figsize=(13, 4.2))
    figure.suptitle("Vector spins in time: closures of their means")
    bars = panels[-1]
    for place, (beta, axes) in enumerate(zip(BETAS, panels, strict=False)):
        rows = lengths(spins, dim, beta, steps, seed)
        compared = errors(chains, beta, seed)
        history, table = history + rows, table + compared
        for number, (closure, (color, label)) in enumerate(CLOSURES.items()):
            mine = [row for row in rows if row["closure"] == closure]
            look: dict[str, Any] = {"color": color, "label": label}
            draw_band(axes, mine, "step", "length", alpha=0.15, **look)
            error = columns(compared, "error", closure=closure)[0]
            drawn = bars.bar([place + 0.27 * (number - 1)], error, 0.27, color=color)
            bars.bar_label(drawn, fmt="%.2f", fontsize=8)
        axes.set(xlabel="time step", ylim=(0, 0.75), title=f"β = {beta:g}")
        noise = 2 * [compared[0]["noise"]]
        bars.plot([place - 0.42, place + 0.42], noise, color="black", linestyle="--")
    panels[0].set_ylabel("length of the mean / radius\n(bands: middle 80 % of the spins)")
    bars.set_title(f"relative error after {SIMULATED[2]} steps\n(dashed: noise of the simulation)")
    bars.set(xticks=range(len(BETAS)), xticklabels=[f"β = {beta:g}" for beta in BETAS])
    bars.margins(y=0.15)
    legend_below(figure, panels[0], 3)
    return {"lengths": history, "errors": table}, figure


if __name__ == "__main__":
    run(kinetic_vectors)
