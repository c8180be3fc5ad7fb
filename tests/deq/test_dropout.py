"""Dropout with one mask a solve: constant within it, in its derivatives, and fresh at the next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import solvers
from implicit_attn import DEQ, Energy
from implicit_attn.energies import Quadratic, ReLUFeedForward
from implicit_attn.regularization import VariationalDropout, dropout_seeds
from implicit_attn.updates import Update
from solvers import Implicit, OneStep, Phantom, Tolerance, Unrolled

TIGHT = Tolerance(1e-12)
EXACT: dict[str, Any] = {"tolerance": TIGHT, "adjoint": Implicit(tolerance=TIGHT), "max_steps": 200}


class Cell(nn.Module):
    """A contraction of tokens with dropout of the state, of hidden units, and of the input's features."""

    def __init__(self, p: float = 0.3, scale: float = 0.5) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.inner, self.outer = nn.Linear(4, 6), nn.Linear(6, 4)
        self.of_state, self.of_hidden = VariationalDropout(p), VariationalDropout(p)
        self.scale = scale
        self.seen: list[Tensor] = []  # hidden units after dropout, of a hidden unit 1

    def forward(self, z: Tensor, x: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = torch.tanh(self.inner(self.of_state(z)))
        self.seen.append(self.of_hidden(torch.ones_like(hidden)).detach())
        return self.scale * self.outer(self.of_hidden(hidden)) + x


def layer(cell: nn.Module | None = None, **options: Any) -> DEQ:
    return DEQ.from_update(cell or Cell(), **(EXACT | options)).double()


def tokens(batch: int = 3, number: int = 5, seed: int = 1) -> Tensor:
    shape = (batch, number, 4)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        yield


def test_one_mask_a_solve_and_sample() -> None:
    cell = Cell()
    deq, x = layer(cell), tokens(16)
    x[:8] *= 1e-3  # these leave the batch early
    solution = deq.solve(x)
    assert bool(solution.converged.all())
    first = cell.seen[0]
    assert set(first.unique().tolist()) == {0.0, 1 / 0.7}
    assert not torch.equal(first[0], first[1])
    for seen in cell.seen:  # rows of later evaluations are rows of the first
        rows = (seen[:, None] == first[None]).flatten(2).all(2)
        assert bool((rows.sum(1) == 1).all())
    number = len(cell.seen)
    solution.value.sum().backward()
    assert len(cell.seen) == number  # the recording was made in the forward pass
    deq(x)
    assert not torch.equal(cell.seen[-1][:3], first[:3])
    assert not torch.equal(cell.seen[-1], cell.seen[number - 1])


def test_none_in_evaluation_and_without_probability() -> None:
    x = tokens()
    plain = DEQ.from_update(Cell(0.0), **EXACT).double()
    dropped = layer()
    state = torch.get_rng_state()
    torch.testing.assert_close(dropped.eval()(x), plain(x), rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)  # and nothing is drawn
    assert not torch.allclose(dropped.train()(x), plain(x))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks_are_fair_coins(p: float) -> None:
    dropout, seeds = VariationalDropout(p), dropout_seeds(400)
    h = torch.ones(400, 100)
    kept = dropout(h, seeds) > 0
    sure = 4 * (p * (1 - p)) ** 0.5
    assert abs(kept.double().mean() - (1 - p)) < sure / 200
    centred = (kept.double() - (1 - p)) / (p * (1 - p)) ** 0.5
    for correlation in (centred.mT @ centred / 400, centred @ centred.mT / 100):
        size = len(correlation)
        other = correlation[~torch.eye(size, dtype=torch.bool)]
        count = 40000 // size
        # Of all pairs of places, or of samples; rare coins have long tails.
        assert other.abs().max() < 9 / count**0.5
        assert abs(other.square().mean() * count - 1) < 0.1
    # Two modules of an update are independent of each other, too.
    numbers = [dropout.mask(h, seeds, number) > 0 for number in (0, 1)]
    agree = (numbers[0] == numbers[1]).double().mean()
    assert abs(agree - (p * p + (1 - p) ** 2)) < 0.02
    assert torch.equal(dropout(h, seeds), dropout(h, seeds.clone()))
    narrow = dropout(h[:, :60], seeds)
    assert torch.equal(narrow, dropout(h, seeds)[:, :60])


@pytest.mark.parametrize(
    "adjoint",
    [EXACT["adjoint"], Unrolled(), Unrolled(checkpoint=True), Phantom(60), OneStep()],
    ids=str,
)
def test_gradients_are_those_of_the_thinned_map(adjoint: Any) -> None:
    """Against the same map with its masks written out, as constants."""
    deq, x = layer(adjoint=adjoint), tokens().requires_grad_()
    torch.manual_seed(8)
    seeds = dropout_seeds(3)
    torch.manual_seed(8)
    value = deq(x)
    cell: Any = deq.update.function  # type: ignore[union-attr]
    first = cell.of_state.mask(x, seeds, 0)
    second = cell.of_hidden.mask(torch.empty(3, 5, 6, dtype=torch.float64), seeds, 1)

    def thinned(z: Tensor, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return 0.5 * cell.outer(second * torch.tanh(cell.inner(first * z))) + x

    given: Any = EXACT | {"adjoint": adjoint}
    expected = solvers.fixed_point(thinned, x, (x, first, second), **given).value
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
    reached = [x, *deq.parameters()]
    ours, theirs = (torch.autograd.grad(v.pow(2).sum(), reached) for v in (value, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


def test_gradcheck_to_second_order() -> None:
    deq, x = layer(), tokens(1, 1).requires_grad_()

    def value(x: Tensor) -> Tensor:
        torch.manual_seed(4)
        return deq(x)

    assert torch.autograd.gradcheck(value, (x,))
    assert torch.autograd.gradgradcheck(value, (x,))


class Memories(Energy):
    """An energy differentiated automatically, with dropout of its hidden units."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.linear = nn.Linear(4, 7, bias=False)
        self.dropout = VariationalDropout(0.4)

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        hidden = self.dropout(torch.relu(self.linear(z)).square())
        if mask is not None:
            hidden = hidden * mask[..., None]
        return -0.1 * hidden.flatten(1).sum(1)


def test_within_an_energy() -> None:
    """It is a symmetric map with a falling energy still, to which masked tokens are nothing."""
    deq = DEQ(Memories() + Quadratic(), **EXACT).double()
    x = tokens(3, 5)
    solution = deq.solve(x, record=True)
    assert bool(solution.converged.all()) and solution.trace is not None
    assert solution.trace.energy is not None
    short = x[:, :3]
    mask = torch.arange(5)[None] < torch.tensor([3, 3, 3])[:, None]
    torch.manual_seed(9)
    padded = deq(x, mask)
    torch.manual_seed(9)
    torch.testing.assert_close(padded[:, :3], deq(short), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(padded[:, 3:], x[:, 3:], rtol=0, atol=0)
    x.requires_grad_()
    torch.manual_seed(9)
    (gradient,) = torch.autograd.grad(deq(x, mask)[:, :3].pow(2).sum(), x)
    assert float(gradient[:, 3:].abs().max()) == 0


@pytest.mark.parametrize("adjoint", [EXACT["adjoint"], Phantom(2), OneStep()], ids=str)
def test_transforms(adjoint: Any) -> None:
    deq, x = layer(adjoint=adjoint), tokens()

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        torch.manual_seed(6)
        return functional_call(deq, weights, (x,)).pow(2).sum()

    weights = {name: p.detach().requires_grad_() for name, p in deq.named_parameters()}
    expected = torch.autograd.grad(loss(weights, x), list(weights.values()))
    plain = {name: p.detach() for name, p in weights.items()}
    for one, other in zip(grad(loss)(plain, x).values(), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    different = vmap(lambda x: deq(x[None])[0], randomness="different")
    same = x[:1].expand(3, -1, -1)
    values = different(same)
    assert not torch.allclose(values[0], values[1])
    values = vmap(lambda x: deq(x[None])[0], randomness="same")(same)
    torch.testing.assert_close(values[0], values[1])
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(lambda x: deq(x[None])[0])(same)


def test_the_penalty_and_the_radius_have_the_masks_of_the_solve() -> None:
    deq, x = layer(Cell(0.5)), tokens()
    z = deq(x).detach()
    cell: Any = deq.update.function  # type: ignore[union-attr]
    last = cell.seen[-1]
    penalty = deq.jacobian_penalty(z, x, samples=None)
    assert torch.equal(cell.seen[-1], last)
    torch.testing.assert_close(penalty, deq.jacobian_penalty(z, x, samples=None))
    f, args = deq._equation(x, None, z)
    image = f(z, *args)
    torch.testing.assert_close(image, z, rtol=1e-9, atol=1e-9)
    assert bool((deq.spectral_radius(z, x) < 1).all())
    with pytest.raises(RuntimeError, match="masks of the latest solve"):
        deq.jacobian_penalty(z[:2], x[:2])


def test_wrong_uses() -> None:
    for p, error in ((1, ValueError), (-0.1, ValueError), ("half", TypeError)):
        with pytest.raises(error, match="p must be"):
            VariationalDropout(p)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shared must not hold 0"):
        VariationalDropout(shared=0)
    dropout = VariationalDropout()
    with pytest.raises(RuntimeError, match="drops by the mask of a solve, and is in none"):
        dropout(tokens())
    with pytest.raises(RuntimeError, match="a closure hides it"):
        DEQ.from_update(lambda z: 0.3 * dropout(z))(tokens())
    with pytest.raises(ValueError, match="shared must fit h"):
        VariationalDropout(shared=3)(tokens(), dropout_seeds(3))
    with pytest.raises(ValueError, match="h must be batched along dim 0"):
        dropout(tokens(), dropout_seeds(4))


def test_dropout_that_a_closed_form_ignores_is_refused() -> None:
    """The energy is dropped from, its gradient in closed form is not: no solve of the thinned energy."""

    class Dropped(ReLUFeedForward):
        def __init__(self) -> None:
            super().__init__(4, 8)
            self.inner = VariationalDropout(0.5)

        def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
            return super().forward(self.inner(z), x, mask=mask)

    deq, x = DEQ(Dropped().weighted(0.1) + Quadratic()), torch.ones(2, 3, 4)
    with pytest.raises(ValueError, match=r"must be called by it, got \['.*inner'\], never called"):
        deq(x)
    assert deq.eval()(x).shape == x.shape
    compiled = DEQ(Dropped().weighted(0.1) + Quadratic())
    compiled.compile(backend="eager")
    with pytest.raises(ValueError, match=r"must be called by it, got \['.*inner'\], never called"):
        compiled(x)


class Prepared(Update):
    """Dropout of the features of the input, and nowhere else."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = VariationalDropout(0.5)

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Tensor:
        return self.dropout(x)

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return 0.5 * torch.tanh(z) + x


@pytest.mark.parametrize("compiled", [False, True])
def test_dropout_in_prepare_alone_is_dropout(compiled: bool) -> None:
    deq = DEQ(Prepared(), tolerance=Tolerance(1e-12), max_steps=200)
    if compiled:
        deq.compile(backend="eager")
    x = 1 + torch.rand(3, 5, 4, dtype=torch.float64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        z = deq(x)
    factor = (z - 0.5 * torch.tanh(z)) / x
    assert torch.allclose(factor, 2 * (factor > 1).to(factor), atol=1e-8)
    assert 0.2 < (factor > 1).double().mean() < 0.8
