"""Figures of spins of fixed length: Bessel ratios, lengths of means, a coupling graph, planar spins."""

import math
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.collections import LineCollection
from runner import Result, Table, columns, rows_of, run
from torch import Tensor

import solvers

ORDERS = [2**power for power in range(10)]
BETAS = {0.1: "C4", 0.5: "C0", 1.0: "C2", 2.0: "C1", 10.0: "C3"}


def bessel_ratio(order: float, x: Tensor) -> Tensor:
    """``I_{order+1}(x) / I_order(x)`` to rounding, by ``1 / r_n = 2 (n + 1) / x + r_{n+1}`` downwards.

    It neither over- nor underflows where the functions themselves do. Source: Amos (1974),
    https://doi.org/10.1090/S0025-5718-1974-0333287-7.
    """
    terms = 64 + math.ceil(8 * math.sqrt(x.max().item()))  # 1e-14 of the start is left
    top = order + terms
    ratio = x / (top + (top**2 + x.square()).sqrt())
    for k in range(terms - 1, -1, -1):
        ratio = x / (2 * (order + k + 1) + x * ratio)
    return ratio


def large_order_ratio(order: float, x: Tensor) -> Tensor:
    """The limit of that ratio for large orders."""
    u = x / order
    return u / (1 + (1 + u.square()).sqrt())


