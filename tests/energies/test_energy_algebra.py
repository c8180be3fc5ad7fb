"""Sums, multiples and selections of energies, signatures of functions, and what mistakes raise."""

# Methods of users that leave arguments out, which the base class then accepts.
# pyright: reportIncompatibleMethodOverride=false
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases.energies import EnergyCase, build, few_energies, tokens
from implicit_attn import DEQ, Update
from implicit_attn.energies import (
    BiSoftmaxAttention,
    DenseAssociative,
    Energy,
    Field,
    FunctionEnergy,
    GatedFeedForward,
    Hopfield,
    IdentityLagrangian,
    LinearAttention,
    Quadratic,
    ReLUFeedForward,
    Scaled,
    ScoreAttention,
    SoftmaxAttention,
    SoftmaxFeedForward,
    Sum,
    check_energy,
)


@pytest.fixture
def z() -> Tensor:
    return torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("record", [True, False])
def test_sums_and_weights(z: Tensor, x: Tensor, record: bool) -> None:
    torch.manual_seed(0)
    parts = [BiSoftmaxAttention(8, heads=2), ReLUFeedForward(8, 12), Quadratic()]
    a, b, c = (part.double() for part in parts)
    weight, v = nn.Parameter(torch.tensor(-0.7).double()), torch.flip(z, (0,))
    with torch.set_grad_enabled(record):
        for energy, weights in (
            (a + (b + c), (1, 1, 1)),
            (0.2 * a + b * 3 + c, (0.2, 3, 1)),
            (c + a - 2 * b, (1, -2, 1)),
            (-(a + b) * 0.5 + c, (-0.5, -0.5, 1)),
            (2 * (0.5 * a), (1, 0, 0)),
            (Sum([a]), (1, 0, 0)),
            (weight * a + b * weight + c, (-0.7, -0.7, 1)),
        ):
            pairs = list(zip(weights, (a, b, c), strict=True))
            value, gradient = energy.value_and_grad(z, x)
            torch.testing.assert_close(value, sum(w * p(z, x) for w, p in pairs))
            torch.testing.assert_close(energy(z, x), value)
            torch.testing.assert_close(gradient, sum(w * p.grad(z, x) for w, p in pairs))
            torch.testing.assert_close(energy.grad(z, x), gradient)
            product = sum(w * p.hvp(z, v, x) for w, p in pairs)
            torch.testing.assert_close(energy.hvp(z, v, x), product)


def test_which_sums_are_concave() -> None:
    concave, other = Field(), Quadratic()
    for energy in (concave + 2 * concave, 0.0 * other, concave.weighted(0.3)):
        assert energy.concave
    for energy in (-concave, concave + other, concave * nn.Parameter(torch.ones(()))):
        assert not energy.concave


def test_select_from_dict_and_tuple(z: Tensor, x: Tensor) -> None:
    torch.manual_seed(0)
    context = torch.randn(3, 7, 5, dtype=torch.float64)
    cross = SoftmaxAttention(8, heads=2, cross=True, context_dim=5).double()
    named = Quadratic().select("input") + cross.select("context")
    given = {"input": x, "context": context}
    for energy, inputs in (
        (named, given),
        (Quadratic().select(0) + cross.select(1), (x, context)),
        (named.select("all"), {"all": given}),
    ):
        value, gradient = energy.value_and_grad(z, inputs)
        torch.testing.assert_close(value, Quadratic()(z, x) + cross(z, context))
        torch.testing.assert_close(gradient, z - x + cross.grad(z, context))
        product = energy.hvp(z, x, inputs)
        torch.testing.assert_close(product, x + cross.hvp(z, x, context))


class QuarticWell(Energy):
    """What a user writes: the forward pass alone."""

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return (0.25 * z**4).flatten(1).sum(1)


