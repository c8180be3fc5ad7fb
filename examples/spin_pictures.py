"""What is the mean of a spin of fixed length in a field? It is a ratio of Bessel functions.

    python examples/spin_pictures.py        # a few seconds

Left: the ratio and its limit for large orders, which is off by 72 % at order 1 and by 0.12 % at order 512.
Middle: the mean saturates at the length of the spin, like a normalisation layer. Right: random directed
couplings between sites.
"""

import math

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.collections import LineCollection
from runner import Result, Table, columns, rows_of, run
from torch import Tensor

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

    figure, (left, right, graph) = plt.subplots(1, 3, figsize=(16, 5), dpi=90)
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
    left.legend(fontsize=8, ncols=3, loc="center right", bbox_to_anchor=(1, 0.57))
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
    graph.set_xlabel(text)
    return {"ratios": ratios, "norms": norms, "edges": edges}, figure


def draw_directed_graph(axes, table: Table, sites: int) -> None:
    """Sites on a circle; edges bend to the left of their way, so that both ways are seen."""
    angles = 2 * math.pi * np.arange(sites) / sites + math.pi / 2
    places, lines, colors, widths = np.stack([np.cos(angles), np.sin(angles)], axis=1), [], [], []
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
    for color, label in (("C3", "J > 0"), ("C0", "J < 0")):
        axes.plot([], [], color=color, linewidth=1.5, label=label)
    axes.set_title(
        f"Random directed couplings of {sites} sites, $J_{{ij}}$ from N(0, 1/N)", fontsize=11
    )
    axes.set(xticks=[], yticks=[], xlim=(-1.2, 1.2), ylim=(-1.2, 1.2), aspect="equal")
    axes.legend(fontsize=8, loc="upper right", frameon=False)
    axes.spines[:].set_visible(False)


if __name__ == "__main__":
    run(spin_pictures)
