"""Norms of weights, spectral radii, and the loss on the way to a fixed point."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torchdeq.loss import fp_correction

import solvers
from implicit_attn import DEQ
from implicit_attn.energies import Projection
from implicit_attn.regularization import (
    SpectralNorm,
    SpectralRadii,
    WeightNorm,
    apply_norm,
    correction_weights,
    fixed_point_correction,
    remove_norm,
    states_at,
)
from solvers import Anderson, Implicit, Tolerance

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
        torch.testing.assert_close(layer.weight, before, rtol=1e-12, atol=1e-14)
        layer.parametrizations.weight.original0.data *= 2
        torch.testing.assert_close(layer.weight, 2 * before, rtol=1e-12, atol=1e-14)
    layer, dim = made(name)
    apply_norm(layer, "spectral", target=0.7)
    assert sigma(layer.weight, dim) == pytest.approx(0.7, rel=1e-10)
    layer, dim = made(name)
    apply_norm(layer, "weight", target=0.7)
    slices = layer.weight.movedim(dim, 0).flatten(1).norm(dim=1)
    torch.testing.assert_close(slices, torch.full_like(slices, 0.7))
    for target in (0.5 * sigma(before, dim), 2 * sigma(before, dim)):
        layer, dim = made(name)
        apply_norm(layer, "bound", target=target)
        assert sigma(layer.weight, dim) == pytest.approx(min(target, sigma(before, dim)), rel=1e-10)


@pytest.mark.parametrize("name", LAYERS)
def test_the_weight_norm_is_torchs(name: str) -> None:
    layer, dim = made(name)
    theirs = parametrizations.weight_norm(copy.deepcopy(layer), dim=dim)
    apply_norm(layer)
    assert list(layer.state_dict()) == list(theirs.state_dict())
    layer.load_state_dict(theirs.state_dict())
    cotangent = drawn(*layer.weight.shape)
    model: Any
    for model in (layer, theirs):
        (model.weight * cotangent).sum().backward()
    for one, other in zip(layer.parameters(), theirs.parameters(), strict=True):
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize(
    ("norm", "count"), [(WeightNorm(), 2), (SpectralNorm(), 2), (SpectralNorm(0.9), 1)], ids=str
)
def test_derivatives(norm: Any, count: int) -> None:
    parts = norm.right_inverse(drawn(3, 4))
    given = [t.requires_grad_() for t in (parts if isinstance(parts, tuple) else (parts,))]
    assert len(given) == count
    assert torch.autograd.gradcheck(norm, given) and torch.autograd.gradgradcheck(norm, given)


def test_filters() -> None:
    def names(**options: Any) -> list[str]:
        return apply_norm(Cell(), **options)

    assert names() == ["inner.weight", "outer.weight", "skip.0.weight"]
    assert names(only="*er") == ["inner.weight", "outer.weight"]
    assert names(skip=["inner", "skip.*"]) == ["outer.weight"]
    assert apply_norm(nn.Sequential(Projection(3, 4)), kinds=(Projection,)) == ["0.weight"]


@pytest.mark.parametrize("norm", ["weight", "spectral", "bound"])
def test_removed_again(norm: str) -> None:
    model, x = nn.Sequential(Cell(), Projection(4, 4, bound=0.5).double()), drawn(2, 3, 4)
    cell: Any = model[0]
    plain = list(dict(cell.named_parameters()))
    apply_norm(model, norm, target=0.8)
    image = cell(x, x)
    removed = ["0.inner.weight", "0.outer.weight", "0.skip.0.weight"]
    assert remove_norm(model) == removed
    assert sorted(dict(cell.named_parameters())) == sorted(plain)
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in cell.parameters())
    torch.testing.assert_close(cell(x, x), image)
    assert parametrize.is_parametrized(model[1], "weight")  # which had a bound of its own
    assert remove_norm(model) == []
    apply_norm(cell, norm, target=0.8)  # and may be normed again


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


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"module": 3}, TypeError, "module must be an nn.Module"),
        (
            {"only": "out"},
            ValueError,
            r"its layers of these kinds are \['inner', 'outer', 'skip.0'\]",
        ),
        ({"skip": [3]}, TypeError, "skip must be a pattern"),
        ({"module": nn.LazyLinear(3)}, ValueError, "weight must be a parameter with numbers"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    given: dict[str, Any] = {"module": Cell()} | arguments
    with pytest.raises(error, match=match):
        apply_norm(given.pop("module"), **given)


def test_weights_that_cannot_be_normed() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    apply_norm(model, only="0")
    with pytest.raises(ValueError, match=r"0.weight is parametrised already"):
        apply_norm(model)
    assert not parametrize.is_parametrized(model[1])
    tied = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match=r"one shared by \['0.weight', '1.weight'\]"):
        apply_norm(tied)
    parametrize.register_parametrization(model[0], "weight", nn.Identity())
    with pytest.raises(ValueError, match=r"0\.weight has other parametrisations"):
        remove_norm(model)


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


def test_radii_above_one_and_failing_models() -> None:
    layer = DEQ.from_update(
        lambda z, x: x - 2 * z, solver=Anderson(), adjoint=Implicit(), on_failure="ignore"
    )
    x = torch.ones(3, 1, 2)
    row = SpectralRadii(x)(layer)[""]
    assert row["above_one"] == 1 and row["median"] == pytest.approx(2, rel=1e-5)

    def failing(_: object) -> None:
        raise RuntimeError("the model's own")

    layer.register_forward_pre_hook(lambda module, inputs: failing(module))
    with pytest.raises(RuntimeError, match="the model's own"):
        SpectralRadii(x)(layer)
    assert layer.observer is None and layer.training


@pytest.mark.parametrize(
    ("inputs", "options", "error", "match"),
    [
        ([1.0], {}, TypeError, "inputs must be a tensor"),
        (torch.ones(0, 2), {}, ValueError, "inputs must hold at least one sample"),
    ],
)
def test_wrong_records(inputs: Any, options: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        SpectralRadii(inputs, **options)


# The fixed-point correction against torchdeq's, and its derivatives.


def states(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, generator=generator, dtype=torch.float64) for _ in range(count)]


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"gamma": 0.5}, {"weight_func": "exp", "gamma": 0.5}),
        ({"kind": "linear"}, {"weight_func": "linear"}),
        ({"kind": "linear", "gamma": 0.3}, {"weight_func": "linear", "gamma": 0.3}),
    ],
)
def test_same_as_torchdeq(count: int, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    passed = states(count)
    expected = fp_correction(lambda z: z.square().mean(), (passed,), **theirs)
    found = fixed_point_correction(
        lambda z: z.square().mean(), passed, correction_weights(count, **ours)
    )
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)


def test_weights_by_hand() -> None:
    assert correction_weights(3, "constant") == [1, 1, 1]
    assert correction_weights(3, gamma=0.5) == [0.25, 0.5, 1]
    assert correction_weights(4, "linear", gamma=1.0) == [0.25, 0.5, 0.75, 1]
    a, b = states(2)
    found = fixed_point_correction(lambda z: z.sum(1), [a, b], weights=[2, 3])
    torch.testing.assert_close(found, 2 * a.sum(1) + 3 * b.sum(1))


def shifted(z: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(0.6 * z.roll(1, -1)) + x


def test_gradient_through_an_unrolled_solve() -> None:
    """Central differences of the whole: solve, states, weighted sum."""
    layer = DEQ.from_update(
        shifted,
        solver=solvers.Anderson(memory=3),
        adjoint=solvers.Unrolled(),
        tolerance=solvers.Tolerance(0.0),
        max_steps=5,
        on_failure="ignore",
    )

    def total(x: Tensor) -> Tensor:
        z0 = 0.3 * torch.ones_like(x)
        every = [*states_at(layer, x, [1, 2, 4], z0=z0), layer.solve(x, z0=z0).value]
        return fixed_point_correction(lambda z: z.pow(2).sum(), every)

    x = states(1)[0][:, None].requires_grad_()
    assert torch.autograd.gradcheck(total, (x,))


def test_states_on_the_way_are_those_of_shorter_solves() -> None:
    layer = DEQ.from_update(shifted, solver=solvers.Forward())
    x = states(1)[0][:, None].requires_grad_()
    layer(x)
    last = layer.last
    first, second = states_at(layer, x, [1, 3])
    assert (
        torch.equal(first, x) and layer.last is last
    )  # the initial state, of which one step is known
    torch.testing.assert_close(second, shifted(shifted(x, x), x))
    (found,) = torch.autograd.grad(second.sum(), x)
    (expected,) = torch.autograd.grad(shifted(second.detach(), x).sum(), x)
    torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="numbers"):
        states_at(layer, x, [3, 1])
    with pytest.raises(TypeError, match="layer must be a DEQ"):
        states_at(shifted, x, [1])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"states": []}, TypeError, "states must be a sequence of at least one"),
        ({"states": torch.ones(2, 3)}, TypeError, "states must be a sequence"),
        ({"weights": [1.0]}, ValueError, "weights must be 2 numbers like states, got 1"),
        ({"loss": lambda z: 1.0}, TypeError, "loss must return a tensor"),
        (
            {"loss": lambda z: z[: int(z[0, 0] > 0)]},
            TypeError,
            "loss must return a tensor of one shape",
        ),
    ],
)
def test_wrong_arguments_of_correction(
    arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    given: dict[str, Any] = {"loss": torch.mean, "states": [torch.ones(2, 3), -torch.ones(2, 3)]}
    given |= arguments
    with pytest.raises(error, match=match):
        fixed_point_correction(given.pop("loss"), given.pop("states"), **given)
