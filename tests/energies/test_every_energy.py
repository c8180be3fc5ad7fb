"""Every energy: its definition, check_energy, masks, precisions, transforms, what is prepared, bounds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

import solvers
from cases.deq import EXACT
from cases.energies import (
    COUNT,
    ENERGIES,
    FAMILIES,
    EnergyCase,
    build,
    each_energy,
    each_family,
    keep_places,
    masks,
    relative_error,
    tokens,
)
from implicit_attn import DEQ, ActivationStep, GradientStep
from implicit_attn.energies import (
    BiSoftmaxAttention,
    Energy,
    Field,
    FunctionEnergy,
    Projection,
    Quadratic,
    ReLUFeedForward,
    RMSNorm,
    RMSNormLagrangian,
    SoftmaxAttention,
    check_energy,
)
from implicit_attn.energies.energy import AttentionContext
from implicit_attn.energies.tokens import hide

HOLES = cast(Tensor, masks()["holes"])
assert HOLES is not None


@pytest.mark.parametrize(("case", "mask_name"), [
    *(pytest.param(case, "holes", id=case.id) for case in ENERGIES),
    *(pytest.param(case, "no-mask", id=f"{case.id}-no-mask") for case in ENERGIES if case.id in FAMILIES),
])  # fmt: skip
def test_an_energy_passes_check_energy(case: EnergyCase, mask_name: str) -> None:
    """Closed forms against autograd in float64, symmetry, samples, masks, inputs left alone, dtypes."""
    z, x = tokens(case)
    report = check_energy(build(case), z, x, mask=masks()[mask_name], tolerance=1e-9, strict=True)
    skipped = {finding.check for finding in report.findings if finding.passed is None}
    without = {"mask of ones", "masked tokens"} if mask_name == "no-mask" else set()
    assert skipped - without <= {"concave", "second order", "proximal"}


@each_energy
def test_a_masked_sample_equals_the_sample_without_those_tokens(case: EnergyCase) -> None:
    energy, (z, x) = build(case), tokens(case)
    v = torch.flip(z, (0, 1))
    value, gradient = energy.value_and_grad(z, x, mask=HOLES)
    product = energy.hvp(z, v, x, mask=HOLES)
    for i, keep in enumerate(HOLES):
        short_x = x if x is None else x[i : i + 1] if "cross" in case.id else x[i, keep][None]
        alone = keep_places(energy, keep) if case.placed else energy
        short, short_v = z[i, keep][None], v[i, keep][None]
        expected, expected_gradient = alone.value_and_grad(short, short_x)
        assert relative_error(value[i : i + 1], expected) <= 1e-12
        assert relative_error(gradient[i, keep][None], expected_gradient) <= 1e-12
        assert relative_error(product[i, keep][None], alone.hvp(short, short_v, short_x)) <= 1e-12
    empty = masks()["empty-sample"]
    value, gradient = energy.value_and_grad(z, x, mask=empty)
    assert value[0] == 0 and (gradient[0] == 0).all() and gradient.isfinite().all()


@each_family
def test_masked_garbage_reaches_neither_input_nor_weights(case: EnergyCase) -> None:
    energy, (z, x) = build(case), tokens(case)
    weights = list(energy.parameters())

    def found(z: Tensor, x: Tensor | None) -> list[Tensor]:
        value, gradient = energy.value_and_grad(z, x, mask=HOLES)
        loss = value.sum() + gradient.square().sum()
        derivatives = torch.autograd.grad(loss, weights, allow_unused=True) if weights else []
        return [value, gradient, *(d for d in derivatives if d is not None)]

    hidden = ~HOLES.unsqueeze(-1)
    for filler in (1e6, float("nan"), float("inf")):
        other_x = x if x is None or "cross" in case.id else x.masked_fill(hidden, filler)
        for a, b in zip(found(z, x), found(z.masked_fill(hidden, filler), other_x), strict=True):
            assert torch.equal(a, b)


@each_family
def test_half_precision_is_close_to_float64(case: EnergyCase) -> None:
    dtype = torch.bfloat16
    energy, reference = build(case, dtype=dtype), build(case)
    reference.load_state_dict({k: v.double() for k, v in energy.state_dict().items()})
    z, x = (t if t is None else t.to(dtype).double() for t in tokens(case))
    expected, expected_gradient = reference.value_and_grad(z, x)
    z, x = (t if t is None else t.to(dtype) for t in (z, x))
    value, gradient = energy.value_and_grad(z, x)
    assert gradient.dtype == dtype
    assert value.dtype == torch.float32 or isinstance(energy, FunctionEnergy)
    assert relative_error(value, expected) <= 4e-2
    assert relative_error(gradient, expected_gradient) <= 4e-2
    product = energy.hvp(z, z, x)
    assert product.dtype == dtype and torch.isfinite(product).all()


class Gradient(nn.Module):
    """The gradient of an energy as a module, for other weights."""

    def __init__(self, energy: Energy) -> None:
        super().__init__()
        self.energy = energy

    def forward(self, z: Tensor, x: Tensor | None) -> Tensor:
        return self.energy.grad(z, x)


@each_family
def test_derivatives_of_the_gradient_by_state_input_and_weights(case: EnergyCase) -> None:
    module = Gradient(build(case, dim=4))
    z, x = tokens(case, batch=1, count=COUNT if case.placed else 2, dim=4)
    weights = {name: parameter.detach() for name, parameter in module.named_parameters()}
    inputs = [t.clone().requires_grad_() for t in (z, x, *weights.values()) if t is not None]

    def gradient(z: Tensor, *rest: Tensor) -> Tensor:
        x, given = (rest[0], rest[1:]) if case.needs_x else (None, rest)
        return torch.func.functional_call(module, dict(zip(weights, given, strict=True)), (z, x))

    assert gradcheck(gradient, inputs, fast_mode=True)
    assert gradgradcheck(gradient, inputs, fast_mode=True)


@each_family
def test_inference_mode_and_function_transforms(case: EnergyCase) -> None:
    energy, (z, x) = build(case), tokens(case)
    v = torch.flip(z, (0, 1))
    gradient, product = energy.grad(z, x).detach(), energy.hvp(z, v, x).detach()
    with torch.inference_mode():
        inside = [None if t is None else t.clone() for t in (z, v, x)]
        assert relative_error(energy.grad(inside[0], inside[2]), gradient) <= 1e-12
        found = Energy.value_and_grad(energy, inside[0], inside[2])[1]  # past closed forms
        assert relative_error(found, gradient) <= 1e-9
        assert relative_error(energy.hvp(*inside), product) <= 1e-9
    pulled = torch.func.vjp(lambda state: energy.grad(state, x), z)[1](v)[0]
    assert relative_error(pulled.detach(), product) <= 1e-9


@pytest.mark.parametrize(("cls", "beta", "norm"), [
    (BiSoftmaxAttention, 500.0, None), (BiSoftmaxAttention, 500.0, RMSNorm(1.0)),
    (SoftmaxAttention, None, None), (SoftmaxAttention, 500.0, RMSNorm(1.0)),
    (partial(SoftmaxAttention, energy="elastic"), 500.0, RMSNorm(1.0)),
])  # fmt: skip
def test_large_scores_do_not_overflow(cls: Any, beta: float | None, norm: RMSNorm | None) -> None:
    torch.manual_seed(0)
    energy = cls(8, 2, norm=norm, beta=beta)
    z = 100 * torch.randn(2, 4, 8)
    value, gradient = energy.value_and_grad(z)
    expected, expected_gradient = energy.double().value_and_grad(z.double())
    assert relative_error(value, expected) <= 1e-5
    assert relative_error(gradient, expected_gradient) <= 1e-3


DIM = 4
MASK = torch.tensor([[True, True, True], [True, False, True], [True, True, False]])


class Steered(Energy):
    """``E = sum cosh(z + tanh(x W))`` without masked tokens; counts what it computes of x."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, dim, dtype=torch.float64))
        self.calls = 0

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> AttentionContext:
        self.calls += 1
        return AttentionContext(torch.tanh(x @ self.weight))

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        shift = (x if isinstance(x, AttentionContext) else self.prepare(x, mask=mask)).parts
        value = torch.cosh(hide(z, mask) + shift).sum(-1)
        return (value if mask is None else value.masked_fill(~mask, 0.0)).sum(1)


