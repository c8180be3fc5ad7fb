"""What the gallery computes beside the library: rings, tokens on circles, local rules, likelihoods."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cases.potts import all_colours, random_couplings, samples_of
from implicit_attn.energies import BareAttention
from implicit_attn.models import PottsModel
from solvers import TorusSite

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
Load = Callable[[Path], ModuleType]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Parity along a ring.


@pytest.mark.parametrize(("size", "marks"), [(1, (1, 1)), (2, (1, 2)), (7, (1, 3)), (12, (4, 20))])
def test_parities_and_runs_by_hand(size: int, marks: tuple[int, int], load: Load) -> None:
    rings = load(EXAMPLES / "rings/easy_to_hard.py").draw_rings(20, size, seeded(), marks)
    for ring in range(20):
        bits, marked = (rings.inputs[ring] > 0).long().T.tolist()
        assert min(marks[0], size) <= sum(marked) <= marks[1]
        runs = []
        for place in range(size):
            back = next(n for n in range(size) if marked[place - n])
            runs.append([bits[place - n] for n in range(back + 1)])
            assert int(rings.targets[ring, place]) == sum(runs[-1]) % 2
        assert int(rings.difficulty[ring]) == max(map(len, runs))


# Images as tokens on circles.


def test_tokens_on_circles_and_back(load: Load) -> None:
    codec = load(EXAMPLES / "bare/images.py").CircleTokens(3, 4, 6, 2)
    images = torch.rand(200, 3, 4, 6, generator=seeded())
    images[0, 0, 0, :2] = torch.tensor([0.0, 1.0])
    tokens, once = codec.encode(images), torch.ones(200, 6)
    assert tokens.shape == (200, codec.sites, codec.dim) == (200, 6, 24)
    torch.testing.assert_close(tokens.norm(dim=-1), 12**0.5 * once)
    for size in (1.0, 0.1):
        torch.testing.assert_close(codec.decode(size * tokens), images, rtol=0, atol=1e-6)
    patches = codec.patches(images)  # squares, counted by rows
    assert torch.equal(patches[:, 1], images[:, :, :2, 2:4].flatten(1))
    assert torch.equal(patches[:, 3], images[:, :, 2:, :2].flatten(1))
    assert torch.equal(codec.images(patches), images)
    noisy, anew = (codec.noisy(tokens, 0.3, seeded(1)) for _ in range(2))
    cosines = (tokens * noisy).unflatten(-1, (-1, 2)).sum(-1)
    assert cosines.mean().item() == pytest.approx(math.exp(-(0.3**2) / 2), abs=3e-3)
    assert torch.equal(noisy, anew)
    random = codec.random(200, seeded(2))
    assert abs(random.mean().item()) < 0.01
    torch.testing.assert_close(random.norm(dim=-1), 12**0.5 * once)


def test_a_value_is_half_a_turn(load: Load) -> None:
    """0, 1/2 and 1 lie at angles 0, pi/2 and pi; directions beyond go to the nearer end.

    A sine of -0.0 beside a negative cosine is the angle -pi; a pair (0, 0) has no direction.
    """
    circles = load(EXAMPLES / "bare/images.py")
    codec = circles.CircleTokens(1, 1, 3, 1)
    tokens = codec.encode(torch.tensor([0.0, 0.5, 1.0]).view(1, 1, 1, 3))
    expected = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    torch.testing.assert_close(tokens[0], expected, rtol=0, atol=1e-6)
    beyond = circles.points(torch.tensor([-0.3, math.pi + 0.3, math.pi / 4])).view(1, 3, 2)
    torch.testing.assert_close(codec.decode(beyond).flatten(), torch.tensor([0.0, 1.0, 0.25]))
    branch = codec.decode(torch.tensor([[[-1.0, -0.0], [0.0, 0.0], [-0.0, -0.0]]])).flatten()
    assert branch[:2].tolist() == [1, 0] and branch.min() >= 0 and branch.max() <= 1


def test_features_are_orthonormal_and_the_principal_ones_keep_most(load: Load) -> None:
    circles = load(EXAMPLES / "bare/images.py")
    images = torch.rand(50, 3, 4, 6, generator=seeded())
    tokens, kept = circles.CircleTokens(3, 4, 6, 2).encode(images), []
    for rows in (circles.random_features(5, 24, seeded(3)), circles.principal_features(5, tokens)):
        torch.testing.assert_close(rows @ rows.mT, torch.eye(5), rtol=0, atol=1e-6)
        kept.append((tokens @ rows.mT).square().mean().item())
    assert kept[1] > 1.5 * kept[0]
    whole = circles.principal_features(24, tokens)
    torch.testing.assert_close(tokens @ whole.mT @ whole, tokens, rtol=0, atol=1e-5)


# Local rules.


def turned() -> Tensor:
    """Three angles, the second that of the first plus a right angle, the third alone."""
    angles = 6.28 * torch.rand(200, 2, generator=seeded(1))
    angles = torch.stack([angles[:, 0], angles[:, 0] + 1.57, angles[:, 1]], 1)
    return torch.stack([angles.cos(), angles.sin()], -1)


@pytest.mark.parametrize("rule", ["exact", "source"])
def test_local_rules_find_the_right_pair(rule: str, load: Load) -> None:
    images, data = load(EXAMPLES / "bare/images.py"), turned()
    torch.manual_seed(0)
    model = BareAttention(3, 2, site=TorusSite())
    before = model.log_prob(data).sum(1).mean().item()
    recipe = images.Recipe(rule, cap=None if rule == "exact" else 1.5)
    images.learn(model, data, recipe, steps=120, batch=128, rate=0.1, seed=2)
    norms, turn = model.couplings.site_norms().detach(), model.couplings.weight[1, 0].detach()
    if rule == "source":  # the loss has no minimum: the bound is reached and holds
        assert norms[0, 1].item() == pytest.approx(1.5, rel=1e-4) and norms.max() <= 1.5 + 1e-6
        return
    assert model.log_prob(data).sum(1).mean().item() > before + 1.5
    assert norms[0, 1] > 2 * norms[0, 2] and norms[1, 0] > 2 * norms[1, 2]
    right_angle = torch.tensor([[0.0, -1], [1, 0]]) / 2**0.5
    torch.testing.assert_close(turn / turn.norm(), right_angle, rtol=0, atol=0.1)


def test_the_local_gradient_of_a_pair_sum_is_that_of_its_likelihood(load: Load) -> None:
    images, data = load(EXAMPLES / "bare/images.py"), turned()[:20].double()
    model = images.PairSum(3, 2, None).double()
    with torch.no_grad():
        model.couplings.free.normal_(generator=seeded())
    loss = -model.log_prob(data).sum(1).mean()
    (expected,) = torch.autograd.grad(loss, model.couplings.free)
    model.assign_gradient(model.local_gradient(data))
    torch.testing.assert_close(model.couplings.free.grad, expected)


# Likelihoods of Potts models.


def potts(seed: int = 0) -> PottsModel:
    model, generator = PottsModel(3, 3).double(), seeded(seed)
    with torch.no_grad():
        model.couplings.weight = random_couplings(3, 3, generator, 0.8)
        model.field.copy_(0.3 * torch.randn(3, 3, generator=generator))
    return model


def states_of(model: PottsModel, number: int) -> Tensor:
    with torch.no_grad():
        return F.one_hot(samples_of(model.energy, 3, 3, number, 0), 3).double()


def gradient_norm(model: PottsModel) -> float:
    norms = [each.grad.norm() for each in model.parameters() if each.grad is not None]
    return torch.stack(norms).norm().item()


def test_the_likelihood_and_its_gradient_by_enumeration(load: Load) -> None:
    exact_likelihood = load(EXAMPLES / "potts/boltzmann_learning.py").exact_likelihood
    model, data = potts(), states_of(potts(1), 50)
    states = F.one_hot(all_colours(3, 3), 3).double()
    one_by_one = torch.stack([exact_likelihood(model, each[None]) for each in states])
    assert one_by_one.exp().sum().item() == pytest.approx(1.0, rel=1e-12)
    torch.testing.assert_close(one_by_one, torch.log_softmax(-model.energy(states), 0))
    exact_likelihood(model, data).backward()
    weight = (-model.energy(states)).softmax(0).detach()
    expected = data.mean(0) - torch.einsum("k,kia->ia", weight, states)
    torch.testing.assert_close(model.field.grad, expected)
    pairs = torch.einsum("mia,mjb->ijab", data, data) / len(data)
    pairs -= torch.einsum("k,kia,kjb->ijab", weight, states, states)
    rows, columns = torch.triu_indices(3, 3, 1)
    torch.testing.assert_close(model.couplings.free.grad, pairs[rows, columns])


def test_the_maximum_has_the_moments_of_the_data(load: Load) -> None:
    likelihood, data = load(EXAMPLES / "potts/boltzmann_learning.py"), states_of(potts(), 3000)
    model = PottsModel(3, 3).double()
    assert likelihood.fit_exact_likelihood(model, data, steps=2) == "max_steps"
    assert likelihood.fit_exact_likelihood(model, data, tolerance=1e-8) == "converged"
    truth = likelihood.exact_likelihood(potts(), data)
    assert likelihood.exact_likelihood(model, data) > truth
    states = F.one_hot(all_colours(3, 3), 3).double()
    mean = torch.einsum("k,kia->ia", (-model.energy(states)).softmax(0), states)
    torch.testing.assert_close(mean, data.mean(0), rtol=0, atol=1e-7)


@pytest.mark.parametrize("chains", [None, 300])
def test_sampling_comes_near_the_maximum(chains: int | None, load: Load) -> None:
    likelihood, data = load(EXAMPLES / "potts/boltzmann_learning.py"), states_of(potts(), 4000)
    best, models = PottsModel(3, 3).double(), [PottsModel(3, 3) for _ in range(3)]
    likelihood.fit_exact_likelihood(best, data)
    for seed, model in enumerate(models[:2]):
        torch.manual_seed(seed)  # which must not matter
        likelihood.contrastive_divergence(model, data, chains=chains, steps=100, batch=500)
    assert torch.equal(models[0].couplings.weight, models[1].couplings.weight)
    with torch.no_grad():
        reached = [likelihood.exact_likelihood(each, data).item() for each in (best, *models[1:])]
    assert 0 <= reached[0] - reached[1] < 0.05 * (reached[0] - reached[2])


def test_the_bias_of_chains_that_start_at_the_data(load: Load) -> None:
    """Two sites that are bound to be equal, data of one colour only: the model knows both colours, but
    its chains do not leave the data in one sweep, so that CD-1 sees next to no gradient."""
    likelihood, model = load(EXAMPLES / "potts/boltzmann_learning.py"), PottsModel(2, 2).double()
    apart, same = 1 - torch.eye(2).double(), 6 * torch.eye(2).double()
    with torch.no_grad():
        model.couplings.weight = torch.einsum("ij,ab->ijab", apart, same)
    data = F.one_hot(torch.zeros(1000, 2).long(), 2).double()
    likelihood.exact_likelihood(model, data).backward()
    true, seen = gradient_norm(model), list[float]()
    for sweeps in (1, 2000):
        likelihood.contrastive_divergence(
            model, data, sweeps=sweeps, steps=1, rate=1e-9, watch=lambda _, norm: seen.append(norm)
        )
    assert seen[0] < 0.1 * true and seen[1] == pytest.approx(true, rel=0.15)


def test_the_masked_loss_hides_every_site_in_its_turn(load: Load) -> None:
    """Conditionals that depend on the visible sites alone: their pseudo-likelihood, by hand."""
    masked_loss = load(EXAMPLES / "potts/potts_recovery.py").masked_loss
    test = torch.randint(3, (10, 5), generator=seeded())
    table = torch.randn(4, 3, generator=seeded(3))

    class Neighbours(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            assert ((tokens == 3).sum(1) == 1).all()
            return table[tokens.roll(1, 1)]  # of the site before

    expected = F.cross_entropy(table[test.roll(1, 1)].flatten(0, 1), test.flatten()).item()
    assert masked_loss(Neighbours(), test, 3, batch=15) == pytest.approx(expected, rel=1e-6)
