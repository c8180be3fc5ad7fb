"""Prediction of the next symbol, evaluation every so many steps, and the recipe of language models."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from implicit_attn.checkpoint import load_checkpoint, save_checkpoint
from implicit_attn.data import ngram_loss
from implicit_attn.data.text import split_text
from implicit_attn.training import CsvLog, Interrupted, NextToken, Recipe, Training

for module in ("safetensors", "tqdm", "lightning_fabric"):
    pytest.importorskip(module, reason="needs the extra [training]")

DATA = split_text("letters", ["the cat sat on the mat and the rat sat on the cat, " * 8], 0.2)
RECIPE = Recipe(2, 8, 0.3, decay="linear", weight_decay=0.0)


class Bigram(nn.Module):
    """Logits of the next symbol from the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(len(DATA.alphabet), len(DATA.alphabet))
        nn.init.zeros_(self.table.weight)
        self.seen: list[Tensor] = []

    def forward(self, ids: Tensor) -> Tensor:
        if self.training:
            self.seen.append(ids)
        return self.table(ids)


def run(path: Path, recipe: Recipe = RECIPE, **options: Any) -> Training:
    task = NextToken(DATA, 10, windows=5)
    training = Training(Bigram(), task, recipe, path / "run.safetensors", **options)
    training.run()
    return training


def test_windows_are_of_the_text_and_their_targets_one_symbol_later() -> None:
    task = NextToken(DATA, 10)
    assert len(task.inputs) == (len(DATA.train) - 1) // 10
    text = DATA.decode(DATA.train)
    generator = torch.Generator().manual_seed(0)
    inputs, targets = task.augmented(task.inputs[:20], task.targets[:20], generator)
    assert inputs.shape == targets.shape == (20, 10) and task.terms(inputs, targets) == 200
    for window, following in zip(inputs, targets, strict=True):
        assert torch.equal(window[1:], following[:-1])
        assert DATA.decode(window) + DATA.decode(following[-1:]) in text
    starts = {DATA.decode(window) for window in inputs}
    assert len(starts) > 10
    again = task.augmented(task.inputs[:20], task.targets[:20], torch.Generator().manual_seed(0))
    assert torch.equal(again[0], inputs)


def test_every_window_of_the_text_may_be_drawn() -> None:
    """The first and the last one, too: nothing of the text is left out."""
    data = split_text("short", ["abcdefghij" + "klmnopqrst"], 0.5)
    task = NextToken(data, 7, windows=3)
    inputs, targets = task.augmented(
        torch.zeros(200), torch.zeros(200), torch.Generator().manual_seed(0)
    )
    assert set(inputs[:, 0].tolist()) == {0, 1, 2}
    assert targets.max() == 9


def test_the_loss_is_a_sum_in_nats_over_fixed_windows_of_the_validation_text() -> None:
    task = NextToken(DATA, 10, windows=7, batch=3)
    uniform = Bigram()
    total, number = task.evaluate(uniform, 0, 1)["validation_loss"]
    assert number == 70
    assert total / number == pytest.approx(torch.tensor(float(len(DATA.alphabet))).log().item())
    with torch.no_grad():
        uniform.table.weight.normal_(generator=torch.Generator().manual_seed(0))
    whole = task.evaluate(uniform, 0, 1)["validation_loss"]
    parts = [task.evaluate(uniform, rank, 3)["validation_loss"] for rank in range(3)]
    assert sum(p[0] for p in parts) == pytest.approx(whole[0]) and sum(p[1] for p in parts) == 70
    assert task.evaluate(uniform, 9, 10)["validation_loss"] == (0.0, 0)


def test_a_model_of_pairs_learns_their_counts(tmp_path: Path) -> None:
    training = run(tmp_path, Recipe(30, 8, 0.3, decay="linear", weight_decay=0.0))
    loss = training.history[-1]["validation_loss"]
    assert loss < 1.1 * ngram_loss(DATA, 2)
    assert training.history[-1]["loss"] < training.history[0]["loss"]


