"""How many random patterns binary memories retrieve."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from implicit_attn.models.memories.binary_memory import BinaryMemory, check_rule
from implicit_attn.studies.experiments.experiment import Advance
from implicit_attn.studies.tables import Table
from solvers.core.checks import require_count, require_number

SWEEPS = 20  # runs end before, with the first sweep that changes nothing


def capacity_curve(
    rule: str | int,
    sites: int,
    loads: Sequence[float],
    flips: float = 0.1,
    seeds: Sequence[int] = (0,),
    *,
    probes: int = 100,
    advance: Advance = lambda what: None,
) -> Table:
    """Overlap and share of exact retrievals of random patterns against their number.

    P patterns of N independent spins are stored; copies with flipped spins are retrieved by
    asynchronous sweeps. The overlap of the end s with its pattern x is ``s.x / N``.

    Args:
        rule: of :class:`BinaryMemory`.
        sites: N.
        loads: values of P / N, > 0; P is rounded, at least 1.
        flips: share of the spins that are flipped at the start, in [0, 1].
        seeds: one independent set of patterns each.
        probes: patterns that are retrieved at most, of each set.
        advance: called with the name of each load.

    Returns:
        A row for each load: ``rule``, ``sites``, ``load``, ``patterns`` (P), ``overlap`` and ``exact``
        (means of the seeds), and the least and largest of the seeds in ``_low`` and ``_high``.

    Raises:
        TypeError, ValueError: for an unknown rule or a number out of range.
    """
    check_rule(rule)
    require_count("sites", sites, low=2)
    require_number("flips", flips, low=0.0, high=1.0)
    require_count("probes", probes)
    if not seeds:
        raise ValueError("seeds must hold at least one seed, got none")
    table: Table = []
    for load in loads:
        if not 0 < load < math.inf:
            raise ValueError(f"loads must be > 0 and finite, got {load}")
        count = max(1, round(load * sites))
        advance(f"{rule}: {count} patterns of {sites} spins")
        row = {"rule": rule, "sites": sites, "load": load, "patterns": count}
        found = torch.stack([_retrieved(rule, sites, count, flips, probes, s) for s in seeds])
        for name, values in zip(("overlap", "exact"), found.mT, strict=True):
            low, high = values.min().item(), values.max().item()
            row |= {name: values.mean().item(), f"{name}_low": low, f"{name}_high": high}
        table.append(row)
    return table


def _retrieved(
    rule: str | int, sites: int, count: int, flips: float, probes: int, seed: int
) -> Tensor:
    """Mean overlap and share of exact retrievals of one set of patterns, (2,)."""
    generator = torch.Generator().manual_seed(seed)
    spins = torch.randint(2, (count, sites), generator=generator)
    patterns = 2.0 * spins.float() - 1
    memory = BinaryMemory(patterns, rule)
    targets = patterns[:probes]
    order = torch.rand(targets.shape, generator=generator).argsort(dim=1)
    damaged = torch.where(order < round(flips * sites), -targets, targets)
    overlap = (memory.retrieve(damaged, SWEEPS) * targets).double().mean(1)
    return torch.stack([overlap.mean(), (overlap == 1).double().mean()])


def half_load(table: Table) -> float:
    """The load at which the share of exact retrievals first falls to one half.

    Linear between the rows, which are sorted by load; NaN where it starts below or stays above.
    """
    for before, after in itertools.pairwise(table):
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
