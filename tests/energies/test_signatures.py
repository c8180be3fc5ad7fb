"""Energies, updates and functions whose signatures leave out the input or the mask."""

# Methods of users that leave arguments out, which the base class then accepts.
# pyright: reportIncompatibleMethodOverride=false
from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from implicit_attn import DEQ, Energy, GradientStep, Update
from implicit_attn.energies import FunctionEnergy, Quadratic, ReLUFeedForward, check_energy
from implicit_attn.updates import FunctionUpdate

X = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(1))
MASK = torch.ones(3, 4, dtype=torch.bool)
MASK[:, 3:] = False


class Well(Energy):
    """``a/4 sum z^4 + 1/2 |z - x|^2``, without a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(0.3))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return (0.25 * self.a * z**4 + 0.5 * (z - x) ** 2).flatten(1).sum(1)


class Alone(Energy):
    """Neither input nor mask."""

    def forward(self, z: Tensor) -> Tensor:
        return (0.25 * z**4).flatten(1).sum(1)


class Names(Energy):
    """Other names, and a mask by position."""

    def forward(self, state: Tensor, inputs: Tensor, mask: Tensor | None) -> Tensor:
        difference = state - inputs
        if mask is not None:
            difference = difference.masked_fill(~mask.unsqueeze(-1), 0.0)
        return 0.5 * difference.square().flatten(1).sum(1)


class Shrink(Update):
    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return 0.5 * torch.tanh(z) + x


class Cosine(Update):
    def forward(self, z: Tensor) -> Tensor:
        return 0.5 * torch.cos(z)


@pytest.mark.parametrize("factory", [Well, Alone, Names])
def test_they_are_sound_alone_and_in_sums(factory: type[Energy]) -> None:
    check_energy(factory(), X, X.flip(0), strict=True)
    weighted = 0.5 * factory() + Quadratic().weighted(0.3) - 0.1 * Alone()
    check_energy(weighted, X, X.flip(0), strict=True)
    check_energy(factory().select("x"), X, {"x": X.flip(0)}, strict=True)
    assert check_energy(Names(), X, X.flip(0), mask=MASK, strict=True).ok


def test_in_layers_of_every_mode() -> None:
    torch.manual_seed(0)  # not every random term can be descended with this damping
    layer = DEQ(Well() + 0.2 * ReLUFeedForward(2, 3), max_steps=100)
    expected = layer(X)
    each = torch.func.vmap(lambda x: layer(x[None])[0])(X)
    torch.testing.assert_close(each, expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(layer.unrolled(60, damping=0.2)(X), expected, rtol=1e-3, atol=1e-4)
    layer.compile(backend="eager")
    torch.testing.assert_close(layer(X), expected, rtol=1e-3, atol=1e-4)
    gradient = torch.compile(Well().grad, backend="eager", fullgraph=True)
    torch.testing.assert_close(gradient(X, X), Well().grad(X, X))
    z = DEQ(Shrink())(X)
    torch.testing.assert_close(z, 0.5 * torch.tanh(z) + X, rtol=1e-3, atol=1e-3)
    alone = DEQ(Cosine())(X)
    torch.testing.assert_close(alone, torch.full_like(X, 0.450184), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "module", [Well(), Alone(), Well() + Quadratic(), 2 * Well(), Shrink(), Cosine()]
)
def test_a_mask_that_is_not_taken_raises(module: Any) -> None:
    words = r"\.forward takes no mask, so masked tokens would influence it; .*\(3, 4\)"
    with pytest.raises(ValueError, match=words):
        DEQ(module)(X, MASK)
    if isinstance(module, Energy):
        for call in (module.value_and_grad, partial(module.hvp, X)):
            with pytest.raises(ValueError, match=words):
                call(X, X, mask=MASK)


def test_signatures_that_nobody_could_call() -> None:
    with pytest.raises(TypeError, match=r"Odd\.forward must be callable as f\(z\) or"):

        class Odd(Energy):
            def forward(self, z: Tensor, x: Tensor, temperature: float) -> Tensor:
                return z.sum()

    class Fine(Energy):
        def forward(self, z: Tensor, *inputs: Any, rate: float = 0.5, **options: Any) -> Tensor:
            assert not options and len(inputs) == 1
            return rate * (z - inputs[0]).square().flatten(1).sum(1)

    torch.testing.assert_close(Fine().grad(X, 0.5 * X), 0.5 * X)
    assert isinstance(GradientStep(Fine()), Update)


def by_name(z: Tensor, *, x: Tensor | None = None) -> Tensor:
    return z.flatten(1).sum(1)


def behind(z: Tensor, mask: Tensor | None = None, x: Tensor | None = None) -> Tensor:
    return z.flatten(1).sum(1)


@pytest.mark.parametrize("function", [by_name, behind, 3])
def test_an_input_that_would_not_arrive_is_refused(function: Any) -> None:
    """By position it would be taken for the mask; by name it would be left out."""
    with pytest.raises(TypeError, match="must be callable"):
        FunctionEnergy(function)


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


@pytest.mark.parametrize("kind", [FunctionEnergy, FunctionUpdate])
def test_functions_and_modules_of_every_signature(kind: Any) -> None:
    class Cell(nn.Linear):
        def forward(self, z: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(z + x).square().flatten(1).sum(1)

    cell = Cell(2, 2)
    made = kind(cell)
    assert set(made.state_dict()) == {"function.weight", "function.bias"}
    torch.testing.assert_close(made(X, X), cell(X, X))
    torch.testing.assert_close(
        kind(lambda *inputs: (inputs[0] - inputs[1]).sum((1, 2)))(X, 2 * X), -X.sum((1, 2))
    )
    torch.testing.assert_close(kind(lambda z, x=None: z.sum((1, 2)))(X, X), X.sum((1, 2)))
    only_mask = kind(lambda z, mask=None: z.sum((1, 2)) if mask is None else mask.sum(1) * 1.0)
    torch.testing.assert_close(only_mask(X, X, mask=MASK), torch.full((3,), 3.0))
    for function in (None, lambda: X, lambda *, mask: mask, lambda z, x, c: z, lambda z, *, s: z):
        with pytest.raises(TypeError, match="callable"):
            kind(function)
    with pytest.raises(ValueError, match=r"takes no mask.*\(3, 4\)"):
        kind(lambda z: z)(X, X, mask=MASK)


def test_a_base_class_says_what_is_missing() -> None:
    class Empty(Update):
        pass

    with pytest.raises(NotImplementedError, match="Empty must define forward"):
        Empty()(X)
    with pytest.raises(NotImplementedError, match="Empty descends no energy"):
        Empty().joint(X)
