"""The concave flag, and what it promises: the unit step on Quadratic() + energy."""

from __future__ import annotations

import pytest
import torch

from cases.energies import COUNT, ENERGIES, EnergyCase, build, few_energies, tokens
from implicit_attn.energies import (
    BiSoftmaxAttention,
    Energy,
    Field,
    Quadratic,
    ReLUFeedForward,
    ScoreAttention,
)

CONCAVE = [case for case in ENERGIES if build(case).concave]


@pytest.mark.parametrize("case", CONCAVE, ids=[case.id for case in CONCAVE])
@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
def test_midpoint_inequality(case: EnergyCase, scale: float) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        energy = case.factory(8).double()
        a, x = tokens(case, seed=seed)
        b, _ = tokens(case, seed=seed + 100)
        a, b = scale * a, scale * b
        ends = 0.5 * (energy(a, x) + energy(b, x))
        assert (energy(0.5 * (a + b), x) >= ends - 1e-9 * ends.abs().clamp_min(1.0)).all()


@few_energies(*[case.id for case in ENERGIES if not build(case).concave])
def test_unflagged_energies_curve_upwards_somewhere(case: EnergyCase) -> None:
    """The flag is not merely cautious: where it is False there are weights and a state with
    positive curvature."""
    assert any(largest_curvature(case, seed) > 1e-6 for seed in range(30))


def largest_curvature(case: EnergyCase, seed: int) -> float:
    """Largest Hessian eigenvalue of one sample at one random state and random weights."""
    torch.manual_seed(seed)
    energy = case.factory(8).double()
    z, x = tokens(case, batch=1, count=COUNT if case.placed else 2, seed=seed)
    z = (0.3, 1.0, 3.0)[seed % 3] * z
    directions = torch.eye(z.numel(), dtype=torch.float64).reshape(-1, *z.shape)
    hessian = torch.stack([energy.hvp(z, v, x).flatten() for v in directions])
    return torch.linalg.eigvalsh(hessian).max().item()


def test_flags_combine() -> None:
    concave = ReLUFeedForward(8, 4, norm=None)
    assert concave.concave and not ReLUFeedForward(8, 4).concave
    assert (concave + Field()).concave
    assert not (concave + Quadratic()).concave
    assert (2.0 * concave).concave and (0.0 * Quadratic()).concave
    assert not (-1.0 * concave).concave
    assert concave.weighted(0.5).concave and concave.select("x").concave
    assert not ScoreAttention(8, 2, norm=None).weighted(0.5).concave
    assert not Energy().concave


def test_attractive_self_attention_is_not_concave_and_its_unit_step_can_rise() -> None:
    """Tokens at 10 and 20 on a line both attend to the second: ``E_int = -w^2 (z_1 z_2 + z_2^2)``
    there, which is indefinite. So the promise holds for cross attention only."""
    repulsion = BiSoftmaxAttention(1, 1, norm=None).double()
    with torch.no_grad():
        repulsion.projection.weight.fill_(3.0)
    attraction = -repulsion
    z = torch.tensor([[[10.0], [20.0]]], dtype=torch.float64)
    target = torch.tensor([[[10.1], [20.0 - 0.1 * (2**0.5 - 1)]]], dtype=torch.float64)
    x = target + attraction.grad(z)  # so that the unit step leads to the target
    energy = attraction + Quadratic()
    step = z - energy.grad(z, x)
    torch.testing.assert_close(step, target)
    assert (energy(step, x) > energy(z, x) + 1e-3).all()
    assert not attraction.concave
