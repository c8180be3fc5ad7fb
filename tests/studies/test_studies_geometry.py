"""Effective rank and angle of sets whose geometry is known; both along a model's iterations."""

from __future__ import annotations

import math

import pytest
import torch

from cases.studies import image_subject, specification
from implicit_attn.models import build_model
from implicit_attn.studies import Subject, average_angle, effective_rank, geometry


def turned(tokens: torch.Tensor) -> torch.Tensor:
    """The same set in a random orthonormal frame, which changes neither rank nor angle."""
    generator = torch.Generator().manual_seed(3)
    size = tokens.shape[-1]
    frame = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator)).Q
    return tokens.double() @ frame


HALF = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
SHARES = {
    "orthonormal": (torch.eye(5, 8), 5.0),
    "scaled orthonormal": (1e-6 * torch.eye(5, 8), 5.0),
    "one direction": (torch.ones(6, 1) * torch.arange(1.0, 5.0), 1.0),
    "two to one": (HALF, math.exp(-(2 / 3) * math.log(2 / 3) - (1 / 3) * math.log(1 / 3))),
    "zero": (torch.zeros(4, 3), 0.0),
}


@pytest.mark.parametrize("name", SHARES)
def test_effective_rank(name: str) -> None:
    tokens, expected = SHARES[name]
    assert effective_rank(tokens).item() == pytest.approx(expected, abs=1e-9)
    assert effective_rank(turned(tokens)).item() == pytest.approx(expected, abs=1e-9)


SIMPLEX = torch.eye(4) - 0.25  # corners of a regular tetrahedron seen from its middle
ANGLES = {
    "orthogonal": (torch.diag(torch.tensor([1.0, 2.0, 3.0])), 90.0),
    "same direction": (torch.ones(5, 3) * torch.arange(1.0, 6.0)[:, None], 0.0),
    "opposite": (torch.tensor([[1.0, 0.0], [-2.0, 0.0]]), 180.0),
    "simplex": (SIMPLEX, math.degrees(math.acos(-1 / 3))),
    "sixty degrees": (torch.tensor([[1.0, 0.0], [0.5, 0.75**0.5]]), 60.0),
    "zero tokens": (torch.zeros(3, 2), 90.0),
}


@pytest.mark.parametrize("name", ANGLES)
def test_average_angle(name: str) -> None:
    tokens, expected = ANGLES[name]
    # Near 0 and 180 degrees the arc cosine takes the square root of the rounding.
    assert average_angle(tokens.double()).item() == pytest.approx(expected, abs=2e-6)
    assert average_angle(turned(tokens)).item() == pytest.approx(expected, abs=2e-5)


def test_batches() -> None:
    both = torch.stack([torch.eye(3), torch.ones(3, 3)]).expand(4, 2, 3, 3)
    assert effective_rank(both).shape == average_angle(both).shape == (4, 2)
    torch.testing.assert_close(effective_rank(both)[0], torch.tensor([3.0, 1.0]).double())


@pytest.mark.parametrize("tokens", [torch.ones(3), torch.ones(3, 2, dtype=torch.int64)])
def test_tokens_that_are_none(tokens: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="tokens must be floating point"):
        effective_rank(tokens)


def test_one_token_has_no_angle() -> None:
    with pytest.raises(ValueError, match="at least two"):
        average_angle(torch.ones(1, 3))


def test_geometry_of_the_recurrence() -> None:
    """The tables say what the model's own trajectory holds."""
    subject = image_subject("hyperset", iterations=3)
    energies, heads = geometry(subject, 4)
    with torch.no_grad():
        found = subject.model.backbone.trajectory(subject.tokens(subject.inputs), iterations=4)
    assert [row["iteration"] for row in energies] == [0, 1, 2, 3, 4]
    for row in energies:
        for name in ("attention", "feedforward"):
            expected = getattr(found, f"{name}_energy")[row["iteration"]].double()
            assert row[f"{name}_energy"] == pytest.approx(expected.mean().item(), rel=1e-6)
            assert row[f"{name}_energy_10"] <= row[f"{name}_energy"] <= row[f"{name}_energy_90"]
    assert len(heads) == 5 * 2
    for row in heads:
        tokens = found.features[row["iteration"], :, row["head"]]
        rank, angle = effective_rank(tokens).mean().item(), average_angle(tokens).mean().item()
        assert row["effective_rank"] == pytest.approx(rank, rel=1e-9)
        assert row["angle"] == pytest.approx(angle, rel=1e-9)
        assert 1.0 <= row["effective_rank"] <= 4.0  # heads are four wide


def test_geometry_of_the_equilibrium() -> None:
    """The sum of its weighted energies and the pull is what the solver brings down."""
    subject = image_subject("hyperset-equilibrium", iterations=30).exact()
    energies, _ = geometry(subject, 6)
    assert subject.energy is not None
    with torch.no_grad():
        x = subject.tokens(subject.inputs)
        start = subject.energy(x, x).mean().item()  # no pull at the input
    assert energies[0]["attention_energy"] + energies[0]["feedforward_energy"] == pytest.approx(
        start
    )
    last = energies[-1]["attention_energy"] + energies[-1]["feedforward_energy"]
    assert last < start


def test_backbones_without_these_energies() -> None:
    with pytest.raises(TypeError, match="SharedTransformer"):
        geometry(image_subject("transformer"), 2)


def test_subject_without_a_backbone() -> None:
    model = build_model(specification("crate"))
    subject = image_subject("crate")
    assert isinstance(subject, Subject)
    other = Subject("a", "", model.head, subject.inputs, subject.targets, 2)
    with pytest.raises(TypeError, match="RecurrentBackbone or a DEQ"):
        _ = other.layer
