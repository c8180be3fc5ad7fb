r"""Solve O(d) spins by minimising a convex function of their Lagrange multipliers.

Couplings J ~ N(0, 1/(N d)) and unit fields h_i. In the units ``K = 2 beta J``, ``x = beta sqrt d h``,
``Lambda = 2 beta t`` the free energy for each of the d components is ``-(phi - N/2 (1 + log 2 beta)) / beta``
at the minimum of ``phi(t) = beta sum_i t_i - 1/2 log det(t - J) + beta/4 h^T (t - J)^-1 h``.
"""

import math
from itertools import pairwise
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
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


def curves(model: Model, beta: float, t: Tensor) -> dict[str, Tensor]:
    """phi, phi' and phi'' per site for one multiplier t; left of the border by ``log |det|``."""
    levels, basis = torch.linalg.eigh(model.couplings)
    weight, gap = (basis.mT @ model.field).square().sum(1), t[:, None] - levels
    return {
        "t": t,
        "phi": beta * t + (-gap.abs().log() / 2 + beta / 4 * weight / gap).mean(1),
        "slope": beta - (0.5 / gap + beta / 4 * weight / gap**2).mean(1),
        "curvature": (0.5 / gap**2 + beta / 2 * weight / gap**3).mean(1),
    }


def spherical_saddle(
    sites: int = 32,  # number of spins in the first five panels
    dim: int = 128,  # number of components of a spin
    beta: float = 1.0,  # inverse temperature, except in the sweep
    frames: int = 100,  # number of inverse temperatures of the sweep, from 0.25 to 10
    seed: int = 0,  # random seed of couplings and fields
) -> Result:
    generator = torch.Generator().manual_seed(seed)
    model = draw_model(sites, dim, generator)
    pair = draw_model(2, 64, generator)
    levels = torch.linalg.eigvalsh(model.couplings)
    border = levels[-1].item()
    betas = torch.logspace(-0.6, 1, frames, dtype=torch.float64).tolist()
    table: Table = []
    for b in betas:
        shared, own = solve(model, b, per_site=False), solve(model, b, per_site=True)
        t = own.multiplier / (2 * b)
        row = {"beta": b, "root": shared.multiplier.item() / (2 * b)}
        row |= {"smallest": t.min().item(), "largest": t.max().item()}
        row |= {"free_energy": -own.log_partition.item() / (b * sites * dim)}
        table.append(row | {"length": own.mean.norm(dim=-1).mean().item() / math.sqrt(dim)})
    grid = torch.linspace(-1, 3, 1001, dtype=torch.float64)
    curve = curves(model, beta, grid)
    root = solve(model, beta, per_site=False).multiplier.item() / (2 * beta)

    figure, (upper, (frame, sweep, plane)) = plt.subplots(2, 3, figsize=(13, 8), dpi=85)
    figure.suptitle(f"O(d) spins: the saddle point of their multipliers: N = {sites}, d = {dim}")
    draw_curves(upper, curve, root, beta, levels)
    shown = {b: curves(model, b, grid) for b in betas[:: max(1, len(betas) // 10)]}
    norm, colors = LogNorm(min(shown), max(shown)), colormaps["viridis"]
    for b, each in shown.items():
        inside = each["t"] > border
        t, slope, color = each["t"][inside], each["slope"][inside] / b, colors(norm(b))
        frame.plot(t, slope, color=color, linewidth=1)
        frame.plot(t[slope > 0][:1], [0] * bool((slope > 0).any()), "o", color=color, markersize=4)
    frame.axhline(0, color="C4", linewidth=0.8)
    frame.axvspan(0, border, color="C3", alpha=0.1, linewidth=0)
    frame.set(xlim=(0, 3), ylim=(-3, 1), xlabel="multiplier t", title="$\\phi' / \\beta$ per site")
    scale = frame.inset_axes((0.42, 0.16, 0.5, 0.05))
    bar = figure.colorbar(ScalarMappable(norm, colors), cax=scale, orientation="horizontal")
    bar.set_ticks([0.3, 1, 3], labels=["0.3", "1", "3"], minor=False)
    bar.minorticks_off()
    scale.set_title("inverse temperature $\\beta$", fontsize=8)

    low, high = columns(table, "smallest", "largest")
    sweep.fill_between(betas, low, high, color="C0", alpha=0.3, label="t of each spin: range")
    labels = {"root": "one t for all", "length": "$|\\langle S_i\\rangle| / \\sqrt{d}$"}
    labels["free_energy"] = "free energy per site and component"
    for color, (name, label) in enumerate(labels.items(), start=1):
        sweep.plot(betas, *columns(table, name), color=f"C{color}", label=label)
    sweep.axhline(border, color="C4", linestyle=":", label="border of the domain of t")
    sweep.set(xscale="log", xlabel="inverse temperature", title="Over the temperature")
    sweep.legend(frameon=False, fontsize=8)

    values = torch.linspace(0.02, 3, 150, dtype=torch.float64)
    # phi(t_1, t_2) of two spins, by t_2 and t_1; NaN outside of the domain.
    t = torch.stack(torch.meshgrid(values, values, indexing="xy"), -1).view(-1, 2)
    factor, failed = torch.linalg.cholesky_ex(torch.diag_embed(t) - pair.couplings)
    fields = pair.field.expand(len(factor), -1, -1)
    half = torch.linalg.solve_triangular(factor, fields, upper=False)
    log_det = 2 * factor.diagonal(dim1=1, dim2=2).log().sum(1)
    phi = beta * t.sum(1) - log_det / 2 + beta / 4 * half.square().sum((1, 2))
    image = torch.where(failed == 0, phi, torch.nan).view(len(values), len(values))
    lowest = image[~image.isnan()].min().item()
    heights = [lowest + 0.02 * 1.5**k for k in range(14)]
    plane.contourf(values, values, image, levels=[lowest, *heights], cmap="viridis", extend="max")
    plane.contour(values, values, image, levels=heights, colors="white", linewidths=0.4)
    at_border = pair.couplings[0, 1] ** 2 / values
    plane.fill_between(values, 0, at_border, color="C3", linewidth=0, label="outside of the domain")
    own = solve(pair, beta, per_site=True).multiplier[0] / (2 * beta)
    first, second = own.tolist()
    label = f"root ({first:.2f}, {second:.2f})"
    plane.plot([first], [second], "o", color="C1", markeredgecolor="black", label=label)
    plane.set(xlim=(0, 3), ylim=(0, 3), xlabel="$t_1$", ylabel="$t_2$")
    plane.set_title("$\\phi(t_1, t_2)$ of two spins: dark is low")
    plane.legend(loc="upper right", fontsize=8)
    return {"temperature": table, "curve": rows_of(curve)}, figure


def draw_curves(panels, curve, root: float, beta: float, levels: Tensor) -> None:
    """phi, phi' and phi'' over the one multiplier, also left of all eigenvalues of J."""
    t, border = curve["t"], levels[-1].item()
    inside, outside = t > border, t < levels[0]
    at = int((t - root).abs().masked_fill(~inside, math.inf).argmin())
    limits = {"phi": (-1.6, 1.6), "slope": (-3, 2), "curvature": (-4, 8)}
    for axes, (name, (low, high)), label in zip(
        panels, limits.items(), ("$\\phi$", "$\\phi'$", "$\\phi''$"), strict=True
    ):
        axes.plot(t[outside], curve[name][outside], ":", color="C4")
        axes.plot(t[inside], curve[name][inside], color="C0")
        here = curve[name][at].item()
        middle = here if name == "phi" else 0
        axes.set(xlim=(-1, 3), ylim=(middle + low, middle + high), xlabel="multiplier t")
        axes.axvspan(-1, border, color="C3", alpha=0.1, linewidth=0)
        axes.plot([root], [here], "o", color="C1", label=f"root t = {root:.3f}")
        axes.set_title(f"{label} per site, $\\beta$ = {beta:g}")
    slope, zoom = panels[1], panels[1].inset_axes((0.56, 0.3, 0.4, 0.24))
    slope.axhline(0, color="C4", linewidth=0.8)
    left = zip(t[outside].tolist(), curve["slope"][outside].tolist(), strict=True)
    wrong = [b for (_, s), (b, r) in pairwise(left) if s * r < 0]
    slope.plot(wrong, [0] * len(wrong), "x", color="C3", label="root outside of the domain")
    note = "red: outside of the domain,\nt - J not positive definite"
    panels[0].text(0.03, 0.04, note, transform=panels[0].transAxes, fontsize=8, color="C3")
    for axes in panels:
        axes.legend(frameon=False, loc="lower right")
    near = inside & ((t - root).abs() < 0.05)
    zoom.plot(t[near], curve["slope"][near], color="C0")
    zoom.axhline(0, color="C4", linewidth=0.8)
    zoom.plot([root], [0], "o", color="C1")
    zoom.axvline((1 + (1 + 4 * beta**2) ** 0.5) / (4 * beta), color="C2", linestyle=":")
    zoom.set_title("near the root; green: without J", fontsize=8)
    zoom.tick_params(labelsize=7)


if __name__ == "__main__":
    run(spherical_saddle)
