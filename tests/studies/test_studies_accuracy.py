"""Histories of a solve, on layers whose behaviour is known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cases.deq import DIM, make, relative_error, tokens
from implicit_attn import DEQ, GradientStep
from implicit_attn.energies import Quadratic
from implicit_attn.studies import solve_history
from implicit_attn.studies.evaluations import carry_forward
from solvers import Forward, Tolerance

NAN = float("nan")
COLUMNS = {"evaluation", "residual", "residual_10", "residual_90", "converged"}


def test_quadratic_takes_one_step() -> None:
    """From zero the unit step lands on x: the second evaluation sees a zero residual."""
    x = tokens(batch=6)
    layer = DEQ(GradientStep(Quadratic()), solver=Forward(), init="zeros")
    table, solution = solve_history(layer, x)
    assert [row["evaluation"] for row in table] == [1, 2]
    assert table[0]["residual"] == pytest.approx(1.0)  # |f(0) - 0| / |f(0)|
    assert table[1]["residual"] == table[1]["residual_90"] == 0.0
    assert [row["converged"] for row in table] == [0.0, 1.0]
    assert table[0]["energy_drop"] == 0.0
    expected = (-0.5 * x.square().sum((1, 2))).median().item()
    assert table[1]["energy_drop"] == pytest.approx(expected)
    assert table[1]["largest_rise"] < 0
    assert (solution.evaluations == 2).all()


def test_damped_steps_contract_at_a_known_rate() -> None:
    """z_k - x = (1 - eta)^k (z_0 - x), so residual and energy are known in closed form."""
    x = tokens(batch=1)
    layer = DEQ(GradientStep(Quadratic(), 0.25), solver=Forward(), init="zeros")
    table, _ = solve_history(layer, x, tolerance=Tolerance(rtol=1e-3), max_steps=60)
    size = x.square().sum().item()
    for k, row in enumerate(table):
        left = 0.75**k
        assert row["residual"] == pytest.approx(0.25 * left / (1 - 0.75 * left))
        assert row["energy_drop"] == pytest.approx(0.5 * size * (left**2 - 1), abs=1e-9)
        if k:
            assert row["largest_rise"] == pytest.approx(
                0.5 * size * (left**2 - (left / 0.75) ** 2), rel=1e-6
            )
    assert table[-1]["residual"] <= 1e-3 < table[-2]["residual"]


def test_every_row_speaks_of_all_samples() -> None:
    """Easy samples end early and keep their last value in the rows that follow."""
    x = tokens(batch=4) * torch.tensor([1e-6, 1.0, 3.0, 10.0], dtype=torch.float64)[:, None, None]
    start = torch.zeros_like(x)
    start[0] = x[0]  # there already
    layer = make("gradient", max_steps=200, tolerance=Tolerance(rtol=1e-8))
    table, solution = solve_history(layer, x, z0=start)
    assert len(table) == int(solution.evaluations.max())
    shares = [row["converged"] for row in table]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    for row in table:
        done = (solution.evaluations <= row["evaluation"]).double().mean().item()
        assert row["converged"] == pytest.approx(done)
        assert row["residual_10"] <= row["residual"] <= row["residual_90"]
    medians = [row["residual"] for row in table]
    assert medians == sorted(medians, reverse=True)  # of the best so far
    final = torch.quantile(solution.residual, 0.5).item()
    assert medians[-1] == pytest.approx(final, rel=1e-6)


@pytest.mark.parametrize("name", ["gradient", "channels", "activation"])
def test_energy_never_rises(name: str) -> None:
    layer = make(name, max_steps=200, tolerance=Tolerance(rtol=1e-8))
    table, solution = solve_history(layer, 3 * tokens(batch=8))
    assert bool(solution.converged.all())
    assert solution.energy is not None
    scale = solution.energy.abs().max().item()
    assert max(row["largest_rise"] for row in table) <= 1e-12 * max(scale, 1.0)
    drops = [row["energy_drop"] for row in table]
    assert drops[-1] < 0 and drops[-1] == pytest.approx(min(drops))


def test_layer_without_energy() -> None:
    table, _ = solve_history(make("update"), tokens())
    assert all(set(row) == COLUMNS for row in table)


def test_no_graph_is_kept_and_options_arrive() -> None:
    layer = make("gradient")
    table, solution = solve_history(
        layer, tokens().requires_grad_(), max_steps=2, on_failure="ignore"
    )
    assert len(table) == 2
    assert not solution.value.requires_grad
    assert set(table[0]) == COLUMNS | {"energy_drop", "energy_above", "largest_rise"}
    assert all(isinstance(value, (int, float)) for row in table for value in row.values())
    with pytest.raises(TypeError, match="unknown options"):
        solve_history(layer, tokens(), max_itr=3)


def test_mask_is_passed_on() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    layer = make("gradient")
    x, other = tokens(), tokens()
    other[~mask] = 100.0
    first, second = solve_history(layer, x, mask)[0], solve_history(layer, other, mask)[0]
    assert [r["residual"] for r in first] == pytest.approx([r["residual"] for r in second])
    assert relative_error(tokens(dim=DIM), x) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lower_precision(dtype: torch.dtype) -> None:
    layer = make("gradient", tolerance=Tolerance(rtol=2e-2)).to(dtype)
    table, _ = solve_history(layer, tokens().to(dtype))
    assert table[-1]["converged"] == 1.0


CARRY: list[tuple[list[list[float]], list[list[bool]] | None, list[list[float]]]] = [
    ([[3, 2, 1]], None, [[3, 2, 1]]),
    ([[3, NAN, 1]], None, [[3, 3, 1]]),
    ([[3, 2, NAN], [5, NAN, NAN]], None, [[3, 2, 2], [5, 5, 5]]),
    ([[3, 9, 1]], [[True, False, True]], [[3, 3, 1]]),
    ([[3, 9, 8, 1]], [[True, False, False, True]], [[3, 3, 3, 1]]),
    ([[3, 9, NAN]], [[True, False, False]], [[3, 3, 3]]),
    ([[3, float("inf"), 2]], None, [[3, 3, 2]]),
]


@pytest.mark.parametrize(("values", "accepted", "expected"), CARRY)
def test_carry_forward(
    values: list[list[float]], accepted: list[list[bool]] | None, expected: list[list[float]]
) -> None:
    flags = None if accepted is None else torch.tensor(accepted)
    original = torch.tensor(values, dtype=torch.float64)
    kept = original.clone()
    found = carry_forward(original, flags)
    assert torch.equal(found, torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(original, kept, equal_nan=True, rtol=0, atol=0)


def test_carry_forward_does_not_invent_a_first_value() -> None:
    """A sample whose first evaluation failed has nothing to carry."""
    values = torch.tensor([[NAN, NAN], [1.0, NAN]])
    found: Tensor = carry_forward(values, None)
    assert bool(found[0].isnan().all())
    assert found[1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("what", ["energy", "energy-and-gradient"])
def test_sample_that_never_had_a_finite_evaluation(what: str) -> None:
    """One bad sample neither hides the others nor counts as converged."""

    def energy(z: Tensor, x: Tensor) -> Tensor:
        bad = (x[:, 0, 0] + 1).log()
        pull = 0.5 * (z - x).square().sum((1, 2))
        return pull + bad if what == "energy" else pull * bad.exp()

    x = tokens(batch=4).abs()
    x[2, 0, 0] = -3.0  # the logarithm of a negative number
    layer = DEQ.from_energy(energy, init="zeros", on_failure="ignore")
    table, solution = solve_history(layer, x)
    assert table[-1]["converged"] == 0.75
    assert table[-1]["residual"] <= 1e-4  # the median over the samples that there are
    assert solution.counts() == {"CONVERGED": 3, "NONFINITE": 1}
