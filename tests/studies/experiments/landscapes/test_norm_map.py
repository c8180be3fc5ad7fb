"""The norm map: its medians, its formula for large d, and what rounding leaves of it."""

from __future__ import annotations

import argparse
import math

import pytest
import torch

from implicit_attn.studies.experiments.landscapes.commands import EXPERIMENTS
from implicit_attn.studies.experiments.landscapes.norms import (
    large_dimension_rms,
    spaced_dimensions,
    step_norms,
)

MEDIANS = [  # tokens, c, d, and the median of ten draws made elsewhere
    (32, 1.0, {2: 3.0, 16: 8.6, 64: 1.9, 128: 0.135, 256: 1.9e-3, 512: 3.4e-6, 1024: 4.8e-10}),
    (32, 0.2, {512: 34.0}),
    (32, 2.0, {256: 1.6e-8}),
    (8, 1.0, {512: 3.1e-7}),
]


@pytest.mark.parametrize(("tokens", "scale", "expected"), MEDIANS)
def test_medians_within_a_factor_of_three(
    tokens: int, scale: float, expected: dict[int, float]
) -> None:
    table = step_norms(list(expected), [scale], tokens=tokens)
    assert [row["dimension"] for row in table] == list(expected)
    for row in table:
        assert 1 / 3 < row["norm"] / expected[row["dimension"]] < 3
        assert row["smallest"] <= row["norm"] <= row["largest"]


def rms_by_sampling(tokens: int, scale: float, dim: int, draws: int = 400) -> float:
    """The root mean square norm, the full softmax, from token 0 drawn where it matters.

    By symmetry the mean is N times that of token 0, whose distribution is narrowed to
    N(0, 1 / (1 + 4 beta - 2 beta^2)); each draw is weighted by the ratio of the densities.
    """
    generator = torch.Generator().manual_seed(0)
    beta = scale / math.sqrt(dim)
    narrow = 1 + 4 * beta - 2 * beta**2
    x = torch.randn(draws, tokens, dim, generator=generator, dtype=torch.float64)
    x[:, 0] /= math.sqrt(narrow)
    scores = beta * (x @ x[:, 0, :, None]).squeeze(-1)
    weights = torch.softmax(scores, dim=-1)
    step = (weights[:, 1:, None] * (x[:, 1:] - x[:, :1])).sum(1)
    squares = x[:, 0].square().sum(-1)
    log_ratio = -0.5 * dim * math.log(narrow) + 0.5 * (narrow - 1) * squares
    return math.sqrt(tokens * (step.square().sum(-1) * log_ratio.exp()).mean().item())


@pytest.mark.parametrize(
    ("tokens", "scale", "dim"), [(32, 0.5, 512), (32, 1.0, 512), (8, 0.5, 768)]
)
def test_root_mean_square_for_large_dimensions(tokens: int, scale: float, dim: int) -> None:
    expected = rms_by_sampling(tokens, scale, dim)
    assert large_dimension_rms(dim, scale, tokens) == pytest.approx(expected, rel=0.08)


def test_no_root_mean_square_where_the_integral_diverges() -> None:
    assert math.isnan(large_dimension_rms(2, 2.0, 32))
    assert math.isfinite(large_dimension_rms(2, 1.7, 32))


def test_tiny_steps_keep_their_digits() -> None:
    """Below the rounding of x, where the difference ``x - softmax(..) x`` itself is exactly zero."""
    (row,) = step_norms([1024], [2.0], draws=3)
    assert 0 < row["smallest"] < row["norm"] < 1e-18
    x = torch.randn(32, 1024, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(x, torch.softmax(2 / 32 * (x @ x.T), -1) @ x)


@pytest.mark.parametrize("count", [2, 3, 10, 40, 100, 1023])
def test_dimensions_are_different_and_end_where_they_should(count: int) -> None:
    found = spaced_dimensions(count)
    assert len(set(found)) == len(found) == count
    assert found == sorted(found) and (found[0], found[-1]) == (2, 1024)
    assert count < 10 or {2**power for power in range(1, 11)} <= set(found)


def test_the_command_prints_the_usual_scale() -> None:
    """At c = 1 whatever scales the map has, from the draws that the options name."""
    experiment = EXPERIMENTS["norm-map"]
    values = {flag[2:]: value for flag, _, value, _ in experiment.options}
    values |= {"dimensions": 2, "scales": 2, "tokens": 4, "draws": 3}
    result = experiment.run(argparse.Namespace(**values), lambda what: None)
    assert result.printed == ("usual",) and result.note == "; 4 tokens, 3 draws"
    table = result.tables["usual"]
    expected = step_norms([row["dimension"] for row in table], [1.0], tokens=4, draws=3)
    assert len(table) == 7 and str(table) == str(expected)  # NaN is equal to NaN as text


def test_errors() -> None:
    with pytest.raises(ValueError, match="count must be at most 1023, got 1024"):
        spaced_dimensions(1024)
    with pytest.raises(ValueError, match="scales must be > 0 and finite, got 0"):
        step_norms([2], [0.0])
    with pytest.raises(ValueError, match="dimensions must be"):
        step_norms([0], [1.0])
