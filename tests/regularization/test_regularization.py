"""Norms of weights, spectral radii, losses on the way to a fixed point; dropout with one mask a solve."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize
from torchdeq.loss import fp_correction

import solvers
from implicit_attn import DEQ, Energy, EquilibriumBlock
from implicit_attn.energies import Quadratic
from implicit_attn.regularization import (
    SpectralNorm,
    SpectralRadii,
    VariationalDropout,
    WeightNorm,
    apply_norm,
    correction_weights,
    dropout_seeds,
    fixed_point_correction,
    remove_norm,
)
from implicit_attn.updates import Update
from solvers import Anderson, Implicit, OneStep, Tolerance, Unrolled

# Norms of all weights of a module, by themselves and during solves.


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Cell(nn.Module):
    """``tanh(V tanh(W z)) + x`` with weights too large to contract."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 6), nn.Linear(6, 4)
        self.skip = nn.Sequential(nn.Linear(4, 4, bias=False))
        for seed, p in enumerate(self.parameters()):
            p.data = 1.5 * drawn(*p.shape, seed=seed)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.outer(torch.tanh(self.inner(z)))) + self.skip(x)


LAYERS = {
    "linear": (lambda: nn.Linear(5, 3), 0),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, groups=2), 0),
    "conv2d": (lambda: nn.Conv2d(2, 3, (3, 2)), 0),
    "transposed": (lambda: nn.ConvTranspose2d(2, 3, 3), 1),
}
POSITIONS = {"linear": 1, "conv1d": 3, "conv2d": 6, "transposed": 9}


def made(name: str) -> tuple[Any, int]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        build, dim = LAYERS[name]
        return build().double(), dim


def sigma(weight: Tensor, dim: int = 0) -> float:
    return float(torch.linalg.matrix_norm(weight.movedim(dim, 0).flatten(1), ord=2).detach())


@pytest.mark.parametrize("name", LAYERS)
def test_norms_of_each_kind_of_layer(name: str) -> None:
    for norm in ("weight", "spectral"):
        layer, dim = made(name)
        before = layer.weight.detach().clone()
        assert apply_norm(layer, norm) == ["weight"]
        torch.testing.assert_close(layer.weight, before, rtol=1e-12, atol=1e-14)
        layer.parametrizations.weight.original1.data *= 7  # a direction has no length
        layer.parametrizations.weight.original0.data *= 2
        torch.testing.assert_close(layer.weight, 2 * before, rtol=1e-12, atol=1e-14)
        apply_norm(layer := made(name)[0], norm, target=0.7)
        matrix = layer.weight.detach().movedim(dim, 0).flatten(1)
        sizes = matrix.norm(dim=1) if norm == "weight" else torch.linalg.matrix_norm(matrix, ord=2)
        expected = 0.7 if norm == "weight" else 0.7 / POSITIONS[name] ** 0.5
        torch.testing.assert_close(sizes, torch.full_like(sizes, expected))
    largest, root = sigma(before, dim), POSITIONS[name] ** 0.5
    for target in (0.5 * largest * root, 2 * largest * root):
        apply_norm(layer := made(name)[0], "bound", target=target)
        assert sigma(layer.weight, dim) == pytest.approx(min(target / root, largest), rel=1e-10)


# Convolutions of inputs (2, 8, 8) or (2, 8).
CONVOLUTIONS: dict[str, Callable[[], Any]] = {
    "1d": lambda: nn.Conv1d(2, 3, 3, padding=1, bias=False),
    "2d": lambda: nn.Conv2d(2, 3, 3, padding=1, bias=False),
    "circular": lambda: nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular", bias=False),
    "groups": lambda: nn.Conv2d(2, 2, 3, groups=2, bias=False),
    "stride": lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=False),
    "patches": lambda: nn.Conv2d(2, 3, 2, stride=2, bias=False),
    "dilation": lambda: nn.Conv2d(2, 3, 3, dilation=2, padding=2, bias=False),
    "stride and dilation": lambda: nn.Conv2d(2, 3, 3, stride=2, dilation=2, bias=False),
    "transposed": lambda: nn.ConvTranspose2d(2, 3, 3, bias=False),
    "transposed with a stride": lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, bias=False),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_bound_holds_for_the_convolution_as_an_operator(name: str) -> None:
    torch.manual_seed(0)
    layer = CONVOLUTIONS[name]().double()
    apply_norm(layer, "bound", target=0.9)
    x, shares = torch.zeros(1, 2, *[8] * (layer.weight.dim() - 2), dtype=torch.float64), []
    for kernel in (torch.randn_like(layer.weight), torch.ones_like(layer.weight)):
        layer.weight = 10.0 * kernel
        jacobian: Any = torch.autograd.functional.jacobian(layer, x)
        shares.append(torch.linalg.matrix_norm(jacobian.reshape(-1, x.numel()), 2).item() / 0.9)
    assert max(shares) <= 1.0 + 1e-9
    if name in ("circular", "patches"):
        assert shares[1] == pytest.approx(1.0)  # the bound is attained