def test_measures_every_so_many_steps_survive_a_kill(tmp_path: Path) -> None:
    def rows(folder: Path) -> list[dict[str, str]]:
        with (folder / "evaluations.csv").open() as file:
            return list(csv.DictReader(file))

    whole = run(tmp_path / "whole", evaluate_every=3, logs=[CsvLog(tmp_path / "whole", 1)])
    steps = [row["step"] for row in whole.evaluations]
    assert steps == list(range(3, whole.steps + 1, 3)) and len(steps) >= 2
    assert [int(row["step"]) for row in rows(tmp_path / "whole")] == steps

    class StopAfter(CsvLog):
        def step(self, step: int, values: dict[str, Any]) -> None:
            super().step(step, values)
            if step == 4:
                training._stop()

    task, path = NextToken(DATA, 10, windows=5), tmp_path / "cut" / "run.safetensors"
    options: dict[str, Any] = {"evaluate_every": 3}
    training = Training(
        Bigram(), task, RECIPE, path, logs=[StopAfter(tmp_path / "cut", 1)], **options
    )
    with pytest.raises(Interrupted):
        training.run()
    assert [row["step"] for row in training.evaluations] == [3]
    resumed = Training(Bigram(), task, RECIPE, path, logs=[CsvLog(tmp_path / "cut", 1)], **options)
    resumed.resume()
    resumed.run()
    assert resumed.evaluations == whole.evaluations
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")
    assert torch.equal(resumed.model.table.weight, whole.model.table.weight)
    other = run(tmp_path / "without")  # looking changes nothing
    assert torch.equal(other.model.table.weight, whole.model.table.weight)


def test_a_checkpoint_without_evaluations_is_resumed(tmp_path: Path) -> None:
    training = run(tmp_path)
    path, fresh = training.path, Bigram()
    optimizer = RECIPE.build_optimizer(fresh)
    progress = load_checkpoint(path, fresh, optimizer)
    del progress["evaluations"]
    save_checkpoint(path, fresh, optimizer, progress)
    again = Training(Bigram(), NextToken(DATA, 10, windows=5), RECIPE, path)
    again.resume()
    assert again.evaluations == [] and again.steps == training.steps
    for wrong in ([3], [{"step": 10**6}], [{"step": 2}, {"step": 1}]):
        save_checkpoint(path, fresh, optimizer, progress | {"evaluations": wrong})
        with pytest.raises(ValueError, match=r"cannot be resumed: its .*evaluation"):
            again.resume()


def test_the_linear_schedule() -> None:
    recipe = Recipe(1, 1, 2.0, warmup=0.1, floor=0.0, decay="linear")
    assert [recipe.rate_at(p) for p in (0, 0.05, 0.1, 0.55, 1.0)] == pytest.approx(
        [0.0, 1.0, 2.0, 1.0, 0.0]
    )
    assert Recipe(1, 1, 2.0, warmup=0.0, floor=0.5, decay="linear").rate_at(0.5) == 1.5
    with pytest.raises(ValueError, match="decay must be one of"):
        Recipe(1, 1, 0.1, decay="steps")


def test_weight_decay_on_matrices_alone(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    groups = (
        Recipe(1, 1, 0.1, weight_decay=0.3, decayed="matrices").build_optimizer(model).param_groups
    )
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert {name: decays[id(p)] for name, p in model.named_parameters()} == {
        "0.weight": 0.3, "0.bias": 0.0, "1.weight": 0.0, "1.bias": 0.0,
    }  # fmt: skip
    assert len(Recipe(1, 1, 0.1, decayed="matrices").build_optimizer(Bigram()).param_groups) == 1
    with pytest.raises(ValueError, match="decayed must be one of"):
        Recipe(1, 1, 0.1, decayed="none")


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="length must be below the 82 symbols for validation"):
        NextToken(DATA, 82)
    with pytest.raises(ValueError, match="windows must be >= 1"):
        NextToken(DATA, 10, windows=0)
    with pytest.raises(ValueError, match="evaluate_every must be >= 1"):
        Training(
            Bigram(), NextToken(DATA, 10), RECIPE, tmp_path / "x.safetensors", evaluate_every=0
        )


def test_a_log_that_takes_no_measures_between_epochs_is_refused(tmp_path: Path) -> None:
    class Silent:
        def start(self, step: int, epochs: int) -> None: ...
        def step(self, step: int, values: dict[str, Any]) -> None: ...
        def epoch(self, step: int, values: dict[str, Any]) -> None: ...
        def close(self) -> None: ...

    path = tmp_path / "x.safetensors"
    Training(Bigram(), NextToken(DATA, 10), RECIPE, path, logs=[Silent()])
    with pytest.raises(TypeError, match=r"logs must have a method evaluation.*Silent has none"):
        Training(Bigram(), NextToken(DATA, 10), RECIPE, path, logs=[Silent()], evaluate_every=3)
