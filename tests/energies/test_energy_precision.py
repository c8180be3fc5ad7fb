"""Half precision, autocast, inference mode, compilation, function transforms."""

from __future__ import annotations

import pytest
import torch

from cases.energies import (
    NORMS,
    EnergyCase,
    build,
    each_energy,
    few_energies,
    masks,
    relative_error,
    tokens,
)
from implicit_attn.energies import BiSoftmaxAttention, Energy, FunctionEnergy, SoftmaxAttention

SEVERAL = (
    "quadratic-input",
    "function",
    "composition",
    "hopfield-learnable",
    "bisoftmax-soft-4",
    "softmax-elastic-soft-4",
    "linear-elu-soft-4",
    "relu-soft",
    "gated-gelu-none",
    "relu-soft-gates",
    "hyperset-context",
)


@each_energy
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_is_close_to_float64(case: EnergyCase, dtype: torch.dtype) -> None:
    energy = build(case, dtype=dtype)
    reference = build(case)
    reference.load_state_dict({k: v.double() for k, v in energy.state_dict().items()})
    z, x = (None if t is None else t.to(dtype) for t in tokens(case))
    assert z is not None
    value, gradient = energy.value_and_grad(z, x)
    expected, expected_gradient = reference.value_and_grad(
        z.double(), None if x is None else x.double()
    )
    assert gradient.dtype == dtype
    if not isinstance(energy, FunctionEnergy):
        assert value.dtype == torch.float32
    # A gradient through a tiny norm is a difference of nearly equal parts.
    bound = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]
    bound *= 5 if "tiny" in case.id else 1
    assert relative_error(value, expected) <= bound
    assert relative_error(gradient, expected_gradient) <= bound
    product = energy.hvp(z, z, x)
    assert product.dtype == dtype and torch.isfinite(product).all()


@few_energies(*SEVERAL)
def test_no_grad_and_inference_mode(case: EnergyCase) -> None:
    energy = build(case)
    z, x = tokens(case)
    mask = masks()["holes"]
    value, gradient = energy.value_and_grad(z, x, mask=mask)
    product = energy.hvp(z, z, x, mask=mask)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert mask is not None
            inside = [None if t is None else t.clone() for t in (z, x, mask)]
            state, given, keep = inside
            for method in (
                energy.value_and_grad,
                lambda *a, **k: Energy.value_and_grad(energy, *a, **k),
            ):
                other, other_gradient = method(state, given, mask=keep)
                assert not other.requires_grad and not other_gradient.requires_grad
                torch.testing.assert_close(other, value.detach(), rtol=1e-10, atol=1e-12)
                torch.testing.assert_close(other_gradient, gradient.detach(), rtol=1e-9, atol=1e-12)
            other = energy.hvp(state, state, given, mask=keep)
            torch.testing.assert_close(other, product.detach(), rtol=1e-9, atol=1e-12)


@few_energies(*SEVERAL)
def test_autocast(case: EnergyCase) -> None:
    energy = build(case, dtype=torch.float32)
    z, x = (None if t is None else t.float() for t in tokens(case))
    assert z is not None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value, gradient = energy.value_and_grad(z, x)
        product = energy.hvp(z, z, x)
    assert value.dtype == torch.float32
    assert gradient.dtype == torch.float32 and product.dtype == torch.float32
    assert relative_error(gradient, energy.grad(z, x)) <= 4e-2


# torch.func.jvp itself still scripts its decompositions.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@few_energies(
    "composition",
    "softmax-elastic-soft-4",
    "hopfield-learnable",
    "bisoftmax-none-1",
    "hyperset-context",
)
def test_function_transforms(case: EnergyCase) -> None:
    energy = build(case)
    z, x = tokens(case)
    v = torch.flip(z, (0, 1))
    product = torch.func.vjp(lambda state: energy.grad(state, x), z)[1]
    torch.testing.assert_close(product(v)[0], energy.hvp(z, v, x))
    tangent = torch.func.jvp(lambda state: energy.grad(state, x), (z,), (v,))[1]
    torch.testing.assert_close(tangent, energy.hvp(z, v, x))


@few_energies("composition", "hyperset-context")
def test_compiled_without_graph_breaks(case: EnergyCase) -> None:
    energy = build(case)
    z, x = tokens(case)
    compiled = torch.compile(energy.value_and_grad, fullgraph=True, backend="aot_eager")
    for mask in masks().values():
        value, gradient = compiled(z, x, mask=mask)
        expected, expected_gradient = energy.value_and_grad(z, x, mask=mask)
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("beta", [None, 500.0])
@pytest.mark.parametrize("norm", ["soft", "none"])
@pytest.mark.parametrize("build_it", [BiSoftmaxAttention, SoftmaxAttention])
def test_large_scores_do_not_overflow(
    build_it: type[BiSoftmaxAttention | SoftmaxAttention], norm: str, beta: float | None
) -> None:
    torch.manual_seed(0)
    energy = build_it(8, 2, norm=NORMS[norm], beta=beta)
    z = 100 * torch.randn(2, 4, 8)
    value, gradient = energy.value_and_grad(z)
    expected, expected_gradient = energy.double().value_and_grad(z.double())
    assert relative_error(value, expected) <= 1e-5
    assert relative_error(gradient, expected_gradient) <= 1e-3