@pytest.mark.parametrize("trained", [True, False])
def test_a_removed_norm_leaves_the_values_as_parameters(trained: bool) -> None:
    """Also where a weight was bounded from the start; other parametrisations stay."""
    cell, block = Cell(), EquilibriumBlock(8, 2)
    apply_norm(cell, "weight", only="inner")
    apply_norm(cell, "bound", target=0.5, only="outer")
    parametrizations.orthogonal(cell.skip[0])
    bounded = [
        f"deq.update.energy.{name}.weight" for name in ("attention.state", "memory.projection")
    ]
    for module, names in ((cell, ["inner.weight", "outer.weight"]), (block, bounded)):
        module.requires_grad_(trained)
        layers: list[Any] = [module.get_submodule(n.removesuffix(".weight")) for n in names]
        before = [layer.weight.detach() for layer in layers]
        assert remove_norm(module) == names
        for name, value in zip(names, before, strict=True):
            weight = dict(module.named_parameters())[name]
            torch.testing.assert_close(weight.detach(), value, rtol=1e-6, atol=1e-14)
            assert weight.requires_grad == trained
    assert parametrize.is_parametrized(cell.skip[0], "weight")


@pytest.mark.parametrize("name", LAYERS)
def test_the_weight_norm_is_torchs(name: str) -> None:
    layer, dim = made(name)
    theirs = parametrizations.weight_norm(copy.deepcopy(layer), dim=dim)
    apply_norm(layer)
    assert list(layer.state_dict()) == list(theirs.state_dict())
    layer.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(layer.weight, theirs.weight)


@pytest.mark.parametrize(
    ("norm", "count"), [(WeightNorm(), 2), (SpectralNorm(), 2), (SpectralNorm(0.9), 1)], ids=str
)
def test_derivatives(norm: Any, count: int) -> None:
    parts = norm.right_inverse(drawn(3, 4))
    given = [t.requires_grad_() for t in (parts if isinstance(parts, tuple) else (parts,))]
    assert len(given) == count
    assert torch.autograd.gradcheck(norm, given) and torch.autograd.gradgradcheck(norm, given)


@pytest.mark.parametrize("norm", ["spectral", "bound"])
def test_a_layer_that_contracts_and_its_gradients(norm: str) -> None:
    """sigma <= 0.9 for both weights: a contraction by 0.81, whatever training does to the parameters."""
    cell, x = Cell(), drawn(1, 1, 4)
    tight = Tolerance(1e-12)
    options: dict[str, Any] = {"tolerance": tight, "adjoint": Implicit(tolerance=tight)}
    layer = DEQ.from_update(cell, max_steps=200, **options)
    apply_norm(cell, norm, target=0.9, skip="skip*")
    optimizer = torch.optim.SGD(cell.parameters(), lr=2.0)
    for _ in range(3):
        solution = layer.solve(x)
        assert bool(solution.converged.all())
        assert float(layer.spectral_radius(solution.value, x).max()) <= 0.81
        optimizer.zero_grad()
        (-solution.value.square().sum()).backward()
        optimizer.step()

    original: Any = cell.outer.parametrizations["weight"].original  # type: ignore[index,union-attr]

    def value(weight: Tensor) -> Tensor:
        replaced = {"function.outer.parametrizations.weight.original": weight}
        update = torch.func.functional_call
        call = lambda z, x: update(layer.update, replaced, (z, x))  # noqa: E731
        return DEQ.from_update(call, max_steps=200, **options)(x)

    assert torch.autograd.gradcheck(value, (original.detach().clone().requires_grad_(),))


# The spectral radii of a model's equilibrium layers.


