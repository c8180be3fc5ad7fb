"""Errors of mean-field theories against coupling strength, and the picture of them."""

from __future__ import annotations

import math
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import solvers
from implicit_attn.studies import (
    error_against_coupling,
    exact_moments,
    random_ising,
    random_potts,
)
from implicit_attn.studies.plots_spins import mean_field_report
from implicit_attn.studies.spins.errors import consistency
from implicit_attn.studies.spins.models import SpinModel

ising, potts = partial(random_ising, 6), partial(random_potts, 4, 3)
FAMILIES = {"ising": ising, "potts": potts}
TIGHT = solvers.Tolerance(rtol=1e-12)


def first_model(draw: Any, strength: float) -> SpinModel:
    return draw(strength, torch.Generator().manual_seed(0))


def off_diagonal_error(covariance: Tensor, exact: Tensor) -> float:
    """Relative error over pairs of different sites, by loops; both (N, d, N, d)."""
    pairs = [(i, j) for i in range(len(exact)) for j in range(len(exact)) if i != j]
    wrong = sum(float((covariance[i, :, j] - exact[i, :, j]).square().sum()) for i, j in pairs)
    return math.sqrt(wrong / sum(float(exact[i, :, j].square().sum()) for i, j in pairs))


def means(model: SpinModel, field: Tensor) -> Tensor:
    solution = solvers.adaptive_tap(model.couplings, field, site=model.site, tolerance=TIGHT)
    return solution.value.mean


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_of_one_model(family: str) -> None:
    """Everything of the table, computed otherwise: plain iteration, differences, loops."""
    draw = FAMILIES[family]
    (row,) = error_against_coupling(draw, [0.7], 1, tolerance=TIGHT)
    model = first_model(draw, 0.7)
    exact = exact_moments(model)
    _, sites, dim = model.field.shape

    naive = torch.zeros_like(model.field)
    none = torch.zeros(1, sites, dim, dim, dtype=torch.float64)
    for _ in range(2000):
        pull = torch.einsum("ijab,njb->nia", model.couplings, naive)
        naive = 0.7 * naive + 0.3 * model.site.mean(model.field + pull, none)
    error = (naive - exact.mean).norm() / exact.mean.norm()
    assert row["naive_mean"] == pytest.approx(error.item(), rel=1e-8)

    tap = means(model, model.field)
    error = (tap - exact.mean).norm() / exact.mean.norm()
    assert row["tap_mean"] == pytest.approx(error.item(), rel=1e-8)

    derivative = torch.zeros(sites, dim, sites, dim, dtype=torch.float64)
    for j in range(sites):
        for b in range(dim):
            shift = torch.zeros_like(model.field)
            shift[0, j, b] = 1e-5
            slope = means(model, model.field + shift) - means(model, model.field - shift)
            derivative[:, :, j, b] = slope[0] / 2e-5
    error = off_diagonal_error(derivative, exact.covariance[0])
    assert row["derivative_pairs"] == pytest.approx(error, rel=1e-5)

    for name, onsager in (("naive_pairs", False), ("tap_pairs", True)):
        solution = solvers.adaptive_tap(
            model.couplings,
            model.field,
            site=model.site,
            onsager=onsager,
            response=True,
            tolerance=TIGHT,
        )
        error = off_diagonal_error(solution.value.response[0], exact.covariance[0])
        assert row[name] == pytest.approx(error, rel=1e-6)
    for name in ("naive_consistent", "tap_consistent", "tap_stable", "tap_better"):
        assert row[name] == 1.0
    assert row["tap_mean"] == row["tap_mean_10"] == row["tap_mean_90"]


def test_consistency_of_ising() -> None:
    """``C^1/2 (Lambda - J) C^1/2`` with numbers for matrices, and the sign of ``Lambda - J``."""
    generator = torch.Generator().manual_seed(0)
    variance = torch.rand(3, 6, generator=generator, dtype=torch.float64)
    cavity = 0.3 * torch.rand(3, 6, generator=generator, dtype=torch.float64)
    signs = set()
    for strength in (0.1, 1.0, 4.0):
        couplings = first_model(ising, strength).couplings
        found = consistency(variance[..., None, None], cavity[..., None, None], couplings)
        for k in range(3):
            plain = torch.diag(1 / variance[k] + cavity[k]) - couplings[..., 0, 0]
            root = variance[k].sqrt()
            scaled = root[:, None] * plain * root
            assert found[k].item() == pytest.approx(torch.linalg.eigvalsh(scaled)[0].item())
            assert (found[k] > 0) == (torch.linalg.eigvalsh(plain)[0] > 0)
            signs.add(bool(found[k] > 0))
    assert signs == {True, False}


