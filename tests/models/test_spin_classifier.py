"""The spin classifier: shapes, parameters, what the class token can know, mistakes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from implicit_attn.models import SpinClassifier
from solvers import Tolerance


def images(batch: int = 3, channels: int = 1) -> Tensor:
    return torch.rand(batch, channels, 28, 28, generator=torch.Generator().manual_seed(0))


def build(**options: Any) -> SpinClassifier:
    torch.manual_seed(0)
    return SpinClassifier(**options)


def test_number_of_parameters() -> None:
    """By hand; within the 27,000 of the published model, couplings counted once per symmetry."""
    stem = 9 * 16 + 9 * 16 * 24 + 9 * 24 * 24 + 9 * 24 * 10 + 10 + 2 * (16 + 24 + 24)
    couplings = 17 * 16 // 2 * 100
    correction = 10 * 40 + 40 + 40 * 10 + 10
    readout = 2 * 10 + 10 * 10 + 10
    model = build()
    expected = stem + couplings + correction + readout + 16 * 10 + 10
    assert sum(p.numel() for p in model.parameters()) == expected == 25_832


def test_the_class_token_learns_of_the_image_through_the_couplings_alone() -> None:
    model = build().eval()
    first, second = images(2)
    both = torch.stack([first, second])
    assert torch.equal(model.tokens(both)[0, 0], model.tokens(both)[1, 0])
    assert not torch.allclose(model(both)[0], model(both)[1], atol=1e-4)
    couplings = model.attention.couplings
    with torch.no_grad():
        cut = couplings.weight.clone()
        cut[0, 1:] = cut[1:, 0] = 0.0
        couplings.weight = cut
        assert torch.allclose(model(both)[0], model(both)[1], atol=1e-6)


def test_couplings_stay_bounded() -> None:
    """However far training pushes J, its spectral norm keeps its bound and the solve converges."""
    model = build(bound=0.8, layer={"tolerance": Tolerance(rtol=1e-4), "max_steps": 100}).eval()
    with torch.no_grad():
        model.attention.couplings.free.mul_(100.0)
        norm = torch.linalg.matrix_norm(model.attention.couplings.matrix, ord=2)
    assert norm <= 0.8 * (1 + 1e-5)
    solution = model.layer.solve(model.tokens(images()))
    assert bool(solution.converged.all()), solution.summary()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"bound": -1.0}, ValueError, "bound"),
        ({"widths": (16, 24)}, ValueError, r"widths must be three integers >= 1, got \(16, 24\)"),
    ],
    ids=str,
)
def test_bad_sizes_are_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build(**options)
