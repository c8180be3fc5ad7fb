"""Kinetic Ising spins around their critical temperature: closures beside Monte Carlo."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from implicit_attn.studies.experiments.experiment import Advance
from implicit_attn.studies.tables import Table
from solvers import IsingSite, glauber, kinetic_trajectory
from solvers.core.checks import require_count

SPREAD = 0.1  # of the couplings, in units of beta / sqrt N
CLOSURES = ("naive", "tap", "gaussian")


class Model(NamedTuple):
    """Fields (1, N, 1) and couplings (N, N) at beta = 1."""

    field: Tensor
    couplings: Tensor


def ising_model(spins: int, generator: torch.Generator) -> Model:
    """``x_i ~ U(-1/2, 1/2)``, ``J_ij ~ N(1/N, 0.1^2 / N)``, asymmetric, with its diagonal."""
    field = torch.rand(1, spins, 1, generator=generator) - 0.5
    noise = torch.randn(spins, spins, generator=generator)
    return Model(field, 1 / spins + SPREAD / math.sqrt(spins) * noise)


def critical_beta(spread: float = SPREAD, points: int = 1001) -> float:
    """Where the state of zero mean turns unstable for many spins: ``beta <1 - tanh^2 h> = 1``,
    ``h = beta (u + spread g)``, u uniform on [-1/2, 1/2], g normal; without spread 2 atanh(1/2)."""
    uniform = (torch.arange(points, dtype=torch.float64) + 0.5) / points - 0.5
    normal = torch.linspace(-8, 8, 97, dtype=torch.float64)
    weights = torch.softmax(-normal.square() / 2, dim=0)
    field = uniform.unsqueeze(-1) + spread * normal

    def gain(beta: float) -> float:
        return beta * ((1 - torch.tanh(beta * field).square()) @ weights).mean().item()

    low, high = 0.5, 2.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if gain(middle) > 1 else (middle, high)
    return (low + high) / 2


def histories(
    model: Model, beta: float, *, steps: int, chains: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Means (steps + 1, N) from all spins up: by each closure, and "exact" from simulated chains."""
    field, couplings = beta * model.field, beta * model.couplings
    start = torch.ones_like(field)
    found = {
        closure: kinetic_trajectory(
            start, field, couplings, steps=steps, site=IsingSite(), closure=closure
        )[:, 0, :, 0]
        for closure in CLOSURES
    }
    up = start.expand(chains, -1, -1).contiguous()
    run = glauber(up, field[0], couplings, steps=steps, site=IsingSite(), generator=generator)
    return found | {"exact": run.means[..., 0]}


def compare(means: dict[str, Tensor], chains: int) -> Table:
    """For each closure its mean after the last step and the r.m.s. error of the sites.

    ``noise`` is the standard error of the simulation, which is part of ``error``.
    """
    exact = means["exact"][-1]
    noise = ((1 - exact.square()) / chains).mean().sqrt().item()
    return [
        {
            "closure": closure,
            "mean": means[closure][-1].mean().item(),
            "exact": exact.mean().item(),
            "error": (means[closure][-1] - exact).square().mean().sqrt().item(),
            "noise": noise,
        }
        for closure in CLOSURES
    ]


def from_many_starts(model: Model, beta: float, *, steps: int, starts: int) -> Tensor:
    """Mean over the spins (steps + 1, starts) from starts with all means equal, between -1 and 1."""
    levels = torch.linspace(-1, 1, starts).view(-1, 1, 1)
    field = (beta * model.field).expand(starts, -1, -1)
    means = kinetic_trajectory(
        levels.expand_as(field), field, beta * model.couplings, steps=steps, site=IsingSite()
    )
    return means.mean((2, 3))


def sweep(
    betas: Sequence[float],
    *,
    spins: int,
    draws: int,
    steps: int,
    generator: torch.Generator,
    advance: Advance = lambda what: None,
) -> Table:
    """``|mean|`` after ``steps`` against beta over random models: median, and the middle 80 %."""
    scale = torch.tensor(list(betas)).view(-1, 1, 1)
    found: dict[str, list[Tensor]] = {"naive": [], "gaussian": []}
    for draw in range(require_count("draws", draws)):
        advance(f"model {draw + 1} of {draws}")
        model = ising_model(spins, generator)
        field, couplings = scale * model.field, scale * model.couplings
        for closure, means in found.items():
            mean = torch.ones_like(field)
            mean = kinetic_trajectory(
                mean, field, couplings, steps=steps, site=IsingSite(), closure=closure
            )[-1]
            means.append(mean.mean((1, 2)).abs())
    levels = torch.tensor([0.1, 0.5, 0.9])
    return [
        {"closure": closure, "beta": beta, "mean": middle, "mean_10": low, "mean_90": high}
        for closure, means in found.items()
        for beta, (low, middle, high) in zip(
            betas, torch.stack(means).quantile(levels, dim=0).T.tolist(), strict=True
        )
    ]


def turning_point(rows: Table) -> float:
    """The beta of a sweep around which its median rises fastest, by central differences."""

    def rise(around: tuple[dict[str, float], ...]) -> float:
        before, _, after = around
        return (after["mean"] - before["mean"]) / (after["beta"] - before["beta"])

    return max(zip(rows, rows[1:], rows[2:], strict=False), key=rise)[1]["beta"]
