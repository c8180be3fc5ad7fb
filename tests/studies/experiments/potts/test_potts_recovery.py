"""The recovery study: data, methods by name, trainings on masked tokens, tables."""

from __future__ import annotations

import math

import pytest
import torch

from implicit_attn.models import MaskedTransformer
from implicit_attn.studies.experiments.potts.data import draw_data
from implicit_attn.studies.experiments.potts.masked import (
    loss_by_recycles,
    masked_loss,
    masked_task,
    train_masked,
)
from implicit_attn.studies.experiments.potts.methods import (
    Effort,
    describe_method,
    read_method,
    recover,
)
from implicit_attn.studies.experiments.potts.recovery import USUAL, compare_methods
from implicit_attn.studies.spins.graphs import GRAPHS, conditional_logits
from implicit_attn.training import Recipe

SMALL = draw_data("tree", 1500, 500, sites=7, colours=3)
SHORT = Effort(steps=200, masked=5, batch=32, dim=8, tested=20)


def test_samples_are_those_of_the_model() -> None:
    """The samples' mean of the calibrated logits: colours are as likely as the conditionals say."""
    data = draw_data("er-kron", 4000, 1000, sites=9, colours=3, seed=1)
    assert data.train.shape == (4000, 9) and data.test.shape == (1000, 9)
    logits = conditional_logits(data.model, data.train)
    chances = logits.softmax(-1)
    taken = torch.nn.functional.one_hot(data.train, 3).double()
    error = (taken - chances).mean(0)  # 0 within sqrt(p (1 - p) / M)
    assert error.abs().max().item() < 5 * math.sqrt(0.25 / 4000)
    entropy = -(chances * chances.log()).sum(-1).mean().item()
    assert data.bayes() == pytest.approx(entropy, abs=0.05)
    again = draw_data("er-kron", 4000, 1000, sites=9, colours=3, seed=1)
    assert torch.equal(again.train, data.train)
    assert not torch.equal(data.first(10).train, data.test[:10])


def test_linear_heads_find_the_tree_and_softmax_heads_cannot() -> None:
    """Rows of a softmax have equal sums, sites of a tree unequal degrees."""
    linear, softmax = (recover(name, SMALL, SHORT).row(SMALL) for name in ("linear", "softmax"))
    assert linear["precision"] == 1.0 and linear["coupling_error"] < 0.27
    assert linear["excess"] < 0.01
    assert softmax["coupling_error"] > 0.3 and softmax["excess"] > 0.02


def test_pseudo_likelihood_finds_the_tree() -> None:
    row = recover("potts", SMALL, SHORT).row(SMALL)
    assert row["status"] in ("converged", "max_steps")
    assert row["precision"] == 1.0 and row["coupling_error"] < 0.5 and row["excess"] < 0.015
    assert row["parameters"] == 21 * 9 + 21


def test_a_transformer_learns_masked_tokens() -> None:
    data = draw_data("tree", 2000, 50, sites=4, colours=3)
    torch.manual_seed(0)
    model, task = MaskedTransformer(4, 3, 16, 2, iterations=2), masked_task(data, 50)
    untrained = masked_loss(model, task)
    recipe = Recipe(1, 64, 1e-2, optimizer="adam", weight_decay=0.0, iterations=(1, 2))
    train_masked(model, task, recipe, 150)
    bayes = data.bayes()
    assert masked_loss(model, task) - bayes < 0.3 * (untrained - bayes)
    rows = loss_by_recycles("two", model, data, (1, 2), 50)
    assert [row["recycles"] for row in rows] == [1, 2]
    assert rows[1]["excess"] == pytest.approx(masked_loss(model, task) - bayes)


def test_names_of_methods() -> None:
    assert describe_method("linear") == "factored, 1 linear head"
    assert describe_method("softmax-16") == "factored, 16 softmax heads"
    assert describe_method("sink-long") == "factored, 1 sink head, long"
    for names in USUAL.values():
        assert [read_method(name) for name in names] == list(names)
    assert set(USUAL) == set(GRAPHS)
    labels = {describe_method(name) for names in USUAL.values() for name in names}
    assert len(labels) == len({name for names in USUAL.values() for name in names})
    for wrong in ("cubic", "sink-0", "softmax-", "linear-long-2"):
        with pytest.raises(ValueError, match="methods must be potts"):
            read_method(wrong)


def test_all_kinds_of_methods_give_rows_and_curves() -> None:
    methods = ("sink-2", "potts", "vanilla", "vanilla-3", "fixed", "recycled")
    tiny = draw_data("tree", 60, 30, sites=4, colours=3)
    effort = Effort(steps=3, evaluations=3, masked=2, batch=8, dim=8, tested=10)
    found = compare_methods(tiny, methods, effort, few=(20, 60))
    assert [row["method"] for row in found.rows] == [describe_method(name) for name in methods]
    assert {row["method"] for row in found.recycles} == {
        describe_method("fixed"),
        describe_method("recycled"),
    }
    assert [row["samples"] for row in found.few] == [20, 60] * 2
    for row in found.curves:
        assert 0 <= row["false_share"] <= 1 and 0 <= row["true_share"] <= 1
    deep, flat = found.rows[3]["parameters"], found.rows[2]["parameters"]
    assert deep > flat == found.rows[4]["parameters"]
    with pytest.raises(ValueError, match="few must be within 1 and the 60 samples"):
        compare_methods(tiny, ["linear"], effort, few=(61,))
