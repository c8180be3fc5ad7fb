"""Energies and updates whose methods take no mask, or no input, stand everywhere that others stand."""

# Methods of users that leave arguments out, which the base class then accepts.
# pyright: reportIncompatibleMethodOverride=false
from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from implicit_attn import DEQ
from implicit_attn.energies import Energy, FunctionEnergy, Quadratic, ReLUFeedForward, check_energy
from implicit_attn.updates import GradientStep, Update

X = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[True, True, True, False]] * 3)


class Well(Energy):
    """``a/4 sum z^4 + 1/2 |z - x|^2``, without a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(0.3))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return (0.25 * self.a * z**4 + 0.5 * (z - x) ** 2).flatten(1).sum(1)


class Written(Well):
    """The same with all that ``Energy`` asks for."""

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        assert mask is None
        return (0.25 * self.a * z**4 + 0.5 * (z - x) ** 2).flatten(1).sum(1)


class Alone(Energy):
    """Neither input nor mask."""

    def forward(self, z: Tensor) -> Tensor:
        return (0.25 * z**4).flatten(1).sum(1)


class Closed(Energy):
    """Closed forms without a mask, one of them without an input."""

    def value_and_grad(self, z: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return 0.5 * (z - x).square().flatten(1).sum(1), z - x

    def hvp(self, z: Tensor, v: Tensor) -> Tensor:
        return v.clone()

    def prepare(self, x: Tensor) -> Tensor:
        return x


class Names(Energy):
    """Other names, and a mask by position."""

    def forward(self, state: Tensor, inputs: Tensor, mask: Tensor | None) -> Tensor:
        difference = state - inputs
        if mask is not None:
            difference = difference.masked_fill(~mask.unsqueeze(-1), 0.0)
        return 0.5 * difference.square().flatten(1).sum(1)


class Shrink(Update):
    """An update without a mask; its initial state is not the input alone."""

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return 0.5 * torch.tanh(z) + x


class Cosine(Update):
    def forward(self, z: Tensor) -> Tensor:
        return 0.5 * torch.cos(z)


@pytest.mark.parametrize("factory", [Well, Alone, Closed, Names])
def test_they_are_sound(factory: type[Energy]) -> None:
    report = check_energy(factory(), X, X.flip(0), strict=True)
    assert report.ok
    weighted = 0.5 * factory() + Quadratic().weighted(0.3) - 0.1 * Alone()
    check_energy(weighted, X, X.flip(0), strict=True)
    check_energy(factory().select("x"), X, {"x": X.flip(0)}, strict=True)


def test_a_mask_that_is_taken_is_given() -> None:
    assert check_energy(Names(), X, X.flip(0), mask=MASK, strict=True).ok


def test_same_values_gradients_and_layer() -> None:
    plain, written = Well(), Written()
    v = torch.flip(X, (2,))
    for name, arguments in {"value_and_grad": (X, X), "grad": (X, X), "hvp": (X, v, X)}.items():
        torch.testing.assert_close(
            getattr(plain, name)(*arguments), getattr(written, name)(*arguments)
        )
    results = []
    for energy in (plain, written):
        layer, x = DEQ(energy), X.clone().requires_grad_()
        layer(x).square().sum().backward()
        assert energy.a.grad is not None and layer.last is not None and layer.last.converged.all()
        results.append((layer.last.residual, x.grad, energy.a.grad))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_by_name_copied_and_inherited(copied: Any) -> None:
    class Child(Well):
        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return 2 * super().forward(z, x)

    energy = copied(Well())
    torch.testing.assert_close(energy(z=X, x=X, mask=None), energy(X, X))
    torch.testing.assert_close(Child()(X, X), 2 * energy(X, X))
    torch.testing.assert_close(Alone()(X, x=X), Alone()(X))
    with pytest.raises(TypeError, match="positional argument"):
        Alone()(X, X, X)


def test_in_other_modes() -> None:
    torch.manual_seed(0)  # not every random term can be descended with this damping
    layer = DEQ(Well() + 0.2 * ReLUFeedForward(2, 3), max_steps=100)
    expected = layer(X)
    each = torch.func.vmap(lambda x: layer(x[None])[0])(X)
    torch.testing.assert_close(each, expected, rtol=1e-3, atol=1e-4)
    fixed = layer.unrolled(60, damping=0.2)
    torch.testing.assert_close(fixed(X), expected, rtol=1e-3, atol=1e-4)
    layer.compile(backend="eager")
    torch.testing.assert_close(layer(X), expected, rtol=1e-3, atol=1e-4)
    gradient = torch.compile(Well().grad, backend="eager", fullgraph=True)
    torch.testing.assert_close(gradient(X, X), Well().grad(X, X))


@pytest.mark.parametrize("energy", [Well(), Alone(), Well() + Quadratic(), 2 * Well(), Closed()])
def test_a_mask_that_is_not_taken_raises(energy: Energy) -> None:
    words = (
        r"(Well|Alone|Closed)\.\w+ takes no mask, so masked tokens would influence it; .*\(3, 4\)"
    )
    with pytest.raises(ValueError, match=words):
        energy.value_and_grad(X, X, mask=MASK)
    with pytest.raises(ValueError, match=words):
        DEQ(energy)(X, MASK)
    with pytest.raises(ValueError, match=words):
        energy.hvp(X, X, X, mask=MASK)


def test_updates() -> None:
    layer = DEQ(Shrink())
    z = layer(X)
    torch.testing.assert_close(z, 0.5 * torch.tanh(z) + X, rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match=r"Shrink\.forward takes no mask"):
        layer(X, MASK)
    alone = DEQ(Cosine())
    torch.testing.assert_close(alone(X), torch.full_like(X, 0.450184), rtol=0, atol=1e-3)
    with pytest.raises(ValueError, match=r"Cosine\.forward takes no mask"):
        alone(X, MASK)


def test_signatures_that_nobody_could_call() -> None:
    with pytest.raises(
        TypeError, match=r"Odd\.forward must be callable with 1 argument\(s\), x and mask="
    ):

        class Odd(Energy):
            def forward(self, z: Tensor, x: Tensor, temperature: float) -> Tensor:
                return z.sum()

    with pytest.raises(TypeError, match=r"Short\.hvp must be callable with 2 argument\(s\)"):

        class Short(Energy):
            def hvp(self, z: Tensor) -> Tensor:
                return z

    with pytest.raises(TypeError, match=r"Named\.forward must be callable"):

        class Named(Update):
            def forward(self, z: Tensor, x: Tensor, *, rate: float) -> Tensor:
                return z

    class Fine(Energy):
        def forward(self, z: Tensor, *inputs: Any, rate: float = 0.5, **options: Any) -> Tensor:
            assert options == {"mask": None} and len(inputs) == 1
            return rate * (z - inputs[0]).square().flatten(1).sum(1)

    torch.testing.assert_close(Fine().grad(X, 0.5 * X), 0.5 * X)
    assert isinstance(GradientStep(Fine()), Update)


def test_an_input_that_would_not_arrive_is_refused() -> None:
    """By position it would be taken for the mask; by name it would be left out."""

    def by_name(z: Tensor, *, x: Tensor | None = None) -> Tensor:
        return z.flatten(1).sum(1)

    def behind(z: Tensor, mask: Tensor | None = None, x: Tensor | None = None) -> Tensor:
        return z.flatten(1).sum(1)

    for function in (by_name, behind):
        with pytest.raises(TypeError, match="must be callable as function"):
            FunctionEnergy(function)
    with pytest.raises(TypeError, match=r"Behind\.forward must be callable"):

        class Behind(Energy):
            def forward(
                self, z: Tensor, mask: Tensor | None = None, x: Tensor | None = None
            ) -> Tensor:
                return behind(z)

    with pytest.raises(TypeError, match=r"ByName\.forward must be callable"):

        class ByName(Update):
            def forward(self, z: Tensor, *, x: Tensor | None = None) -> Tensor:
                return z


def test_what_a_partial_function_holds_stays() -> None:
    def energy(z: Tensor, x: Tensor, mask: Tensor | None = None) -> Tensor:
        kept = 1.0 if mask is None else mask.unsqueeze(-1)
        return ((z - x).square() * kept).flatten(1).sum(1)

    masked, other = energy(X, X.flip(0), MASK), MASK.flip(1)
    held = FunctionEnergy(partial(energy, mask=MASK))
    torch.testing.assert_close(held(X, X.flip(0)), masked)
    torch.testing.assert_close(held(X, X.flip(0), mask=other), energy(X, X.flip(0), other))
    held = FunctionEnergy(partial(energy, x=X.flip(0)))
    torch.testing.assert_close(held(X, X, mask=MASK), masked)