class Own(Energy):
    """A user's energy that knows nothing of prepare and uses its input."""

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor)
        value = (hide(z, mask) * x).sin().sum(-1)
        return (value if mask is None else value.masked_fill(~mask, 0.0)).sum(1)


def attention() -> Energy:
    return BiSoftmaxAttention(DIM, 2, bound=1.0).weighted(0.3).double()


COMPOSITIONS: dict[str, Callable[[], Energy]] = {
    "alone": Steered,
    "weighted": lambda: Steered().weighted(0.4).double(),
    "minus": lambda: Quadratic() - 0.1 * Steered(),
    "sum": lambda: attention() + Steered() + 0.5 * Steered() + Quadratic(),
    "with a user's": lambda: Own() + Steered() + Field() + Quadratic(),
    "scaled sum": lambda: 0.5 * (Own() + Steered()) + Quadratic(),
}


def wide_tokens(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 3, DIM, generator=generator, dtype=torch.float64)


def calls(module: nn.Module) -> list[int]:
    return [part.calls for part in module.modules() if isinstance(part, Steered)]


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_prepared_input_gives_the_numbers_of_the_input(name: str) -> None:
    torch.manual_seed(0)
    energy, z, x = COMPOSITIONS[name](), wide_tokens(), wide_tokens(1)
    counted = calls(energy)
    assert isinstance(energy.prepare(x, mask=MASK), AttentionContext)
    assert calls(energy) == [before + 1 for before in counted]
    for mask in (None, MASK):
        check_energy(energy, z, x, mask=mask, strict=True)


