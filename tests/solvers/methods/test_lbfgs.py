"""L-BFGS where the first steps are far too long, and the state that it keeps."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from solvers import Descent, Solution, Tolerance, fixed_point


def minimise(
    energy: Callable[[Tensor], Tensor], *start: float, factor: float = 1.0, **options: object
) -> Solution:
    """From ``start``, to a gradient of ``1e-6 factor``; the energy is multiplied by ``factor``."""
    return fixed_point(
        Descent(lambda z: factor * energy(z)), torch.tensor([start], dtype=torch.float64),
        tolerance=Tolerance(rtol=0.0, atol=1e-6 * factor), max_steps=500, adjoint=None,
        on_failure="ignore", **options,  # type: ignore[arg-type]
    )  # fmt: skip


def cosh(z: Tensor) -> Tensor:
    return 2 * z.cosh().sum(1)


def box_three_dimensional(z: Tensor) -> Tensor:
    """Moré, Garbow and Hillstrom (1981), problem 12."""
    t = 0.1 * torch.arange(1, 11, dtype=z.dtype)
    first, second, third = (column[:, None] for column in z.unbind(1))
    known = torch.exp(-t) - torch.exp(-10 * t)
    return (torch.exp(-t * first) - torch.exp(-t * second) - third * known).square().sum(1)


def wood(z: Tensor) -> Tensor:
    """Moré, Garbow and Hillstrom (1981), problem 14."""
    a, b, c, d = z.unbind(1)
    valleys = 100 * (b - a * a) ** 2 + (1 - a) ** 2 + 90 * (d - c * c) ** 2 + (1 - c) ** 2
    return valleys + 10 * (b + d - 2) ** 2 + 0.1 * (b - d) ** 2


# The evaluations that scipy's L-BFGS-B needs from the same starts: 12, 38 and 112.
STEEP = [(cosh, (5.3,), 12), (box_three_dimensional, (0.0, 10.0, 20.0), 48),
         (wood, (-3.0, -1.0, -3.0, -1.0), 112)]  # fmt: skip


@pytest.mark.defect("A13")
@pytest.mark.parametrize(("energy", "start", "most"), STEEP)
def test_a_first_trial_far_away_is_no_end(
    energy: Callable[[Tensor], Tensor], start: tuple[float, ...], most: int
) -> None:
    solution = minimise(energy, *start)
    assert solution.counts() == {"CONVERGED": 1}
    assert int(solution.evaluations) <= most


@pytest.mark.defect("A13")
@pytest.mark.parametrize("shift", [0.0, 1e3, -1e3])
def test_an_energy_of_any_offset_is_minimised(shift: float) -> None:
    """The length of the first step looks at the size of the energy, which an offset changes."""
    solution = minimise(lambda z: cosh(z) + shift, 5.3, -4.0, 0.2)
    assert solution.counts() == {"CONVERGED": 1}
    assert int(solution.evaluations) <= 30


@pytest.mark.defect("A13")
@pytest.mark.parametrize("constant", [0.0, 1e-6, 100.0])
def test_the_constant_of_an_energy_costs_no_evaluation(constant: float) -> None:
    """Near ``E = 0`` a unit step of ordinary length promises many times E, and keeps it."""
    matrix = torch.randn(8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    start = 1e-2 * torch.randn(8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def energy(z: Tensor, c: float) -> Tensor:
        return 0.5 * (z * z).sum(1) + torch.logsumexp(z @ matrix, 1) - math.log(8) + c

    usual = minimise(lambda z: energy(z, 1.0), *start.tolist())
    shifted = minimise(lambda z: energy(z, constant), *start.tolist())
    assert shifted.converged.all()
    assert int(shifted.evaluations) <= int(usual.evaluations)


@pytest.mark.defect("D12")
@pytest.mark.parametrize("factor", [2.0**20])
@pytest.mark.parametrize(("energy", "start", "most"), STEEP)
def test_a_steep_energy_times_a_factor_takes_the_same_steps(
    energy: Callable[[Tensor], Tensor], start: tuple[float, ...], most: int, factor: float
) -> None:
    """To the same point, that is with a tolerance that grows with the energy."""
    once, scaled = minimise(energy, *start), minimise(energy, *start, factor=factor)
    assert torch.equal(scaled.value, once.value)
    assert scaled.evaluations.tolist() == once.evaluations.tolist()
