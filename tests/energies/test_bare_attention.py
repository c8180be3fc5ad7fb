"""Bare attention: energy, conditional laws, local learning, and its step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import solvers
from implicit_attn import DEQ
from implicit_attn.energies import BareAttention, Quadratic
from implicit_attn.updates import BareAttentionStep
from solvers import IsingSite, PottsSite, SphericalSite, TorusSite

F64 = torch.float64
# Tokens that are not masked: all, three, one.
KEEP = torch.tensor([[True] * 4, [True, False, True, True], [False, False, True, False]])


def made(sites: int = 4, dim: int = 4, *, size: float = 1.0, **options: Any) -> BareAttention:
    """With couplings N(0, size^2), drawn from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sites + dim)
        energy = BareAttention(sites, dim, **options).double()
        nn.init.normal_(energy.couplings.free, std=size)
    return energy


def on_circles(batch: int, sites: int, dim: int, seed: int = 0) -> Tensor:
    """Tokens (B, N, d) of d / 2 points on unit circles."""
    angles = torch.rand(batch, sites, dim // 2, generator=seeded(seed), dtype=F64) * 2 * math.pi
    return torch.stack([angles.cos(), angles.sin()], -1).flatten(-2)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def features(dim: int, width: int) -> Tensor:
    return torch.randn(dim, width, generator=seeded(9), dtype=F64) / width**0.5


def own_gradients(energy: BareAttention, z: Tensor) -> Tensor:
    """``de_i / dz_i`` for every i."""
    jacobian = torch.autograd.functional.jacobian(lambda s: energy.token_energies(s)[0], z)
    assert isinstance(jacobian, Tensor)
    index = torch.arange(z.shape[1])
    return jacobian[index, 0, index]


@pytest.mark.parametrize("lam", [0.3, 2.0])
@pytest.mark.parametrize("width", [None, 6])
def test_attention_is_minus_the_gradient_of_a_tokens_own_energy(
    lam: float, width: int | None
) -> None:
    energy = made(lam=lam, features=None if width is None else features(4, width))
    z = torch.randn(1, 4, energy.width, generator=seeded(1), dtype=F64)
    torch.testing.assert_close(energy.pull(z)[0], -own_gradients(energy, z), rtol=1e-12, atol=1e-13)
    alpha, effective = energy.attention(z), energy.couplings.weight
    if energy.features is not None:
        effective = energy.features.mT @ effective @ energy.features
    mixed = torch.einsum("nij,ijab,njb->nia", alpha, effective, z)
    torch.testing.assert_close(energy.pull(z), mixed, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_gradient_of_the_sum_has_another_term_as_large(symmetric: bool) -> None:
    """So the step, which leaves it out, is no descent of the energy; not for symmetric J either."""
    energy = made(12, 8, symmetric_sites=symmetric)
    z = on_circles(8, 12, 8)
    pull, both = energy.pull(z), -energy.grad(z)
    ratio = ((both - pull).norm() / pull.norm()).item()
    assert 0.7 < ratio < 1.4
    if symmetric:
        assert ((both / 2 - pull).norm() / pull.norm()).item() > 0.2


def test_a_small_lam_gives_the_pair_model_and_a_large_one_the_best_neighbour() -> None:
    z = on_circles(3, 5, 4)
    for lam, allowed in ((1e-3, 1e-2), (1e-5, 1e-4)):
        energy = made(5, 4, lam=lam)
        pair = torch.einsum("nia,ijab,njb->nij", z, energy.couplings.weight, z).sum(-1) / 4
        expected = -math.log(4) / lam - pair
        assert (energy.token_energies(z) - expected).abs().max() < allowed
    energy = made(5, 4, lam=300.0)
    scores = torch.einsum("nia,ijab,njb->nij", z, energy.couplings.weight, z)
    best = scores.masked_fill(torch.eye(5, dtype=torch.bool), -torch.inf).amax(-1)
    torch.testing.assert_close(energy.token_energies(z), -best, rtol=0, atol=math.log(4) / 300)


# --- the conditional laws --------------------------------------------------------------------------


def test_conditional_densities_integrate_to_one_and_have_their_means() -> None:
    """Two circles a token, on a grid of angles of the token; its neighbours stay as they are."""
    energy = made(3, 4, size=1.5, lam=1.3, site=TorusSite())
    z = on_circles(1, 3, 4)
    angle = torch.arange(60, dtype=F64) * (2 * math.pi / 60)
    first, second = torch.meshgrid(angle, angle, indexing="ij")
    grid = torch.stack([first.cos(), first.sin(), second.cos(), second.sin()], -1).view(-1, 1, 4)
    mixture, spread = energy.conditionals(z), 0.0
    for i in range(3):
        moved = z.expand(len(grid), 3, 4).clone()
        moved[:, i : i + 1] = grid
        density = energy.log_prob(moved)[:, i].exp()
        assert density.mean().item() == pytest.approx(1.0, abs=1e-12)
        mean = (density[:, None] * grid[:, 0]).mean(0)
        torch.testing.assert_close(mixture.mean()[0, i], mean, rtol=1e-10, atol=1e-12)
        spread = max(spread, density.std().item())
    assert spread > 0.5


def test_the_law_is_the_energy_and_its_normaliser() -> None:
    energy = made(lam=0.7, site=SphericalSite())
    z = (
        torch.nn.functional.normalize(torch.randn(2, 4, 4, generator=seeded(3), dtype=F64), dim=-1)
        * 2
    )
    mixture = energy.conditionals(z)
    expected = -0.7 * energy.token_energies(z) - mixture.log_total
    torch.testing.assert_close(energy.log_prob(z), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mixture.log_prob(z), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mixture.weights.sum(-1), torch.ones(2, 4, dtype=F64))
    moved = z.clone()
    moved[:, 0] = -moved[:, 0]
    torch.testing.assert_close(
        energy.conditionals(moved).mean()[:, 0], mixture.mean()[:, 0], rtol=1e-13, atol=1e-14
    )


@pytest.mark.parametrize(("site", "dim"), [(TorusSite(), 4), (IsingSite(), 1), (PottsSite(), 3)])
def test_draws_have_the_means_of_the_law(site: Any, dim: int) -> None:
    energy, draws = made(3, dim, size=1.2, site=site), 4000
    z = site.sample(torch.zeros(1, 3, dim, dtype=F64), seeded(5))
    mixture = energy.conditionals(z.expand(draws, 3, dim))
    drawn = mixture.sample(seeded(6))
    error = drawn.mean(0) - energy.conditionals(z).mean()[0]
    assert (error.abs() <= 4 * drawn.std(0) / draws**0.5 + 1e-12).all()
    assert drawn.std(0).max() > 0.1
    if dim == 4:
        torch.testing.assert_close(drawn.square().sum(-1), torch.full((draws, 3), 2.0, dtype=F64))


# --- masks -----------------------------------------------------------------------------------------


def test_masked_tokens_neither_speak_nor_have_a_law() -> None:
    energy = made(site=TorusSite())
    z = on_circles(3, 4, 4)
    garbage = z.masked_fill(~KEEP.unsqueeze(-1), torch.nan)
    log_prob, alpha = energy.log_prob(garbage, mask=KEEP), energy.attention(garbage, mask=KEEP)
    assert (log_prob[~KEEP] == 0).all() and (alpha[~KEEP] == 0).all()
    assert (alpha.mT[~KEEP] == 0).all()
    short = made(3, 4, site=TorusSite())
    keep = KEEP[1]
    short.couplings.weight = energy.couplings.weight.detach()[keep][:, keep]
    torch.testing.assert_close(log_prob[1, keep], short.log_prob(z[1:2, keep])[0])
    mean = energy.conditionals(garbage, mask=KEEP).mean()
    torch.testing.assert_close(mean[1, keep], short.conditionals(z[1:2, keep]).mean()[0])


def test_a_token_without_neighbours_has_the_law_of_the_site() -> None:
    energy = made(site=TorusSite())
    z = on_circles(3, 4, 4)
    assert energy.token_energies(z, mask=KEEP)[2].abs().max() == 0
    assert energy.log_prob(z, mask=KEEP)[2].abs().max() <= 1e-15
    assert energy.pull(z, mask=KEEP)[2].abs().max() == 0
    assert energy.conditionals(z, mask=KEEP).mean()[2, 2].abs().max() == 0
    assert energy.local_gradient(z[2:], mask=KEEP[2:]).abs().max() == 0


# --- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e3, 1e20, 1e30])
def test_laws_of_huge_couplings_are_finite_in_single_precision(size: float) -> None:
    energy = made(3, 4, size=size, site=TorusSite()).float()
    z = on_circles(2, 3, 4).float()
    law = energy.conditionals(z)
    for found in (energy.log_prob(z), law.mean(), energy.local_gradient(z)):
        assert found.isfinite().all()
    pairs = law.mean().unflatten(-1, (2, 2)).norm(dim=-1)
    torch.testing.assert_close(pairs, torch.ones_like(pairs), rtol=0, atol=1e-3)


# --- errors ----------------------------------------------------------------------------------------


def by_autograd(energy: BareAttention, z: Tensor, rule: str, mask: Tensor | None = None) -> Tensor:
    """The gradient of the rule's loss by the free entries of J."""
    terms = -energy.log_prob(z, mask=mask) if rule == "exact" else energy(z, mask=mask).unsqueeze(1)
    return torch.autograd.grad(terms.sum(1).mean(), energy.couplings.free)[0]


@pytest.mark.parametrize("rule", ["exact", "source"])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("width", [None, 6])
@pytest.mark.parametrize("masked", [False, True])
def test_a_local_rule_is_the_gradient_of_its_loss(
    rule: str, symmetric: bool, width: int | None, masked: bool
) -> None:
    given = None if width is None else features(4, width)
    energy = made(lam=1.4, features=given, symmetric_sites=symmetric, site=TorusSite())
    z, mask = on_circles(3, 4, energy.width), KEEP if masked else None
    expected = by_autograd(energy, z, rule, mask)
    gradient = energy.local_gradient(z, rule, mask=mask)
    assert gradient.shape == (4, 4, 4, 4)
    assert gradient[range(4), range(4)].abs().max() == 0
    energy.assign_gradient(gradient)
    assert energy.couplings.free.grad is not None
    torch.testing.assert_close(energy.couplings.free.grad, expected, rtol=1e-10, atol=1e-13)


def test_hebbs_rule_is_the_limit_of_a_small_lam_and_the_first_step_of_every_rule() -> None:
    z = on_circles(6, 4, 4)
    blocks = torch.einsum("nia,njb->ijab", z, z) / -(6 * 3)
    blocks[range(4), range(4)] = 0.0
    energy = made(lam=1e-7, site=TorusSite())
    torch.testing.assert_close(energy.local_gradient(z, "hebb"), blocks)
    torch.testing.assert_close(energy.local_gradient(z, "source"), blocks, rtol=1e-5, atol=1e-6)
    zero = made(lam=1.0, site=TorusSite())
    with torch.no_grad():
        zero.couplings.free.zero_()
    for rule in ("hebb", "source", "exact"):
        torch.testing.assert_close(zero.local_gradient(z, rule), blocks, rtol=1e-12, atol=1e-14)


def test_without_the_normaliser_the_loss_has_no_minimum() -> None:
    """Times 10, E falls about tenfold, for ever; the likelihood has a best scale."""
    z = on_circles(200, 4, 4)
    sums, losses = [], []
    for size in (0.3, 3.0, 30.0):
        energy = made(site=TorusSite(), size=size)
        sums.append(energy(z).mean().item())
        losses.append(-energy.log_prob(z).sum(1).mean().item())
    assert sums[0] > sums[1] > sums[2]
    assert sums[2] / sums[1] == pytest.approx(10, rel=0.1)
    assert losses[2] > losses[1] > losses[0] > 0  # data without structure: the best J is 0


def test_on_a_ball_the_small_lam_minimum_is_hebbs_matrix() -> None:
    """E is linear in J for lam -> 0, so its minimum on ``|J|_F <= 1`` points along the data."""
    z = on_circles(6, 4, 4)
    hebb = -made(lam=1e-6).local_gradient(z, "hebb")
    best = hebb / hebb.norm()
    energy = made(lam=1e-6)
    energy.couplings.weight = best
    smallest = energy(z).mean().item()
    for seed in range(20):
        other = torch.randn(best.shape, generator=seeded(seed), dtype=F64)
        other = (best + 0.3 * other) * (best != 0)
        energy.couplings.weight = other / other.norm()
        assert energy(z).mean().item() > smallest


def test_errors_name_what_is_wrong() -> None:
    z, energy = on_circles(2, 4, 4), made(site=TorusSite())
    mixture, gradient = energy.conditionals(z), energy.local_gradient(z)

    class NoDraws:
        log_partition = mean = covariance = staticmethod(lambda h, v: h.sum(-1))

    rows: list[tuple[Any, type[Exception], str]] = [
        (lambda: BareAttention(4, 4, features=torch.ones(6, 4)), ValueError, "d = 4, got .6, 4."),
        (lambda: BareAttention(4, 4, site=TorusSite), TypeError, "site must have log_partition"),  # type: ignore[arg-type]
        (lambda: made()(z[:, :3]), ValueError, "must have 4 sites"),
        (lambda: made()(z[..., :3]), ValueError, "4 features"),
        (lambda: made()(z.float()), TypeError, "dtype of the weights"),
        (lambda: made().log_prob(z), ValueError, "site must be given"),
        (lambda: mixture.log_prob(z[:, :3]), ValueError, r"z must have the shape \(2, 4, 4\)"),
        (mixture._replace(site=NoDraws()).sample, NotImplementedError, "no method sample"),
        (lambda: energy.local_gradient(z[:0]), ValueError, "z must hold at least one sample"),
        (lambda: energy.assign_gradient(gradient.float()), TypeError, "of torch.float64"),
        (lambda: energy.assign_gradient(gradient[:3]), ValueError, "N = 4, d = 4, got"),
    ]
    for call, error, words in rows:
        with pytest.raises(error, match=words):
            call()


def step_of(sites: int, dim: int, seed: int = 0, **options: Any) -> BareAttention:
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
    energy, z = step_of(5, 4), start(3, 5, 4)
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
    step = BareAttentionStep(step_of(5, 3, symmetric_sites=True), gamma=gamma)
    states = trajectory(step, start(4, 5, 3), 1000)
    residual = (step(states[-1]) - states[-1]).flatten(1).norm(dim=1)
    assert residual.max() < 1e-13
    radius = solvers.spectral_radius(step, states[-1])
    assert (radius < 1).all()


def test_as_a_layer_with_implicit_gradients() -> None:
    """From a state near a fixed point; gradients reach the couplings."""
    energy = step_of(5, 3, symmetric_sites=True)
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
        moved = step_of(5, 3, symmetric_sites=True)
        with torch.no_grad():
            moved.couplings.free.add_(eps * change)
            values.append(value(moved).item())
    expected = (values[0] - values[1]) / 2e-5
    assert (slope * change).sum().item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("size", [1e-30, 1e-22, 1e-10, 1e10, 1e20, 1e30])
def test_pulls_of_any_size_end_on_the_sphere(size: float) -> None:
    energy = step_of(5, 4).float()
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
    step = BareAttentionStep(step_of(3, 4), radius=3.0, gamma=0.5)
    alone = torch.tensor([[False, True, False]])
    assert torch.equal(step(z, mask=alone), z)
    single = BareAttentionStep(step_of(1, 4), radius=3.0)
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
        moved = BareAttentionStep(step_of(4, 3), gamma=0.5, radius=radius)(z, mask=mask)
        (slope,) = torch.autograd.grad(moved[mask].square().sum() + moved[mask].sum(), z)
        assert slope.isfinite().all() and (slope[0, 2] == 0).all()


def test_errors_of_steps() -> None:
    energy = step_of(3, 4)
    with pytest.raises(TypeError, match="energy must be a BareAttention"):
        BareAttentionStep(Quadratic())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gamma must be below 1"):
        BareAttentionStep(energy, gamma=1.0)
    with pytest.raises(ValueError, match="circles must divide the 4 components, got 3"):
        BareAttentionStep(energy, circles=3)
