"""The parts of the experiments with bare attention: predictors, runs, periods, tables."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from implicit_attn.data.spherical import CircleTokens
from implicit_attn.energies import BareAttention
from implicit_attn.studies.experiments.bare.ends import periods, random_ends
from implicit_attn.studies.experiments.bare.pipeline import (
    EXACT,
    PAIRS,
    RECIPES,
    SOURCE,
    Setup,
    compare,
    open_setup,
    predict,
)
from implicit_attn.studies.experiments.bare.predictors import PairSum, best_strength, ridge
from implicit_attn.studies.experiments.bare.transients import (
    FOLDED,
    MEAN,
    Corruption,
    baselines,
    iterate_mean,
    measure,
    run,
    transients,
)

F64 = torch.float64


@pytest.fixture(scope="module")
def setup() -> Setup:
    """Small images whose left half tells the right: 2 x 4 pixels, patches of one pixel."""
    random = torch.Generator().manual_seed(0)
    codec = CircleTokens(1, 2, 4, 1)
    left = torch.rand(400, 1, 2, 2, generator=random)
    tokens = codec.encode(torch.cat([left, 1 - left.flip(3)], 3))
    return Setup("digits", codec, tokens[:300], tokens[300:], None, 150, 64, 0)


def test_ridge_is_least_squares() -> None:
    random = torch.Generator().manual_seed(1)
    train, test = (torch.rand(n, 3, 2, generator=random, dtype=F64) for n in (40, 7))
    for data in (train, train[:5]):  # more samples than unknowns, and fewer
        found = ridge(data, test, 0.3 / len(data))
        x, y = data[:, [0, 2]].flatten(1), data[:, 1]
        ahead = torch.cat([x - x.mean(0), 0.3**0.5 * torch.eye(4, dtype=F64)])
        target = torch.cat([y - y.mean(0), torch.zeros(4, 2, dtype=F64)])
        weights = torch.linalg.lstsq(ahead, target).solution
        expected = (test[:, [0, 2]].flatten(1) - x.mean(0)) @ weights + y.mean(0)
        torch.testing.assert_close(found[:, 1].double(), expected.clamp(0, 1), rtol=0, atol=1e-6)


def test_ridge_chooses_a_strength_by_held_out_samples() -> None:
    """Noise wants a strong penalty, a rule without noise a weak one."""
    random = torch.Generator().manual_seed(4)
    noise = torch.rand(60, 3, 8, generator=random)
    rule = noise.clone()
    rule[:, 1] = 0.5 * (noise[:, 0] + noise[:, 2])
    rule[:, 2], rule[:, 0] = rule[:, 1], rule[:, 1]
    assert best_strength(noise) >= 0.1
    assert best_strength(rule) <= 1e-3


@pytest.mark.parametrize("rows", [None, 3])
def test_the_pair_sums_rule_is_its_gradient(rows: int | None) -> None:
    random = torch.Generator().manual_seed(2)
    F = None if rows is None else torch.randn(rows, 4, generator=random, dtype=F64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = PairSum(3, rows or 4, features=F).double()
    angles = 6.28 * torch.rand(5, 3, 2, generator=random, dtype=F64)
    z = torch.stack([angles.cos(), angles.sin()], -1).flatten(-2)
    loss = -model.log_prob(z).sum(1).mean()
    (expected,) = torch.autograd.grad(loss, model.couplings.free)
    model.assign_gradient(model.local_gradient(z))
    assert model.couplings.free.grad is not None
    torch.testing.assert_close(model.couplings.free.grad, expected, rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match="rule must be"):
        model.local_gradient(z, "source")


def test_every_predictor_has_its_row_and_the_exact_ones_beat_the_mean(setup: Setup) -> None:
    said: list[str] = []
    found = compare(setup, said.append)
    rows = {row["predictor"]: row for row in found.table}
    assert list(rows) == ["mean of the site", "ridge regression", *RECIPES]
    assert set(said) == {"ridge regression", *RECIPES}
    mean = rows["mean of the site"]["error"]
    for name in (EXACT, PAIRS, "ridge regression"):
        assert rows[name]["error"] < 0.6 * mean
    assert rows[SOURCE.format(2)]["error"] > rows[EXACT]["error"]
    assert math.isnan(rows["ridge regression"]["npl"])
    assert rows[EXACT]["npl"] < rows[SOURCE.format(8)]["npl"]
    expected = setup.codec.decode_patches(predict(found.models[EXACT], setup.test))
    torch.testing.assert_close(found.predictions[EXACT], expected)


def test_digits_are_opened_with_features() -> None:
    pytest.importorskip("sklearn", reason="the digits need the extra [examples]")
    for kind in ("principal", "random"):
        setup = open_setup("digits", images=20, steps=2, features=5, kind=kind, seed=1)
        assert setup.train.shape == (20, 16, 8) and setup.test.shape == (20, 16, 8)
        model = setup.fit(RECIPES[EXACT])
        assert isinstance(model, BareAttention)
        assert model.couplings.dim == 5 and predict(model, setup.test).shape == (20, 16, 8)
    with pytest.raises(ValueError, match="features must be at most 8 for digits, got 9"):
        open_setup("digits", features=9)
    with pytest.raises(ValueError, match="data must be one of"):
        open_setup("mnist")
    for kind in ("principal", "random"):
        with pytest.raises(ValueError, match="kind needs features, which are off for digits"):
            open_setup("digits", images=20, kind=kind)
    for name, value in (("images", -1), ("steps", 0), ("features", -1)):
        with pytest.raises(ValueError, match=f"{name} must be >="):
            open_setup("digits", **{name: value})  # type: ignore[arg-type]


def test_runs_start_where_they_should(setup: Setup) -> None:
    model, originals = setup.bare(), setup.test[:20]
    noisy = run(setup, model, originals, Corruption(sigma=0.5, steps=3))
    assert len(noisy.states) == 4 and noisy.free.all()
    masked = run(setup, model, originals, Corruption(masked=2, steps=3))
    assert (masked.free.sum(1) == 2).all()
    for state in masked.states:
        assert torch.equal(state[~masked.free], originals[~masked.free])
    assert not torch.allclose(masked.states[1], masked.states[0])
    rows = measure(setup, model, masked, (0, 1, 3))
    assert [row["step"] for row in rows] == [0, 1, 3]
    assert math.isnan(rows[0]["residual"]) and abs(rows[0]["overlap"]) < 0.4
    right = replace(masked, states=[originals])
    perfect = measure(setup, model, right, [0])[0]
    assert perfect["overlap"] == pytest.approx(1.0, abs=1e-5)
    assert perfect["error"] == pytest.approx(0.0, abs=1e-5)


def test_corruptions_out_of_range_are_named(setup: Setup) -> None:
    for name, value in (("masked", -3), ("sigma", math.nan), ("gamma", 2.0), ("steps", 0)):
        with pytest.raises(ValueError, match=f"^{name} must be"):
            Corruption(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="masked must be at most the 8 patches of an image, got 9"):
        run(setup, setup.bare(), setup.test[:2], Corruption(masked=9))


def test_baselines_of_denoising(setup: Setup) -> None:
    """Folding into the half circle of the values takes noise away, and cannot without noise."""
    found = {}
    for sigma in (0.0, 0.8):
        noisy = run(setup, setup.bare(), setup.test, Corruption(sigma=sigma, steps=1))
        rows = baselines(setup, noisy)
        assert [row["predictor"] for row in rows] == [FOLDED, MEAN]
        found[sigma] = [row["overlap"] for row in rows]
    assert found[0.0][0] == pytest.approx(1.0, abs=1e-5)
    assert found[0.8][0] > math.exp(-(0.8**2) / 2) + 0.03  # that of the noise itself
    assert found[0.0][1] == pytest.approx(found[0.8][1])


def test_a_trained_model_fills_masked_patches(setup: Setup) -> None:
    model = setup.fit(RECIPES[EXACT])
    assert isinstance(model, BareAttention)
    table, runs = transients(setup, {EXACT: model}, Corruption(masked=1, gamma=0.0, steps=12), 50)
    rows = {row["step"]: row for row in table if row["part"] == "test"}
    assert rows[0]["overlap"] < 0.3 < 0.6 < rows[12]["overlap"]
    mean = iterate_mean(setup, model, runs[EXACT], 2)
    found = measure(setup, model, mean, [2])[0]
    assert found["error"] < 0.5 * rows[0]["error"]


def test_periods_of_known_orbits() -> None:
    """Turns by a quarter and a third, a point at rest, and a turn that never comes back."""
    turns = torch.tensor([math.pi / 2, 2 * math.pi / 3, 0.0, 1.0], dtype=F64)
    states = [
        torch.stack([(t * turns).cos(), (t * turns).sin()], -1).unsqueeze(1) for t in range(100)
    ]
    assert periods(states).tolist() == [4, 3, 1, 0]


def test_symmetric_random_couplings_end_in_fixed_points() -> None:
    found = random_ends(models=2, starts=6, steps=400)
    symmetric = [row for row in found.table if row["couplings"] == "symmetric"]
    assert {row["gamma"] for row in symmetric} == {0.0, 0.5}
    for row in found.table:
        assert row["fixed point"] + row["cycle"] + row["not settled"] == pytest.approx(1.0)
        assert 0.0 < row["rises"] < 0.6
    for row in symmetric:
        assert row["fixed point"] == 1.0
        assert row["largest_residual"] < 1e-13
        assert row["largest_radius"] < 1.0
    assert {row["step"] for row in found.residuals} >= {1, 400}
