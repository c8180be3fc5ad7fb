"""How far does one step of bare self-attention move random tokens?

    python examples/norm_map.py        # half a minute

The map shows ``|x - softmax(beta x x^T) x|_F`` for x ~ N(0, I) and beta = c / sqrt d. At c = 1 it falls from
3.0 in two dimensions to 3.5e-6 in 512, because each token attends to itself alone.
"""

import math

import matplotlib.pyplot as plt
import torch
from runner import Result, Table, columns, run

USUAL = [2, 16, 64, 128, 256, 512, 1024]  # dimensions of the table at the usual scale c = 1


def step_norms(dims: list[int], scales: list[float], tokens: int, draws: int, seed: int) -> Table:
    """Median, least and largest norm of the draws, the same x for every scale."""
    generator, table = torch.Generator().manual_seed(seed), Table()
    for dim in dims:
        x = torch.randn(draws, tokens, dim, generator=generator, dtype=torch.float64)
        overlaps = x @ x.mT
        for scale in scales:
            weights = torch.softmax(scale / math.sqrt(dim) * overlaps, dim=-1)
            # sum_j w_ij (x_i - x_j): x_i minus its mean would lose its digits where w_ii is nearly 1.
            weights.diagonal(dim1=-2, dim2=-1).zero_()
            moved = weights.sum(-1, keepdim=True) * x - weights @ x
            norms = moved.flatten(1).norm(dim=1).sort().values
            row = {"dimension": dim, "scale": scale, "norm": norms.median().item()}
            table.append(row | {"smallest": norms[0].item(), "largest": norms[-1].item()})
    return table


def norm_map(
    dimensions: int = 40,  # number of dimensions d between 2 and 1024, at least 2
    scales: int = 19,  # number of scales c between 0.2 and 2
    tokens: int = 32,  # number of tokens in a draw
    draws: int = 50,  # number of independent draws for each point
    seed: int = 0,  # random seed of the draws
) -> Result:
    values = torch.linspace(0.2, 2, scales, dtype=torch.float64).tolist()
    spaced = [round(2 ** (1 + 9 * k / (dimensions - 1))) for k in range(dimensions)]
    table = step_norms([*dict.fromkeys(spaced)], values, tokens, draws, seed)
    usual = step_norms(USUAL, [1.0], tokens, draws, seed)
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5), width_ratios=[1.25, 1])
    title = "Bare self-attention: the norm of one step on random tokens"
    figure.suptitle(f"{title}; {tokens} tokens, {draws} draws")
    every = sorted({row["dimension"] for row in table})
    image = torch.tensor([row["norm"] for row in table]).view(len(every), scales).T
    exponents = image.clamp(1e-8, 1e2).log10()
    mesh = left.pcolormesh(every, values, exponents, vmin=-8, vmax=2, shading="nearest")
    left.set_xscale("log", base=2)
    left.axhline(1, color="C3", linewidth=1.2, linestyle="--")
    for dim in (2, 512):
        left.axvline(dim, color="C3", linewidth=1.4, linestyle=":")
    left.set(xlabel="dimension d of a token", ylabel="scale c, β = c / √d")
    left.set_title("median of the draws (lines: d = 2, d = 512, c = 1)", fontsize=11)
    figure.colorbar(mesh, ax=left, label="log10 of the norm, cut off at -8")

    chosen = {min(values, key=lambda c: abs(c - wanted)): None for wanted in (0.2, 1.0, 2.0)}
    for scale, color in zip(chosen, ("C2", "C0", "C1"), strict=False):
        rows = [row for row in table if row["scale"] == scale]
        places, low, high, middle = columns(rows, "dimension", "smallest", "largest", "norm")
        right.fill_between(places, low, high, color=color, alpha=0.2, linewidth=0)
        right.plot(places, middle, color=color, label=f"c = {scale:.2g}")
    right.set_xscale("log", base=2)
    right.set(yscale="log", xlabel="dimension d of a token", ylabel="norm of the step")
    right.set_title("median and range of the draws", fontsize=11)
    right.legend(fontsize=9)
    return {"norms": table, "usual": usual}, figure


if __name__ == "__main__":
    run(norm_map)
