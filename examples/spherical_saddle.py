r"""What are the means of coupled spins on spheres? They follow from the minimum of a convex function.

    python examples/spherical_saddle.py        # a few seconds

The function has one variable t_i for each spin, the Lagrange multiplier of its length. For couplings
J ~ N(0, 1/(N d)) and unit fields h_i, and in the units ``K = 2 beta J``, ``x = beta sqrt d h``,
``Lambda = 2 beta t`` it is ``phi(t) = beta sum_i t_i - 1/2 log det(t - J) + beta/4 h^T (t - J)^-1 h``. At the
minimum, ``-(phi - N/2 (1 + log 2 beta)) / beta`` is the free energy of one of the d components.

Left: phi where all multipliers are equal; the solver finds its minimum. Middle: the multipliers fall to a
limit as the temperature falls, and the means grow to the length of the spins. Right: phi of two spins.
"""

import math
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
from runner import Result, Table, columns, rows_of, run
from torch import Tensor
from torch.nn import functional as F

import solvers


class Model(NamedTuple):
    couplings: Tensor  # (N, N), float64
    field: Tensor  # (N, d), unit vectors


def draw_model(sites: int, dim: int, generator: torch.Generator) -> Model:
    upper = torch.randn(sites, sites, generator=generator, dtype=torch.float64).triu(1)
    field = torch.randn(sites, dim, generator=generator, dtype=torch.float64)
    couplings = (upper + upper.mT) / math.sqrt(sites * dim)
    return Model(couplings, F.layer_norm(field, (dim,), eps=0.0) / math.sqrt(dim))


def solve(model: Model, beta: float, per_site: bool) -> solvers.SaddlePoint:
    field = beta * math.sqrt(model.field.shape[1]) * model.field[None]
    return solvers.spherical_saddle(2 * beta * model.couplings, field, per_site=per_site).value


def phi(model: Model, beta: float, t: Tensor) -> Tensor:
    """Return phi for multipliers t (K, N), NaN where t - J is not positive definite: (K,)."""
    factor, failed = torch.linalg.cholesky_ex(torch.diag_embed(t) - model.couplings)
    fields = model.field.expand(len(t), -1, -1)
    half = torch.linalg.solve_triangular(factor, fields, upper=False)
    log_det = 2 * factor.diagonal(dim1=1, dim2=2).log().sum(1)
    value = beta * t.sum(1) - log_det / 2 + beta / 4 * half.square().sum((1, 2))
    return torch.where(failed == 0, value, torch.nan)


def spherical_saddle(
    sites: int = 32,  # number of spins in the first two panels
    dim: int = 128,  # number of components of a spin
    beta: float = 1.0,  # inverse temperature, except in the sweep
    frames: int = 100,  # number of inverse temperatures of the sweep, from 0.25 to 10
    seed: int = 0,  # random seed of couplings and fields
) -> Result:
    generator = torch.Generator().manual_seed(seed)
    model = draw_model(sites, dim, generator)
    pair = draw_model(2, 64, generator)
    border = torch.linalg.eigvalsh(model.couplings)[-1].item()  # of the domain of one t for all
    betas = torch.logspace(-0.6, 1, frames, dtype=torch.float64).tolist()
    table: Table = []
    for b in betas:
        shared, own = solve(model, b, per_site=False), solve(model, b, per_site=True)
        t = own.multiplier / (2 * b)
        row = {"beta": b, "root": shared.multiplier.item() / (2 * b)}
        row |= {"smallest": t.min().item(), "largest": t.max().item()}
        row |= {"free_energy": -own.log_partition.item() / (b * sites * dim)}
        table.append(row | {"length": own.mean.norm(dim=-1).mean().item() / math.sqrt(dim)})
    grid = torch.linspace(border, 3, 1001, dtype=torch.float64)[1:]
    heights = phi(model, beta, grid[:, None].expand(-1, sites)) / sites
    root = solve(model, beta, per_site=False).multiplier.item() / (2 * beta)

    figure, (one, sweep, plane) = plt.subplots(1, 3, figsize=(13, 4.3), dpi=85)
    figure.suptitle(f"Spins on spheres: N = {sites}, d = {dim}")
    one.plot(grid, heights, color="C0")
    least = heights.min().item()
    one.plot([root], [least], "o", color="C1", label=f"minimum, t = {root:.3f}")
    one.axvspan(0, border, color="C3", alpha=0.15, linewidth=0, label="outside of the domain")
    one.set(xlim=(0, 3), ylim=(least - 0.3, least + 2), xlabel="multiplier t")
    one.set_title(f"$\\phi$ per site, one t for all, $\\beta$ = {beta:g}")
    one.legend(frameon=False, loc="upper right")

    low, high = columns(table, "smallest", "largest")
    sweep.fill_between(betas, low, high, color="C0", alpha=0.3, label="t of each spin: range")
    labels = {"root": "one t for all", "length": "length of the mean / length of the spin"}
    labels["free_energy"] = "free energy per site and component"
    for color, (name, label) in enumerate(labels.items(), start=1):
        sweep.plot(betas, *columns(table, name), color=f"C{color}", label=label)
    sweep.set(xscale="log", xlabel="inverse temperature $\\beta$", title="over the temperature")
    sweep.set_ylim(top=3.4)  # room for the legend
    sweep.legend(frameon=False, fontsize=9, loc="upper right")

    values = torch.linspace(0.02, 3, 150, dtype=torch.float64)
    t = torch.stack(torch.meshgrid(values, values, indexing="xy"), -1).view(-1, 2)
    image = phi(pair, beta, t).view(len(values), len(values))
    lowest = image[~image.isnan()].min().item()
    levels = [lowest + 0.02 * 1.5**k for k in range(14)]
    plane.contourf(values, values, image, levels=[lowest, *levels], cmap="viridis", extend="max")
    plane.contour(values, values, image, levels=levels, colors="white", linewidths=0.4)
    at_border = pair.couplings[0, 1] ** 2 / values
    plane.fill_between(values, 0, at_border, color="C3", linewidth=0, label="outside of the domain")
    first, second = (solve(pair, beta, per_site=True).multiplier[0] / (2 * beta)).tolist()
    label = f"minimum ({first:.2f}, {second:.2f})"
    plane.plot([first], [second], "o", color="C1", markeredgecolor="black", label=label)
    plane.set(xlim=(0, 3), ylim=(0, 3), xlabel="$t_1$", ylabel="$t_2$")
    plane.set_title("$\\phi(t_1, t_2)$ of two spins: dark is low")
    plane.legend(loc="upper right", fontsize=9)
    return {"temperature": table, "curve": rows_of({"t": grid, "phi": heights})}, figure


if __name__ == "__main__":
    run(spherical_saddle)