class QuarticInClosedForm(Energy):
    """Value and gradient at once: ``forward`` follows."""

    def value_and_grad(
        self, z: Any, x: Any = None, *, mask: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        return (0.25 * z**4).flatten(1).sum(1), z**3


@pytest.mark.parametrize(("cls", "record"), [(QuarticWell, False), (QuarticInClosedForm, True)])
def test_user_energies(cls: type[Energy], record: bool, z: Tensor) -> None:
    energy = cls()
    with torch.set_grad_enabled(record):
        value, gradient = energy.value_and_grad(z)
        torch.testing.assert_close(value, (0.25 * z**4).sum((1, 2)))
        torch.testing.assert_close(energy(z), value)
        torch.testing.assert_close(gradient, z**3)
        torch.testing.assert_close(energy.grad(z), z**3)
        torch.testing.assert_close(energy.hvp(z, z), 3 * z**3)
        torch.testing.assert_close((energy + 2.0 * Quadratic()).grad(z), z**3 + 2 * z)


def test_a_definition_that_sums_would_pass_by_is_refused() -> None:
    for name, base in (
        ("grad", Quadratic),
        ("value_and_grad", type("G", (Energy,), {"grad": len})),
    ):
        with pytest.raises(TypeError, match=name):
            type("Own", (base,), {name: lambda self, z, x=None, *, mask=None: z})
    mixin = type("Half", (), {"grad": lambda self, z, x=None, *, mask=None: 0.5 * z})
    with pytest.raises(TypeError, match="evaluate instead of grad"):
        type("Mixed", (mixin, ReLUFeedForward), {})


@pytest.mark.parametrize(("function", "mode"), [
    (lambda z, x: torch.ones(z.shape[0], dtype=z.dtype), torch.no_grad),
    (lambda z, x: (0.5 * (z - x).square().sum((1, 2))).detach(), torch.enable_grad),
    (lambda z, x: 0.5 * (z.detach() - x).square().sum((1, 2)), torch.inference_mode),
    (lambda z, x: (x * torch.tensor(z.tolist())).sum((1, 2)), torch.no_grad),
])  # fmt: skip
def test_an_energy_that_does_not_depend_on_the_state_is_refused(
    function: Any, mode: Any, z: Tensor, x: Tensor
) -> None:
    """Every state would be a fixed point of its gradient step, found in one evaluation."""
    x = x.requires_grad_()
    for call in (
        lambda: FunctionEnergy(function).value_and_grad(z, x),
        lambda: DEQ.from_energy(function)(x),
    ):
        with mode(), pytest.raises(ValueError, match=r"\bz\b"):
            call()


def test_input_is_constant_even_where_it_is_the_state(z: Tensor, x: Tensor) -> None:
    """``dE(z, x)/dz`` holds x fixed, also where x is z or was computed from it."""
    energy = FunctionEnergy(lambda z, x: 0.5 * (z - x).square().flatten(1).sum(1))
    z = z.requires_grad_()
    assert (energy.grad(z, z) == 0).all()
    shifted = z + x
    torch.testing.assert_close(energy.grad(z, shifted), -x)
    torch.testing.assert_close(energy.hvp(z, x, shifted), x)
    (total,) = torch.autograd.grad(energy.grad(z, 2 * z).sum(), z)
    torch.testing.assert_close(total, torch.full_like(z, -1.0))


@pytest.mark.parametrize("record", [True, False])
def test_pytree_states(z: Tensor, x: Tensor, record: bool) -> None:
    def coupled(state: dict[str, Tensor], x: Tensor) -> Tensor:
        a, b = state["a"], state["b"]
        return (0.5 * (a - x).square() + a * b + b**4).flatten(1).sum(1)

    state, first, second = {"a": z, "b": x}, x + 1, z - 2
    energy = FunctionEnergy(coupled) + 0.5 * FunctionEnergy(coupled)
    with torch.set_grad_enabled(record):
        value, gradient = energy.value_and_grad(state, z)
        product = energy.hvp(state, {"a": first, "b": second}, z)
    torch.testing.assert_close(value, 1.5 * coupled(state, z))
    torch.testing.assert_close(gradient["a"], 1.5 * x)
    torch.testing.assert_close(gradient["b"], 1.5 * (z + 4 * x**3))
    torch.testing.assert_close(product["a"], 1.5 * (first + second))
    torch.testing.assert_close(product["b"], 1.5 * (first + 12 * x**2 * second))


X = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(1))
MASK = torch.tensor([[True] * 3 + [False]] * 3)


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


class Cosine(Update):
    def forward(self, z: Tensor) -> Tensor:
        return 0.5 * torch.cos(z)


@pytest.mark.parametrize("factory", [Well, Alone, Names])
def test_they_are_sound_alone_and_in_sums(factory: type[Energy]) -> None:
    check_energy(factory(), X, X.flip(0), mask=MASK if factory is Names else None, strict=True)
    weighted = 0.5 * factory() + Quadratic().weighted(0.3) - 0.1 * Alone()
    check_energy(weighted, X, X.flip(0), strict=True)
    check_energy(factory().select("x"), X, {"x": X.flip(0)}, strict=True)


@pytest.mark.parametrize("module", [Well(), Alone() + Quadratic(), 2 * Well(), Cosine()])
def test_a_mask_for_an_energy_without_masks_raises(module: Any) -> None:
    calls: list[Any] = [lambda: DEQ(module)(X, MASK)]
    if isinstance(module, Energy):
        calls += [
            partial(module.value_and_grad, X, X, mask=MASK),
            partial(module.hvp, X, X, X, mask=MASK),
        ]
    for call in calls:
        with pytest.raises(ValueError, match=r"\.forward .*mask"):
            call()


Z, SIX, META = torch.zeros(3, 4, 8), torch.zeros(3, 6, 5), torch.zeros(3, 4, 8, device="meta")
summed: Any = FunctionEnergy


def scalar(z: Tensor) -> Tensor:
    return z.square().sum()


def needs_two_more(z: Tensor, x: Tensor, other: Tensor) -> Tensor:
    return z.flatten(1).sum(1)


def cross_attention() -> SoftmaxAttention:
    return SoftmaxAttention(8, 2, cross=True, context_dim=5)


def prepared_without_mask(energy: Energy) -> object:
    return energy.grad(Z, energy.prepare(Z), mask=MASK)


