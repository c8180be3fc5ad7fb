"""Norms of all weights of a module, by themselves and during solves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from implicit_attn import DEQ
from implicit_attn.energies import Projection
from implicit_attn.regularization import SpectralNorm, WeightNorm, apply_norm, remove_norm
from solvers import Implicit, Tolerance


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
