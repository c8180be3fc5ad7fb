"""Free energies against enumeration, and the mixing of Gibbs chains."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from implicit_attn.studies import log_partition_errors, random_ising, random_potts
from implicit_attn.studies.experiments.theories.mixing import energy_per_site, gibbs_mixing
from implicit_attn.studies.experiments.theories.saddle import SaddleModel, curves, plane, sweep
from implicit_attn.studies.spins.graphs import graph_potts


def test_higher_orders_are_better_at_weak_couplings() -> None:
    for draw in (partial(random_ising, 6), partial(random_potts, 4, 3)):
        weak, strong = log_partition_errors(draw, (0.25, 1.0), 6)
        for what in ("log_partition", "mean"):
            naive, second, adaptive = (
                weak[f"{order}_{what}"] for order in ("naive", "second", "adaptive")
            )
            assert second < 0.2 * naive and adaptive < 0.2 * naive
            assert all(strong[f"{o}_{what}"] > weak[f"{o}_{what}"] for o in ("naive", "second"))
        assert weak["adaptive_converged"] == 1.0


def test_a_theory_that_does_not_converge_is_infinitely_wrong() -> None:
    (row,) = log_partition_errors(partial(random_ising, 4), (1.0,), 2, max_steps=1)
    assert row["adaptive_mean"] == row["naive_log_partition"] == float("inf")
    assert row["naive_converged"] == 0.0


@pytest.mark.parametrize(("models", "error"), [(0, ValueError), (1.5, TypeError)])
def test_a_number_of_models(models: int, error: type[Exception]) -> None:
    with pytest.raises(error, match="models"):
        log_partition_errors(partial(random_ising, 3), (1.0,), models)


def test_energies_fall_until_the_chains_have_mixed() -> None:
    table = gibbs_mixing(sites=9, colours=4, chains=1000, sweeps=32)
    assert {row["graph"] for row in table} == {"er-kron", "er-general", "tree", "ring4"}
    for graph in ("er-kron", "er-general", "tree"):
        rows = [row for row in table if row["graph"] == graph]
        assert [row["sweeps"] for row in rows] == [1, 2, 4, 8, 16, 32]
        assert not rows[0]["mixed"] and rows[-1]["mixed"]
        assert rows[0]["energy"] > rows[1]["energy"] > rows[-1]["energy"] - 0.1


def test_the_energy_of_one_state() -> None:
    model = graph_potts("tree", torch.Generator().manual_seed(0), sites=3, colours=2)
    spins = torch.eye(2)[torch.tensor([[0, 0, 0], [0, 1, 0], [1, 0, 0]])]
    assert torch.equal(energy_per_site(model, spins), torch.tensor([-2.0, -1.0, 0.0]).double())


def saddle_model() -> SaddleModel:
    return SaddleModel.drawn(6, 12, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("beta", [0.3, 1.0, 4.0])
def test_curves_are_derivatives_and_end_at_the_solved_root(beta: float) -> None:
    model = saddle_model()
    root = model.solve(beta, per_site=False).multiplier.item() / (2 * beta)
    step = 1e-4
    around = torch.tensor([root - step, root, root + step], dtype=torch.float64)
    low, at, high = curves(model, beta, around)
    assert abs(at["slope"]) < 1e-9 and at["curvature"] > 0
    assert (high["phi"] - low["phi"]) / (2 * step) == pytest.approx(0.0, abs=1e-6)
    assert (high["slope"] - low["slope"]) / (2 * step) == pytest.approx(at["curvature"], rel=1e-5)
    assert root > model.levels[-1]


def test_the_plane_is_lowest_at_the_solved_pair_and_ends_at_the_border() -> None:
    model = SaddleModel.drawn(2, 8, torch.Generator().manual_seed(1))
    first, second = (model.solve(1.0, per_site=True).multiplier[0] / 2).tolist()
    values = torch.linspace(0.01, 3, 300, dtype=torch.float64)
    image = plane(model, 1.0, values)
    row, column = divmod(int(image.nan_to_num(torch.inf).argmin()), len(values))
    assert values[column] == pytest.approx(first, abs=0.011)
    assert values[row] == pytest.approx(second, abs=0.011)
    product = model.couplings[0, 1] ** 2
    assert torch.equal(image.isnan(), values * values[:, None] <= product)


def test_a_sweep_over_the_temperature() -> None:
    table, failed = sweep(saddle_model(), [0.25, 1.0, 4.0])
    assert failed == 0
    roots, lengths = ([row[name] for row in table] for name in ("root", "length"))
    assert roots == sorted(roots, reverse=True) and lengths == sorted(lengths)
    for row in table:
        assert row["smallest"] <= row["root"] <= row["largest"]
    # The formula of the free energy, at one temperature.
    model, beta = saddle_model(), 1.0
    multiplier = model.solve(beta, per_site=True).multiplier[0] / (2 * beta)
    matrix = torch.diag(multiplier) - model.couplings
    aligned = (model.field * torch.linalg.solve(matrix, model.field)).sum()
    phi = beta * multiplier.sum() - torch.logdet(matrix) / 2 + beta / 4 * aligned
    wanted = -(phi - 3 * (1 + math.log(2 * beta))) / beta / 6
    assert table[1]["free_energy"] == pytest.approx(wanted.item(), rel=1e-9)
