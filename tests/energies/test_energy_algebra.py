"""Sums, weights, selections, plain functions, and energies that users write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from implicit_attn import DEQ
from implicit_attn.energies import (
    BiSoftmaxAttention,
    Energy,
    FunctionEnergy,
    Quadratic,
    ReLUFeedForward,
    SoftmaxAttention,
    Sum,
    Weighted,
)


@pytest.fixture
def z() -> Tensor:
    return torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.fixture
def parts() -> list[Energy]:
    torch.manual_seed(0)
    return [BiSoftmaxAttention(8, heads=2).double(), ReLUFeedForward(8, 12).double(), Quadratic()]


def assert_combination(
    energy: Energy, weights: list[float], parts: list[Energy], z: Tensor, x: Any
) -> None:
    pairs = list(zip(weights, parts, strict=True))
    v = torch.flip(z, (0,))
    value, gradient = energy.value_and_grad(z, x)
    torch.testing.assert_close(value, sum(w * p(z, x) for w, p in pairs))
    torch.testing.assert_close(energy(z, x), value)
    torch.testing.assert_close(gradient, sum(w * p.grad(z, x) for w, p in pairs))
    torch.testing.assert_close(energy.grad(z, x), gradient)
    torch.testing.assert_close(energy.hvp(z, v, x), sum(w * p.hvp(z, v, x) for w, p in pairs))


@pytest.mark.parametrize("record", [True, False])
def test_sums_and_weights(parts: list[Energy], z: Tensor, x: Tensor, record: bool) -> None:
    a, b, c = parts
    with torch.set_grad_enabled(record):
        assert_combination(a + b + c, [1, 1, 1], parts, z, x)
        assert_combination(a + (b + c), [1, 1, 1], parts, z, x)
        assert_combination(0.2 * a + b * 3 + c, [0.2, 3, 1], parts, z, x)
        assert_combination(c + a - 2 * b, [1, 1, -2], [c, a, b], z, x)
        assert_combination(-(a + b) * 0.5 + c, [-0.5, -0.5, 1], parts, z, x)
        assert_combination(2 * (0.5 * a), [1.0], [a], z, x)
        assert_combination(Sum([a]), [1], [a], z, x)
        weight = nn.Parameter(torch.tensor(-0.7, dtype=torch.float64))
        assert_combination(weight * a + b * weight + c, [-0.7, -0.7, 1], parts, z, x)


def test_sum_is_flat(parts: list[Energy]) -> None:
    a, b, c = parts
    for total in (a + b + c, a + (b + c), sum([a, b, c]), Sum([a, Sum([b, Sum([c])])])):
        assert isinstance(total, Sum)
        assert list(total.terms) == parts


def test_sum_leaves_the_terms_gradients_alone(z: Tensor) -> None:
    """The gradient of Quadratic is z itself: adding in place must not write there."""
    kept = z.clone()
    with torch.no_grad():
        gradient = (Quadratic() + Quadratic() + Quadratic() + Quadratic()).grad(z)
    assert torch.equal(z, kept)
    torch.testing.assert_close(gradient, 4 * z)


def test_weighted(parts: list[Energy], z: Tensor, x: Tensor) -> None:
    a, b, c = parts
    for initial in (1e-3, 0.2, 30.0):
        assert a.weighted(initial).factor().item() == pytest.approx(initial, rel=1e-5)
        bounded = a.weighted(initial, maximum=40.0)
        assert bounded.factor().item() == pytest.approx(initial, rel=1e-5)
        for raw in (-30.0, 30.0):
            with torch.no_grad():
                bounded.raw.fill_(raw)
            assert 0 < bounded.factor() <= 40.0
    energy = (a.weighted(0.2) + b.weighted(0.3, maximum=1.0) + c).double()
    assert_combination(energy, [0.2, 0.3, 1.0], parts, z, x)
    weights = [term.raw for term in energy.terms if isinstance(term, Weighted)]
    for gradient in torch.autograd.grad(energy.grad(z, x).square().sum(), weights):
        assert gradient.abs() > 0


def test_select_from_dict_and_tuple(z: Tensor, x: Tensor) -> None:
    torch.manual_seed(0)
    context = torch.randn(3, 7, 5, dtype=torch.float64)
    cross = SoftmaxAttention(8, heads=2, cross=True, context_dim=5).double()
    for energy, given in (
        (Quadratic().select("input") + cross.select("context"), {"input": x, "context": context}),
        (Quadratic().select(0) + cross.select(1), (x, context)),
        (
            (Quadratic().select("input") + cross.select("context")).select("all"),
            {"all": {"input": x, "context": context}},
        ),
    ):
        value, gradient = energy.value_and_grad(z, given)
        torch.testing.assert_close(value, Quadratic()(z, x) + cross(z, context))
        torch.testing.assert_close(energy(z, given), value)
        torch.testing.assert_close(gradient, z - x + cross.grad(z, context))
        product = energy.hvp(z, x, given)
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


class QuarticWithBoth(QuarticWell):
    def value_and_grad(
        self, z: Any, x: Any = None, *, mask: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        return self(z), z**3


@pytest.mark.parametrize("cls", [QuarticWell, QuarticInClosedForm, QuarticWithBoth])
@pytest.mark.parametrize("record", [True, False])
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


INDEPENDENT: dict[str, Any] = {
    "constant": lambda z, x: torch.ones(z.shape[0], dtype=z.dtype),
    "detached": lambda z, x: (0.5 * (z - x).square().sum((1, 2))).detach(),
    "a detached state": lambda z, x: 0.5 * (z.detach() - x).square().sum((1, 2)),
    "through lists": lambda z, x: (x * torch.tensor(z.tolist())).sum((1, 2)),
}


@pytest.mark.parametrize("name", INDEPENDENT)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_an_energy_that_does_not_depend_on_the_state_is_refused(
    name: str, mode: Any, z: Tensor, x: Tensor
) -> None:
    """Every state would be a fixed point of its gradient step, found in one evaluation."""
    x = x.requires_grad_()
    with mode(), pytest.raises(ValueError, match=r"must depend on z, and the function .*lambda"):
        FunctionEnergy(INDEPENDENT[name]).value_and_grad(z, x)
    with mode(), pytest.raises(ValueError, match="must depend on z"):
        DEQ.from_energy(INDEPENDENT[name])(x)


def test_a_linear_energy_has_no_curvature(z: Tensor, x: Tensor) -> None:
    linear = FunctionEnergy(lambda z, x: (z * x).flatten(1).sum(1))
    torch.testing.assert_close(linear.grad(z, x), x)
    assert (linear.hvp(z, z, x) == 0).all()


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


def test_pytree_states(z: Tensor, x: Tensor) -> None:
    def coupled(state: dict[str, Tensor], x: Tensor) -> Tensor:
        a, b = state["a"], state["b"]
        return (0.5 * (a - x).square() + a * b + b**4).flatten(1).sum(1)

    state = {"a": z, "b": x}
    first, second = x + 1, z - 2
    energy = FunctionEnergy(coupled) + 0.5 * FunctionEnergy(coupled)
    for record in (True, False):
        with torch.set_grad_enabled(record):
            value, gradient = energy.value_and_grad(state, z)
            product = energy.hvp(state, {"a": first, "b": second}, z)
        torch.testing.assert_close(value, 1.5 * coupled(state, z))
        torch.testing.assert_close(gradient["a"], 1.5 * (z - z + x))
        torch.testing.assert_close(gradient["b"], 1.5 * (z + 4 * x**3))
        torch.testing.assert_close(product["a"], 1.5 * (first + second))
        torch.testing.assert_close(product["b"], 1.5 * (first + 12 * x**2 * second))


def test_an_inherited_gradient_of_another_energy_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Quartic must define grad, too .* Quadratic\.grad is"):

        class Quartic(Quadratic):
            def value_and_grad(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Any:
                return super().value_and_grad(z, x, mask=mask)

    class Tripled(Sum):
        grad = Energy.grad

        def value_and_grad(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Any:
            value, gradient = super().value_and_grad(z, x, mask=mask)
            return 3.0 * value, 3.0 * gradient

    z = torch.randn(2, 3, 4)
    torch.testing.assert_close(Tripled([Quadratic()]).grad(z), 3.0 * z)
