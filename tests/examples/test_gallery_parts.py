"""What the gallery computes beside the library: rings, tokens on circles, likelihoods, Potts data."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import solvers
from cases.spin_models import all_colours, samples_of
from cases.spin_models import couplings as random_couplings
from implicit_attn.energies.spins import zero_sum
from implicit_attn.models import FactoredAttention, PottsModel

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


@pytest.fixture
def rings(load: Load) -> ModuleType:
    torch.manual_seed(0)
    return load(EXAMPLES / "rings/ring_models.py")


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def contraction(rings: ModuleType) -> Any:
    model = rings.EquilibriumRing(8, 2).double()
    with torch.no_grad():
        model.layer.update.output.weight.mul_(0.1)
        model.layer.update.narrow.weight.mul_(0.1)
    return model


def test_a_local_block_is_attention_over_the_neighbours(rings: ModuleType) -> None:
    """Against a loop over positions, heads and offsets."""
    model, size = rings.EquilibriumRing(8, 2).double(), 7
    block, table, cells = model.layer.update, model.bias.table, drawn(1, size, 8, seed=2)
    z = drawn(1, size, 8)
    found = block(z, rings.Surroundings(cells, model.bias(size)))
    made = block.queries_keys_values(block.attention_norm(z)).chunk(3, 2)
    query, key, value = (each[0].unflatten(1, (2, 4)) for each in made)
    taken = torch.zeros(size, 2, 4, dtype=torch.float64)
    for i in range(size):
        for h in range(2):
            near = [(i + 1) % size, i, (i - 1) % size]
            scores = torch.stack([query[i, h] @ key[j, h] / math.sqrt(4) for j in near])
            taken[i, h] = (scores + table[h]).softmax(0) @ value[near, h]
    h = cells + block.output(taken.flatten(1))
    wanted = h + block.narrow(block.widen(block.feedforward_norm(h)).relu())
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match="takes no mask"):
        model.layer(model.encode(drawn(3, 4, 2)), mask=torch.ones(3, 4, dtype=torch.bool))


@pytest.mark.parametrize("depth", [1, 3])
def test_what_is_farther_than_the_evaluations_is_not_seen(depth: int, rings: ModuleType) -> None:
    x = drawn(3, 12, 2)
    other = x.clone()
    other[:, 0] += 1
    distance = torch.minimum(torch.arange(12), 12 - torch.arange(12))

    def changed(model: Any, **options: int) -> list[bool]:
        model = model.double()
        return ((model(x, **options) - model(other, **options)).abs().sum((0, 2)) > 1e-12).tolist()

    # Evaluation t sees the input itself, and its neighbours' states after t - 1; the first starts at zero.
    seen = changed(rings.EquilibriumRing(8, 2), iterations=depth)
    assert seen == (distance < depth).tolist()
    assert changed(rings.LayeredRing(8, 2, depth, True)) == (distance <= depth).tolist()
    assert all(changed(rings.LayeredRing(8, 2, depth)))


def test_iterations_end_at_the_fixed_point_that_the_layer_finds(rings: ModuleType) -> None:
    """Values and gradients, implicit ones and those through 80 iterations."""
    model, x, tight = contraction(rings), drawn(2, 4, 2), solvers.Tolerance(rtol=1e-12)
    implicit = solvers.Implicit(tolerance=tight)
    end = model.layer(model.encode(x), tolerance=tight, max_steps=200, adjoint=implicit)
    wanted = model.decode(end)
    errors = [(model(x, iterations=n) - wanted).abs().max().item() for n in (2, 6, 80)]
    assert errors[0] > errors[1] > errors[2] and errors[2] < 1e-9
    parameters = list(model.parameters())
    found = torch.autograd.grad(wanted.square().sum(), parameters)
    through = torch.autograd.grad(model(x, iterations=80).square().sum(), parameters)
    for one, other in zip(found, through, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


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


# Local rules.


def turned() -> Tensor:
    """Three angles, the second that of the first plus a right angle, the third alone."""
    angles = 6.28 * torch.rand(200, 2, generator=seeded(1))
    angles = torch.stack([angles[:, 0], angles[:, 0] + 1.57, angles[:, 1]], 1)
    return torch.stack([angles.cos(), angles.sin()], -1)


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
        model.couplings.weight = random_couplings(3, 3, 0.8, generator)
        model.field.copy_(0.3 * torch.randn(3, 3, generator=generator))
    return model


def states_of(model: PottsModel, number: int) -> Tensor:
    with torch.no_grad():
        return F.one_hot(samples_of(model.energy, 3, 3, number, 0), 3).double()


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


# Potts models on graphs, and measures of couplings.


@pytest.fixture
def couplings(load: Load) -> ModuleType:
    return load(EXAMPLES / "potts/couplings.py")


@pytest.mark.parametrize(
    ("kind", "edges"), [("er-kron", 30), ("er-general", 30), ("tree", 19), ("ring4", 40)]
)
def test_graphs_and_conditionals(couplings: ModuleType, kind: str, edges: int) -> None:
    """Symmetric and sparse; ``p(s_i | rest)`` against energies of changed configurations."""
    model = couplings.graph_potts(kind, torch.Generator().manual_seed(2), colours=3)
    graph, n = couplings.neighbours(model), torch.arange(20)
    assert torch.equal(model.couplings, model.couplings.permute(1, 0, 3, 2))
    assert int(graph.sum()) == 2 * edges and not graph.diagonal().any()
    colours = torch.randint(0, 3, (4, 20), generator=torch.Generator().manual_seed(0))

    def energy(s: Tensor) -> Tensor:
        return torch.stack([0.5 * model.couplings[n[:, None], n, r[:, None], r].sum() for r in s])

    logits = couplings.conditional_logits(model, colours).log_softmax(-1)
    for site in (0, 7):
        changed = colours.repeat(3, 1, 1)
        changed[:, :, site] = torch.arange(3)[:, None]
        expected = torch.stack([energy(each) for each in changed], dim=1).log_softmax(1)
        torch.testing.assert_close(logits[:, site], expected)
    chosen = logits.gather(2, colours[:, :, None]).mean().item()
    assert couplings.bayes_npl(model, colours) == pytest.approx(-chosen, rel=1e-12)


def test_precision_and_area(couplings: ModuleType) -> None:
    """Scores 6 to 1 of the pairs (0,1) (0,2) (0,3) (1,2) (1,3) (2,3), the first and the third true."""
    scores, edges = torch.zeros(4, 4), torch.zeros(4, 4).bool()
    rows, columns = torch.triu_indices(4, 4, 1)
    scores[rows, columns] = torch.arange(6.0).flip(0) + 1
    edges[rows, columns] = torch.tensor([1, 0, 1, 0, 0, 0]).bool()
    assert couplings.contact_precision(scores, edges) == pytest.approx(0.5)
    false_share, true_share = couplings.roc_curve(scores, edges)
    assert float(torch.trapezoid(true_share, false_share)) == pytest.approx(7 / 8)


class Exact(nn.Module):
    """The conditionals of a Potts model; refuses a call with two masked sites or none."""

    def __init__(self, logits: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, tokens: Tensor) -> Tensor:
        assert ((tokens == 3).sum(1) == 1).all()
        return self.logits(tokens.clamp_max(2))


def test_the_categorical_jacobian_of_known_couplings(couplings: ModuleType) -> None:
    model = couplings.graph_potts("tree", torch.Generator().manual_seed(0), sites=5, colours=3)
    sequences = torch.randint(0, 3, (4, 5), generator=torch.Generator().manual_seed(1))
    exact = Exact(lambda tokens: couplings.conditional_logits(model, tokens))
    found = couplings.categorical_jacobian(exact, sequences, 3, mask=3, batch=7)
    assert couplings.coupling_error(found, model.couplings) < 1e-12
    assert not found.diagonal().any() and exact.training
    torch.manual_seed(0)
    factored = FactoredAttention(5, 3, heads=2, rows="sink").double()
    with torch.no_grad():
        factored.values.normal_()
    found = couplings.categorical_jacobian(factored, sequences, 3)
    torch.testing.assert_close(zero_sum(found), zero_sum(factored.couplings().detach()))
