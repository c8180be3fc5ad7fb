"""Models of discrete sites: Potts, factored attention, and their fit by pseudo-likelihood."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.spin_models import all_colours, coupling_error, draw_exactly, samples_of
from cases.spin_models import couplings as random_couplings
from implicit_attn.energies.spins import zero_sum
from implicit_attn.models import FactoredAttention, PottsModel, fit_pseudolikelihood
from implicit_attn.models.potts import ROWS

# The Potts model: its conditionals by enumeration, its gradient by the formula, its gauge.


SITES, COLOURS = 4, 3


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def model_of(
    seed: int = 0, *, sites: int = SITES, scale: float = 1.0, field: float = 1.0
) -> PottsModel:
    model = PottsModel(sites, COLOURS).double()
    drawn = random_couplings(sites, COLOURS, scale, generator(seed))
    with torch.no_grad():
        model.couplings.weight = drawn
        model.field.copy_(field * torch.randn(sites, COLOURS, generator=generator(seed + 1)))
    return model


def colours(samples: int = 5, sites: int = SITES, seed: int = 2) -> Tensor:
    return torch.randint(COLOURS, (samples, sites), generator=generator(seed))


def test_logits_are_the_conditionals_of_the_joint_distribution() -> None:
    model = model_of()
    states = all_colours(SITES, COLOURS)
    weight = (-model.energy(states)).exp().view((COLOURS,) * SITES)
    conditional = torch.softmax(model.logits(states), -1)
    for site in range(SITES):
        wanted = (weight / weight.sum(site, keepdim=True)).movedim(site, -1)
        # Entry [s] of the others, then every colour of the site.
        found = conditional[:, site].view(*(COLOURS,) * SITES, COLOURS).select(site, 0)
        torch.testing.assert_close(found, wanted)


def test_gradient_of_the_pseudo_likelihood() -> None:
    """-<(S_i^a - p_i^a) S_j^b> / N, and the transposed term."""
    model, s = model_of(), colours(7)
    states = model.one_hot(s)
    model.pseudo_likelihood(s).backward()
    surprise = states - torch.softmax(model.logits(s), -1)
    wanted = -torch.einsum("nia,njb->ijab", surprise, states) / (len(s) * SITES)
    wanted = wanted + wanted.permute(1, 0, 3, 2)
    rows, columns = torch.triu_indices(SITES, SITES, 1)
    torch.testing.assert_close(model.couplings.free.grad, wanted[rows, columns])
    assert model.field.grad is not None
    torch.testing.assert_close(model.field.grad, -surprise.sum(0) / (len(s) * SITES))


def test_one_masked_site_estimates_the_pseudo_likelihood_without_bias() -> None:
    model, s = model_of(), colours(6)
    log_p = torch.log_softmax(model.logits(s), -1).gather(2, s.unsqueeze(2)).squeeze(2)
    # The mean over the masked site of the loss of predicting it, as masked modelling draws it.
    torch.testing.assert_close(model.pseudo_likelihood(s), -log_p.mean(0).mean())
    hidden = s.clone()
    hidden[:, 1] = (hidden[:, 1] + 1) % COLOURS
    torch.testing.assert_close(model.logits(hidden)[:, 1], model.logits(s)[:, 1])


def test_a_change_of_gauge_changes_no_conditional() -> None:
    model, other, s = model_of(), model_of(), colours(9)
    shift = torch.randn(SITES, SITES, COLOURS, dtype=torch.float64, generator=generator(7))
    shift = shift * (1 - torch.eye(SITES, dtype=torch.float64)).unsqueeze(2)
    moved = model.couplings.weight + shift[:, :, :, None] + shift.transpose(0, 1)[:, :, None, :]
    with torch.no_grad():
        other.couplings.weight = moved
        other.field.sub_(shift.sum(1))  # K_ij^{a} of all j acts on site i as a field
    torch.testing.assert_close(other.logits(s).softmax(-1), model.logits(s).softmax(-1))
    torch.testing.assert_close(zero_sum(moved), zero_sum(model.couplings.weight))
    assert coupling_error(moved, model.couplings.weight) < 1e-12
    assert float((moved - model.couplings.weight).detach().norm()) > 1


def test_the_fit_recovers_the_couplings_as_samples_grow() -> None:
    truth = model_of(3, sites=5, scale=0.8, field=0.3)
    errors = []
    for number in (500, 20_000):
        with torch.no_grad():
            data = samples_of(truth.energy, 5, COLOURS, number, seed=4)
        model = PottsModel(5, COLOURS).double()
        fit = fit_pseudolikelihood(model, data, 1e-6, steps=200, tolerance=1e-3)
        assert fit.converged and fit.gradient <= 1e-3
        errors.append(coupling_error(model.couplings.weight, truth.couplings.weight))
    assert errors[1] < 0.1 < errors[0]


WRONG = [
    (torch.zeros(2, 5, dtype=torch.long), ValueError, r"\(B, N\).*4 sites"),
    (torch.zeros(2, 4, 2), ValueError, r"\(B, N, d\).*3 colours"),
    (torch.full((2, 4), 3), ValueError, r"0 \.\. 2, got 3 \.\. 3"),
    (torch.full((2, 4), -1), ValueError, "got -1"),
    (torch.zeros(2, 4, dtype=torch.bool), TypeError, "bool"),
    (torch.zeros(0, 4, dtype=torch.long), ValueError, "B >= 1"),
    ([[0, 1, 2, 0]], TypeError, "list"),
]


@pytest.mark.parametrize(("s", "kind", "message"), WRONG)
def test_wrong_states_are_refused(s: Tensor, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        PottsModel(SITES, COLOURS).logits(s)


# Factored attention as a Potts model: rank, row sums, three sites, gradients.


def drawn(sites: int, colours: int, heads: int, rows: str, power: int = 1) -> FactoredAttention:
    """A model with all parameters at random, float64."""
    generator = torch.Generator().manual_seed(0)
    model = FactoredAttention(sites, colours, heads, rows, power).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def drawn_colours(model: FactoredAttention, samples: int = 4) -> Tensor:
    shape = (samples, model.sites)
    return torch.randint(model.colours, shape, generator=torch.Generator().manual_seed(1))


# With 9 heads of 4 sites and 3 colours the product with J is cheaper than the heads.
@pytest.mark.parametrize("heads", [1, 9])
@pytest.mark.parametrize("rows", ROWS)
def test_logits_are_those_of_the_couplings(rows: str, heads: int) -> None:
    model = drawn(4, 3, heads, rows)
    s = drawn_colours(model)
    couplings = model.couplings()
    wanted = model.field.expand(len(s), -1, -1).clone()
    for i in range(4):
        for j in range(4):
            wanted[:, i] += couplings[i, j].T[s[:, j]]
    torch.testing.assert_close(model.logits(s), wanted)
    assert bool((couplings.diagonal() == 0).all())
    torch.testing.assert_close(model.penalty(), 0.5 * couplings.square().sum())


@pytest.mark.parametrize("heads", [1, 4, 9])
def test_the_error_of_the_best_heads_is_the_tail_of_the_singular_values(heads: int) -> None:
    couplings = random_couplings(5, 3, 1.0, torch.Generator().manual_seed(2))
    sigma = torch.linalg.svdvals(couplings.reshape(25, 9))
    model = FactoredAttention.from_couplings(couplings, heads)
    error = (model.couplings() - couplings).norm()
    torch.testing.assert_close(error, sigma[heads:].square().sum().sqrt(), atol=1e-12, rtol=1e-9)
    assert heads == 9 or float(error.detach()) > 0.1  # 9 = min(N^2, d^2) is exact


@pytest.mark.parametrize("heads", [1, 7])
def test_softmax_rows_give_every_site_the_same_sum_of_couplings(heads: int) -> None:
    sums = drawn(5, 3, heads, "softmax").couplings().sum(1)
    torch.testing.assert_close(sums, sums[:1].expand_as(sums), atol=1e-14, rtol=1e-12)
    for rows in ("sink", "linear"):
        free = drawn(5, 3, heads, rows).couplings().sum(1)
        assert float((free - free[:1]).detach().abs().max()) > 0.05
    assert bool((drawn(5, 3, heads, "sink").attention().sum(-1) < 1).all())


@pytest.mark.parametrize("rows", ROWS)
def test_squared_values_are_couplings_of_three_sites(rows: str) -> None:
    model = drawn(4, 3, 2, rows, power=2)
    s, weights, values = drawn_colours(model), model.attention(), model.values
    triples = torch.einsum(
        "hij,hik,har,hrb,hrc->ijkabc", weights, weights, model.output, values, values
    )
    states = model.one_hot(s)
    wanted = model.field + torch.einsum("ijkabc,mjb,mkc->mia", triples, states, states)
    torch.testing.assert_close(model.logits(s), wanted)
    with pytest.raises(ValueError, match="power must be 1"):
        model.couplings()


def test_squared_values_learn_three_sites_where_pairs_cannot() -> None:
    """Six spins whose triples (0 1 2) and (3 4 5) multiply to 1: no pair is correlated."""
    states = all_colours(6, 2)
    spins = 1.0 - 2.0 * states
    log_weight = 1.5 * (spins[:, :3].prod(1) + spins[:, 3:].prod(1))
    generator = torch.Generator().manual_seed(5)
    data = states[draw_exactly(log_weight, 4000, generator)]
    # p(s_i | rest) = sigmoid(2 * 1.5 * s_i s_j s_k), the same at every site.
    right = torch.sigmoid(torch.tensor(3.0)).item()
    bayes = -right * math.log(right) - (1 - right) * math.log(1 - right)
    losses = {}
    for power in (1, 2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = FactoredAttention(6, 2, heads=2, rows="sink", power=power)
        fit = fit_pseudolikelihood(model, data, solver="adam", steps=300, batch=500, rate=0.1)
        assert fit.status == "max_steps"
        losses[power] = float(model.pseudo_likelihood(data).detach())
    assert losses[2] < bayes + 0.02
    assert losses[1] > math.log(2) - 0.01


def test_mistakes_of_a_model() -> None:
    with pytest.raises(ValueError, match="rows"):
        FactoredAttention(4, 3, rows="none")
    with pytest.raises(ValueError, match="power"):
        FactoredAttention(4, 3, power=3)
    with pytest.raises(ValueError, match=r"heads must be <= 9"):
        FactoredAttention.from_couplings(torch.zeros(5, 5, 3, 3), 10)
    with pytest.raises(ValueError, match="shape"):
        FactoredAttention.from_couplings(torch.zeros(5, 4, 3, 3), 1)
    with pytest.raises(ValueError, match="J_ii"):
        FactoredAttention.from_couplings(torch.ones(5, 5, 3, 3), 1)


# Fits by pseudo-likelihood: what the record says, and that it is true.


def data(samples: int = 60) -> Tensor:
    """Four sites of three colours; the second follows the first, nine times in ten."""
    generator = torch.Generator().manual_seed(0)
    s = torch.randint(3, (samples, 4), generator=generator)
    follow = torch.rand(samples, generator=generator) < 0.9
    s[:, 1] = torch.where(follow, s[:, 0], s[:, 1])
    return s


def test_a_converged_fit_is_at_the_minimum() -> None:
    model = PottsModel(4, 3).double()
    fit = fit_pseudolikelihood(model, data(), 0.01, steps=200, tolerance=1e-6)
    assert fit.status == "converged" and fit.gradient <= 1e-6
    objective = model.pseudo_likelihood(data()) + 0.01 * model.penalty()
    gradients = torch.autograd.grad(objective, list(model.parameters()))
    assert max(float(each.abs().max()) for each in gradients) < 1e-6
    assert math.isclose(fit.losses[-1], float(objective.detach()), rel_tol=1e-9)
    assert fit.losses[0] == pytest.approx(math.log(3))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_too_few_steps_are_called_so() -> None:
    fit = fit_pseudolikelihood(PottsModel(4, 3), data(), 0.01, steps=2)
    assert (fit.status, fit.steps, fit.converged) == ("max_steps", 2, False)
    assert fit.gradient > 1e-5


@pytest.mark.parametrize("schedule", ["one-cycle", "constant"])
def test_adam_finds_the_same_minimum(schedule: str) -> None:
    exact, model = PottsModel(4, 3), PottsModel(4, 3)
    fit_pseudolikelihood(exact, data(), 0.01, steps=100)
    seen: list[tuple[int, float]] = []
    fit = fit_pseudolikelihood(
        model, data(), 0.01, "adam", steps=300, schedule=schedule,
        watch=lambda step, loss: seen.append((step, loss)),
    )  # fmt: skip
    assert fit.status == "max_steps" and math.isnan(fit.gradient)
    torch.testing.assert_close(model.couplings.weight, exact.couplings.weight, atol=2e-2, rtol=0)
    assert seen == list(enumerate(fit.losses, 1)) and len(seen) == 300


@pytest.mark.parametrize("solver", ["lbfgs", "adam"])
def test_a_loss_that_is_not_finite_is_told_and_changes_nothing(solver: str) -> None:
    model = PottsModel(4, 3)
    with torch.no_grad():
        model.field[0, 0] = float("nan")
    fit = fit_pseudolikelihood(model, data(), solver=solver)
    assert fit.status == "nonfinite"
    assert not bool(model.couplings.free.any())


@pytest.mark.parametrize("solver", ["lbfgs", "adam"])
def test_a_model_without_free_parameters_is_refused(solver: str) -> None:
    with pytest.raises(ValueError, match="model must have a parameter"):
        fit_pseudolikelihood(PottsModel(4, 3).requires_grad_(False), data(), solver=solver)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"l2": -1.0}, ValueError, "l2"),
        ({"solver": "newton"}, ValueError, "solver"),
        ({"solver": "adam", "rate": 0.0}, ValueError, "rate"),
        ({"solver": "adam", "rate": 1e38}, ValueError, "rate"),
        ({"solver": "adam", "schedule": "none"}, ValueError, "schedule"),
        ({"rate": 0.1}, ValueError, "rate needs solver='adam'"),
        ({"solver": "adam", "tolerance": 1e-3}, ValueError, "tolerance needs solver='lbfgs'"),
        ({"watch": 3}, TypeError, "watch"),
    ],
)
def test_mistakes_of_a_fit(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        fit_pseudolikelihood(PottsModel(4, 3), data(), **options)
    with pytest.raises(TypeError, match="model"):
        fit_pseudolikelihood(torch.nn.Linear(2, 2), data())  # type: ignore[arg-type]
