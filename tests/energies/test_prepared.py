"""``Energy.prepare``: what depends on the input alone is computed once a solve, with the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import solvers
from cases.deq import EXACT
from implicit_attn import DEQ, ActivationStep, GradientStep
from implicit_attn.energies import (
    BiSoftmaxAttention,
    Energy,
    Field,
    Quadratic,
    RMSNormLagrangian,
    Sum,
    check_energy,
)
from implicit_attn.energies.energy import Prepared, SummedEnergy
from implicit_attn.energies.tokens import hide

DIM = 4
MASK = torch.tensor([[True, True, True], [True, False, True], [True, True, False]])


class Steered(Energy):
    """``E = sum cosh(z + tanh(x W))`` without masked tokens; counts what it computes of x."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, dim, dtype=torch.float64))
        self.calls = 0

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Prepared:
        self.calls += 1
        return Prepared(torch.tanh(x @ self.weight))

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        shift = (x if isinstance(x, Prepared) else self.prepare(x, mask=mask)).parts
        value = torch.cosh(hide(z, mask) + shift).sum(-1)
        return (value if mask is None else value.masked_fill(~mask, 0.0)).sum(1)


class Own(Energy):
    """A user's energy that knows nothing of prepare and uses its input."""

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor)
        value = (hide(z, mask) * x).sin().sum(-1)
        return (value if mask is None else value.masked_fill(~mask, 0.0)).sum(1)


class Pair(SummedEnergy):
    def __init__(self, *terms: Energy) -> None:
        super().__init__()
        self.pair = nn.ModuleList(terms)

    def summands(self) -> Any:
        return self.pair


def attention() -> Energy:
    return BiSoftmaxAttention(DIM, 2, bound=1.0).double().weighted(0.3).double()


COMPOSITIONS: dict[str, Callable[[], Energy]] = {
    "alone": Steered,
    "scaled": lambda: 0.3 * Steered(),
    "weighted": lambda: Steered().weighted(0.4).double(),
    "minus": lambda: Quadratic() - 0.1 * Steered(),
    "sum": lambda: attention() + 0.2 * Steered() + Quadratic(),
    "two": lambda: Steered() + 0.5 * Steered() + Quadratic(),
    "with a user's": lambda: Own() + Steered() + Field() + Quadratic(),
    "scaled sum": lambda: 0.5 * (Own() + Steered()) + Quadratic(),
    "other sums": lambda: Pair(Pair(Quadratic(), Steered()), Quadratic() + 0.1 * Own()),
}
each_composition = pytest.mark.parametrize("name", COMPOSITIONS)


def make(name: str) -> Energy:
    torch.manual_seed(0)
    return COMPOSITIONS[name]()


def tokens(seed: int = 0, batch: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, DIM, generator=generator, dtype=torch.float64)


def calls(module: nn.Module) -> list[int]:
    return [part.calls for part in module.modules() if isinstance(part, Steered)]


@each_composition
def test_prepared_input_gives_the_numbers_of_the_input(name: str) -> None:
    energy, z, x = make(name), tokens(), tokens(1)
    counted = calls(energy)
    assert isinstance(energy.prepare(x, mask=MASK), Prepared)
    assert calls(energy) == [before + 1 for before in counted]
    for mask in (None, MASK):
        check_energy(energy, z, x, mask=mask, strict=True)


@pytest.mark.parametrize("key", ["input", 0])
def test_selections_prepare_their_part(key: Any) -> None:
    torch.manual_seed(0)
    part = (0.3 * Steered() + Own()).select(key)
    energy = part + Quadratic().select("other" if key == "input" else 1)
    z, x, other = tokens(), tokens(1), tokens(2)
    given = {"input": x, "other": other} if key == "input" else (x, other)
    prepared = energy.prepare(given)
    assert isinstance(prepared, Prepared) and calls(energy) == [1]
    torch.testing.assert_close(energy.grad(z, prepared), energy.grad(z, given))
    expected = part.energy.grad(z, x) + z - other
    torch.testing.assert_close(energy.grad(z, prepared), expected)
    with pytest.raises(ValueError, match=r"x must hold 'input', it holds \['other'\]"):
        Steered().select("input").prepare({"other": x})


def test_what_prepares_nothing_hands_the_input_on() -> None:
    x = tokens()
    energies = [Quadratic(), Own(), 0.3 * Own(), attention() + Quadratic(), Sum([Own()])]
    for energy in energies:
        assert energy.prepare(x) is x
        assert GradientStep(energy).prepare(x) is x
        assert energy.prepare(None) is None
    given = {"a": x}
    assert (0.5 * Own()).select("a").prepare(given) == Prepared(x)
    assert ActivationStep(Own(), RMSNormLagrangian()).prepare(x) is x


def update_of(kind: str, energy: Energy) -> GradientStep | ActivationStep:
    if kind == "activation":
        return ActivationStep(energy, RMSNormLagrangian(), 0.5)
    return GradientStep(energy, 0.5)


class Recomputing(Steered):
    """Computes the same at every evaluation."""

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Any:
        return x

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return super().forward(z, Steered.prepare(self, x, mask=mask), mask=mask)


ADJOINTS = {"implicit": EXACT["adjoint"], "unrolled": solvers.Unrolled()}


@pytest.mark.parametrize("kind", ["gradient", "activation"])
@pytest.mark.parametrize("adjoint", ADJOINTS)
@pytest.mark.parametrize("mask", [None, MASK], ids=["no-mask", "mask"])
def test_a_layer_prepares_once_with_all_gradients(
    kind: str, adjoint: str, mask: Tensor | None
) -> None:
    found = []
    for cls in (Steered, Recomputing):
        torch.manual_seed(0)
        terms = 0.1 * cls() + 0.1 * Own()
        update = update_of(kind, terms if kind == "activation" else terms + Quadratic())
        layer = DEQ(update, **EXACT | {"adjoint": ADJOINTS[adjoint]})
        x = tokens(1).requires_grad_()
        z = layer(x, mask)
        (z if mask is None else z[mask]).pow(3).sum().backward()
        assert (calls(layer) == [1]) == (cls is Steered)
        found.append([z.detach(), x.grad, *(p.grad for p in layer.parameters())])
    for value, reference in zip(*found, strict=True):
        assert value is not None and value.abs().max() > 0
        torch.testing.assert_close(value, reference, rtol=1e-8, atol=1e-10)
