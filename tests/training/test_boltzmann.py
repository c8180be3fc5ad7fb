"""Learning by the gradient of the likelihood: against enumeration, and against the truth."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import solvers
from implicit_attn.models import PottsModel
from implicit_attn.training import (
    contrastive_divergence,
    exact_likelihood,
    fit_exact_likelihood,
)
from tests.cases.potts import all_colours, random_couplings, samples_of


def potts(sites: int = 3, colours: int = 3, scale: float = 0.8, seed: int = 0) -> PottsModel:
    model = PottsModel(sites, colours).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        model.couplings.weight = random_couplings(sites, colours, generator, scale)
        model.field.copy_(0.3 * torch.randn(sites, colours, generator=generator))
    return model


def states_of(model: PottsModel, number: int, seed: int = 0) -> Tensor:
    with torch.no_grad():
        drawn = samples_of(model.energy, model.sites, model.colours, number, seed)
    return F.one_hot(drawn, model.colours).double()


class Ising(nn.Module):
    """Spins +-1, to see that nothing needs one-hot sites."""

    class Weight(nn.Module):
        def __init__(self, sites: int) -> None:
            super().__init__()
            self.free = nn.Parameter(torch.zeros(sites, sites, dtype=torch.float64))

        @property
        def weight(self) -> Tensor:
            upper = self.free.triu(1)
            return (upper + upper.mT)[..., None, None]

    def __init__(self, sites: int) -> None:
        super().__init__()
        self.couplings = self.Weight(sites)
        self.field = nn.Parameter(torch.zeros(sites, 1, dtype=torch.float64))

    def energy(self, s: Tensor) -> Tensor:
        acting = self.field + 0.5 * torch.einsum("ijab,kjb->kia", self.couplings.weight, s)
        return -(acting * s).sum((1, 2))


def test_the_likelihood_against_probabilities() -> None:
    model = potts()
    states = F.one_hot(all_colours(3, 3), 3).double()
    one_by_one = torch.stack([exact_likelihood(model, each[None]) for each in states])
    assert one_by_one.exp().sum().item() == pytest.approx(1.0, rel=1e-12)
    expected = torch.log_softmax(-model.energy(states), 0)
    torch.testing.assert_close(one_by_one, expected)
    free = PottsModel(3, 3).double()
    assert exact_likelihood(free, states[:2]).item() == pytest.approx(-3 * math.log(3))


def test_its_gradient_is_the_difference_of_moments() -> None:
    model, data = potts(), states_of(potts(seed=1), 50)
    exact_likelihood(model, data).backward()
    states = F.one_hot(all_colours(3, 3), 3).double()
    weight = (-model.energy(states)).softmax(0).detach()
    assert model.field.grad is not None
    expected = data.mean(0) - torch.einsum("k,kia->ia", weight, states)
    torch.testing.assert_close(model.field.grad, expected)
    pairs = torch.einsum("mia,mjb->ijab", data, data) / len(data)
    pairs -= torch.einsum("k,kia,kjb->ijab", weight, states, states)
    gradient = model.couplings.free.grad
    assert gradient is not None
    rows, columns = torch.triu_indices(3, 3, 1)
    torch.testing.assert_close(gradient, pairs[rows, columns])


def test_the_maximum_has_the_moments_of_the_data() -> None:
    data, model = states_of(potts(), 3000), PottsModel(3, 3).double()
    fit = fit_exact_likelihood(model, data, tolerance=1e-8)
    assert fit.converged and fit.steps == len(fit.gradients) - 2
    best = exact_likelihood(model, data)
    assert best > exact_likelihood(potts(), data)  # more likely than the truth
    states = F.one_hot(all_colours(3, 3), 3).double()
    mean = torch.einsum("k,kia->ia", (-model.energy(states)).softmax(0), states)
    torch.testing.assert_close(mean, data.mean(0), rtol=0, atol=1e-7)


def test_the_penalty_keeps_couplings_finite() -> None:
    """Two sites that are always equal: the likelihood has no maximum."""
    data = F.one_hot(torch.tensor([[0, 0], [1, 1]]), 2).double()
    free, kept = PottsModel(2, 2).double(), PottsModel(2, 2).double()
    fit = fit_exact_likelihood(kept, data, l2=1e-2, tolerance=1e-8)
    unbound = [
        (fit_exact_likelihood(free, data, tolerance=tolerance), free.couplings.weight.abs().max())
        for tolerance in (1e-3, 1e-5)
    ]
    assert fit.converged and all(each.converged for each, _ in unbound)
    assert unbound[1][1] > unbound[0][1] + 1  # the size follows from the tolerance
    assert free.couplings.weight.abs().max() > 2 * kept.couplings.weight.abs().max()


@pytest.mark.parametrize("persistent", [False, True])
def test_sampling_comes_near_the_maximum(persistent: bool) -> None:
    data, best, model = states_of(potts(), 4000), PottsModel(3, 3).double(), PottsModel(3, 3)
    fit_exact_likelihood(best, data)
    seen: list[int] = []
    fit = contrastive_divergence(
        model,
        data,
        persistent=persistent,
        chains=300 if persistent else None,
        steps=100,
        batch=500,
        watch=lambda step, gradient: seen.append(step),
    )
    assert fit.status == "max_steps" and not fit.converged and seen == list(range(1, 101))
    with torch.no_grad():
        lost = exact_likelihood(best, data) - exact_likelihood(model, data.float())
        before = exact_likelihood(best, data) - exact_likelihood(PottsModel(3, 3), data.float())
    assert 0 <= lost.item() < 0.05 * before.item()


def test_the_bias_of_chains_that_start_at_the_data() -> None:
    """Two sites that are bound to be equal, data of one colour only: the model knows both colours, but
    its chains do not leave the data in one sweep, so that CD-1 sees next to no gradient."""
    model = PottsModel(2, 2).double()
    with torch.no_grad():
        model.couplings.weight = torch.einsum(
            "ij,ab->ijab", 1 - torch.eye(2).double(), 6 * torch.eye(2).double()
        )
    data = F.one_hot(torch.zeros(1000, 2).long(), 2).double()
    exact_likelihood(model, data).backward()
    gradients = [
        parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None
    ]
    true = torch.stack(gradients).norm().item()
    options = {"steps": 1, "batch": 1000, "rate": 1e-9}
    short = contrastive_divergence(model, data, sweeps=1, **options)  # type: ignore[arg-type]
    long = contrastive_divergence(model, data, sweeps=2000, **options)  # type: ignore[arg-type]
    assert short.gradients[0] < 0.1 * true
    assert long.gradients[0] == pytest.approx(true, rel=0.15)


def test_ising_spins() -> None:
    truth, model, sampled = Ising(4), Ising(4), Ising(4)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        truth.couplings.free.copy_(0.5 * torch.randn(4, 4, generator=generator))
    values = torch.tensor([[1.0], [-1.0]])
    states = torch.cartesian_prod(*[values[:, 0]] * 4).unsqueeze(-1).double()
    weight = (-truth.energy(states)).softmax(0).detach()
    data = states[torch.multinomial(weight, 5000, replacement=True, generator=generator)]
    assert fit_exact_likelihood(model, data, values=values, tolerance=1e-8).converged
    difference = (model.couplings.weight - truth.couplings.weight).abs().max()
    assert difference.item() < 0.1
    site = solvers.IsingSite()
    contrastive_divergence(sampled, data, site=site, steps=100, batch=500, rate=0.05)
    difference = (model.couplings.weight - sampled.couplings.weight).abs().max()
    assert difference.item() < 0.15


def test_learning_does_not_touch_the_random_state_and_repeats() -> None:
    data, found = states_of(potts(), 200), []
    for seed in (1, 2):
        model = PottsModel(3, 3)
        torch.manual_seed(seed)
        state = torch.random.get_rng_state()
        contrastive_divergence(model, data, steps=3, seed=7, persistent=True)
        assert torch.equal(torch.random.get_rng_state(), state)
        found.append(model.couplings.weight.detach())
    assert torch.equal(found[0], found[1])


def test_mistakes() -> None:
    model, data = PottsModel(3, 3), states_of(potts(), 10)
    with pytest.raises(ValueError, match="chains must be None without persistent"):
        contrastive_divergence(model, data, chains=5)
    with pytest.raises(ValueError, match="data must be states"):
        contrastive_divergence(model, data[:, :2])
    with pytest.raises(TypeError, match="site must be"):
        contrastive_divergence(model, data, site="potts")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="data must be one-hot for PottsSite"):
        contrastive_divergence(model, 0.5 * data)
    with pytest.raises(TypeError, match="persistent must be"):
        contrastive_divergence(model, data, persistent=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="seed must be"):
        contrastive_divergence(model, data, seed=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rate must be"):
        contrastive_divergence(model, data, rate=0.0)
    with pytest.raises(ValueError, match="configurations"):
        exact_likelihood(PottsModel(14, 3), torch.zeros(1, 14, 3))
    with pytest.raises(ValueError, match="values must have the shape"):
        exact_likelihood(model, data, values=torch.eye(2))
    with pytest.raises(ValueError, match="tied must be True"):
        exact_likelihood(PottsModel(3, 3, tied=False), data)


class Broken(PottsModel):
    """Its energy is not a number."""

    def energy(self, s: Tensor) -> Tensor:
        return super().energy(s) * math.nan


def test_a_gradient_that_is_not_finite_ends_the_learning() -> None:
    model, data = Broken(3, 3), states_of(potts(), 10)
    before = [parameter.clone() for parameter in model.parameters()]
    for fit in (contrastive_divergence(model, data, steps=5), fit_exact_likelihood(model, data)):
        assert fit.status == "nonfinite" and fit.steps == 0 and not fit.converged
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    data[0, 0, 0] = torch.inf
    with pytest.raises(ValueError, match="data must be finite"):
        fit_exact_likelihood(model, data)
