"""Kinetic vector spins: their means over time, and the errors of the closures.

Fields have uniform directions, couplings J_ij ~ N(0, 1/N) are asymmetric, spins have length R = sqrt(d / 2).
"""

import math
from typing import Any

import matplotlib.pyplot as plt
import torch
from runner import Result, Table, columns, draw_band, legend_below, run
from torch import Generator, Tensor
from torch.nn.functional import cosine_similarity

from solvers import Site, SolveError, SphericalSite, glauber, kinetic_step

CLOSURES = ("naive", "plefka", "gaussian")
COLOURS = {"naive": "C1", "tap": "C2", "plefka": "C2", "gaussian": "C0"}
NAMES = {"naive": "naive mean field", "plefka": "TAP (Plefka)", "gaussian": "Gaussian closure"}
# Inverse temperature, length of the fields (None: the radius), factor of the couplings.
SETTINGS = {
    "beta = 1": (1.0, None, 1.0),
    "beta = 2": (2.0, None, 1.0),
    "beta = 1, weak fields, J doubled": (1.0, 1.0, 2.0),
}


def draw_network(spins: int, dim: int, setting: str, generator: Generator) -> tuple[Tensor, Tensor]:
    """Fields (1, N, d) and couplings (N, N), beta in both."""
    beta, length, strength = SETTINGS[setting]
    noise = torch.randn(spins, spins, generator=generator)
    field = torch.randn(1, spins, dim, generator=generator)
    field = beta * (length or math.sqrt(dim / 2)) * field / field.norm(dim=-1, keepdim=True)
    return field, beta * strength / math.sqrt(spins) * noise


def follow(start: Tensor, field: Tensor, couplings: Tensor, closure: str, steps: int, site: Site):
    """Means (steps + 1, N, d), and the steps that were not solved: they go on from the best point found."""
    means, unsolved = [start], []
    for step in range(1, steps + 1):
        args = (means[-1], field, couplings)
        try:
            mean = kinetic_step(*args, site=site, closure=closure, on_failure="raise")
        except SolveError as error:
            mean = error.solution.value
            unsolved.append(step)
        means.append(mean)
    return torch.cat(means), unsolved


def histories(field: Tensor, couplings: Tensor, setting: str, steps: int) -> Table:
    """Cosines and lengths of the means over time: means over the spins, with the middle 80 %."""
    dim, table = field.shape[-1], []
    start, radius = torch.full_like(field, 1 / math.sqrt(dim)), math.sqrt(dim / 2)
    site = SphericalSite(radius, large_dimension=True)
    for closure in CLOSURES:
        means, unsolved = follow(start, field, couplings, closure, steps, site)
        for step, mean in enumerate(means):
            values = {
                "length": mean.norm(dim=-1) / radius,
                "to_field": cosine_similarity(mean, field[0], dim=-1),
                "to_previous": cosine_similarity(mean, means[max(step - 1, 0)], dim=-1),
            }
            row: dict[str, Any] = {"setting": setting, "closure": closure, "step": step}
            row["unsolved"] = int(step in unsolved)
            for name, value in values.items():
                low, high = value.quantile(torch.tensor([0.1, 0.9])).tolist()
                row |= {name: value.mean().item(), f"{name}_10": low, f"{name}_90": high}
            table.append(row)
    return table


def errors(chains: int, seed: int, steps: int) -> Table:
    """Each closure against simulated chains on the exact sphere: ``|m - exact| / |exact|`` at the end.

    Of 6 steps the closures are those of many dimensions; of one step, from independent random spins,
    those of the exact sphere but for "plefka". The error contains the ``noise`` of the simulation.
    """
    table: Table = []
    spins, dim = (64, 32) if steps == 6 else (48, 16)
    radius = math.sqrt(dim / 2)
    site, many_dimensions = SphericalSite(radius), SphericalSite(radius, large_dimension=True)
    for setting in ("beta = 1", "beta = 2"):
        generator, beta = torch.Generator().manual_seed(seed), SETTINGS[setting][0]
        field, couplings = draw_network(spins, dim, setting, generator)
        if steps == 6:
            start = torch.full_like(field, 1 / math.sqrt(dim))
            many, sites = start.expand(chains, -1, -1), dict.fromkeys(CLOSURES, many_dimensions)
        else:
            before = torch.randn(1, spins, dim, generator=generator)
            before = beta * radius * before / before.norm(dim=-1, keepdim=True)
            start = site.mean(before, before.new_zeros(1, spins, dim, dim))
            many = site.sample(before.expand(chains, -1, -1), generator)
            sites = {"naive": site, "tap": site, "plefka": many_dimensions, "gaussian": site}
        run = glauber(many, field[0], couplings, steps=steps, site=site, generator=generator)
        exact = run.means[-1]
        noise = (run.spins.var(0).sum().sqrt() / math.sqrt(chains) / exact.norm()).item()
        for closure, own in sites.items():
            means, unsolved = follow(start, field, couplings, closure, steps, own)
            found = ((means[-1] - exact).norm() / exact.norm()).item()
            row = {"steps": steps, "beta": beta, "closure": closure, "error": found}
            table.append(row | {"noise": noise, "unsolved": len(unsolved)})
    return table


