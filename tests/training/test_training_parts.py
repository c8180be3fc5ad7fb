"""Recipes, random iterations, logs, the split of a batch, compiled steps."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounter

from cases.training import Recorder, toy_data
from implicit_attn.data import RandomAffine, epoch_generator
from implicit_attn.models import HyperSET, ImageClassifier
from implicit_attn.training import (
    Recipe,
    SettingsDiffer,
    TensorBoardLog,
    Training,
    compile_step,
    describe,
    start_processes,
)
from implicit_attn.training.processes import share

for module in ("safetensors", "tqdm", "lightning_fabric"):
    pytest.importorskip(module, reason="needs the extra [training]")


def test_the_rate_rises_and_falls() -> None:
    recipe = Recipe(200, 128, 1e-3, warmup=5 / 200, floor=0.01)
    assert recipe.rate_at(0) == 0
    rates = [recipe.rate_at(epoch / 200) for epoch in range(201)]
    assert rates[:6] == sorted(rates[:6])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert max(rates) == pytest.approx(1e-3, rel=2e-3)
    assert rates[-1] == pytest.approx(1e-5)
    constant = Recipe(1, 1, 0.5, warmup=0, floor=1)
    assert [constant.rate_at(p) for p in (0, 0.3, 0.99)] == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_the_optimiser_is_the_one_named(name: str) -> None:
    optimizer = Recipe(
        1, 1, 0.1, weight_decay=0.3, optimizer=name, betas=(0.8, 0.9)
    ).build_optimizer(nn.Linear(2, 2))
    assert type(optimizer).__name__.lower() == name
    assert optimizer.defaults["betas"] == (0.8, 0.9)
    assert optimizer.defaults["weight_decay"] == 0.3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "epochs must be >= 1, got 0"),
        ({"rate": float("nan")}, "rate .* got nan"),
        ({"warmup": 2}, r"warmup must lie in \[0, 1\], got 2"),
        ({"floor": -1}, "floor .* got -1"),
        ({"weight_decay": -0.1}, r"weight_decay .* got -0\.1"),
        ({"clip": 0}, "clip must be > 0 or None, got 0"),
        ({"optimizer": "sgd"}, "optimizer must be one of .* got 'sgd'"),
        ({"iterations": 0}, "iterations .* got 0"),
        ({"iterations": (3, 2)}, r"iterations .* got \(3, 2\)"),
        ({"iterations": (0, 2)}, r"iterations\[0\] .* got 0"),
    ],
)
def test_bad_recipes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe(**({"epochs": 1, "batch": 1, "rate": 0.1} | changes))


@pytest.mark.parametrize("changes", [{"batch": 2.5}, {"epochs": True}, {"iterations": (1, 2.0)}])
def test_numbers_of_a_recipe_are_integers(changes: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"(batch|epochs|iterations\[1\]) must be an integer, got"):
        Recipe(**({"epochs": 1, "batch": 1, "rate": 0.1} | changes))


def train(folder: Path, recipe: Recipe, **options: Any) -> Recorder:
    torch.manual_seed(0)
    model = Recorder()
    Training(model, toy_data(), recipe, folder / "checkpoint", **options).run(overwrite=True)
    return model


def test_random_iterations_are_drawn_per_batch_and_repeat(tmp_path: Path) -> None:
    recipe = Recipe(12, 3, 0.1, iterations=(2, 5), seed=1)
    drawn = train(tmp_path, recipe).iterations
    assert len(drawn) == 12 * 4
    assert set(drawn) == {2, 3, 4, 5}
    torch.rand(3)  # whatever else was drawn in between
    assert train(tmp_path, recipe).iterations == drawn
    expected = [
        recipe.draw_iterations(epoch_generator(1, epoch, batch))
        for epoch in range(12)
        for batch in range(4)
    ]
    assert drawn == expected
    assert train(tmp_path, Recipe(12, 3, 0.1, iterations=(2, 5), seed=2)).iterations != drawn


@pytest.mark.parametrize("iterations", [None, 7])
def test_fixed_iterations_leave_the_augmentation_alone(
    tmp_path: Path, iterations: int | None
) -> None:
    options = {"augment": RandomAffine()}
    plain = train(tmp_path, Recipe(2, 5, 0.1), **options)
    model = train(tmp_path, Recipe(2, 5, 0.1, iterations=iterations), **options)
    assert model.iterations == 4 * [iterations]
    for first, second in zip(plain.images, model.images, strict=True):
        assert torch.equal(first, second)
    assert not torch.equal(model.images[0], model.images[2])


def test_other_settings_and_missing_checkpoints_are_refused(tmp_path: Path) -> None:
    def training(settings: dict[str, Any]) -> Training:
        return Training(Recorder(), toy_data(), Recipe(1, 5, 0.1), tmp_path / "c", settings)

    with pytest.raises(FileNotFoundError, match="nothing to resume"):
        training({}).resume()
    training({"a": 1}).run()
    with pytest.raises(SettingsDiffer, match="other settings"):
        training({"a": 2}).resume()
    resumed = training({"a": 1})
    resumed.resume()
    assert (resumed.epoch, resumed.steps, len(resumed.history)) == (1, 2, 1)


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [
        (ValueError, {"save_every": 0}, "save_every .* got 0"),
        (TypeError, {"save_every": 1.5}, r"save_every must be an integer, got 1\.5"),
        (TypeError, {"augment": RandomAffine(), "task": "other"}, "augment goes with image data"),
    ],
)
def test_bad_options_of_a_training_are_refused(
    tmp_path: Path, error: type[Exception], options: dict[str, Any], message: str
) -> None:
    task: Any = options.pop("task", None) or toy_data()
    with pytest.raises(error, match=message):
        Training(Recorder(), task, Recipe(1, 5, 0.1), tmp_path / "c", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 0}, "devices must be >= 1, got 0"),
        ({"accelerator": "abacus"}, "accelerator must be one of .* got 'abacus'"),
        ({"precision": "8-bit"}, "precision must be one of .* got '8-bit'"),
    ],
)
def test_bad_processes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        start_processes(**options)


@settings(deadline=None, max_examples=100)
@given(length=st.integers(1, 40), world=st.integers(1, 9))
def test_every_sample_of_a_batch_belongs_to_one_process(length: int, world: int) -> None:
    samples = list(range(length))
    parts = [share(length, rank, world) for rank in range(world)]
    assert [s for part, own in parts if own for s in samples[part]] == samples
    sizes = [len(samples[part]) for part, own in parts if own]
    assert max(sizes) - min(sizes) <= 1
    assert all(samples[part] == [0] for part, own in parts if not own)


def test_without_tensorboard_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match=r"implicit-attn\[tensorboard\]"):
        TensorBoardLog(tmp_path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside tensorboard
def test_tensorboard_events(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra [tensorboard]")
    train(tmp_path, Recipe(2, 5, 0.1), logs=[TensorBoardLog(tmp_path / "events", every=1)])
    content = b"".join(path.read_bytes() for path in (tmp_path / "events").iterdir())
    for name in (b"step/loss", b"step/rate", b"epoch/test_accuracy", b"epoch/loss"):
        assert name in content


def test_descriptions() -> None:
    assert describe("test_accuracy", 0.98333) == "test accuracy 98.33 %"
    assert describe("test_loss", 0.5) == "test loss 0.5000"


# Dynamo looks at the gradients of what it traces, which warns for a state in mid-iteration.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_the_repeated_layer_is_compiled_for_all_iterations() -> None:
    torch.manual_seed(0)
    backbone = HyperSET(8, 2, 8, iterations=3, initial_step=0.1, time_dim=8)
    model = ImageClassifier(backbone, 4, 1, 3, patch=2)
    images = toy_data().train_images
    expected = [model(images, iterations=count) for count in (3, 7, 12)]
    counter = CompileCounter()
    assert compile_step(model, backend=counter) is model
    found = [model(images, iterations=count) for count in (3, 7, 12)]
    for first, second in zip(expected, found, strict=True):
        torch.testing.assert_close(first, second)
    assert 1 <= counter.frame_count <= 3  # by the index: the first, and all later ones


def test_a_model_that_repeats_nothing_is_compiled_whole() -> None:
    counter = CompileCounter()
    model = nn.Linear(3, 2)
    compiled = compile_step(model, backend=counter)
    x = torch.ones(4, 3)
    torch.testing.assert_close(compiled(x), model(x))
    assert counter.frame_count == 1


@pytest.mark.defect("A1")
def test_runs_in_threads_train_as_they_do_alone(tmp_path: Path) -> None:
    """In other threads than the main one there are no signals to listen to."""

    def training(name: str) -> Training:
        torch.manual_seed(3)
        return Training(Recorder(), toy_data(), Recipe(2, 5, 0.1), tmp_path / name, {"some": 1})

    alone = training("alone")
    alone.run()
    together = [training(f"thread {number}") for number in range(3)]
    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(each.run) for each in together]:
            future.result(120)
    for each in together:
        for ours, theirs in zip(each.model.parameters(), alone.model.parameters(), strict=True):
            assert torch.equal(ours, theirs)