MISTAKES: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: ScoreAttention(8, 2, norm=1e-6), TypeError, "norm"),  # type: ignore[arg-type]
    (lambda: LinearAttention(8, 2, feature_map="exp"), ValueError, "feature_map"),
    (lambda: SoftmaxAttention(8, 2, cross=True, causal=True), ValueError, "causal"),
    (lambda: SoftmaxAttention(8, 2, cross=True, context_dim=0), ValueError, "context_dim"),
    (lambda: BiSoftmaxAttention(8, 2, beta=(1.0, 2.0, 3.0)), ValueError, "beta"),
    (lambda: BiSoftmaxAttention(8, 2, beta=torch.ones(2).requires_grad_()), TypeError, "beta"),
    (lambda: GatedFeedForward(8, 4, activation="cosine"), ValueError, "activation"),
    (lambda: SoftmaxFeedForward(8, 4, temperature=2), TypeError, r"temperature"),  # type: ignore[call-arg]
    (lambda: Hopfield(torch.ones(3)), ValueError, "patterns"),
    (lambda: Hopfield(torch.ones(3, 2).int()), TypeError, "patterns"),
    (lambda: DenseAssociative(torch.ones(3, 2), power=1), ValueError, "power"),
    (lambda: DenseAssociative(torch.ones(3, 2), shift=1.0), ValueError, "shift"),
    (lambda: Sum([]), ValueError, "terms"),
    (lambda: Sum([scalar]), TypeError, "energy"),  # type: ignore[list-item]
    (lambda: Scaled(Quadratic(), nn.Parameter(torch.ones(2))), ValueError, "weight"),
    (lambda: Quadratic().weighted(2.0, maximum=1.0), ValueError, "initial"),
    (lambda: FunctionEnergy(3), TypeError, "function"),  # type: ignore[arg-type]
    (lambda: FunctionEnergy(needs_two_more), TypeError, "needs_two_more"),
    (lambda: FunctionEnergy(lambda: Z), TypeError, "lambda"),
    (lambda: (Quadratic() + FunctionEnergy(scalar))(Z), ValueError, "scalar"),
    (lambda: summed(lambda z: 0.0).grad(Z), TypeError, "lambda"),
    (lambda: summed(lambda z: z.flatten(1).sum(1)).grad(Z, mask=MASK), ValueError, "mask"),
    (lambda: summed(lambda z: z.sum(1)).grad(3.0), TypeError, r"\bz\b"),
    (lambda: summed(lambda z: z.sum(1)).grad({}), ValueError, r"\bz\b"),
    (lambda: Energy().grad(Z), NotImplementedError, "Energy"),
    (lambda: Quadratic().grad(Z, Z[:2]), ValueError, r"\bx\b"),
    (lambda: Quadratic().grad(Z, {"x": Z}), TypeError, "select"),  # type: ignore[arg-type]
    (lambda: Quadratic().grad(Z.int()), TypeError, r"\bz\b"),
    (lambda: Quadratic().hvp(Z, Z[0]), ValueError, r"\bv\b"),
    (lambda: Field().grad(Z), TypeError, r"\bx\b"),
    (lambda: ReLUFeedForward(7, 3).grad(Z), ValueError, r"\bz\b"),
    (lambda: ReLUFeedForward(8, 3).grad(Z[0], mask=MASK[0]), ValueError, "mask"),
    (lambda: BiSoftmaxAttention(8, 2).grad(Z[0]), ValueError, r"\bz\b"),
    (lambda: cross_attention().grad(Z), TypeError, r"\bx\b"),
    (lambda: cross_attention().grad(Z, Z), ValueError, r"\bx\b"),
    (lambda: cross_attention().grad(Z, META[..., :5]), ValueError, r"\bx\b"),
    (lambda: cross_attention().grad(Z, (SIX, MASK)), ValueError, "mask"),
    (lambda: Quadratic().select("a").grad(Z, {"b": Z}), ValueError, r"\bx\b"),
    (lambda: Quadratic().select(2).grad(Z, (Z, Z)), ValueError, r"\bx\b"),
    (lambda: IdentityLagrangian()(Z.int()), TypeError, r"\bz\b"),
    (lambda: prepared_without_mask(BiSoftmaxAttention(8, 2)), ValueError, "mask"),
    (lambda: prepared_without_mask(Quadratic() + ReLUFeedForward(8, 3)), ValueError, "mask"),
]


@pytest.mark.parametrize(("call", "error", "name"), MISTAKES)
def test_mistakes(call: Callable[[], object], error: type[Exception], name: str) -> None:
    with pytest.raises(error, match=name):
        call()


# A function checks its own mask.
@few_energies("quadratic-input", "composition", "relu-soft-gates", "spins-ising")
def test_bad_masks(case: EnergyCase) -> None:
    energy, (z, x) = build(case), tokens(case)
    good = torch.ones(z.shape[:2], dtype=torch.bool)
    for mask, error in (
        (good.float(), TypeError),
        (good[:, :4], ValueError),
        (good.to("meta"), ValueError),
    ):
        with pytest.raises(error, match="mask"):
            energy.value_and_grad(z, x, mask=mask)
