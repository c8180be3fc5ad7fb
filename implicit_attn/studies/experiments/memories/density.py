"""The continuous memory as a density: two-dimensional pictures of it, and fits to its samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from implicit_attn.energies import Hopfield
from implicit_attn.models.memories.fitting import fit_patterns
from implicit_attn.studies.tables import Table
from solvers.core.checks import require_count

REACH, GRID = 3.2, 241  # half the width of the picture, points on a side
RATE = 0.2  # of the ascent
MARGIN, SPACING = 9.0, 0.5  # of the grid of the integral, in standard deviations


class DensityMap(NamedTuple):
    """The density of a memory on a square grid, at one temperature."""

    cooling: int
    line: Tensor  # (G,) coordinates
    log_prob: Tensor  # (G, G), rows along y
    samples: Tensor  # (n, 2)


def ring_memory(count: int, beta: float, generator: torch.Generator) -> Hopfield:
    """Patterns (count, 2) around the origin, at random angles, with norms from 1.4 to 1.7."""
    angles = torch.arange(count) + 0.5 * torch.rand(count, generator=generator)
    angles = (2 * torch.pi / require_count("count", count) * angles).double()
    norms = torch.linspace(1.4, 1.7, count, dtype=torch.float64)
    norms = norms[torch.randperm(count, generator=generator)]
    directions = torch.stack([angles.cos(), angles.sin()], dim=1)
    return Hopfield(norms.unsqueeze(1) * directions, beta=beta)


def density_map(
    memory: Hopfield, cooling: int, samples: int, generator: torch.Generator
) -> DensityMap:
    """Density and samples at temperature ``1 / (cooling beta)`` of a memory in two dimensions."""
    line = torch.linspace(-REACH, REACH, GRID, dtype=torch.float64)
    y, x = torch.meshgrid(line, line, indexing="ij")
    log_prob = memory.log_prob(torch.stack([x, y], dim=-1), cooling)
    return DensityMap(cooling, line, log_prob, memory.sample(samples, generator, cooling))


def temperatures(memory: Hopfield, coolings: Sequence[int]) -> Table:
    """A row for each cooling k: ``temperature``, ``log_partition`` and ``integral`` of the density by the
    trapezoidal rule, with its distance from 1 as ``error``.

    The grid follows the width ``1 / sqrt(k beta)`` of the Gaussians: at half a width the rule is exact
    to rounding, and 9 widths beyond the patterns nothing is left.
    """
    table: Table = []
    for cooling in coolings:
        width = (cooling * memory.beta) ** -0.5
        reach = memory.patterns.abs().max().item() + MARGIN * width
        count = 1 + math.ceil(2 * reach / (SPACING * width))
        line = torch.linspace(-reach, reach, count, dtype=torch.float64)
        points, area = torch.cartesian_prod(line, line), (line[1] - line[0]).item() ** 2
        integral = memory.log_prob(points, cooling).exp().sum().item() * area
        row = {"cooling": cooling, "temperature": 1 / (cooling * memory.beta)}
        row |= {"log_partition": memory.log_partition(cooling).item(), "integral": integral}
        table.append(row | {"error": abs(integral - 1)})
    return table


def fit_histories(
    memory: Hopfield, data: Tensor, starts: int, steps: int, generator: torch.Generator
) -> Table:
    """Mean log-likelihood of ``data`` against the step, from ``starts`` random choices of patterns.

    Two ways up: ``fit_patterns``, and the ascent ``x_mu += RATE (<p_mu(z) z> - w_mu x_mu)`` along the
    gradient.

    Returns:
        A row for each method, start and step: ``method``, ``start``, ``step``, ``log_likelihood``.
    """
    table: Table = []
    for start in range(starts):
        order = torch.randperm(len(data), generator=generator)[: len(memory.patterns)]
        first = data[order]
        fitted = fit_patterns(
            data, len(first), memory.beta, start=first, steps=steps, tolerance=0.0
        )
        curves = {"fit_patterns": fitted.log_likelihood}
        curves["gradient"] = _gradient_ascent(data, first, memory.beta, steps)
        table += [
            {"method": method, "start": start, "step": step, "log_likelihood": value}
            for method, values in curves.items()
            for step, value in enumerate(values)
        ]
    return table


def summary_of_fits(fits: Table, best: float) -> Table:
    """A row for each method: its ``starts``, the least and largest ``log_likelihood`` that they end with
    (``lowest``, ``highest``), and the largest number of steps until one is within 1e-4 of its end. The
    last row is ``best``, that of the patterns which the data come from."""
    found: Table = []
    for method in dict.fromkeys(row["method"] for row in fits):
        rows = [row for row in fits if row["method"] == method]
        curves = [
            [row["log_likelihood"] for row in rows if row["start"] == start]
            for start in dict.fromkeys(row["start"] for row in rows)
        ]
        ends = [curve[-1] for curve in curves]
        near = [
            min(step for step, value in enumerate(curve) if abs(value - curve[-1]) <= 1e-4)
            for curve in curves
        ]
        row = {"method": method, "starts": len(curves), "lowest": min(ends), "highest": max(ends)}
        found.append(row | {"steps": max(near)})
    row = {"method": "true patterns", "starts": 0, "lowest": best, "highest": best}
    return [*found, row | {"steps": 0}]


def _gradient_ascent(data: Tensor, patterns: Tensor, beta: float, steps: int) -> list[float]:
    values = []
    for _ in range(steps):
        values.append(Hopfield(patterns, beta=beta).log_prob(data).mean().item())
        attention = (beta * data @ patterns.mT).softmax(1)
        weight = (0.5 * beta * patterns.square().sum(1)).softmax(0)
        ascent = attention.mT @ data / len(data) - weight.unsqueeze(1) * patterns
        patterns = patterns + RATE * ascent
    return values
