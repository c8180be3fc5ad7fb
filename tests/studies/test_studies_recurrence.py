"""Unrolled models at other numbers of iterations, and stopped sample by sample."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cases.studies import CLASSES, image_subject
from implicit_attn.studies import (
    HeldStep,
    accuracy_by_iterations,
    adaptive_stopping,
    evaluations_to_reach,
    extrapolate,
    run_from,
    stopping_times,
)
from implicit_attn.studies.extrapolation import budgets_up_to, relative_changes
from implicit_attn.studies.subjects import Pool, measure_boards, measure_classes

CHANGES = torch.tensor([[0.5, 0.9, 0.1], [0.2, 0.8, 0.3], [0.05, 0.7, 0.2], [0.4, 0.6, 0.01]])


@pytest.mark.parametrize(
    ("rtol", "expected"),
    [(1.0, [1, 1, 1]), (0.25, [2, 4, 1]), (0.2, [2, 4, 1]), (0.05, [3, 4, 4]), (1e-9, [4, 4, 4])],
)
def test_stopping_times(rtol: float, expected: list[int]) -> None:
    """The first small change counts, later large ones do not; who never stops takes all."""
    assert stopping_times(CHANGES, rtol).tolist() == expected


def test_relative_changes() -> None:
    states = torch.tensor([[[3.0, 0.0]], [[3.0, 4.0]], [[0.0, 0.0]]])
    changes = relative_changes(states)
    assert changes.shape == (2, 1)
    assert changes[0].item() == pytest.approx(4 / 5)


def test_run_from_the_input_is_the_recurrence() -> None:
    for options in ({"beyond": "hold"}, {"layers": 2}, {"layers": 2, "order": "cyclic"}):
        backbone: Any = image_subject("hyperset", **options).recurrence
        x = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            assert torch.equal(run_from(backbone, x, x, 5), backbone.states(x, iterations=5))


@pytest.mark.parametrize("options", [{}, {"layers": 2}, {"layers": 2, "order": "cyclic"}], ids=str)
def test_accuracy_by_iterations(options: dict[str, Any]) -> None:
    """A row is what the model itself does at that number of iterations."""
    subject = image_subject("hyperset", **options)
    for row in accuracy_by_iterations(subject, [1, 3, 7]):
        with torch.no_grad():
            logits = subject.model(subject.inputs, iterations=row["evaluations"])
        right = (logits.argmax(1) == subject.targets).double().mean().item()
        loss = torch.nn.functional.cross_entropy(logits.double(), subject.targets).item()
        assert row["accuracy"] == pytest.approx(right)
        assert row["loss"] == pytest.approx(loss, rel=1e-5)
        assert row["residual"] > 0 and "energy" in row


def test_of_the_baselines_one_has_an_energy() -> None:
    assert "energy" in accuracy_by_iterations(image_subject("energy-transformer"), [1])[0]
    assert "energy" not in accuracy_by_iterations(image_subject("transformer"), [1])[0]
    with pytest.raises(TypeError, match="unrolled"):
        accuracy_by_iterations(image_subject("hyperset-equilibrium"), [1])


@pytest.mark.parametrize("name", ["hyperset", "hyperset-equilibrium"])
def test_adaptive_stopping(name: str) -> None:
    subject = image_subject(name)
    table, depths = adaptive_stopping(subject, 9, [10.0, 0.05, 1e-9])
    assert table[0]["evaluations"] == 1.0 and table[0]["stopped"] == 1.0
    assert table[2]["evaluations"] == 9.0 and table[2]["stopped"] == 0.0
    assert 1.0 <= table[1]["evaluations"] <= table[1]["evaluations_90"] <= 9.0
    for row in table:
        mine = [each for each in depths if each["rtol"] == row["rtol"]]
        assert sum(each["samples"] for each in mine) == len(subject.inputs)
        mean = sum(each["samples"] * each["evaluations"] for each in mine) / len(subject.inputs)
        assert mean == pytest.approx(row["evaluations"])


def test_stopped_sample_is_read_out_where_it_stopped() -> None:
    subject = image_subject("hyperset")
    assert subject.recurrence is not None
    with torch.no_grad():
        states = subject.recurrence.states(subject.tokens(subject.inputs), iterations=9)
        changes = relative_changes(states)
        rtol = changes[4].median().item()
        times = stopping_times(changes, rtol)
        assert len(times.unique()) > 1  # else this test could not tell samples apart
        ends = states[times, torch.arange(len(times))]
        loss = torch.nn.functional.cross_entropy(subject.classify(ends), subject.targets)
    table, _ = adaptive_stopping(subject, 9, [rtol])
    assert table[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_held_step_is_the_last_one() -> None:
    """Given the state before the last iteration it makes the last iteration."""
    for options in ({}, {"layers": 2}, {"step_size": "conditioned-input", "lora_rank": 1}):
        subject = image_subject("hyperset", **options)
        backbone: Any = subject.recurrence
        with torch.no_grad():
            x = subject.tokens(subject.inputs)
            states = backbone.states(x)
            torch.testing.assert_close(HeldStep(backbone)(states[-2], x), states[-1])


def test_extrapolate_an_unrolled_model() -> None:
    subject = image_subject("hyperset").first(6)
    seen: list[str] = []
    found = extrapolate(subject, 2, seen.append)
    methods = list(dict.fromkeys(row["method"] for row in found.curves))
    assert methods[:2] == ["recurrence, time goes on", "recurrence, time held at T"]
    assert [name.split()[0] for name in methods[2:]] == ["Anderson", "Broyden"]
    assert seen == [*methods, "adaptive stopping"]
    first = [r for r in found.curves if r["method"] == methods[0]]
    second = [r for r in found.curves if r["method"] == methods[1]]
    for one, other in zip(first, second, strict=True):  # the same up to T, different beyond
        same = one["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert same == (one["evaluations"] <= subject.trained)
    assert found.reach[0]["to_accuracy"] <= subject.trained
    assert set(found.reach[0]) >= {"accuracy_1x", "accuracy_2x", "to_loss", "to_residual"}
    constant = replace(subject, model=image_subject("hyperset", step_size="fixed").model)
    assert extrapolate(constant, 1).curves[0]["method"] == "recurrence"


def test_extrapolate_an_equilibrium() -> None:
    subject = replace(image_subject("hyperset-equilibrium").first(6), trained=4)
    found = extrapolate(subject, 2)
    methods = list(dict.fromkeys(row["method"] for row in found.curves))
    assert methods == ["forward", "plain forward", "L-BFGS", "Anderson", "Broyden"]
    starts = [row["loss"] for row in found.curves if row["evaluations"] == 1]
    assert starts == pytest.approx([starts[0]] * 5, rel=1e-6)
    assert all(("energy" in r) == (r["method"] != "plain forward") for r in found.curves)


def test_evaluations_to_reach() -> None:
    table = [
        {"evaluations": k, "accuracy": a, "loss": b}
        for k, a, b in [(1, 0.2, 3.0), (2, 0.9, 1.0), (4, 0.8, 0.5)]
    ]
    assert evaluations_to_reach(table, "accuracy", 0.8) == 2
    assert evaluations_to_reach(table, "accuracy", 0.95) is None
    assert evaluations_to_reach(table, "loss", 0.6, at_most=True) == 4
    assert evaluations_to_reach(table, "loss", 3.0, at_most=True) == 1


@pytest.mark.parametrize("trained", [1, 3, 12, 13, 50])
def test_budgets(trained: int) -> None:
    budgets = budgets_up_to(trained, 4)
    assert budgets == sorted(set(budgets)) and budgets[0] == 1 and len(budgets) < 40
    assert {trained, 2 * trained, 3 * trained, 4 * trained} <= set(budgets)
    assert budgets[-1] == 4 * trained
    with pytest.raises(ValueError, match="trained and factor"):
        budgets_up_to(0)


def test_measures_pool_over_batches() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(11, CLASSES, generator=generator)
    labels = torch.randint(CLASSES, (11,), generator=generator)
    pool = Pool()
    for part in (slice(0, 7), slice(7, 11)):
        pool.add(measure_classes(logits[part], logits[part], labels[part]))
    found = pool.means()
    assert found["accuracy"] == pytest.approx((logits.argmax(1) == labels).double().mean().item())
    expected = torch.nn.functional.cross_entropy(logits.double(), labels).item()
    assert found["loss"] == pytest.approx(expected)


def test_measures_of_boards() -> None:
    """Three unknown cells, two of them right; a board with all of its one unknown cell right."""
    solutions = torch.arange(81).remainder(9).add(1).repeat(2, 1)
    puzzles = solutions.clone()
    puzzles[0, :3], puzzles[1, 0] = 0, 0
    logits = 20 * torch.nn.functional.one_hot(solutions - 1, 9).double()
    logits[0, 2] = logits[0, 2].roll(1)
    pool = Pool()
    pool.add(measure_boards(logits, puzzles, solutions))
    found = pool.means()
    assert found["accuracy"] == 0.5 and found["cell_accuracy"] == 0.75
    assert found["loss"] == pytest.approx(20 / 4, rel=1e-6)
