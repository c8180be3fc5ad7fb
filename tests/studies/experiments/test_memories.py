"""What the experiments on memories measure, at sizes that take seconds."""

from __future__ import annotations

import math

import pytest
import torch

from implicit_attn.energies import Hopfield
from implicit_attn.studies.experiments.memories.capacity import (
    capacity_curve,
    half_load,
    theoretical_load,
)
from implicit_attn.studies.experiments.memories.density import (
    density_map,
    fit_histories,
    ring_memory,
    summary_of_fits,
    temperatures,
)
from implicit_attn.studies.experiments.memories.figures import centred_edges
from implicit_attn.studies.experiments.memories.kinds import (
    clustered_patterns,
    fixed_point_kinds,
    summary_of_kinds,
)
from implicit_attn.studies.experiments.memories.machines import (
    SCALAR,
    cumulant_curves,
    gibbs_errors,
    gibbs_histogram,
)


def test_hebbs_rule_fails_where_theory_says() -> None:
    """Half of the retrievals from 10 % flips are exact between P / N = 0.13 and 0.19 at N = 100."""
    loads = (0.1, 0.138, 0.16, 0.18, 0.22)
    table = capacity_curve("hebb", 100, loads, seeds=range(4))
    assert 0.13 <= half_load(table) <= 0.19
    assert table[0]["exact"] > 0.9 > 0.5 > table[-1]["exact"]
    assert [row["patterns"] for row in table] == [10, 14, 16, 18, 22]
    for row in table:
        for key in ("overlap", "exact"):
            assert row[f"{key}_low"] <= row[key] <= row[f"{key}_high"]


def test_the_exponential_memory_is_exact_at_32_patterns_a_spin() -> None:
    (row,) = capacity_curve("exp", 40, [32], seeds=range(2), probes=20)
    assert row["patterns"] == 1280
    assert row["exact_low"] == row["overlap_low"] == 1.0


def test_pseudo_rules_hold_more_than_hebbs() -> None:
    found = {
        rule: capacity_curve(rule, 60, [0.3], seeds=range(2))[0]["exact"]
        for rule in ("hebb", "pseudo-inverse", "pseudo-likelihood")
    }
    assert found["hebb"] < 0.3 < 0.8 < min(found["pseudo-inverse"], found["pseudo-likelihood"])


@pytest.mark.parametrize(("beta", "cooling"), [(0.5, 2), (4.0, 3), (1000.0, 5)])
def test_the_integral_follows_the_width_of_the_density(beta: float, cooling: int) -> None:
    """At both ends of the options of the command: wide Gaussians, and needles."""
    memory = ring_memory(5, beta, torch.Generator().manual_seed(0))
    assert max(row["error"] for row in temperatures(memory, (1, cooling))) < 1e-11


@pytest.mark.parametrize("sizes", [(1, 20, 200), (1, 200), (1, 3, 6), (1,)])
def test_marked_sizes_lie_in_the_middle_of_a_bin(sizes: tuple[int, ...]) -> None:
    edges = centred_edges(sizes).log()
    centres, width = (edges[1:] + edges[:-1]) / 2, edges[1] - edges[0]
    for size in sizes:
        assert (centres - math.log(size)).abs().min() < 0.05 * width


def test_summary_of_fits() -> None:
    fits = [
        {"method": method, "start": start, "step": step, "log_likelihood": value}
        for method, curves in {"a": [[-3, -2.00005, -2], [-4, -3, -1]], "b": [[-5, -5]]}.items()
        for start, curve in enumerate(curves)
        for step, value in enumerate(curve)
    ]
    first, second, true = summary_of_fits(fits, -1.5)
    assert first == {"method": "a", "starts": 2, "lowest": -2, "highest": -1, "steps": 2}
    assert (second["lowest"], second["steps"]) == (-5, 0)
    assert (true["method"], true["lowest"]) == ("true patterns", -1.5)


def test_half_load() -> None:
    def rows(*shares: float) -> list[dict[str, float]]:
        return [{"load": float(n), "exact": share} for n, share in enumerate(shares)]

    assert half_load(rows(1.0, 0.75, 0.25, 0.0)) == 1.5
    assert half_load(rows(1.0, 0.5)) == 1.0
    assert math.isnan(half_load(rows(1.0, 0.9))) and math.isnan(half_load(rows(0.2, 0.1)))