def test_consistency_of_singular_covariances() -> None:
    """Potts: the sign is that of ``Lambda - J`` among changes of the means that keep their sum."""
    basis = torch.linalg.qr(torch.tensor([[1.0, 0.0], [-1.0, 1.0], [0.0, -1.0]]).double())[0]
    signs = set()
    for strength in (0.3, 3.0, 8.0):
        model = first_model(potts, strength)
        none = torch.zeros(1, 4, 3, 3, dtype=torch.float64)
        covariance = model.site.covariance(model.field, none)
        found = consistency(covariance, none, model.couplings)
        inverse = torch.linalg.inv(basis.mT @ covariance[0] @ basis)
        own = torch.block_diag(*inverse)
        between = (basis.mT @ model.couplings @ basis).transpose(1, 2).reshape(8, 8)
        smallest = torch.linalg.eigvalsh(own - between)[0]
        assert (found[0] > 0) == (smallest > 0)
        signs.add(bool(smallest > 0))
    assert signs == {True, False}


def test_truth_beyond_naive_mean_field() -> None:
    """The criterion at the exact means: fine at weak, lost at strong couplings."""
    weak, strong = error_against_coupling(ising, [0.2, 2.0], 8)
    assert weak["truth_consistent"] == 1.0
    assert strong["truth_consistent"] < 0.5
    assert strong["truth_eigenvalue_10"] < strong["truth_eigenvalue"] < 0
    model = first_model(ising, 2.0)
    (row,) = error_against_coupling(ising, [2.0], 1)
    root = (1 - exact_moments(model).mean[0, :, 0].square()).sqrt()
    scaled = torch.eye(6) - root[:, None] * model.couplings[..., 0, 0] * root
    assert row["truth_eigenvalue"] == pytest.approx(torch.linalg.eigvalsh(scaled)[0].item())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_theories_at_moderate_couplings(family: str) -> None:
    table = error_against_coupling(FAMILIES[family], [0.2, 0.5], 6)
    for row in table:
        assert row["tap_better"] == row["tap_consistent"] == row["tap_stable"] == 1.0
        assert row["tap_mean"] < row["naive_mean"] / 8
        assert row["derivative_pairs"] < row["tap_pairs"] < row["naive_pairs"] < 1
        assert 0 < row["naive_eigenvalue"] < row["tap_eigenvalue"] < 1
        assert row["tap_mean_10"] <= row["tap_mean"] <= row["tap_mean_90"]
    assert table[0]["tap_mean"] < table[1]["tap_mean"]
    assert [row["strength"] for row in table] == [0.2, 0.5]


def test_failures_count_as_infinitely_wrong() -> None:
    """With too few steps some models, or all, have no solution; none is left out."""
    (none,) = error_against_coupling(ising, [1.0], 4, max_steps=1)
    for name in ("naive", "tap"):
        assert none[f"{name}_consistent"] == 0.0
        assert none[f"{name}_mean"] == none[f"{name}_pairs_10"] == math.inf
    assert none["derivative_pairs"] == math.inf
    assert none["tap_stable"] == 0.0
    (some,) = error_against_coupling(ising, [1.0], 6, max_steps=60)
    assert 0.1 < some["naive_consistent"] < 0.9
    assert math.isfinite(some["naive_mean_10"])
    assert some["naive_mean_90"] == math.inf
    assert not any(math.isnan(value) for value in some.values())


def test_tables_repeat() -> None:
    once = error_against_coupling(ising, [0.4, 0.8], 3, seed=5)
    assert error_against_coupling(ising, iter([0.4, 0.8]), 3, seed=5) == once
    assert error_against_coupling(ising, [0.8], 3, seed=5) == once[1:]
    assert error_against_coupling(ising, [0.4, 0.8], 3, seed=6) != once
    with torch.no_grad():
        assert error_against_coupling(ising, [0.4, 0.8], 3, seed=5) == once


BAD: list[tuple[dict[str, Any], str]] = [
    ({"models": 0}, "models must be >= 1, got 0"),
    ({"strengths": [0.0]}, "strengths must be > 0 and finite, got 0.0"),
    ({"strengths": [math.inf]}, "strengths must be > 0 and finite, got inf"),
    ({"draw": partial(random_ising, 3, samples=2)}, "one sample, got 2"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_arguments(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"draw": ising, "strengths": [1.0], "models": 2} | changes
    with pytest.raises(ValueError, match=message):
        error_against_coupling(**arguments)


@pytest.mark.parametrize("max_steps", [1, 60])
def test_the_picture(tmp_path: Path, max_steps: int) -> None:
    """One family or two; also where nothing, or only a part, was solved."""
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="the picture needs matplotlib")
    table = error_against_coupling(ising, [0.5, 1.0], 3, max_steps=max_steps)
    before = len(pyplot.get_fignums())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mean_field_report(tmp_path / "two.png", "a title", {"Ising": table, "again": table})
        mean_field_report(tmp_path / "one.png", "a title", {"Ising": table[:1]})
    assert len(pyplot.get_fignums()) == before
    sizes = []
    for name in ("one.png", "two.png"):
        content = (tmp_path / name).read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        assert len(content) > 20_000
        sizes.append([int.from_bytes(content[i : i + 4], "big") for i in (16, 20)])
    assert sizes[0][0] == sizes[1][0] > 1000
    assert sizes[0][1] < sizes[1][1]