def planar_spins(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Couplings (N, N) ~ N(0, 4 / N), fields (N, 2) ~ N(0, I / 4), and naive mean-field means (N, 2)."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randn(count, count, generator=generator, dtype=torch.float64).triu(1)
    couplings = 2 / math.sqrt(count) * (raw + raw.T)
    fields = 0.5 * torch.randn(count, 2, generator=generator, dtype=torch.float64)
    blocks = couplings[..., None, None] * torch.eye(2, dtype=torch.float64)
    solution = solvers.adaptive_tap(
        blocks, fields[None], site=solvers.SphericalSite(1.0), order="naive", damping=0.5,
        tolerance=1e-10, max_steps=500, adjoint=None,
    )  # fmt: skip
    return couplings, fields, solution.value.mean[0]


def strongest(couplings: Tensor, share: float) -> Table:
    """The ``share`` of the couplings that are not 0 with the largest ``|J_ij|``, weakest first."""
    ends = couplings.nonzero(as_tuple=True)
    order = couplings[ends].abs().argsort()
    order = order[len(order) - math.ceil(share * len(order)) :]
    to, start = (each[order] for each in ends)
    return rows_of({"to": to, "from": start, "coupling": couplings[to, start]})


def spin_pictures(
    dim: int = 512,  # number of dimensions d >= 3 of the spins whose mean is plotted
    sites: int = 64,  # number of sites of the directed graph, at least 2
    share: float = 0.03,  # share of the strongest couplings that are drawn, above 0
    seed: int = 0,  # random seed of the couplings and fields
) -> Result:
    ratios, norms = Table(), Table()
    for nu in ORDERS:
        for at, x in (("sqrt(nu)", nu**0.5), ("nu", nu), ("nu^2", nu**2)):
            place = torch.tensor(x, dtype=torch.float64)
            exact, limit = bessel_ratio(nu, place).item(), large_order_ratio(nu, place).item()
            row = {"order": nu, "at": at, "x": float(x), "ratio": exact, "limit": limit}
            ratios.append(row | {"relative_error": limit / exact - 1})
    # |<S>| of a spin of radius R = sqrt(d/2 - 1) in a field beta h, and its limit.
    order, radius = dim / 2 - 1, math.sqrt(dim / 2 - 1)
    strengths = torch.linspace(0, 40, 81, dtype=torch.float64)
    for beta in BETAS:
        x = radius * beta * strengths
        curves = {"field": strengths, "norm": radius * large_order_ratio(order, x)}
        norms += rows_of(curves | {"exact": radius * bessel_ratio(order, x)}, beta=beta)
    generator = torch.Generator().manual_seed(seed)
    directed = torch.randn(sites, sites, generator=generator, dtype=torch.float64) / sites**0.5
    edges = strongest(directed.fill_diagonal_(0.0), share)
    couplings, fields, means = planar_spins(7, seed)

    figure, ((left, right), (graph, arrows)) = plt.subplots(2, 2, figsize=(12, 10.5), dpi=90)
    figure.suptitle("Spins of fixed length: their mean in a field, and their couplings")
    for at, color, label in (("sqrt(nu)", "C0", "√ν"), ("nu", "C1", "ν"), ("nu^2", "C2", "ν²")):
        limits, exact = columns(ratios, "limit", "ratio", at=at)
        left.plot(ORDERS, limits, color=color, label=f"limit, x = {label}")
        left.plot(ORDERS, exact, "o", color=color, ms=5, label="exact")
    for row in ratios:
        if row["at"] == "nu" and row["order"] in (1, 8, 64, 512):
            first = row["order"] == 1
            note = f"{row['relative_error']:.2g}" + "\n(all three, x = 1)" * first
            place, away = (row["order"], row["ratio"]), (0, -20 if first else -14)
            left.annotate(note, place, away, textcoords="offset points", fontsize=8, ha="center")
    left.set_xscale("log", base=2)
    left.set_xticks(ORDERS[::2])
    left.set(xlabel="order ν", ylabel="ratio", xlim=(0.45, 900), ylim=(0, 1.05))
    title = "Bessel ratio $I_{ν+1}(x) / I_ν(x)$ and its limit for large ν\n"
    left.set_title(title + "(numbers: relative error of the limit at x = ν)", fontsize=11)
    left.legend(fontsize=8, ncols=3, loc="center right", bbox_to_anchor=(1, 0.66))
    for beta, color in BETAS.items():
        places, limits, exact = columns(norms, "field", "norm", "exact", beta=beta)
        right.plot(places, limits, color=color, label=f"β = {beta:g}")
        right.plot(places[::8], exact[::8], "o", color=color, markersize=3.5)
    right.axhline(radius, color="black", linestyle="--", linewidth=1, label=f"R = {radius:.1f}")
    right.set(xlabel="length of the field |h|", ylabel="length of the mean |⟨S⟩|")
    title = f"A spin of length R in {dim} dimensions turns into its field\n"
    right.set_title(title + "(lines: limit for large d, dots: exact)", fontsize=11)
    right.legend(fontsize=8, ncols=2, loc="center right", bbox_to_anchor=(1, 0.28))
    draw_directed_graph(graph, edges, sites)
    text = f"the strongest {share:.0%}; an edge bends to the left of its way"
    graph.text(0, -1.22, text, ha="center")
    draw_spins(arrows, fields, means, strongest(couplings.triu(), 0.5))
    rows = rows_of({"spin": torch.arange(len(means)), "x": means[:, 0], "y": means[:, 1]})
    return {"ratios": ratios, "norms": norms, "edges": edges, "spins": rows}, figure


def draw_directed_graph(axes, table: Table, sites: int) -> None:
    """Sites on a circle; edges bend to the left of their way, so that both ways are seen."""
    places, lines, colors, widths = circle(sites), [], [], []
    largest = max(abs(row["coupling"]) for row in table)
    time = np.linspace(0, 1, 15)[:, None]
    for row in table:
        start, end = places[row["from"]], places[row["to"]]
        across = np.array([start[1] - end[1], end[0] - start[0]])
        middle = (start + end) / 2 + 0.15 * across
        lines.append((1 - time) ** 2 * start + 2 * time * (1 - time) * middle + time**2 * end)
        colors.append("C3" if row["coupling"] > 0 else "C0")
        widths.append(1.5 * (abs(row["coupling"]) / largest) ** 2)
    # Without antialiasing the file has half the size.
    axes.add_collection(LineCollection(lines, colors=colors, linewidths=widths, antialiaseds=False))
    axes.plot(*places.T, "o", color="black", markersize=4)
    title = f"Random directed couplings of {sites} sites, $J_{{ij}}$ from N(0, 1/N)"
    frame(axes, title, 1.3, 1.5)


def draw_spins(axes, fields: Tensor, means: Tensor, table: Table) -> None:
    """Mean spins as arrows at their sites, with the strongest couplings between them."""
    count, places = len(means), circle(len(means))
    largest = max(abs(row["coupling"]) for row in table)
    for row in table:
        ends = places[[row["from"], row["to"]]]
        color, width = "C3" if row["coupling"] > 0 else "C0", 4 * abs(row["coupling"]) / largest
        axes.plot(*ends.T, color=color, linewidth=width, alpha=0.7, zorder=1)
    axes.plot(*places.T, "o", color="white", markeredgecolor="black", markersize=12, zorder=2)
    scaled = fields / fields.norm(dim=1).max()
    for vectors, color, label in ((scaled, "C4", "field x"), (means, "black", "mean spin m")):
        style = {"angles": "xy", "scale_units": "xy", "scale": 1, "width": 0.008, "zorder": 3}
        axes.quiver(*places.T, *(0.36 * vectors).T, color=color, label=label, **style)
    frame(axes, f"{count} planar spins at their mean-field solution", 1.5, 3)
    text = f"lines: the {len(table)} strongest of {count * (count - 1) // 2} couplings"
    axes.text(0, -1.42, text, ha="center")


def circle(count: int) -> Any:
    """Places (count, 2), the first at the top."""
    angles = 2 * math.pi * np.arange(count) / count + math.pi / 2
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def frame(axes, title: str, reach: float, width: float) -> None:
    """A square without axes, with a legend of the colours of the signs."""
    for color, label in (("C3", "J > 0"), ("C0", "J < 0")):
        axes.plot([], [], color=color, linewidth=width, label=label)
    axes.set_title(title, fontsize=11)
    limits = (-reach, reach)
    axes.set(xticks=[], yticks=[], xlim=limits, ylim=limits, aspect="equal")
    axes.legend(fontsize=8, loc="upper right")
    axes.spines[:].set_visible(False)


if __name__ == "__main__":
    run(spin_pictures)
