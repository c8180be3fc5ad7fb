"""Path independence of maps whose ends are known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cases.studies import image_subject
from implicit_attn.studies import path_independence, paths_of_layer, paths_of_recurrence
from implicit_attn.studies.paths import starts_for

X = torch.linspace(0.2, 1.0, 9, dtype=torch.float64)[:, None]


def classify(z: Tensor) -> Tensor:
    """Class 1 where the state is positive."""
    return torch.cat([-z, z], dim=1)


def starts() -> dict[str, Tensor]:
    return {"input": X, "zero": torch.zeros_like(X), "below": -X, "far": 50 * X}


def test_contraction_forgets_its_start() -> None:
    """``z <- z / 2 + x`` ends at 2 x from everywhere."""

    def solve(z: Tensor) -> Tensor:
        for _ in range(80):
            z = 0.5 * z + X
        return z

    summary, samples = path_independence(solve, starts(), classify)
    assert [row["start"] for row in summary] == ["input", "zero", "below", "far"]
    for row in summary:
        assert row["distance_largest"] <= 1e-12
        assert row["same"] == row["agreement"] == 1.0
    assert len(samples) == 4 * len(X)


def test_bistable_map_remembers_its_start() -> None:
    """``z <- tanh(3 z)`` has attracting ends +m and -m, and keeps zero."""

    def solve(z: Tensor) -> Tensor:
        for _ in range(300):
            z = torch.tanh(3 * z)
        return z

    summary = {r["start"]: r for r in path_independence(solve, starts(), classify)[0]}
    end = solve(torch.ones(1, dtype=torch.float64)).item()
    assert 0.99 < end < 1.0
    assert summary["far"]["distance_largest"] <= 1e-12 and summary["far"]["agreement"] == 1.0
    assert summary["below"]["distance"] == pytest.approx(2.0)  # |-m - m| / |m|
    assert summary["below"]["same"] == summary["below"]["agreement"] == 0.0
    assert summary["zero"]["distance"] == pytest.approx(1.0)


def test_reference_residual_and_energy() -> None:
    summary, _ = path_independence(
        lambda z: z,
        {"a": 2 * X, "b": X},
        classify,
        reference="b",
        same=1.0,
        residual=lambda z: z[:, 0],
        energy=lambda z: z.square().sum(1),
    )
    assert summary[0]["distance"] == pytest.approx(1.0) and summary[0]["same"] == 1.0
    assert summary[0]["residual"] == pytest.approx(2 * X.median().item())
    assert summary[1]["energy"] == pytest.approx(X.square().mean().item())
    with pytest.raises(ValueError, match="reference must be one of"):
        path_independence(lambda z: z, {"a": X}, classify)


def test_starts() -> None:
    x = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))
    made = starts_for(x, random=2, seed=5)
    assert list(made) == ["input", "zero", "random 1", "random 2"]
    assert torch.equal(made["random 1"], starts_for(x, random=1, seed=5)["random 1"])
    assert not torch.equal(made["random 1"], made["random 2"])
    big = starts_for(100 * x, random=1, seed=5)["random 1"]
    torch.testing.assert_close(big, 100 * made["random 1"])


def test_equilibrium_is_found_from_everywhere() -> None:
    """With small weights the energy is convex, so there is one minimum."""
    subject = image_subject("hyperset-equilibrium", weight=0.05).exact()
    summary, samples = paths_of_layer(subject, random=1, rtol=1e-9)
    assert [row["start"] for row in summary] == ["input", "zero", "random 1"]
    assert all(row["distance_largest"] < 1e-6 for row in summary)
    assert all(row["residual"] <= 1e-9 for row in summary)
    energies = [row["energy"] for row in summary]
    assert energies == pytest.approx([energies[0]] * 3, rel=1e-9)
    assert all(row["accuracy"] == summary[0]["accuracy"] for row in summary)
    assert len(samples) == 3 * len(subject.inputs)


def test_recurrence_without_injection_depends_on_its_start() -> None:
    """Zero stays zero, and what is said about the input is what the model says."""
    subject = image_subject("hyperset").exact()
    summary, _ = paths_of_recurrence(subject, 3, random=1)
    assert summary[1]["start"] == "zero" and summary[1]["distance"] == pytest.approx(1.0)
    with torch.no_grad():
        right = subject.model(subject.inputs).argmax(1) == subject.targets
    assert summary[0]["accuracy"] == pytest.approx(right.double().mean().item())
    with pytest.raises(TypeError, match="unrolled"):
        paths_of_recurrence(image_subject("hyperset-equilibrium"), 3)
