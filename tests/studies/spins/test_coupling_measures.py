"""Measures of couplings against loops and known rankings."""

from __future__ import annotations

import pytest
import torch

from cases.potts import random_couplings
from implicit_attn.studies.spins.measures import (
    contact_precision,
    contact_scores,
    coupling_error,
    roc_curve,
)


def couplings(seed: int = 0) -> torch.Tensor:
    return random_couplings(5, 3, torch.Generator().manual_seed(seed))


def test_the_score_is_the_norm_of_the_gauged_block_at_any_scale() -> None:
    single = torch.zeros(2, 2, 2, 2)
    single[0, 1] = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    torch.testing.assert_close(contact_scores(single)[0, 1], torch.tensor(1.0))
    given = couplings().float()
    for scale in (1e-30, 1e-25, 1e25, 1e37):  # whose squares leave the range of float32
        torch.testing.assert_close(contact_scores(given * scale) / scale, contact_scores(given))
    found = given.clone().requires_grad_()
    contact_scores(found).sum().backward()
    assert found.grad is not None and bool(found.grad.isfinite().all())


def test_the_error_is_relative() -> None:
    truth = couplings()
    assert coupling_error(truth, truth) == 0
    assert coupling_error(torch.zeros_like(truth), truth) == pytest.approx(1)
    assert coupling_error(1.1 * truth, truth) == pytest.approx(0.1)
    assert coupling_error(1.1e-200 * truth, 1e-200 * truth) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="truth"):
        coupling_error(truth, torch.ones_like(truth))
    for name, given in (
        ("couplings", (float("nan") * truth, truth)),
        ("truth", (truth, truth / 0)),
    ):
        with pytest.raises(ValueError, match=f"{name} must be finite"):
            coupling_error(*given)


def pairs(values: list[float]) -> torch.Tensor:
    """(4, 4) symmetric, with the values at (0,1) (0,2) (0,3) (1,2) (1,3) (2,3)."""
    scores = torch.zeros(4, 4)
    rows, columns = torch.triu_indices(4, 4, 1)
    scores[rows, columns] = scores[columns, rows] = torch.tensor(values).float()
    return scores


@pytest.mark.parametrize(
    ("scores", "truth", "precision", "area"),
    [
        ([6, 5, 4, 3, 2, 1], [1, 1, 0, 0, 0, 0], 1.0, 1.0),
        ([6, 5, 4, 3, 2, 1], [0, 0, 0, 0, 1, 1], 0.0, 0.0),
        ([6, 5, 4, 3, 2, 1], [1, 0, 1, 0, 0, 0], 0.5, 7 / 8),
        ([1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0], 1 / 3, 0.5),
        ([2, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0], 0.75, 1 - 0.5 / 8),
    ],
)
def test_precision_and_area(
    scores: list[float], truth: list[float], precision: float, area: float
) -> None:
    edges = pairs(truth) > 0
    assert contact_precision(pairs(scores), edges) == pytest.approx(precision)
    false_share, true_share = roc_curve(pairs(scores), edges)
    assert float(torch.trapezoid(true_share, false_share)) == pytest.approx(area)
    for share in (false_share, true_share):
        assert float(share[0]) == 0 and float(share[-1]) == 1
        assert bool((share.diff() >= 0).all())


def test_edges_may_be_given_in_one_direction() -> None:
    scores, edges = pairs([6, 5, 4, 3, 2, 1]), pairs([1, 0, 1, 0, 0, 0]) > 0
    for one in (edges.triu(), edges.tril()):
        assert contact_precision(scores, one) == contact_precision(scores, edges) == 0.5


def test_precision_at_another_number() -> None:
    edges = pairs([1, 0, 1, 0, 0, 0]) > 0
    scores = pairs([6, 5, 4, 3, 2, 1])
    assert contact_precision(scores, edges, 1) == 1
    assert contact_precision(scores, edges, 6) == pytest.approx(2 / 6)
    with pytest.raises(ValueError, match="number must be <= 6"):
        contact_precision(scores, edges, 7)


def test_mistakes() -> None:
    edges = torch.ones(4, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match="edges must leave"):
        roc_curve(torch.rand(4, 4), edges)
    with pytest.raises(ValueError, match="at least one true pair"):
        contact_precision(torch.rand(4, 4), ~edges)
    with pytest.raises(ValueError, match="edges must be bool"):
        contact_precision(torch.rand(4, 4), edges.float())
    with pytest.raises(ValueError, match="scores"):
        contact_precision(torch.full((4, 4), float("nan")), edges)
    with pytest.raises(TypeError, match="edges must be a tensor"):
        contact_precision(torch.rand(4, 4), [[True]])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="scores must be a tensor"):
        contact_precision([1.0, 2.0], edges)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="couplings"):
        contact_scores(torch.zeros(3, 3, 2, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="differ"):
        coupling_error(torch.rand(3, 3, 2, 2), torch.rand(4, 4, 2, 2))
