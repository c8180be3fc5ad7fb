"""Kinetic Ising and vector spins: the critical temperature, and what the tables say."""

from __future__ import annotations

import math

import pytest
import torch

from implicit_attn.studies.experiments.kinetic.ising import (
    compare,
    critical_beta,
    from_many_starts,
    histories,
    ising_model,
    sweep,
    turning_point,
)
from implicit_attn.studies.experiments.kinetic.vectors import (
    SETTINGS,
    errors_after_one_step,
    errors_after_steps,
    vector_histories,
    vector_network,
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_critical_temperature() -> None:
    assert critical_beta() == pytest.approx(1.1108, abs=5e-5)
    assert critical_beta(0.0) == pytest.approx(2 * math.atanh(0.5), abs=1e-5)


def test_the_mean_turns_at_the_critical_temperature() -> None:
    critical = critical_beta()
    betas = (critical * torch.linspace(0.4, 2, 9)).tolist()
    table = sweep(betas, spins=300, draws=3, steps=60, generator=generator())
    rows = [row for row in table if row["closure"] == "gaussian"]
    assert [row["beta"] for row in rows] == betas
    assert turning_point(rows) == pytest.approx(critical, rel=0.11)
    assert rows[0]["mean"] < 0.05 and rows[-1]["mean"] > 0.85
    assert all(row["mean_10"] <= row["mean"] <= row["mean_90"] for row in rows)


def test_two_states_below_the_critical_temperature_and_one_above() -> None:
    model, critical = ising_model(200, generator()), critical_beta()
    hot = from_many_starts(model, 0.5 * critical, steps=30, starts=4)[-1]
    cold = from_many_starts(model, 2 * critical, steps=30, starts=4)[-1]
    assert (hot.max() - hot.min()) < 1e-3
    assert cold.min() < -0.8 and cold.max() > 0.8


def test_closures_beside_the_simulation() -> None:
    """Far from the transition they agree with it up to its noise; at it TAP is nearer than naive."""
    model, chains = ising_model(100, generator(1)), 400
    far = histories(model, 2 * critical_beta(), steps=20, chains=chains, generator=generator())
    for row in compare(far, chains):
        assert row["error"] < 1.5 * row["noise"]
    near = histories(model, critical_beta(), steps=20, chains=chains, generator=generator())
    errors = {row["closure"]: row["error"] for row in compare(near, chains)}
    assert errors["tap"] < errors["naive"]
    assert errors["gaussian"] == pytest.approx(errors["tap"], rel=0.05)


def test_vectors_in_time() -> None:
    table = vector_histories(40, 20, steps=12, seed=0)
    last = {(r["setting"], r["closure"]): r for r in table if r["step"] == 12}
    assert len(last) == 9
    for setting in SETTINGS[:2]:  # settled
        for closure in ("naive", "gaussian"):
            assert last[setting.title, closure]["to_previous"] > 0.999
    assert last["beta = 2", "plefka"]["length"] < last["beta = 1", "plefka"]["length"] + 0.1
    assert last["beta = 2", "naive"]["length"] > last["beta = 2", "gaussian"]["length"]
    assert all(0 <= row["length"] <= 1 for row in table)


def test_the_fields_of_a_network() -> None:
    network = vector_network(30, 8, SETTINGS[1], generator())
    torch.testing.assert_close(network.field.norm(dim=-1), torch.full((1, 30), 4.0))
    assert network.radius == 2 and network.couplings.std() == pytest.approx(2 / 30**0.5, rel=0.1)


def test_errors_of_vector_closures() -> None:
    def silent(what: str) -> None: ...

    options = {"chains": 300, "seed": 0, "advance": silent}
    rows = errors_after_steps(spins=24, dim=16, steps=4, **options)
    rows += errors_after_one_step(spins=24, dim=12, **options)
    corrected = {(r["steps"], r["beta"], r["closure"]): r["corrected"] for r in rows}
    assert len(corrected) == 14
    for steps, beta in ((4, 1.0), (4, 2.0), (1, 1.0), (1, 2.0)):
        assert 2 * corrected[steps, beta, "gaussian"] < corrected[steps, beta, "naive"]
    assert corrected[4, 2.0, "naive"] < corrected[4, 2.0, "plefka"]