class Model(nn.Module):
    """Two equilibrium layers whose radii are known: 0.25 and 0.75."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.first = DEQ.from_update(lambda z, x: 0.25 * z.roll(1, -1) + x, init="zeros")
        self.second = DEQ.from_update(lambda z, x: 0.75 * z.roll(1, -1) + x, solver=Anderson())

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.dropout(x))
        return self.second(x) + self.second(2 * x)


def test_radii_of_a_model_for_the_record() -> None:
    model, x = Model().train(), torch.randn(6, 2, 3, generator=torch.Generator().manual_seed(0))
    model.second.eval()
    model.first(torch.ones(1, 2, 3))
    before, state = model.first.last, torch.get_rng_state()
    record = SpectralRadii(x, samples=4)(model)
    assert list(record) == ["first", "second"]
    for name, radius in (("first", 0.25), ("second", 0.75)):
        row = record[name]
        assert row["median"] == pytest.approx(radius, rel=1e-5)
        assert row["largest"] == pytest.approx(radius, rel=1e-5)
        assert row["above_one"] == 0
    assert record["first"]["samples"] == 4 and record["second"]["samples"] == 8
    # Nothing of the training has changed.
    assert model.first.last is before and model.second.last is None
    assert model.first.observer is None and torch.equal(torch.get_rng_state(), state)
    assert model.training and model.first.training and not model.second.training


# The fixed-point correction against torchdeq's, and its derivatives.


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize(("ours", "theirs"), [
    ({}, {}),
    ({"gamma": 0.5}, {"weight_func": "exp", "gamma": 0.5}),
    ({"kind": "linear", "gamma": 0.3}, {"weight_func": "linear", "gamma": 0.3}),
])  # fmt: skip
def test_same_as_torchdeq(count: int, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    passed = [drawn(2, 3, seed=k) for k in range(count)]
    expected = fp_correction(lambda z: z.square().mean(), (passed,), **theirs)
    found = fixed_point_correction(
        lambda z: z.square().mean(), passed, correction_weights(count, **ours)
    )
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)


def shifted(z: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(0.6 * z.roll(1, -1)) + x


TIGHT = Tolerance(1e-12)
EXACT: dict[str, Any] = {"tolerance": TIGHT, "adjoint": Implicit(tolerance=TIGHT), "max_steps": 200}


class Dropping(nn.Module):
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
    return DEQ.from_update(cell or Dropping(), **(EXACT | options)).double()


def tokens(batch: int = 3, number: int = 5) -> Tensor:
    return drawn(batch, number, 4, seed=1)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        yield


def test_dropout_draws_one_mask_for_each_solve_and_sample() -> None:
    cell = Dropping()
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
    assert not torch.equal(cell.seen[-1], cell.seen[number - 1])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks_are_fair_coins(p: float) -> None:
    dropout, seeds = VariationalDropout(p), dropout_seeds(400)
    h = torch.ones(400, 100)
    kept = dropout(h, seeds) > 0
    assert abs(kept.double().mean() - (1 - p)) < 4 * (p * (1 - p)) ** 0.5 / 200
    centred = (kept.double() - (1 - p)) / (p * (1 - p)) ** 0.5
    # Of all pairs of places, or of samples; rare coins have long tails.
    for correlation, count in (
        (centred.mT @ centred / 400, 400),
        (centred @ centred.mT / 100, 100),
    ):
        other = correlation[~torch.eye(len(correlation), dtype=torch.bool)]
        assert other.abs().max() < 9 / count**0.5
        assert abs(other.square().mean() * count - 1) < 0.1
    # Two modules of an update are independent of each other, too.
    numbers = [dropout.mask(h, seeds, number) > 0 for number in (0, 1)]
    agree = (numbers[0] == numbers[1]).double().mean()
    assert abs(agree - (p * p + (1 - p) ** 2)) < 0.02
    assert torch.equal(dropout(h[:, :60], seeds), dropout(h, seeds.clone())[:, :60])


@pytest.mark.parametrize(
    "adjoint",
    [EXACT["adjoint"], Unrolled(), OneStep()],
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


# Mistakes, by what the error says.


def dropped_in_a_closure() -> object:
    dropout = VariationalDropout()
    return DEQ.from_update(lambda z: 0.3 * dropout(z))(tokens())


MISTAKES: list[tuple[Callable[[], object], str]] = [
    (lambda: apply_norm(3), "module"),  # type: ignore[arg-type]
    (lambda: apply_norm(Cell(), only="out"), "only"),
    (lambda: apply_norm(Cell(), skip=[3]), "skip"),  # type: ignore[list-item]
    (lambda: apply_norm(nn.LazyLinear(3)), "weight"),
    (lambda: SpectralRadii([1.0]), "inputs"),  # type: ignore[arg-type]
    (lambda: SpectralRadii(torch.ones(0, 2)), "inputs"),
    (lambda: fixed_point_correction(torch.mean, []), "states"),
    (lambda: fixed_point_correction(torch.mean, torch.ones(2, 3)), "states"),  # type: ignore[arg-type]
    (lambda: fixed_point_correction(torch.mean, [torch.ones(3)] * 2, [1.0]), "weights"),
    (lambda: fixed_point_correction(torch.mean, [torch.ones(3)], [-1.0]), "weights"),
    *[(lambda p=p: VariationalDropout(p), r"\bp\b") for p in (1, -0.1, "half")],  # type: ignore[misc]
    (lambda: VariationalDropout(shared=0), "shared"),
    (lambda: VariationalDropout()(tokens()), r"Dropout|mask"),
    (dropped_in_a_closure, "closure"),
    (lambda: VariationalDropout(shared=3)(tokens(), dropout_seeds(3)), "shared"),
    (lambda: VariationalDropout()(tokens(), dropout_seeds(4)), r"\bh\b"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), MISTAKES)
def test_mistakes(call: Callable[[], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
        call()


class HalfWeights(Update):
    """``tanh(W z / 2) + x``, whose half weight is put in place by ``functional_call``."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        half = {name: 0.5 * weight for name, weight in self.linear.named_parameters()}
        return torch.tanh(functional_call(self.linear, half, (z,)) + x)


def test_a_weight_put_in_place_within_the_update_counts() -> None:
    linear = nn.Linear(4, 4).double()
    apply_norm(linear, "bound", target=0.9)
    update, x = HalfWeights(linear), drawn(3, 4)
    with torch.no_grad():
        # So that the bound is not active.
        next(p for n, p in linear.named_parameters() if "original" in n).mul_(0.1)
        value = DEQ(update, tolerance=1e-10, max_steps=100)(x)
        torch.testing.assert_close(update(value, x), value, rtol=1e-9, atol=1e-9)
