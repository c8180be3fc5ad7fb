"""What steps of attention do to queries on the landscape of their energy, in two dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from implicit_attn.studies.experiments.experiment import Advance
from implicit_attn.studies.tables import Table
from implicit_attn.updates.query_descent import QueryDescent
from solvers.core.checks import require_count


class Picture(NamedTuple):
    """One way of attending: ``beta = scale / sqrt 2``, and how many steps of which size."""

    name: str
    meaning: str
    scale: float = 1.0
    step_size: float = 1.0
    steps: int = 1
    keys: str = "patterns"  # "maps": of the patterns, with queries and values; "states" themselves


PICTURES = (
    Picture("bare cross-attention", "one big step"),
    Picture("small steps", "hardly anything moves", step_size=0.1),
    Picture("many steps", "every state ends in a minimum", steps=10),
    Picture("small scale", "smooth, one minimum near the mean", scale=0.1),
    Picture("large scale", "separate valleys, single patterns attract", scale=10.0, steps=5),
    Picture("queries, keys and values", "values may point uphill", scale=2.0, keys="maps"),
    Picture("bare self-attention", "the states are the keys, and move", keys="states"),
)


class Landscape(NamedTuple):
    """A picture's states, what they attend to, and the energy around them.

    Attributes:
        picture: what is shown.
        keys: (M, 2), the stored patterns.
        states: (steps + 1, N, 2), the states before, between and after the steps.
        energies: (steps + 1, N), of those states.
        values: (N, 2), what attention with values returns, or None.
        grid: (2, G), coordinates on either axis, over twice the range of the data.
        surface: (G, G), the energy at ``(grid[0, column], grid[1, row])``.
    """

    picture: Picture
    keys: Tensor
    states: Tensor
    energies: Tensor
    values: Tensor | None
    grid: Tensor
    surface: Tensor

    @property
    def rise(self) -> float:
        """The most that a state's energy is above its start at the end; not above 0 for a descent."""
        return (self.energies[-1] - self.energies[0]).max().item()

    def summary(self) -> dict[str, float | int | str]:
        """Energies, distances and spreads in numbers."""
        start, end = self.states[0], self.states[-1]
        return {
            "picture": self.picture.name,
            "scale": self.picture.scale,
            "step_size": self.picture.step_size,
            "steps": self.picture.steps,
            "energy_before": self.energies[0].mean().item(),
            "energy_after": self.energies[-1].mean().item(),
            "largest_rise": self.rise,
            "distance_moved": (end - start).norm(dim=1).mean().item(),
            "spread_before": spread(start),
            "spread_after": spread(end),
        }


def landscapes(
    *,
    states: int = 16,
    patterns: int = 32,
    points: int = 81,
    seed: int = 0,
    pictures: Sequence[Picture] = PICTURES,
    advance: Advance = lambda what: None,
) -> list[Landscape]:
    """The landscapes of ``pictures``, for the same random states and patterns from N(0, I_2).

    ``E(q) = 1/2 |q|^2 - beta^-1 log sum_j exp(beta q.k_j)``, ``q <- q - eta dE/dq``. With maps,
    ``q = W_q x``, ``k = W_k c``, ``v = W_v c`` for random 2 x 2 matrices.

    Args:
        states, patterns: how many.
        points: of the grid on each axis, >= 2.
        seed: of states, patterns and maps.
        advance: called with the name of each picture.

    Raises:
        ValueError: for a number below its bound.

    Source: Bal, "Attention as Energy Minimization: Visualizing Energy Landscapes" (2021),
    https://mcbal.github.io/post/attention-as-energy-minimization-visualizing-energy-landscapes/
    """
    require_count("states", states)
    require_count("patterns", patterns)
    require_count("points", points, low=2)
    generator = torch.Generator().manual_seed(seed)
    x, stored = (
        torch.randn(count, 2, generator=generator, dtype=torch.float64)
        for count in (states, patterns)
    )
    maps = torch.randn(3, 2, 2, generator=generator, dtype=torch.float64)
    found = []
    for picture in pictures:
        advance(picture.name)
        if picture.keys == "maps":
            query, key, value = x @ maps[0].T, stored @ maps[1].T, stored @ maps[2].T
            found.append(_landscape(picture, query, key, value, points))
        else:
            keys = x if picture.keys == "states" else stored
            found.append(_landscape(picture, x, keys, None, points))
    return found


def _landscape(
    picture: Picture, query: Tensor, key: Tensor, value: Tensor | None, points: int
) -> Landscape:
    beta = picture.scale / math.sqrt(2)
    descent = QueryDescent(2, beta=beta, step_size=picture.step_size)
    path, energies = descent.trajectory(query[None], key[None], picture.steps)
    values = None
    if value is not None:
        values = torch.softmax(beta * query @ key.T, dim=-1) @ value
    shown = [query, key, path[-1, 0]] + ([] if values is None else [values])
    low, high = (torch.cat(shown).amin(0), torch.cat(shown).amax(0))
    steps = torch.linspace(-1, 1, points, dtype=torch.float64)
    grid = (low + high)[:, None] / 2 + (high - low).max() * steps
    plane = torch.stack(torch.meshgrid(grid[0], grid[1], indexing="xy"), -1).view(1, -1, 2)
    surface = descent.energies(plane, key[None]).view(points, points)
    return Landscape(picture, key, path[:, 0], energies[:, 0, 0], values, grid, surface)


def moved_states(found: Sequence[Landscape]) -> Table:
    """A row for each state of each picture at each step: where it is and its energy."""
    return [
        {"picture": each.picture.name, "state": i, "step": t, "x": x, "y": y, "energy": energy}
        for each in found
        for t, (places, energies) in enumerate(
            zip(each.states.tolist(), each.energies.tolist(), strict=True)
        )
        for i, ((x, y), energy) in enumerate(zip(places, energies, strict=True))
    ]


def spread(states: Tensor) -> float:
    """Root mean square distance of states (N, d) from their mean."""
    return (states - states.mean(0)).square().sum(1).mean().sqrt().item()
