"""The effective energy of an RBM: equal to the machine with its hidden units summed out."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from implicit_attn import DEQ
from implicit_attn.energies import (
    ClassicalHopfield,
    DenseAssociative,
    EffectiveRBM,
    Hopfield,
    IsingLagrangian,
    Quadratic,
    SphericalLagrangian,
)
from solvers import SphericalSite, Tolerance

UNITS, DIM = 2, 3


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


LAWS = {"ising": ([-1.0, 1.0], 0.5), "binary": ([0.0, 1.0], 0.5), "constant": ([1.0], 1.0)}


def summed_out(weights: Tensor, v: Tensor, name: str) -> Tensor:
    """``-log`` of the joint sum over all states of the hidden units, (B,)."""
    points, mass = LAWS[name]
    h = torch.tensor(list(itertools.product(points, repeat=len(weights))), dtype=torch.float64)
    return -torch.logsumexp(v @ weights.mT @ h.mT, dim=-1) - len(weights) * math.log(mass)


@pytest.mark.parametrize("name", LAWS)
def test_equals_the_sum_over_hidden_units(name: str) -> None:
    weights, v = draw(UNITS, DIM), draw(16, DIM, seed=1)
    energy = EffectiveRBM(weights, name)
    assert (energy(v) - summed_out(weights, v, name)).abs().max() <= 1e-12
    bias = draw(DIM, seed=2)
    full = EffectiveRBM(weights, name, visible="normal", bias=bias)
    extra = 0.5 * v.square().sum(1) - v @ bias
    assert (full(v) - summed_out(weights, v, name) - extra).abs().max() <= 1e-12


def test_vector_units_equal_their_sums() -> None:
    """One-hot units by enumeration; units on a sphere in three dimensions, Archimedes' integral."""
    weights, v = draw(2, 3, DIM), draw(16, DIM, seed=1)
    fields = torch.einsum("ukd,bd->buk", weights, v)
    states = itertools.product(torch.eye(3).double(), repeat=2)
    joint = [sum(fields[:, u] @ h for u, h in enumerate(state)) for state in states]
    enumerated = -torch.logsumexp(torch.stack(joint), 0) + math.log(9)  # type: ignore[arg-type]
    assert (EffectiveRBM(weights, "one-hot")(v) - enumerated).abs().max() <= 1e-12

    cosine, mass = (torch.from_numpy(t) for t in np.polynomial.legendre.leggauss(60))
    length = 1.5 * fields.norm(dim=-1, keepdim=True)
    on_sphere = -((length * cosine).exp() * mass / 2).sum(-1).log().sum(-1)
    energy = EffectiveRBM(weights, SphericalSite(radius=1.5))
    assert (energy(v) - on_sphere).abs().max() <= 1e-12


