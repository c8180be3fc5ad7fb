"""Free energies against enumeration, and the mixing of Gibbs chains."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from implicit_attn.studies import log_partition_errors, random_ising, random_potts
from implicit_attn.studies.experiments.theories.mixing import energy_per_site, gibbs_mixing
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
