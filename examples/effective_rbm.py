"""Which energy does a Boltzmann machine have when its hidden units are summed out, and do samples agree?

    python examples/effective_rbm.py        # a few seconds

Above: the cumulant functions of the kinds of hidden units, each with its Taylor sums. Below: states that
independent Gibbs chains end in are as frequent as the energy says, within the standard errors.
"""

import itertools
import math
from typing import Any

import matplotlib.pyplot as plt
import torch
from runner import Result, Table, columns, rows_of, run

from implicit_attn.energies.memories import PRIORS, EffectiveRBM, ScalarPrior

ORDERS = {2: "C1", 4: "C2", 8: "C3"}  # of the Taylor sums
UNITS = 4  # hidden units
MACHINES = {"normal": 0.35, "poisson": 0.25, "one-hot": 0.6}  # hidden law, strength of W


def taylor_sums(name: str, prior: ScalarPrior) -> Table:
    """``K(t)`` and its Taylor sums on an interval around 0, of the derivatives of K there."""
    low, high = max(-3.0, prior.lower), min(3.0, prior.upper)
    inset = 2e-3 * (high - low)
    t = torch.linspace(low + inset, high - inset, 121, dtype=torch.float64)
    zero = torch.zeros((), dtype=torch.float64, requires_grad=True)
    derivative, terms = prior.cumulant_function(zero), []
    for n in range(1, max(ORDERS) + 1):
        if derivative.requires_grad:
            (derivative,) = torch.autograd.grad(derivative, zero, create_graph=True)
        else:
            derivative = torch.zeros(())
        terms.append(derivative.item() * t**n / math.factorial(n))
    sums = {f"order {order}": torch.stack(terms[:order]).sum(0) for order in ORDERS}
    return rows_of({"t": t, "K": prior.cumulant_function(t)} | sums, hidden=name)


def gibbs_histogram(hidden: str, spins: int, chains: int, sweeps: int, seed: int) -> Table:
    """How often independent chains end in each of the 2^spins states, and how often they should.

    The weights are patterns of +1 and -1 times a strength; the states are sorted by falling probability.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (1, UNITS, spins) if hidden == "one-hot" else (UNITS, spins)
    patterns = torch.randint(2, shape, generator=generator).double() * 2 - 1
    energy = EffectiveRBM(MACHINES[hidden] * patterns, hidden, visible="ising")
    states = torch.tensor([*itertools.product([-1.0, 1.0], repeat=spins)], dtype=torch.float64)
    exact = (-energy(states)).softmax(0)
    first = torch.randint(2, (chains, spins), generator=generator).double() * 2 - 1
    v = energy.gibbs(first, sweeps, generator)
    numbers = ((v > 0).long() * 2 ** torch.arange(spins - 1, -1, -1)).sum(1)
    found = torch.bincount(numbers, minlength=len(states)).double() / chains
    error = (exact * (1 - exact) / chains).sqrt()
    order = exact.argsort(descending=True, stable=True)
    measured = {"exact": exact[order], "found": found[order], "error": error[order]}
    return rows_of(measured, hidden=hidden)


def deviations(table: Table) -> dict[str, Any]:
    """The largest and r.m.s. deviation in standard errors, and the total variation."""
    each = [abs(row["found"] - row["exact"]) / row["error"] for row in table]
    found = {"hidden": table[0]["hidden"], "states": len(table), "largest deviation": max(each)}
    found["rms deviation"] = (sum(d * d for d in each) / len(each)) ** 0.5
    variation = sum(abs(row["found"] - row["exact"]) for row in table) / 2
    return found | {"total variation": variation}


def effective_rbm(
    spins: int = 6,  # number of visible units, at most 10
    chains: int = 20_000,  # number of independent chains
    sweeps: int = 50,  # sweeps of each chain
    seed: int = 0,  # random seed of weights and chains
) -> Result:
    laws = {name: prior for name, prior in PRIORS.items() if isinstance(prior, ScalarPrior)}
    curves = {name: taylor_sums(name, prior) for name, prior in laws.items()}
    histograms = [gibbs_histogram(name, spins, chains, sweeps, seed) for name in MACHINES]

    figure = plt.figure(figsize=(13, 9))
    figure.suptitle("RBMs without their hidden units: cumulant functions and Gibbs sampling")
    upper, lower = figure.subfigures(2, 1, height_ratios=[3, 2], squeeze=False).flat
    panels = upper.subplots(2, -(-len(curves) // 2))
    for axes, (name, rows) in zip(panels.flat, curves.items(), strict=False):
        t, exact, *sums = columns(rows, "t", "K", *(f"order {order}" for order in ORDERS))
        for (order, color), taylor in zip(ORDERS.items(), sums, strict=True):
            axes.plot(t, taylor, color=color, linewidth=1, label=f"Taylor sum, order {order}")
        axes.plot(t, exact, color="C0", linewidth=2.2, label="K(t), exact", zorder=0)
        low, high = min(exact), max(exact)
        margin = 0.15 * (high - low)
        axes.set(title=f"{name} units", xlabel="field t", ylabel="K(t)")
        axes.set_ylim(low - margin, high + margin)
    for axes in panels.flat[len(curves) :]:
        axes.set_axis_off()
    panels.flat[-1].legend(*panels.flat[0].get_legend_handles_labels(), fontsize=9, loc="center")
    shared = lower.subplots(1, len(histograms), sharey=True)
    look: Any = {"fmt": ".", "color": "black", "ms": 4, "elinewidth": 0.8}
    for axes, hidden, table in zip(shared, MACHINES, histograms, strict=True):
        exact, found, error = columns(table, "exact", "found", "error")
        axes.bar(range(len(table)), exact, color="C0", alpha=0.4, label="exact, exp(-E) / Z")
        bars = [2 * each for each in error]
        label = "Gibbs, 2 standard errors"
        axes.errorbar(range(len(table)), found, yerr=bars, label=label, **look)
        axes.set(title=f"{hidden} hidden units", xlabel="state, by falling probability")
        axes.set_yscale("log")
    shared[0].set_ylabel("probability of a state")
    shared[0].legend(fontsize=8)
    tables = {"cumulants": sum(curves.values(), Table()), "gibbs": sum(histograms, Table())}
    return tables | {"errors": [deviations(table) for table in histograms]}, figure


if __name__ == "__main__":
    run(effective_rbm)
