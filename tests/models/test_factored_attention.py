"""Factored attention as a Potts model: rank, row sums, three sites, gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cases.potts import all_colours, draw_exactly, random_couplings
from implicit_attn.models import FactoredAttention, fit_pseudolikelihood
from implicit_attn.models.potts import ROWS


def drawn(sites: int, colours: int, heads: int, rows: str, power: int = 1) -> FactoredAttention:
    """A model with all parameters at random, float64."""
    generator = torch.Generator().manual_seed(0)
    model = FactoredAttention(sites, colours, heads, rows, power).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def colours(model: FactoredAttention, samples: int = 4) -> Tensor:
    shape = (samples, model.sites)
    return torch.randint(model.colours, shape, generator=torch.Generator().manual_seed(1))


# With 9 heads of 4 sites and 3 colours the product with J is cheaper than the heads.
@pytest.mark.parametrize("heads", [1, 9])
@pytest.mark.parametrize("rows", ROWS)
def test_logits_are_those_of_the_couplings(rows: str, heads: int) -> None:
    model = drawn(4, 3, heads, rows)
    s = colours(model)
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
    couplings = random_couplings(5, 3, torch.Generator().manual_seed(2))
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
    s, weights, values = colours(model), model.attention(), model.values
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


def test_mistakes() -> None:
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