def kinetic_vectors(
    spins: int = 256,  # number of spins N (1024 in the source)
    dim: int = 128,  # number of dimensions d, at least 3 (512 in the source)
    steps: int = 20,  # number of time steps
    chains: int = 3000,  # number of simulated chains for the errors
    seed: int = 0,  # random seed of models and simulations
) -> Result:
    figure, panels = plt.subplots(2, len(SETTINGS) + 1, figsize=(14, 7))
    figure.suptitle("Kinetic vector spins: closures of their means")
    table: Table = []
    for setting, (above, below) in zip(SETTINGS, panels.T, strict=False):
        network = draw_network(spins, dim, setting, torch.Generator().manual_seed(seed))
        rows = histories(*network, setting, steps)
        table += rows
        for closure in CLOSURES:
            mine = [row for row in rows if row["closure"] == closure]
            look: Any = {"color": COLOURS[closure], "label": NAMES[closure]}
            for axes, key in ((above, "to_field"), (below, "length")):
                draw_band(axes, mine, "step", key, alpha=0.15, **look)
            above.plot(*columns(mine[1:], "step", "to_previous"), ":", color=COLOURS[closure])
        above.set(title=setting.replace("beta", "β"), ylim=(-0.2, 1.05))
        below.set(xlabel="time step", ylim=(0, 0.75))
    panels[0, 0].set_ylabel("cosine with the field (solid),\nwith the step before (dotted)")
    panels[1, 0].set_ylabel("length of the mean / radius\n(bands: middle 80 % of the spins)")
    six, one = errors(chains, seed, 6), errors(chains, seed, 1)
    draw_errors(panels[0, -1], one, "one step\nexact sphere; Plefka: many dimensions")
    draw_errors(panels[1, -1], six, "6 steps\nclosures of many dimensions")
    legend_below(figure, panels[0, 0], 3)
    return {"histories": table, "errors": six + one}, figure


def draw_errors(axes, rows: Table, what: str) -> None:
    """A bar for each beta and closure, over a line at the noise of the simulation."""
    closures = list(dict.fromkeys(row["closure"] for row in rows))
    width = 0.8 / len(closures)
    for number, closure in enumerate(closures):
        found, unsolved = columns(rows, "error", "unsolved", closure=closure)
        places = [beta + (number - (len(closures) - 1) / 2) * width for beta in range(len(found))]
        style: dict[str, Any] = {"color": COLOURS[closure]}
        if closure == "tap":
            style |= {"hatch": "//", "alpha": 0.6, "label": "TAP of the exact sphere"}
        labels = [f"{e:.2f}{'*' * bool(u)}" for e, u in zip(found, unsolved, strict=True)]
        axes.bar_label(axes.bar(places, found, width, **style), labels, fontsize=7)
        if closure == "tap":
            axes.legend(fontsize=8, loc="upper left")
    for place, beta in enumerate((1.0, 2.0)):
        level = max(row["noise"] for row in rows if row["beta"] == beta)
        axes.plot([place - 0.42, place + 0.42], [level, level], color="black", linestyle="--")
    star = "; *: not solved" if any(row["unsolved"] for row in rows) else ""
    title = f"relative error after {what}\ndashed: simulation noise{star}"
    axes.set_title(title, fontsize=10)
    axes.set(xticks=[0, 1], xticklabels=["β = 1", "β = 2"])
    axes.margins(y=0.2)


if __name__ == "__main__":
    run(kinetic_vectors)