def test_equals_the_energies_that_have_a_name() -> None:
    weights, z = draw(5, DIM), draw(4, 6, DIM, seed=1)

    def same(energy: EffectiveRBM, value: Tensor, gradient: Tensor) -> None:
        torch.testing.assert_close(energy(z), value, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(energy.grad(z), gradient, rtol=1e-12, atol=1e-12)

    bias = draw(DIM, seed=3)
    classical = ClassicalHopfield(weights, bias=-bias)
    same(EffectiveRBM(weights, "normal", bias=bias), classical(z), classical.grad(z))
    dense = DenseAssociative(weights, power="exp")
    same(EffectiveRBM(weights, "poisson"), dense(z) + 6 * 5, dense.grad(z))  # 6 tokens, 5 units
    modern = Hopfield(weights)
    one_hot = EffectiveRBM(weights.unsqueeze(0), "one-hot", visible="normal")
    same(one_hot, modern(z) + 6 * math.log(5), modern.grad(z))
    ising = EffectiveRBM(weights, IsingLagrangian())
    named = EffectiveRBM(weights, "ising")
    same(named, ising(z) + 6 * 5 * math.log(2), ising.grad(z))


def test_a_domain_is_left_with_an_infinite_energy_and_no_gradient() -> None:
    energy = EffectiveRBM(torch.eye(2).double(), "exponential", visible="normal")
    z = torch.tensor([[0.2, 0.3], [0.2, 1.5], [1.0, 0.0]], dtype=torch.float64)
    value, gradient = energy.value_and_grad(z)
    assert value.isfinite().tolist() == [True, False, False]
    assert (value[1:] == -math.inf).all()
    assert gradient.isfinite().all(1).tolist() == [True, False, False]


def test_a_solver_stays_inside_the_domain() -> None:
    """``v = b + W^T K'(W v)``, with a barrier at about 2 and the wall at 2.5: whoever starts beyond the
    barrier slides towards the wall, where E has no minimum, and is not called converged."""
    weights = 0.4 * torch.eye(3, dtype=torch.float64)
    bias = torch.tensor([-0.2, 0.0, 0.3], dtype=torch.float64)
    energy = EffectiveRBM(weights, "exponential", visible="normal", bias=bias)
    layer = DEQ(energy, tolerance=Tolerance(rtol=1e-10), max_steps=200)
    starts = torch.tensor([[0.0, 0.0, 0.0], [1.8, -4.0, 1.0], [0.5, 2.4, -2.0]]).double()
    solution = layer.solve(starts, z0=starts, on_failure="ignore")
    assert solution.converged.tolist() == [True, True, False]
    assert (solution.value @ weights.mT < 1).all()
    assert energy(solution.value).isfinite().all()
    assert energy.grad(solution.value[:2]).abs().max() < 1e-8


@pytest.mark.parametrize(
    ("hidden", "shape", "options"),
    [
        ("normal", (3, 4), {}),
        ("poisson", (3, 4), {"scale": 0.25}),
        ("binary", (3, 4), {}),
        ("laplace", (3, 4), {"scale": 0.12}),
        ("one-hot", (2, 3, 4), {}),
        (SphericalSite(), (2, 2, 4), {"scale": 0.5}),
    ],
    ids=["normal", "poisson", "binary", "laplace", "one-hot", "sphere"],
)
def test_gibbs_samples_have_the_law_of_the_effective_energy(
    hidden: str | SphericalSite, shape: tuple[int, ...], options: dict[str, float]
) -> None:
    """Frequencies of the 16 states of 4 visible spins against ``exp(-E) / Z``."""
    weights, chains = options.get("scale", 0.4) * draw(*shape), 20_000
    energy = EffectiveRBM(weights, hidden, visible="ising", bias=0.3 * draw(4, seed=5))
    states = torch.tensor([*itertools.product([-1.0, 1.0], repeat=4)], dtype=torch.float64)
    exact = (-energy(states)).softmax(0)
    generator = torch.Generator().manual_seed(0)
    v = energy.gibbs(states[:1].expand(chains, 4), 15, generator)
    found = (v.unsqueeze(1) == states).all(-1).double().mean(0)
    error = (exact * (1 - exact) / chains).sqrt()
    assert found.sum() == pytest.approx(1)  # no other state
    assert ((found - exact).abs() <= 4 * error).all()


def test_gibbs_samples_of_real_units() -> None:
    """Normal units on both sides: a Gaussian with covariance ``(I - W^T W)^-1``."""
    weights, bias = 0.25 * draw(3, 3), draw(3, seed=5)
    energy = EffectiveRBM(weights, "normal", visible="normal", bias=bias)
    covariance = torch.linalg.inv(torch.eye(3) - weights.mT @ weights)
    v = energy.gibbs(torch.zeros(40_000, 3).double(), 25, torch.Generator().manual_seed(0))
    assert (v.mean(0) - covariance @ bias).abs().max() < 0.03
    assert (torch.cov(v.mT) - covariance).abs().max() < 0.05


def test_an_equilibrium_is_found_and_differentiated() -> None:
    torch.manual_seed(0)
    energy = EffectiveRBM(
        0.3 * torch.randn(4, 3), "ising", visible="normal", learnable=True
    ).double()
    x = torch.randn(2, 5, 3).double()
    layer = DEQ(energy + Quadratic(), tolerance=Tolerance(rtol=1e-12), max_steps=200)
    layer(x).square().sum().backward()
    assert energy.patterns.grad is not None and energy.patterns.grad.abs().max() > 0


def test_mistakes_of_samples() -> None:
    weights, vector = draw(3, 4), draw(2, 3, 4)
    spins, h = torch.ones(2, 4).double(), torch.ones(2, 3).double()
    ising = EffectiveRBM(weights, visible="ising")
    for bad, error, message in (
        (lambda: ising.gibbs(spins * math.nan, 1), ValueError, r"v must have the entries -1 and 1"),
        (lambda: ising.gibbs(spins[:, :3], 1), ValueError, r"v must have the shape \(\.\.\., 4\)"),
        (lambda: ising.gibbs(spins.float(), 1), TypeError, "v must be of the dtype of the weights"),
        (lambda: ising.sample_visible(h[:, :2]), ValueError, r"h must have the shape \(\.\.\., 3"),
        (
            lambda: EffectiveRBM(vector, "one-hot", visible="ising").sample_visible(spins),
            ValueError,
            r"h must have the shape \(\.\.\., 2, 3\), got",
        ),
        (lambda: EffectiveRBM(draw(1, 1, 4), "one-hot"), ValueError, r"with components >= 2, got"),
    ):
        with pytest.raises(error, match=message):
            bad()


def test_strong_fields_of_poisson_units_keep_their_spins() -> None:
    """Fields of 48: means of 10^20, which no integer of the sampler holds."""
    energy = EffectiveRBM(torch.full((1, 4), 12.0), "poisson", visible="ising")
    aligned = torch.ones(5, 4)
    assert torch.equal(energy.gibbs(aligned, 3, torch.Generator().manual_seed(0)), aligned)


def test_mistakes() -> None:
    weights = draw(3, 4)
    for bad, error, message in (
        (lambda: EffectiveRBM(weights, SphericalSite()), ValueError, "d >= 2"),
        (lambda: EffectiveRBM(weights, "one-hot"), ValueError, "needs weights .units, components,"),
        (lambda: EffectiveRBM(weights, bias=torch.ones(3)), ValueError, "bias must have the shape"),
        (lambda: EffectiveRBM(weights).gibbs(torch.ones(1, 4).double(), 1), ValueError, "visible"),
        (
            lambda: EffectiveRBM(weights, SphericalLagrangian()).sample_hidden(
                torch.ones(1, 4).double()
            ),
            TypeError,
            "hidden must have sample",
        ),
    ):
        with pytest.raises(error, match=message):
            bad()
