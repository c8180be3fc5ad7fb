"""Kinetic vector spins: what their means do in time, and how wrong each closure is."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from implicit_attn.studies.experiments.experiment import Advance
from implicit_attn.studies.tables import Table
from solvers import GlauberRun, Site, SolveError, SphericalSite, glauber, kinetic_step

CLOSURES = ("naive", "plefka", "gaussian")
LEVELS = (0.1, 0.9)


class Setting(NamedTuple):
    """Inverse temperature, length of the fields (None: the radius), factor of the couplings."""

    beta: float
    field_length: float | None
    strength: float
    title: str


SETTINGS = (
    Setting(1.0, None, 1.0, "beta = 1"),
    Setting(2.0, None, 1.0, "beta = 2"),
    Setting(1.0, 1.0, 2.0, "beta = 1, weak fields, J doubled"),
)


class Followed(NamedTuple):
    """Means (steps + 1, N, d) of a closure, and at which steps its equation was not solved."""

    means: Tensor
    unsolved: list[int]


class Network(NamedTuple):
    """Fields (1, N, d) and couplings (N, N), beta in both, and the radius of the spins."""

    field: Tensor
    couplings: Tensor
    radius: float

    @property
    def large(self) -> SphericalSite:
        """The sites in the limit of many dimensions, where all closures have closed forms."""
        return SphericalSite(self.radius, large_dimension=True)

    def follow(self, start: Tensor, closure: str, steps: int, site: Site) -> Followed:
        """From the means ``start`` (1, N, d); an equation without solution goes on from the best point
        that was found."""
        means, unsolved = [start], []
        for step in range(1, steps + 1):
            try:
                mean = kinetic_step(
                    means[-1],
                    self.field,
                    self.couplings,
                    site=site,
                    closure=closure,
                    on_failure="raise",
                )
            except SolveError as error:
                mean = error.solution.value
                unsolved.append(step)
            means.append(mean)
        return Followed(torch.cat(means), unsolved)


def vector_network(spins: int, dim: int, setting: Setting, generator: torch.Generator) -> Network:
    """Directions of the fields uniform, ``J_ij ~ N(0, strength^2 / N)``, ``R = sqrt(d / 2)``."""
    radius = math.sqrt(dim / 2)
    noise = torch.randn(spins, spins, generator=generator)
    field = torch.randn(1, spins, dim, generator=generator)
    length = radius if setting.field_length is None else setting.field_length
    field = setting.beta * length * field / field.norm(dim=-1, keepdim=True)
    return Network(field, setting.beta * setting.strength / math.sqrt(spins) * noise, radius)


def vector_histories(
    spins: int,
    dim: int,
    *,
    steps: int,
    seed: int,
    advance: Advance = lambda what: None,
) -> Table:
    """Cosines and lengths of the means over time, of each setting and closure.

    A row for each step: ``length`` is ``|m| / R``, ``to_field``, ``to_start`` and ``to_previous`` are the
    cosines with the field, the start and the step before; means over the spins, with the middle 80 %
    as ``_10`` and ``_90``. ``unsolved`` is 1 where the closure is an equation and was not solved at this
    step. The start is ``(1, ..., 1) / sqrt d``.
    """
    table: Table = []
    for setting in SETTINGS:
        network = vector_network(spins, dim, setting, torch.Generator().manual_seed(seed))
        start = torch.full_like(network.field, 1 / math.sqrt(dim))
        for closure in CLOSURES:
            advance(f"{setting.title}, {closure}")
            found = network.follow(start, closure, steps, network.large)
            table += _rows(found, network, setting.title, closure)
    return table


def _rows(found: Followed, network: Network, setting: str, closure: str) -> Table:
    field, rows = network.field[0], []
    levels = torch.tensor(LEVELS)
    means = found.means
    for step, mean in enumerate(means):
        values = {
            "length": mean.norm(dim=-1) / network.radius,
            "to_field": cosine_similarity(mean, field, dim=-1),
            "to_start": cosine_similarity(mean, means[0], dim=-1),
            "to_previous": cosine_similarity(mean, means[max(step - 1, 0)], dim=-1),
        }
        row = {"setting": setting, "closure": closure, "step": step}
        row["unsolved"] = int(step in found.unsolved)
        for name, value in values.items():
            low, high = value.quantile(levels).tolist()
            row |= {name: value.mean().item(), f"{name}_10": low, f"{name}_90": high}
        rows.append(row)
    return rows


def errors_after_steps(
    *, spins: int = 64, dim: int = 32, steps: int = 6, chains: int, seed: int, advance: Advance
) -> Table:
    """Relative errors of the means after ``steps`` of the dynamics, against simulated chains.

    ``error`` is ``|m - exact| / |exact|``, in which the simulation's own ``noise`` is contained;
    ``corrected`` is the root of the difference of their squares; ``unsolved`` counts the steps whose
    equation was not solved. The closures are those of many dimensions, the simulation's sphere is exact.
    """
    table: Table = []
    for setting in SETTINGS[:2]:
        advance(f"{steps} steps, {setting.title}")
        generator = torch.Generator().manual_seed(seed)
        network = vector_network(spins, dim, setting, generator)
        start = torch.full_like(network.field, 1 / math.sqrt(dim))
        exact = SphericalSite(network.radius)
        run = glauber(
            start.expand(chains, -1, -1),
            network.field[0],
            network.couplings,
            steps=steps,
            site=exact,
            generator=generator,
        )
        for closure in CLOSURES:
            found = network.follow(start, closure, steps, network.large)
            table.append(_error(found, setting.beta, closure, run))
    return table


def errors_after_one_step(
    *, spins: int = 48, dim: int = 16, chains: int, seed: int, advance: Advance
) -> Table:
    """The same for one step from independent random spins, with the closures of the exact sphere but
    for "plefka", which is for many dimensions."""
    table: Table = []
    for setting in SETTINGS[:2]:
        advance(f"one step, {setting.title}")
        generator = torch.Generator().manual_seed(seed)
        network = vector_network(spins, dim, setting, generator)
        exact = SphericalSite(network.radius)
        before = torch.randn(1, spins, dim, generator=generator)
        length = setting.beta * network.radius
        before = length * before / before.norm(dim=-1, keepdim=True)
        mean = exact.mean(before, before.new_zeros(1, spins, dim, dim))
        drawn = exact.sample(before.expand(chains, -1, -1), generator)
        run = glauber(
            drawn, network.field[0], network.couplings, steps=1, site=exact, generator=generator
        )
        for site, closure in (
            (exact, "naive"),
            (exact, "tap"),
            (network.large, "plefka"),
            (exact, "gaussian"),
        ):
            found = network.follow(mean, closure, 1, site)
            table.append(_error(found, setting.beta, closure, run))
    return table


def _error(found: Followed, beta: float, closure: str, run: GlauberRun) -> dict[str, Any]:
    """A row of the last means against the averages over chains."""
    exact, spins = run.means[-1], run.spins
    size = exact.norm()
    error = ((found.means[-1] - exact).norm() / size).item()
    noise = (spins.var(0).sum().sqrt() / math.sqrt(len(spins)) / size).item()
    return {
        "steps": len(found.means) - 1,
        "beta": beta,
        "closure": closure,
        "error": error,
        "noise": noise,
        "corrected": math.sqrt(max(error**2 - noise**2, 0.0)),
        "unsolved": len(found.unsolved),
    }
