"""Masked tokens: nothing in the energy, no gradient, no influence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cases.energies import (
    NORMS,
    EnergyCase,
    build,
    each_energy,
    few_energies,
    keep_places,
    masks,
    relative_error,
    tokens,
)
from implicit_attn.energies import SoftmaxAttention

WITH_HOLES = ["holes", "empty-sample"]


def mask_of(name: str) -> Tensor:
    mask = masks()[name]
    assert mask is not None
    return mask


@pytest.mark.parametrize("mask_name", WITH_HOLES)
@each_energy
def test_content_of_masked_tokens_changes_nothing(case: EnergyCase, mask_name: str) -> None:
    energy = build(case)
    z, x = tokens(case)
    v = torch.flip(z, (0, 1))
    mask = mask_of(mask_name)
    hidden = ~mask.unsqueeze(-1)
    value, gradient = energy.value_and_grad(z, x, mask=mask)
    product = energy.hvp(z, v, x, mask=mask)
    assert (gradient[~mask] == 0).all() and (product[~mask] == 0).all()
    for filler in (1e6, float("nan"), float("inf")):
        other = z.masked_fill(hidden, filler)
        other_x = x
        if x is not None and "cross" not in case.id:  # an input per token, not a context
            other_x = x.masked_fill(hidden, filler)
        other_value, other_gradient = energy.value_and_grad(other, other_x, mask=mask)
        assert torch.equal(other_value, value)
        assert torch.equal(other_gradient, gradient)
        assert torch.equal(energy(other, other_x, mask=mask), energy(z, x, mask=mask))
        other_v = v.masked_fill(hidden, 3.0)
        assert torch.equal(energy.hvp(other, other_v, other_x, mask=mask), product)


@each_energy
def test_masked_sample_is_the_sample_without_those_tokens(case: EnergyCase) -> None:
    energy = build(case)
    z, x = tokens(case)
    v = torch.flip(z, (0, 1))
    mask = mask_of("holes")
    value, gradient = energy.value_and_grad(z, x, mask=mask)
    product = energy.hvp(z, v, x, mask=mask)
    for i, keep in enumerate(mask):
        short, short_v = z[i, keep][None], v[i, keep][None]
        short_x = x
        if x is not None:
            short_x = x[i : i + 1] if "cross" in case.id else x[i, keep][None]
        alone = keep_places(energy, keep) if case.placed else energy
        expected, expected_gradient = alone.value_and_grad(short, short_x)
        assert relative_error(value[i : i + 1], expected) <= 1e-12
        assert relative_error(gradient[i, keep][None], expected_gradient) <= 1e-12
        assert relative_error(product[i, keep][None], alone.hvp(short, short_v, short_x)) <= 1e-12


@each_energy
def test_sample_without_tokens_has_no_energy_and_no_gradient(case: EnergyCase) -> None:
    energy = build(case)
    z, x = tokens(case)
    value, gradient = energy.value_and_grad(z, x, mask=mask_of("empty-sample"))
    assert value[0] == 0 and (gradient[0] == 0).all()
    assert torch.isfinite(value).all() and torch.isfinite(gradient).all()


@each_energy
def test_mask_of_ones_is_no_mask(case: EnergyCase) -> None:
    energy = build(case)
    z, x = tokens(case)
    mask = torch.ones(z.shape[:2], dtype=torch.bool)
    value, gradient = energy.value_and_grad(z, x, mask=mask)
    expected, expected_gradient = energy.value_and_grad(z, x)
    assert relative_error(value, expected) <= 1e-12
    assert relative_error(gradient, expected_gradient) <= 1e-12


@few_energies(
    "bisoftmax-soft-4",
    "bisoftmax-none-4",
    "softmax-inner-none-4",
    "softmax-elastic-tiny-4",
    "sigmoid-soft-4",
    "linear-elu-soft-4",
    "relu-soft",
    "hopfield-learnable",
    "composition",
)
@pytest.mark.parametrize("mask_name", WITH_HOLES)
def test_masked_garbage_does_not_reach_the_weights(case: EnergyCase, mask_name: str) -> None:
    energy = build(case)
    z, x = tokens(case)
    mask = mask_of(mask_name)

    def weight_gradients(state: Tensor) -> list[Tensor]:
        value, gradient = energy.value_and_grad(state, x, mask=mask)
        loss = value.sum() + gradient.square().sum()
        return list(torch.autograd.grad(loss, list(energy.parameters())))

    clean = weight_gradients(z)
    dirty = weight_gradients(z.masked_fill(~mask.unsqueeze(-1), float("nan")))
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))


@pytest.mark.parametrize("norm", ["soft", "none"])
@pytest.mark.parametrize("kind", ["inner", "elastic"])
def test_context_mask_of_cross_attention(kind: str, norm: str) -> None:
    torch.manual_seed(0)
    energy = SoftmaxAttention(
        8, 2, energy=kind, cross=True, context_dim=6, norm=NORMS[norm]
    ).double()
    z, context = torch.randn(3, 4, 8).double(), torch.randn(3, 7, 6).double()
    keep = torch.tensor([[True] * 7, [True, False] * 3 + [True], [False] * 7])
    value, gradient = energy.value_and_grad(z, (context, keep))
    garbage = context.masked_fill(~keep.unsqueeze(-1), float("nan"))
    other_value, other_gradient = energy.value_and_grad(z, (garbage, keep))
    assert torch.equal(other_value, value) and torch.equal(other_gradient, gradient)
    assert value[2] == 0 and (gradient[2] == 0).all()
    torch.testing.assert_close(gradient[:1], energy.grad(z[:1], context[:1]))
    torch.testing.assert_close(gradient[1:2], energy.grad(z[1:2], context[1:2, keep[1]]))
