"""Initial weights, and the parametrisation that bounds their spectral norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from implicit_attn.energies import (
    BiSoftmaxAttention,
    Energy,
    LinearAttention,
    Projection,
    Quadratic,
    ReLUFeedForward,
    RMSNorm,
    ScoreAttention,
    SoftmaxAttention,
    SpectralBound,
)

BOUNDED: dict[str, Any] = {
    "bisoftmax": lambda: BiSoftmaxAttention(8, 2, bound=0.7),
    "softmax": lambda: SoftmaxAttention(8, 2, bound=0.7),
    "relu": lambda: ReLUFeedForward(8, 12, bound=0.7),
}
each_bounded = pytest.mark.parametrize("name", BOUNDED)
STATE = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def build(name: str) -> Energy:
    torch.manual_seed(7)
    return BOUNDED[name]().double()


def spectral_norms(energy: Energy) -> list[float]:
    weights = [m.weight for m in energy.modules() if isinstance(m, Projection)]
    return [torch.linalg.matrix_norm(w.detach().double(), ord=2).item() for w in weights]


def grow(energy: Energy, factor: float) -> None:
    with torch.no_grad():
        for parameter in energy.parameters():
            parameter.mul_(factor)


@each_bounded
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_stay_within_the_bound(name: str, dtype: torch.dtype) -> None:
    energy = build(name).to(dtype)
    for factor in (1.0, 100.0):
        grow(energy, factor)
        norms = spectral_norms(energy)
        assert norms and norms == pytest.approx([0.7] * len(norms), rel=1e-5)
    grow(energy, 1e-4)
    assert max(spectral_norms(energy)) < 0.1
    grow(energy, 0.0)
    assert spectral_norms(energy) == [0.0] * len(norms)
    assert torch.isfinite(energy.grad(STATE.to(dtype))).all()


def test_assigned_and_small_weights_are_stored_as_they_are() -> None:
    energy = ReLUFeedForward(4, 4, bound=0.5)
    energy.projection.weight = torch.eye(4)
    torch.testing.assert_close(energy.projection.weight.detach(), 0.5 * torch.eye(4))
    weight = 0.01 * torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(SpectralBound(1.0)(weight), weight)


def test_names_and_shapes_of_the_weights() -> None:
    """What files of weights hold."""

    def shapes(energy: Energy) -> dict[str, tuple[int, ...]]:
        return {name: tuple(value.shape) for name, value in energy.state_dict().items()}

    for cls in (BiSoftmaxAttention, ScoreAttention, LinearAttention):
        assert shapes(cls(12, 3, head_dim=5)) == {"projection.weight": (15, 12)}
    own = {"projection.weight": (12, 12), "bias": (12,), "temperatures.raw": (3,)}
    given = BiSoftmaxAttention(12, 3, context_dim=7, learned_beta=True)
    assert shapes(given) == {**own, "context.weight": (12, 7)}
    cross = SoftmaxAttention(12, 3, cross=True, context_dim=7)
    assert shapes(cross) == {"query.weight": (12, 12), "key.weight": (12, 7)}
    gated = ReLUFeedForward(6, 9, context_dim=4, gates=True)
    assert shapes(ReLUFeedForward(6, 9)) == {"projection.weight": (9, 6)}
    assert shapes(gated) == {
        "projection.weight": (9, 6), "bias": (9,), "context.weight": (9, 4),
        "gate.weight": (9, 4), "gate.bias": (9,),
    }  # fmt: skip


@pytest.mark.parametrize("epsilon", [1.0, 1e-6])
def test_soft_norm_bounds_the_curvature(epsilon: float) -> None:
    """A norm with a small epsilon is nearly singular where a projection vanishes."""
    torch.manual_seed(0)
    energy = (BiSoftmaxAttention(8, 2, norm=RMSNorm(epsilon)) + Quadratic()).double()
    z = 1e-2 * STATE[:1, :3]
    directions = torch.eye(24, dtype=torch.float64).reshape(24, 1, 3, 8)
    hessian: Tensor = torch.stack([energy.hvp(z, v).flatten() for v in directions])
    largest = torch.linalg.eigvalsh(hessian).abs().max().item()
    assert largest < 20 if epsilon == 1.0 else largest > 200
