"""Initial weights, and the parametrisation that bounds their spectral norm."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parametrize

from cases.energies import EnergyCase, build, few_energies, relative_error, tokens
from implicit_attn.energies import (
    BiSoftmaxAttention,
    Energy,
    GatedFeedForward,
    LinearAttention,
    Projection,
    Quadratic,
    ReLUFeedForward,
    RMSNorm,
    SigmoidAttention,
    SoftmaxAttention,
    SoftmaxFeedForward,
    SpectralBound,
)

BOUNDED = (
    "bisoftmax-bound",
    "sigmoid-bound",
    "linear-elu-bound",
    "softmax-inner-bound",
    "softmax-cross-elastic-bound",
    "relu-bound",
    "softmax-ff-bound",
    "gated-gelu-bound",
)


def spectral_norms(energy: Energy) -> list[float]:
    weights = [m.weight for m in energy.modules() if isinstance(m, Projection)]
    return [torch.linalg.matrix_norm(w.detach().double(), ord=2).item() for w in weights]


def grow(energy: Energy, factor: float) -> None:
    with torch.no_grad():
        for parameter in energy.parameters():
            parameter.mul_(factor)


@few_energies(*BOUNDED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_stay_within_the_bound(case: EnergyCase, dtype: torch.dtype) -> None:
    energy = build(case, dtype=dtype)
    for factor in (1.0, 100.0):
        grow(energy, factor)
        norms = spectral_norms(energy)
        assert norms and norms == pytest.approx([0.7] * len(norms), rel=1e-5)
    grow(energy, 1e-4)
    assert max(spectral_norms(energy)) < 0.1
    grow(energy, 0.0)
    assert spectral_norms(energy) == [0.0] * len(norms)
    z, x = tokens(case)
    assert torch.isfinite(energy.grad(z.to(dtype), None if x is None else x.to(dtype))).all()


def test_small_weights_are_not_scaled() -> None:
    torch.manual_seed(0)
    weight = 0.01 * torch.randn(5, 4)
    assert torch.equal(SpectralBound(1.0)(weight), weight)


@few_energies(*BOUNDED)
def test_bounded_energy_is_the_same_in_training_and_evaluation(case: EnergyCase) -> None:
    energy = build(case)
    z, x = tokens(case)
    first = energy.train().grad(z, x)
    assert torch.equal(energy.train().grad(z, x), first)
    assert torch.equal(energy.eval().grad(z, x), first)
    with parametrize.cached():
        assert torch.equal(energy.grad(z, x), first)
        assert torch.equal(energy.grad(z, x), first)


@few_energies(*BOUNDED)
def test_bounded_energy_copies_converts_and_restores(case: EnergyCase) -> None:
    """weight_norm of old broke deepcopy and went stale after load_state_dict."""
    energy = build(case)
    z, x = tokens(case)
    expected = energy.grad(z, x)
    clone = copy.deepcopy(energy)
    assert torch.equal(clone.grad(z, x), expected)
    grow(clone, 0.2)
    assert not torch.allclose(clone.grad(z, x), expected)
    assert torch.equal(energy.grad(z, x), expected)

    file = io.BytesIO()
    torch.save(energy.state_dict(), file)
    file.seek(0)
    clone.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(clone.grad(z, x), expected)

    single = copy.deepcopy(energy).float()
    gradient = single.grad(z.float(), None if x is None else x.float())
    assert gradient.dtype == torch.float32
    assert relative_error(gradient, expected) < 1e-4


@few_energies("bisoftmax-bound", "relu-bound", "softmax-elastic-bound")
def test_bounded_weights_train(case: EnergyCase) -> None:
    """Gradient steps on the stored weight change the energy, and the bound holds throughout."""
    energy = build(case)
    z, x = tokens(case)
    optimizer = torch.optim.SGD(energy.parameters(), lr=0.5)
    before = energy.grad(z, x).detach()
    for _ in range(5):
        optimizer.zero_grad()
        energy.grad(z, x).square().sum().neg().backward()
        optimizer.step()
        assert max(spectral_norms(energy)) <= 0.7 * (1 + 1e-9)
    assert not torch.allclose(energy.grad(z, x), before)


def test_assigned_weight_is_stored_and_bounded() -> None:
    energy = ReLUFeedForward(4, 4, bound=0.5)
    energy.projection.weight = torch.eye(4)
    torch.testing.assert_close(energy.projection.weight.detach(), 0.5 * torch.eye(4))


def test_bound_works_in_half_precision() -> None:
    torch.manual_seed(0)
    energy = BiSoftmaxAttention(8, 2, bound=0.5).to(torch.bfloat16)
    assert energy.projection.weight.dtype == torch.bfloat16
    assert max(spectral_norms(energy)) < 0.51
    assert energy.grad(torch.randn(2, 3, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("dim", [16, 256])
def test_initial_projections_are_of_order_one(dim: int) -> None:
    torch.manual_seed(0)
    z = torch.randn(64, 4, dim)
    for energy in (BiSoftmaxAttention(dim, 4), ReLUFeedForward(dim, 2 * dim)):
        projected = z @ energy.projection.weight.T
        assert projected.square().mean().item() == pytest.approx(1.0, rel=0.2)


def test_one_weight_for_queries_and_keys() -> None:
    for cls in (BiSoftmaxAttention, SigmoidAttention, LinearAttention):
        shapes = {name: tuple(p.shape) for name, p in cls(12, 3, head_dim=5).named_parameters()}
        assert shapes == {"projection.weight": (15, 12)}
    softmax = SoftmaxAttention(12, 3, cross=True, context_dim=7)
    shapes = {name: tuple(p.shape) for name, p in softmax.named_parameters()}
    assert shapes == {"query.weight": (12, 12), "key.weight": (12, 7)}
    for feedforward in (ReLUFeedForward, SoftmaxFeedForward, GatedFeedForward):
        shapes = {name: tuple(p.shape) for name, p in feedforward(6, 9).named_parameters()}
        assert shapes == {"projection.weight": (9, 6)}


def test_default_temperature() -> None:
    energies = (BiSoftmaxAttention(32, 2), SigmoidAttention(32, 2), SoftmaxAttention(32, 2))
    for energy in energies:
        assert energy.beta == pytest.approx(16**-0.5)


@pytest.mark.parametrize("epsilon", [1.0, 1e-6])
def test_soft_norm_bounds_the_curvature(epsilon: float) -> None:
    """A norm with a small epsilon is nearly singular where a projection vanishes."""
    energy = (BiSoftmaxAttention(8, 2, norm=RMSNorm(epsilon)) + Quadratic()).double()
    z = 1e-2 * torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(0)).double()
    directions = torch.eye(24, dtype=torch.float64).reshape(24, 1, 3, 8)
    hessian: Tensor = torch.stack([energy.hvp(z, v).flatten() for v in directions])
    largest = torch.linalg.eigvalsh(hessian).abs().max().item()
    assert largest < 20 if epsilon == 1.0 else largest > 200
