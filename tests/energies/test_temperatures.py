"""Inverse temperatures of heads: constant or learned, one number or one a head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from cases.energies import relative_error
from implicit_attn.energies import (
    BiSoftmaxAttention,
    LinearAttention,
    ScoreAttention,
    SoftmaxAttention,
)

DIM, BETAS = 8, (0.3, 1.4)
CLASSES: dict[str, Any] = {
    "bisoftmax": BiSoftmaxAttention,
    "sigmoid": ScoreAttention,
    "linear": LinearAttention,
    "inner": SoftmaxAttention,
    "elastic": lambda *a, **o: SoftmaxAttention(*a, energy="elastic", **o),
    "cross": lambda *a, **o: SoftmaxAttention(*a, cross=True, **o),
    "cross-elastic": lambda *a, **o: SoftmaxAttention(*a, cross=True, energy="elastic", **o),
}
each_class = pytest.mark.parametrize("kind", CLASSES)


def make(kind: str, heads: int = 2, **options: Any) -> Any:
    torch.manual_seed(0)
    return CLASSES[kind](DIM, heads, head_dim=3, **options).double()


def state(tokens: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    z, x = torch.randn(2, 3, tokens, DIM, generator=generator, dtype=torch.float64)
    return z, x


@each_class
def test_heads_of_different_temperature_add_up(kind: str) -> None:
    """The energy is the sum of those of its heads alone, each at its own temperature."""
    z, x = state()
    energy = make(kind, beta=BETAS)
    value, gradient, product = energy(z, x), energy.grad(z, x), energy.hvp(z, x, x)
    for head, beta in enumerate(BETAS):
        alone = make(kind, heads=1, beta=beta)
        with torch.no_grad():
            for (_, own), (_, both) in zip(
                alone.named_parameters(), energy.named_parameters(), strict=True
            ):
                own.copy_(both[3 * head : 3 * head + 3])
        value, gradient = value - alone(z, x), gradient - alone.grad(z, x)
        product = product - alone.hvp(z, x, x)
    for rest, whole in ((value, energy(z, x)), (gradient, energy.grad(z, x))):
        assert rest.norm() <= 1e-12 * whole.norm()
    assert product.norm() <= 1e-12 * energy.hvp(z, x, x).norm()


@each_class
def test_learned_temperatures_begin_as_given_and_stay_positive(kind: str) -> None:
    z, x = state()
    for beta in (None, 0.7, BETAS):
        plain, learned = make(kind, beta=beta), make(kind, beta=beta, learned_beta=True)
        assert (
            relative_error(learned.grad(z, x), plain.grad(z, x)) <= 1e-6
        )  # raw is made in float32
        assert set(learned.state_dict()) - set(plain.state_dict()) == {"temperatures.raw"}
    raw = learned.temperatures.raw
    assert gradcheck(lambda _: (learned(z, x), learned.grad(z, x), learned.hvp(z, x, x)), raw)
    with torch.no_grad():
        raw.fill_(-20.0)
    assert (learned.beta > 0).all() and learned.grad(z, x).isfinite().all()


@pytest.mark.parametrize("kind", ["bisoftmax", "sigmoid"])
@pytest.mark.parametrize("backend", ["reference", "blocks"])
def test_kernels_are_used_through_rescaled_features(kind: str, backend: str) -> None:
    z, x = state(tokens=70)
    choices: list[dict[str, Any]] = [{"beta": BETAS}, {"norm": None, "beta": BETAS}]
    for options in [*choices, {"learned_beta": True}]:
        exact = make(kind, backend="reference", **options)
        energy = make(kind, backend=backend, **options).float()
        single = (z.float(), x.float())
        for ours, theirs in (
            (energy(single[0]), exact(z)),
            (energy.grad(single[0]), exact.grad(z)),
            (energy.hvp(*single), exact.hvp(z, x)),
        ):
            assert ours.dtype == torch.float32 and relative_error(ours, theirs) <= 2e-5
