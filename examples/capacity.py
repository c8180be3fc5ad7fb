"""How many random patterns can a binary memory store and retrieve without an error?

    python examples/capacity.py        # half a minute

P patterns of N independent spins are stored, and asynchronous sweeps retrieve them from copies in which 10
% of the spins are flipped. Half of the patterns come back without an error up to P / N = 0.167 with Hebb's
rule, 0.51 with the pseudo-inverse and 29.7 with the power 4.
"""

import itertools
import math
from typing import Any

import matplotlib.pyplot as plt
import torch
from runner import Result, Table, draw_band, run
from torch import Tensor

from implicit_attn.models import BinaryMemory

PAIR_RULES = ("hebb", "pseudo-inverse", "pseudo-likelihood")
DENSE_RULES = (2, 3, 4, "exp")
PAIR_LOADS = (0.05, 0.1, 0.12, 0.138, 0.16, 0.18, 0.2, 0.3, 0.5, 0.65, 0.8, 1.0)
FLIPS = 0.1  # share of the spins that are flipped at the start
DENSE_LOADS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


def retrieved(rule: str | int, sites: int, count: int, probes: int, seed: int) -> Tensor:
    """Mean overlap and share of exact retrievals of one set of patterns, (2,)."""
    generator = torch.Generator().manual_seed(seed)
    patterns = 2.0 * torch.randint(2, (count, sites), generator=generator).float() - 1
    memory, targets = BinaryMemory(patterns, rule), patterns[:probes]
    order = torch.rand(targets.shape, generator=generator).argsort(dim=1)
    damaged = torch.where(order < round(FLIPS * sites), -targets, targets)
    overlap = (memory.retrieve(damaged, 20) * targets).double().mean(1)
    return torch.stack([overlap.mean(), (overlap == 1).double().mean()])


def half_load(rows: Table) -> float:
    """Where the share of exact retrievals first falls to one half, linear between rows; or NaN."""
    for before, after in itertools.pairwise(rows):
        if before["exact"] > 0.5 >= after["exact"]:
            part = (before["exact"] - 0.5) / (before["exact"] - after["exact"])
            return before["load"] + part * (after["load"] - before["load"])
    return math.nan


def theoretical_load(rule: str | int, sites: int) -> float:
    """The published capacity P / N of random patterns; NaN where there is none.

    Hebb's 0.138 keeps a few errors (Amit, Gutfreund, Sompolinsky 1985,
    https://doi.org/10.1103/PhysRevLett.55.1530); 1 for the pseudo-inverse. A power n without errors
    ``N^(n - 2) / (2 (2 n - 3)!! ln N)`` (Krotov and Hopfield 2016, https://arxiv.org/abs/1606.01164);
    the exponential ``2^(N / 2) / N`` (Demircigil et al. 2017, https://arxiv.org/abs/1702.01929).
    """
    if isinstance(rule, int):
        odd = math.prod(range(2 * rule - 3, 0, -2))
        return sites ** (rule - 2) / (2 * odd * math.log(sites))
    known = {"hebb": 0.138, "pseudo-inverse": 1.0, "exp": 2 ** (sites / 2) / sites}
    return known.get(rule, math.nan)


def capacity(
    sites: int = 100,  # number of spins N of the pair rules
    loads: tuple[float, ...] = PAIR_LOADS,  # loads P / N of the pair rules
    dense_sites: int = 40,  # number of spins of the dense rules
    dense_loads: tuple[float, ...] = DENSE_LOADS,  # loads of the dense rules
    seeds: int = 5,  # number of independent sets of patterns
    probes: int = 40,  # maximum number of patterns retrieved from each set
    seed: int = 0,  # random seed of the first set
) -> Result:
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    title = f"Patterns retrieved by binary memories; {FLIPS:.0%} of the spins flipped"
    figure.suptitle(f"{title}, mean and range of {seeds} seeds")
    tables: dict[str, Table] = {"pairs": [], "dense": []}
    halves: Table = []
    for name, axes, rules, size, values in (
        ("pairs", panels[0], PAIR_RULES, sites, loads),
        ("dense", panels[1], DENSE_RULES, dense_sites, dense_loads),
    ):
        for color, rule in enumerate(rules):
            rows: Table = []
            for load in sorted(values):
                count = max(1, round(load * size))
                sets = range(seed, seed + seeds)
                found = torch.stack([retrieved(rule, size, count, probes, s) for s in sets])
                row: dict[str, Any] = {"rule": rule, "sites": size, "load": load, "patterns": count}
                for key, column in zip(("overlap", "exact"), found.mT, strict=True):
                    low, high = column.min().item(), column.max().item()
                    row |= {key: column.mean().item(), f"{key}_low": low, f"{key}_high": high}
                rows.append(row)
            tables[name] += rows
            halves.append({"rule": rule, "sites": size, "half load": half_load(rows)})
            draw_rule(axes, rows, f"C{color}")
        axes.set(title=f"N = {size} spins", xlabel="load P / N", xscale="log", ylim=(-0.03, 1.05))
        axes.axhline(0.5, color="black", linewidth=0.6, linestyle=":")
        axes.legend(
            fontsize=9, ncols=2, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.15)
        )
    panels[0].set_ylabel("share of exact retrievals (dotted: half)")
    return tables | {"half": halves}, figure


def draw_rule(axes, rows: Table, color: str) -> None:
    """Mean and range of the seeds against the load, with the load of theory."""
    rule, most = rows[0]["rule"], rows[-1]["load"]
    name = f"power {rule}" if isinstance(rule, int) else rule
    theory = theoretical_load(rule, rows[0]["sites"])
    if theory <= most:
        axes.axvline(theory, color=color, linewidth=1, linestyle="--")
        place = theory, 0.62 if theory < most else 0.2  # the right edge is full above
        note = axes.annotate("theory", place, (-4, 0), textcoords="offset points")
        note.set(fontsize=7, color=color, rotation=90, ha="right", va="center")
    if not math.isnan(theory):
        name += f" (theory: {theory:.{3 if theory <= most else 2}g})"
    look: Any = {"color": color, "marker": "o", "ms": 3.5, "label": name}
    draw_band(axes, rows, "load", "exact", "_low", "_high", **look)


if __name__ == "__main__":
    run(capacity)