def test_theoretical_loads() -> None:
    assert theoretical_load("hebb", 100) == 0.138
    assert theoretical_load("exp", 40) == 2**20 / 40
    assert theoretical_load(3, 40) == pytest.approx(40**2 / (2 * 3 * math.log(40)) / 40)
    assert theoretical_load(4, 40) == pytest.approx(40**3 / (2 * 15 * math.log(40)) / 40)
    assert math.isnan(theoretical_load("pseudo-likelihood", 40))


def test_mistakes_name_the_argument() -> None:
    for bad, message in (
        (lambda: capacity_curve("hebb", 10, [0.0]), "loads must be > 0"),
        (lambda: capacity_curve("hebb", 10, [1.0], flips=2.0), "flips must be in"),
        (lambda: capacity_curve("hebb", 10, [1.0], seeds=()), "seeds must hold"),
        (lambda: capacity_curve("hebb", 1, [1.0]), "sites must be >= 2"),
        (lambda: capacity_curve("hob", 10, [1.0]), "rule must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            bad()


def test_clusters_of_patterns_are_fixed_points_of_their_own() -> None:
    """All, a cluster, one: the three kinds, and random patterns, which have no cluster states."""
    generator = torch.Generator().manual_seed(0)
    patterns = clustered_patterns(10, 20, 64, 0.3, generator)
    table = fixed_point_kinds(patterns, (1.0, 8.0, 150.0))
    warm, plateau, cold = summary_of_kinds(table, (1, 20, 200))
    assert warm["share at 200"] == 1
    assert plateau["least"] >= 19 and plateau["largest"] <= 21
    assert cold["share at 1"] > 0.9
    assert all(row["converged"] for row in table)
    # The state of the plateau is the average of the cluster that the start belongs to.
    memory = Hopfield(patterns, beta=8.0)
    averages = patterns.view(10, 20, 64).mean(1)
    moved = averages - memory.grad(averages)
    assert ((moved - averages).norm(dim=1) < 0.15 * averages.norm(dim=1)).all()

    random = clustered_patterns(200, 1, 64, 0.0, generator)
    torch.testing.assert_close(random.norm(dim=1), torch.ones(200).double())
    warm, cold = summary_of_kinds(fixed_point_kinds(random, (5.0, 15.0)), (1, 20, 200))
    assert warm["share at 200"] == 1 and cold["share at 1"] == 1


def test_densities_integrate_to_one_and_fits_never_fall() -> None:
    generator = torch.Generator().manual_seed(0)
    memory = ring_memory(5, 4.0, generator)
    assert all(row["error"] <= 1e-6 for row in temperatures(memory, (1, 2, 4)))
    found = density_map(memory, 2, 50, generator)
    row, column = 70, 130
    at = torch.stack([found.line[column], found.line[row]])
    torch.testing.assert_close(found.log_prob[row, column], memory.log_prob(at, 2))
    table = fit_histories(memory, memory.sample(200, generator), 2, 40, generator)
    for method in ("fit_patterns", "gradient"):
        for start in (0, 1):
            rows = [r for r in table if (r["method"], r["start"]) == (method, start)]
            values = torch.tensor([r["log_likelihood"] for r in rows]).double()
            assert (values.diff() >= -1e-12).all(), method


def test_gibbs_histograms_and_cumulant_curves() -> None:
    tables = [
        gibbs_histogram(hidden, 4, 3, 0.2, chains=5000, sweeps=20, seed=0)
        for hidden in ("normal", "poisson", "one-hot")
    ]
    for table, errors in zip(tables, gibbs_errors(tables), strict=True):
        assert len(table) == 16 and len({row["state"] for row in table}) == 16
        assert sum(row["exact"] for row in table) == pytest.approx(1)
        assert errors["largest deviation"] < 4.5 and errors["total variation"] < 0.05
        assert [r["exact"] for r in table] == sorted((r["exact"] for r in table), reverse=True)
    curves = cumulant_curves(SCALAR, (2, 8), points=11)
    assert len(curves) == 11 * len(SCALAR) and all(math.isfinite(row["K"]) for row in curves)
    for row in curves:
        if abs(row["t"]) < 0.3:
            assert abs(row["order 8"] - row["K"]) < 1e-3
