"""Samples are independent, tokens are a set, and a call leaves its arguments alone."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.energies import (
    ENERGIES,
    EnergyCase,
    build,
    each_energy,
    few_energies,
    masks,
    relative_error,
    tokens,
)
from implicit_attn.energies import BiSoftmaxAttention, LinearAttention, Quadratic, ReLUFeedForward


@each_energy
def test_sample_does_not_depend_on_its_batch(case: EnergyCase) -> None:
    energy = build(case)
    z, x = tokens(case)
    mask = masks()["holes"]
    assert mask is not None
    value, gradient = energy.value_and_grad(z, x, mask=mask)
    for i in range(3):
        one = slice(i, i + 1)
        alone, alone_gradient = energy.value_and_grad(
            z[one], None if x is None else x[one], mask=mask[one]
        )
        assert relative_error(value[one], alone) <= 1e-13
        assert relative_error(gradient[one], alone_gradient) <= 1e-13


@each_energy
def test_poisoned_neighbour_stays_alone(case: EnergyCase) -> None:
    energy = build(case)
    z, x = tokens(case)
    value, gradient = energy.value_and_grad(z, x)
    z[1] = float("nan")
    poisoned, poisoned_gradient = energy.value_and_grad(z, x)
    assert torch.equal(poisoned[[0, 2]], value[[0, 2]])
    assert torch.equal(poisoned_gradient[[0, 2]], gradient[[0, 2]])


@few_energies(*[case.id for case in ENERGIES if "causal" not in case.id and not case.placed])
def test_permuting_tokens_permutes_the_gradient(case: EnergyCase) -> None:
    energy = build(case)
    z, x = tokens(case)
    order = torch.tensor([3, 0, 4, 1, 2])
    value, gradient = energy.value_and_grad(z, x)
    moved, moved_gradient = energy.value_and_grad(z[:, order], None if x is None else x[:, order])
    assert relative_error(moved, value) <= 1e-12
    assert relative_error(moved_gradient, gradient[:, order]) <= 1e-12


@few_energies("bisoftmax-causal-soft-4", "softmax-causal-none-4")
def test_causal_energy_grows_by_a_part_of_the_past(case: EnergyCase) -> None:
    """``E(z_1..z_n) - E(z_1..z_n-1)`` is token n's part; the gradient does reach back."""
    energy = build(case)
    z, _ = tokens(case)
    parts = [energy(z[:, : n + 1]) - (energy(z[:, :n]) if n else 0.0) for n in range(5)]
    changed = z.clone()
    changed[:, 4] += 1.0
    others = [
        energy(changed[:, : n + 1]) - (energy(changed[:, :n]) if n else 0.0) for n in range(5)
    ]
    for part, other in zip(parts[:4], others[:4], strict=True):
        assert torch.equal(part, other)
    assert not torch.equal(parts[4], others[4])
    assert not torch.allclose(energy.grad(changed)[:, 0], energy.grad(z)[:, 0])


@each_energy
def test_arguments_are_left_alone(case: EnergyCase) -> None:
    energy = build(case)
    z, x = tokens(case)
    mask = masks()["holes"]
    assert mask is not None
    kept = [t.clone() for t in (z, mask)]
    kept_x = None if x is None else x.clone()
    for record in (True, False):
        with torch.set_grad_enabled(record):
            energy.value_and_grad(z, x, mask=mask)
            energy.grad(z, x)
            energy.hvp(z, z, x, mask=mask)
    assert torch.equal(z, kept[0]) and torch.equal(mask, kept[1])
    assert x is None or (kept_x is not None and torch.equal(x, kept_x))
    assert not z.requires_grad


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 4),
    count=st.integers(1, 9),
    heads=st.sampled_from([1, 2, 3]),
    width=st.integers(1, 5),
    dim=st.integers(1, 7),
    scale=st.sampled_from([1e-3, 1.0, 1e2]),
)
def test_shapes_and_finiteness(
    batch: int, count: int, heads: int, width: int, dim: int, scale: float
) -> None:
    torch.manual_seed(0)
    energy = (
        BiSoftmaxAttention(dim, heads, head_dim=width)
        + LinearAttention(dim, heads, head_dim=width)
        + 0.5 * ReLUFeedForward(dim, 3)
        + Quadratic()
    )
    z = scale * torch.randn(batch, count, dim)
    value, gradient = energy.value_and_grad(z, torch.zeros_like(z))
    assert value.shape == (batch,) and gradient.shape == z.shape
    assert torch.isfinite(value).all() and torch.isfinite(gradient).all()
    automatic = torch.func.grad(lambda state: energy(state).sum())(z)
    torch.testing.assert_close(gradient, automatic, rtol=1e-4, atol=1e-4 * scale)


@few_energies("bisoftmax-soft-4", "softmax-elastic-soft-4", "linear-relu-soft-4", "relu-soft")
def test_strided_states(case: EnergyCase) -> None:
    energy = build(case)
    z, _ = tokens(case)
    strided = z.transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    for strided_state in (strided, z.unsqueeze(0).expand(2, *z.shape)[1]):
        assert relative_error(energy.grad(strided_state), energy.grad(z)) <= 1e-13
        product = energy.hvp(strided_state, strided_state)
        assert relative_error(product, energy.hvp(z, z)) <= 1e-13
