"""Learning rules side by side: exact samples, and errors near that of the exact likelihood."""

from __future__ import annotations

import torch
from torch import Tensor

from implicit_attn.studies import exact_moments, random_potts
from implicit_attn.studies.experiments.potts.learning import compare_rules, sample_exactly


def within(found: Tensor, expected: Tensor, samples: int) -> bool:
    return (found - expected).abs().max().item() < 4.5 * (0.25 / samples) ** 0.5


def test_samples_have_the_exact_moments() -> None:
    generator = torch.Generator().manual_seed(0)
    model, number = random_potts(4, 3, 1.5, generator), 50_000
    states = sample_exactly(model, number, generator).double()
    exact = exact_moments(model)
    assert within(states.mean(0), exact.mean[0], number)
    centred = states - exact.mean[0]
    pairs = torch.einsum("mia,mjb->iajb", centred, centred) / number
    assert within(pairs, exact.covariance[0], number)


def test_all_rules_come_near_the_exact_likelihood() -> None:
    by_samples, by_step = compare_rules((200, 8000), sites=3, seeds=1, steps=120)
    errors = {(row["rule"], row["samples"]): row["error"] for row in by_samples}
    rules = {rule for rule, _ in errors}
    assert len(rules) == 4
    exact = errors["exact likelihood", 8000]
    assert exact < 0.15
    for rule in ("exact likelihood", "pseudo-likelihood"):
        assert errors[rule, 8000] < errors[rule, 200]
    statuses = {row["rule"]: row["status"] for row in by_samples if row["samples"] == 8000}
    assert statuses["exact likelihood"] == statuses["pseudo-likelihood"] == "converged"
    assert statuses["CD-1"] == statuses["PCD-1"] == "max_steps"
    assert len(errors) == 6  # rules that sample see all samples
    for rule in rules:
        assert abs(errors[rule, 8000] - exact) < 0.04, rule
    assert {row["rule"] for row in by_step} == {"CD-1", "PCD-1"}
    first, *_, last = [row["error"] for row in by_step if row["rule"] == "CD-1"]
    assert last < 0.5 * first
