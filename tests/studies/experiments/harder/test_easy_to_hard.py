"""The parts of the experiment on rings: fair rivals, the picture, the summary."""

from __future__ import annotations

import pytest
import torch

from implicit_attn.data.tasks.ring_parity import draw_rings
from implicit_attn.studies.experiments.harder.commands import summary
from implicit_attn.studies.experiments.harder.contenders import (
    EQUILIBRIUM,
    ONCE,
    SAME_DEPTH,
    SAME_PARAMETERS,
    Settings,
    contenders,
)
from implicit_attn.studies.experiments.harder.runs import draw_test, longest_run, unfolding


def test_rivals_have_as_many_parameters_or_evaluations() -> None:
    settings = Settings()
    each = contenders(settings)
    numbers = {
        name: sum(p.numel() for p in contender.build().parameters())
        for name, contender in each.items()
    }
    assert numbers[SAME_PARAMETERS] == pytest.approx(numbers[EQUILIBRIUM], rel=0.05)
    assert numbers[ONCE] == numbers[EQUILIBRIUM] < numbers[SAME_DEPTH] / 10
    least, most = each[EQUILIBRIUM].iterations  # type: ignore[misc]
    assert each[SAME_DEPTH].evaluations == (least + most) / 2
    spent = each[SAME_PARAMETERS].steps * each[SAME_PARAMETERS].evaluations
    assert spent >= each[EQUILIBRIUM].steps * (least + most) / 2


def test_training_is_repeatable_and_leaves_the_global_state() -> None:
    settings = Settings(size=4, steps=2, batch=4, dim=8, heads=2)
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    contender = contenders(settings)[EQUILIBRIUM]
    one, same, other = (contender.train(settings, seed, lambda step: None) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), state)
    inputs = draw_test(6, 3).inputs
    with torch.no_grad():
        assert torch.equal(one(inputs), same(inputs))
        assert not torch.equal(one(inputs), other(inputs))


def test_training_rings_are_no_larger_than_said() -> None:
    settings = Settings(size=8)
    generator = torch.Generator().manual_seed(0)
    sizes = {settings.draw(1, generator).targets.shape[1] for _ in range(100)}
    assert sizes == set(range(settings.least, 9))


def test_the_picture_begins_at_the_mark_of_the_longest_run() -> None:
    assert longest_run(torch.tensor([False, True, False, True, False, False])) == 3
    assert longest_run(torch.tensor([False, False, True])) == 2
    rings = draw_rings(5, 7, generator=torch.Generator().manual_seed(1))
    model = contenders(Settings(size=4, dim=8, heads=2))[EQUILIBRIUM].build()
    picture = unfolding(model, rings, 6)
    assert picture.shape == (6, 7) and picture.dtype == torch.bool


def test_the_summary_has_a_row_for_each_model() -> None:
    table = [
        {"model": m, "parameters": 1, "size": s, "seed": k, "solved": k, "accuracy": 1.0}
        for m in ("a", "b")
        for k in (0, 1)
        for s in (4, 6, 8, 12, 16)
    ]
    rows = summary(table)
    assert [row["model"] for row in rows] == ["a", "b"]
    assert rows[0]["solved_6"] == 0.5 and "accuracy_6" not in rows[0] and rows[0]["accuracy_8"] == 1
