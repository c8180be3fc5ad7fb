"""The Potts model: its conditionals by enumeration, its gradient by the formula, its gauge."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cases.potts import all_colours, coupling_error, random_couplings, samples_of
from implicit_attn.energies.spins import zero_sum
from implicit_attn.models import PottsModel, fit_pseudolikelihood

SITES, COLOURS = 4, 3


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def model_of(
    seed: int = 0, *, sites: int = SITES, scale: float = 1.0, field: float = 1.0
) -> PottsModel:
    model = PottsModel(sites, COLOURS).double()
    drawn = random_couplings(sites, COLOURS, generator(seed), scale)
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
