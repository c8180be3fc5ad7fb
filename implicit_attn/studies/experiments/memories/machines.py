"""Effective energies of RBMs: cumulant functions with their Taylor sums, and Gibbs against exact laws."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from implicit_attn.energies.effective import PRIORS, EffectiveRBM, ScalarPrior
from implicit_attn.studies.tables import Table

SCALAR = tuple(name for name, prior in PRIORS.items() if isinstance(prior, ScalarPrior))


def cumulant_curves(names: Sequence[str], orders: Sequence[int], points: int = 121) -> Table:
    """``K(t)`` and its Taylor sums on an interval around 0.

    Returns:
        A row for each name and t: ``hidden``, ``t``, ``K``, and ``order n`` for each n of ``orders``.
    """
    table: Table = []
    for name in names:
        prior = PRIORS[name]
        assert isinstance(prior, ScalarPrior)
        low, high = max(-3.0, prior.lower), min(3.0, prior.upper)
        inset = 2e-3 * (high - low)
        t = torch.linspace(low + inset, high - inset, points, dtype=torch.float64)
        columns = {"t": t, "K": prior.cumulant_function(t)}
        columns |= {f"order {order}": prior.taylor(t, order) for order in orders}
        rows = zip(*(column.tolist() for column in columns.values()), strict=True)
        table += [{"hidden": name} | dict(zip(columns, row, strict=True)) for row in rows]
    return table


def gibbs_histogram(
    hidden: str, spins: int, units: int, strength: float, chains: int, sweeps: int, seed: int
) -> Table:
    """How often block Gibbs sampling ends in each state of a few visible spins, and how often it should.

    The weights are patterns of +1 and -1 times ``strength``; ``chains`` independent chains start from
    random states.

    Returns:
        A row for each of the 2^spins states, by falling probability: ``hidden``, ``state``,
        ``exact`` (``exp(-E) / Z``), ``found``, ``error`` (the standard error of ``found``).
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (1, units, spins) if hidden == "one-hot" else (units, spins)
    patterns = torch.randint(2, shape, generator=generator).double() * 2 - 1
    energy = EffectiveRBM(strength * patterns, hidden, visible="ising")
    states = torch.tensor([*itertools.product([-1.0, 1.0], repeat=spins)], dtype=torch.float64)
    exact = (-energy(states)).softmax(0)
    first = torch.randint(2, (chains, spins), generator=generator).double() * 2 - 1
    v = energy.gibbs(first, sweeps, generator)
    powers = 2 ** torch.arange(spins - 1, -1, -1)
    numbers = ((v > 0).long() * powers).sum(1)
    found = torch.bincount(numbers, minlength=len(states)).double() / chains
    error = (exact * (1 - exact) / chains).sqrt()
    return [
        {
            "hidden": hidden,
            "state": "".join("+" if spin > 0 else "-" for spin in states[index].tolist()),
            "exact": exact[index].item(),
            "found": found[index].item(),
            "error": error[index].item(),
        }
        for index in exact.argsort(descending=True, stable=True).tolist()
    ]


def gibbs_errors(tables: Sequence[Table]) -> Table:
    """A row for each histogram: the largest deviation in standard errors, and the total variation."""
    found: Table = []
    for table in tables:
        deviations = [abs(row["found"] - row["exact"]) / row["error"] for row in table]
        variation = sum(abs(row["found"] - row["exact"]) for row in table) / 2
        row = {"hidden": table[0]["hidden"], "states": len(table)}
        row |= {"largest deviation": max(deviations)}
        row |= {"rms deviation": (sum(d * d for d in deviations) / len(deviations)) ** 0.5}
        found.append(row | {"total variation": variation})
    return found
