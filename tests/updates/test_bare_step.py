"""The step of bare attention: its fixed points, its spheres, and that it descends no energy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import solvers
from implicit_attn import DEQ
from implicit_attn.energies import BareAttention, Quadratic
from implicit_attn.updates import BareAttentionStep

F64 = torch.float64


def made(sites: int, dim: int, seed: int = 0, **options: Any) -> BareAttention:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        energy = BareAttention(sites, dim, **options).double()
        nn.init.normal_(energy.couplings.free)
    return energy


def start(batch: int, sites: int, dim: int, seed: int = 1) -> Tensor:
    z = torch.randn(batch, sites, dim, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return z / z.norm(dim=-1, keepdim=True)


@torch.no_grad()
def trajectory(step: BareAttentionStep, z: Tensor, steps: int) -> list[Tensor]:
    states = [z]
    for _ in range(steps):
        states.append(step(states[-1]))
    return states


@pytest.mark.parametrize("gamma", [0.0, 0.5])
def test_the_step_is_attention_and_a_normalisation(gamma: float) -> None:
    energy, z = made(5, 4), start(3, 5, 4)
    mixed = (1 - gamma) * energy.pull(z) + gamma * z
    step = BareAttentionStep(energy, gamma=gamma, radius=2.0)
    torch.testing.assert_close(step(z), 2 * mixed / mixed.norm(dim=-1, keepdim=True))
    circles = BareAttentionStep(energy, gamma=gamma, radius=2**0.5, circles=2)(z)
    pairs = mixed.unflatten(-1, (2, 2))
    torch.testing.assert_close(circles, (pairs / pairs.norm(dim=-1, keepdim=True)).flatten(-2))
    free = BareAttentionStep(energy, gamma=gamma, radius=None)
    torch.testing.assert_close(free(z), mixed)


@pytest.mark.parametrize("gamma", [0.0, 0.5])
def test_symmetric_couplings_reach_a_fixed_point(gamma: float) -> None:
    """N = 5, d = 3: a residual below 1e-13, and the derivative there says how fast."""
    step = BareAttentionStep(made(5, 3, symmetric_sites=True), gamma=gamma)
    states = trajectory(step, start(4, 5, 3), 1000)
    residual = (step(states[-1]) - states[-1]).flatten(1).norm(dim=1)
    assert residual.max() < 1e-13
    radius = solvers.spectral_radius(step, states[-1])
    assert (radius < 1).all()


def test_as_a_layer_with_implicit_gradients() -> None:
    """From a state near a fixed point; gradients reach the couplings."""
    energy = made(5, 3, symmetric_sites=True)
    near = trajectory(BareAttentionStep(energy, gamma=0.5), start(2, 5, 3), 100)[-1]
    weights = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(3), dtype=F64)

    def value(energy: BareAttention) -> Tensor:
        options = {"solver": solvers.Forward(), "tolerance": solvers.Tolerance(1e-12)}
        solution = DEQ(BareAttentionStep(energy, gamma=0.5), **options).solve(near, max_steps=400)
        assert solution.converged.all()
        return (weights * solution.value).sum()

    (slope,) = torch.autograd.grad(value(energy), energy.couplings.free)
    change = torch.randn(slope.shape, generator=torch.Generator().manual_seed(4), dtype=F64)
    values = []
    for eps in (1e-5, -1e-5):
        moved = made(5, 3, symmetric_sites=True)
        with torch.no_grad():
            moved.couplings.free.add_(eps * change)
            values.append(value(moved).item())
    expected = (values[0] - values[1]) / 2e-5
    assert (slope * change).sum().item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("size", [1e-30, 1e-22, 1e-10, 1e10, 1e20, 1e30])
def test_pulls_of_any_size_end_on_the_sphere(size: float) -> None:
    energy = made(5, 4).float()
    with torch.no_grad():
        energy.couplings.free.mul_(size)
    z = start(3, 5, 4).float()
    for circles in (1, 2):
        moved = BareAttentionStep(energy, radius=3.0, circles=circles)(z)
        norms = moved.unflatten(-1, (circles, -1)).norm(dim=-1)
        torch.testing.assert_close(norms, torch.full_like(norms, 3.0 / circles**0.5))


def test_loneliness_is_a_matter_of_the_mask_and_not_of_the_pull() -> None:
    """Tokens without neighbours keep any norm; neighbours whose pull is 0 leave gamma z to normalise."""
    z = 0.5 * start(1, 3, 4)
    step = BareAttentionStep(made(3, 4), radius=3.0, gamma=0.5)
    alone = torch.tensor([[False, True, False]])
    assert torch.equal(step(z, mask=alone), z)
    single = BareAttentionStep(made(1, 4), radius=3.0)
    assert torch.equal(single(z[:, :1]), z[:, :1])
    with torch.no_grad():
        step.energy.couplings.free.zero_()
    torch.testing.assert_close(step(z), 6 * z)
    loose = BareAttentionStep(step.energy, radius=None, gamma=0.25)
    torch.testing.assert_close(loose(z), 0.25 * z)


def test_gradients_pass_by_nan_at_masked_tokens() -> None:
    mask = torch.tensor([[True, True, False, True]])
    z = start(1, 4, 3)
    z[0, 2] = torch.nan
    z.requires_grad_()
    for radius in (1.0, None):
        moved = BareAttentionStep(made(4, 3), gamma=0.5, radius=radius)(z, mask=mask)
        (slope,) = torch.autograd.grad(moved[mask].square().sum() + moved[mask].sum(), z)
        assert slope.isfinite().all() and (slope[0, 2] == 0).all()


def test_errors_name_what_is_wrong() -> None:
    energy = made(3, 4)
    with pytest.raises(TypeError, match="energy must be a BareAttention"):
        BareAttentionStep(Quadratic())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gamma must be below 1"):
        BareAttentionStep(energy, gamma=1.0)
    with pytest.raises(ValueError, match="circles must divide the 4 components, got 3"):
        BareAttentionStep(energy, circles=3)