class Recomputing(Steered):
    """Computes the same at every evaluation."""

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Any:
        return x

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return super().forward(z, Steered.prepare(self, x, mask=mask), mask=mask)


@pytest.mark.parametrize(("kind", "adjoint", "mask"), [
    ("gradient", EXACT["adjoint"], MASK), ("activation", solvers.Unrolled(), None),
])  # fmt: skip
def test_a_layer_prepares_once_with_all_gradients(
    kind: str, adjoint: Any, mask: Tensor | None
) -> None:
    found = []
    for cls in (Steered, Recomputing):
        torch.manual_seed(0)
        terms = 0.1 * cls() + 0.1 * Own()
        update = GradientStep(terms + Quadratic(), 0.5)
        if kind == "activation":
            update = ActivationStep(terms, RMSNormLagrangian(), 0.5)
        layer = DEQ(update, **EXACT | {"adjoint": adjoint})
        x = wide_tokens(1).requires_grad_()
        z = layer(x, mask)
        (z if mask is None else z[mask]).pow(3).sum().backward()
        assert (calls(layer) == [1]) == (cls is Steered)
        found.append([z.detach(), x.grad, *(p.grad for p in layer.parameters())])
    for value, reference in zip(*found, strict=True):
        assert value is not None and value.abs().max() > 0
        torch.testing.assert_close(value, reference, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("cls", [BiSoftmaxAttention, SoftmaxAttention, ReLUFeedForward])
def test_weights_stay_within_the_bound(cls: Any) -> None:
    torch.manual_seed(7)
    energy, z = cls(8, 2, bound=0.7), torch.randn(3, 5, 8)

    def spectral_norms(factor: float) -> list[float]:
        with torch.no_grad():
            for parameter in energy.parameters():
                parameter.mul_(factor)
        weights = [m.weight for m in energy.modules() if isinstance(m, Projection)]
        return [torch.linalg.matrix_norm(w.detach().double(), ord=2).item() for w in weights]

    for factor in (1.0, 100.0):
        norms = spectral_norms(factor)
        assert norms and norms == pytest.approx([0.7] * len(norms), rel=1e-5)
    assert max(spectral_norms(1e-4)) < 0.1
    assert max(spectral_norms(0.0)) == 0.0
    assert torch.isfinite(energy.grad(z)).all()
