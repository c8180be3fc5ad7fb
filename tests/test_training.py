"""The training loop: equal runs are equal, killed ones go on, none harms another; the tasks, each trained."""

from __future__ import annotations

import csv
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

import solvers
from implicit_attn import DEQ
from implicit_attn.checkpoint import read_progress, save_checkpoint
from implicit_attn.data import (
    ImageData,
    RandomAffine,
    SudokuSymmetries,
    board_counts,
    epoch_generator,
    load_sudoku,
    reveal_up_to,
)
from implicit_attn.data.images import hidden_patches
from implicit_attn.data.sudoku import solved, units
from implicit_attn.data.text import split_text
from implicit_attn.energies import Quadratic, ReLUFeedForward
from implicit_attn.models import BoardSolver, HyperSET, ImageClassifier, MaskedImageModel
from implicit_attn.optional import require
from implicit_attn.programs.boards import RTOL, solved_after, solved_when_converged
from implicit_attn.training import (
    CarriedStates,
    Classification,
    MaskedImages,
    NextToken,
    NonFiniteLoss,
    Recipe,
    SettingsDiffer,
    SolveCounts,
    SudokuCompletion,
    Task,
    Training,
    alone,
    compile_step,
    start_processes,
)

for module in ("sklearn", "tqdm", "lightning_fabric"):
    pytest.importorskip(module, reason="needs the extra [examples]")

from workers.training import EPOCHS, SPOILT, equilibrium, unrolled  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
KILL_AT = 8  # in the third epoch of three steps


# The smallest training: ten images, a linear model that remembers its calls.


def toy_data(train: int = 10) -> ImageData:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(train + 4, 1, 4, 4, generator=generator)
    labels = torch.arange(train + 4) % 3
    return ImageData("toy", 3, images[:train], labels[:train], images[train:], labels[train:])


class Recorder(nn.Module):
    """Remembers how it was called in training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 3)
        self.iterations: list[int | None] = []
        self.images: list[Tensor] = []

    def forward(self, images: Tensor, iterations: int | None = None) -> Tensor:
        if self.training:
            self.iterations.append(iterations)
            self.images.append(images)
        return self.linear(images.flatten(1))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As the worker: sums depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def training(path: Path, model: Recorder | None = None, **options: Any) -> Training:
    torch.manual_seed(0)
    recipe = options.pop("recipe", Recipe(3, 5, 0.1))
    return Training(
        model or Recorder(), toy_data(), recipe, path, options.pop("settings", None), **options
    )


def weights(model: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in model.parameters()]


def equal(first: nn.Module, second: nn.Module) -> bool:
    return all(map(torch.equal, weights(first), weights(second)))


# Killed, resumed, split among processes: the same training.


def run_worker(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "OMP_NUM_THREADS": "1",
    }
    if "lo" in [name for _, name in socket.if_nameindex()]:
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    return subprocess.run(
        [sys.executable, str(ROOT / "tests" / "workers" / "training.py"), *arguments],
        env=environment, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip


def table(path: Path) -> list[dict[str, float]]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: float(v) for k, v in row.items() if k != "seconds"} for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run in one process."""
    folder = tmp_path_factory.mktemp("whole")
    unrolled(folder).run()
    equilibrium(folder).run()
    return folder


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_a_killed_run_continued_gives_the_weights_of_one_never_killed(
    whole: Path, tmp_path: Path
) -> None:
    result = run_worker(str(tmp_path), "--kill-at", str(KILL_AT))
    assert result.returncode == -signal.SIGKILL, result.stdout + result.stderr
    resumed = unrolled(tmp_path)
    resumed.resume()
    assert resumed.epoch == 2 and len(resumed.history) == 2
    resumed.run()
    load = require("safetensors.torch", extra=None).load_file
    found, expected = (load(str(each / "checkpoint.safetensors")) for each in (tmp_path, whole))
    assert found.keys() == expected.keys()
    assert {name for name in found if not torch.equal(found[name], expected[name])} == set()
    rows = table(tmp_path / "checkpoint.csv")
    assert rows == table(whole / "checkpoint.csv") and len(rows) == EPOCHS
    assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="torch.distributed")
def test_two_processes_train_as_one(whole: Path, tmp_path: Path) -> None:
    result = run_worker(str(tmp_path), "--devices", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    for name in ("checkpoint.csv", "deq.csv"):
        for one, two in zip(table(whole / name), table(tmp_path / name), strict=True):
            assert one["loss"] == pytest.approx(two["loss"], rel=1e-3)
            assert one["test_accuracy"] == pytest.approx(two["test_accuracy"], abs=2 / 359)
    for one, two in zip(table(whole / "deq.csv"), table(tmp_path / "deq.csv"), strict=True):
        assert one["converged"] == two["converged"] == 1.0  # all solves are counted
        assert one["adjoint_products"] == pytest.approx(two["adjoint_products"], rel=1e-2)


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="torch.distributed")
def test_a_gradient_that_one_process_spoils_stops_both(tmp_path: Path) -> None:
    result = run_worker(str(tmp_path), "--devices", "2", "--spoil", "1")
    assert result.returncode == 0, result.stdout + result.stderr
    ends = [(tmp_path / f"end-{rank}.txt").read_text() for rank in (0, 1)]
    assert ends[0] == ends[1] and "the gradient's norm is nan in epoch 2, batch 2" in ends[0]
    left = unrolled(tmp_path)
    left.resume()
    assert left.epoch == SPOILT // 3


@pytest.mark.defect("A1")
def test_runs_in_threads_train_as_they_do_alone(tmp_path: Path) -> None:
    single = training(tmp_path / "alone")
    single.run()
    together = [training(tmp_path / f"thread {number}") for number in range(3)]
    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(each.run) for each in together]:
            future.result(120)
    assert all(equal(each.model, single.model) for each in together)


# What is drawn depends on the seed, the epoch and the batch alone.


class Masked(Recorder):
    """Keeps the masks that it drew for ones."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []

    def forward(self, images: Tensor, iterations: int | None = None) -> Tensor:
        mask = nn.functional.dropout(torch.ones(images.shape), training=self.training)
        if self.training:
            self.masks.append(mask)
        return super().forward(images * mask, iterations)


def test_every_step_draws_its_own_masks_again(tmp_path: Path) -> None:
    drawn = []
    for _ in range(2):
        model = Masked()
        run = training(tmp_path / "c", model)
        for batch in (0, 1):
            torch.rand(3)  # whatever was drawn in between
            run.step(batch, run.task.inputs, run.task.targets)
        drawn.append(model.masks)
    assert all(map(torch.equal, drawn[0], drawn[1]))
    assert not torch.equal(drawn[0][0], drawn[0][1])


def test_random_iterations_are_drawn_per_batch(tmp_path: Path) -> None:
    recipe = Recipe(12, 3, 0.1, iterations=(2, 5), seed=1)
    model = Recorder()
    training(tmp_path / "c", model, recipe=recipe).run()
    assert set(model.iterations) == {2, 3, 4, 5}
    pairs = [(epoch, batch) for epoch in range(12) for batch in range(4)]
    assert model.iterations == [recipe.draw_iterations(epoch_generator(1, *each)) for each in pairs]


def test_images_are_augmented_and_an_iteration_count_changes_nothing_else(tmp_path: Path) -> None:
    plain, seven = Recorder(), Recorder()
    for name, model, iterations in (("a", plain, None), ("b", seven, 7)):
        recipe = Recipe(2, 5, 0.1, iterations=iterations)
        task = Classification(toy_data(), RandomAffine())
        torch.manual_seed(0)
        Training(model, task, recipe, tmp_path / name).run()
    assert plain.iterations == 4 * [None] and seven.iterations == 4 * [7]
    assert all(map(torch.equal, plain.images, seven.images))
    assert not torch.equal(plain.images[0], plain.images[2])


def test_averaged_weights_are_measured_kept_in_the_end_and_resumed(tmp_path: Path) -> None:
    recipe, seen = Recipe(3, 5, 0.1, average=0.8), []

    whole, part, rest = (training(tmp_path / name, recipe=recipe) for name in "abb")
    whole.optimizer.register_step_post_hook(lambda *_: seen.append(weights(whole.model)))
    whole.run()
    expected = seen[0]
    for each in seen[1:]:
        expected = [0.8 * mean + 0.2 * value for mean, value in zip(expected, each, strict=True)]
    for found, wanted in zip(weights(whole.model), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    assert whole.evaluate() == {"test_accuracy": whole.history[-1]["test_accuracy"]}
    part._run_epoch()
    part.save()
    rest.resume()
    rest.run()
    assert equal(rest.model, whole.model) and rest.history[:1] == part.history


def test_averages_of_a_run_that_ended_go_on_with_more_epochs(tmp_path: Path) -> None:
    def run(name: str, epochs: int, average: float = 0.8) -> Training:
        # The rate does not depend on the number of epochs.
        recipe = Recipe(epochs, 5, 0.1, warmup=0, floor=1, average=average)
        return training(tmp_path / name, recipe=recipe)

    whole, first, longer, plain = run("a", 4), run("b", 2), run("b", 4), run("b", 3, 0.0)
    whole.run()
    first.run()
    plain.resume()
    before = weights(plain.model)
    assert all(map(torch.equal, before, weights(first.model)))
    plain._run_epoch()  # from the averages, which nothing exchanges any more
    assert not any(map(torch.equal, before, weights(plain.model)))
    longer.resume()
    longer.run()
    assert equal(longer.model, whole.model)


def test_an_interrupted_measurement_leaves_the_weights_to_train_on(tmp_path: Path) -> None:
    last: list[list[Tensor]] = []

    def observe(model: nn.Module) -> None:
        if last:  # not the model that is new
            raise KeyboardInterrupt

    run = training(tmp_path / "a", recipe=Recipe(3, 5, 0.1, average=0.8), observe=observe)
    run.optimizer.register_step_post_hook(lambda *_: last.append(weights(run.model)))
    with pytest.raises(KeyboardInterrupt):
        run._run_epoch()
    assert all(map(torch.equal, weights(run.model), last[-1]))


# Nothing is lost.


@pytest.mark.defect("B6")
def test_a_run_leaves_the_files_of_another_alone(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    first = training(path)
    first.run()
    before = path.read_bytes()
    with pytest.raises(ValueError, match="is there already: resume that run, overwrite it"):
        training(path).run()
    with alone(path), ThreadPoolExecutor(1) as pool:
        other = training(path)
        with pytest.raises(ValueError, match="in use by another run"):
            pool.submit(other.run, overwrite=True).result(60)
        other.run(overwrite=True)  # the owner of the lock itself
    first.run()  # its own, at its end
    assert equal(other.model, first.model)
    assert len(path.read_bytes()) == len(before)


@pytest.mark.defect("B2")
@pytest.mark.parametrize("place", ["below a file", "folder in its place"])
def test_what_cannot_be_written_is_found_before_the_first_step(tmp_path: Path, place: str) -> None:
    (tmp_path / "taken").write_text("a file")
    (tmp_path / "folder").mkdir()
    run = training(tmp_path / ("taken/run" if place == "below a file" else "folder"))
    with pytest.raises((OSError, ValueError), match=r"taken|folder"):
        run.run()
    assert run.model.images == []


@pytest.mark.defect("B3")
def test_a_run_removes_what_a_kill_within_a_save_left(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    left, other = tmp_path / f"{path.name}.abc.part", tmp_path / "mine.part"
    for each in (left, other):
        each.write_text("unfinished")
    training(path).run()
    assert not left.exists() and other.exists()


def test_what_does_not_fit_is_not_resumed(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        training(path).resume()
    done = training(path, settings={"a": 1})
    done.run()
    with pytest.raises(SettingsDiffer, match="other settings"):
        training(path, settings={"a": 2}).resume()
    with pytest.raises(ValueError, match="epochs must be >= 3"):
        training(path, settings={"a": 1}, recipe=Recipe(2, 5, 0.1)).resume()
    for progress in ({}, read_progress(path) | {"history": []}):
        save_checkpoint(path, done.model, done.optimizer, progress)
        fresh = training(path, settings={"a": 1})
        before = weights(fresh.model)
        with pytest.raises(ValueError, match="no checkpoint of a training"):
            fresh.resume()
        assert all(map(torch.equal, weights(fresh.model), before)) and fresh.epoch == 0


def test_observations_are_kept(tmp_path: Path) -> None:
    def norm(model: Any) -> float:
        return model.linear.weight.norm().item()

    run = training(tmp_path / "c", observe=norm)
    run.run()
    resumed = training(tmp_path / "c", observe=norm)
    resumed.resume()
    assert resumed.observations == run.observations and len(set(run.observations)) == 4


# Losses, gradients and parameters that are not finite.


class Breaks(Recorder):
    """Its outputs are changed in its third training call, the first batch of the second epoch."""

    def __init__(self, change: Callable[[Tensor, nn.Linear], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, images: Tensor, iterations: int | None = None) -> Tensor:
        outputs = super().forward(images, iterations)
        broken = self.training and len(self.images) == 3
        return self.change(outputs, self.linear) if broken else outputs


def flat_root(outputs: Tensor, linear: nn.Linear) -> Tensor:
    """The outputs themselves; their gradient is 0 times the infinite slope of a root at 0."""
    return outputs + (0 * linear.weight.sum()).sqrt()


def steep_root(outputs: Tensor, linear: nn.Linear) -> Tensor:
    """The outputs themselves; the gradient of one weight is infinite."""
    weight = linear.weight[0, 0]
    return outputs + (weight - weight.detach()).sqrt() * torch.tensor([1.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda outputs, _: outputs * math.nan, "loss is nan"),
        (flat_root, "gradient's norm is nan"),
        (steep_root, "gradient's norm is (nan|inf)"),
    ],
    ids=["loss", "nan", "inf"],
)
def test_what_is_not_finite_stops_before_the_step(tmp_path: Path, change: Any, what: str) -> None:
    recipe = Recipe(2, 5, 0.1, clip=None)
    whole = training(tmp_path / "whole", recipe=recipe)
    whole.run()
    torch.manual_seed(0)  # as ``training`` does
    broken = training(tmp_path / "c", Breaks(change), recipe=recipe)
    with pytest.raises(NonFiniteLoss, match=f"the {what} in epoch 2, batch 1"):
        broken.run()
    assert all(bool(value.isfinite().all()) for value in weights(broken.model))
    resumed = training(tmp_path / "c", recipe=recipe)  # what was wrong is mended
    resumed.resume()
    resumed.run()
    assert equal(resumed.model, whole.model)


def test_a_parameter_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    run = training(tmp_path / "c")
    run.run()
    with torch.no_grad():
        run.model.linear.weight[1, 2] = math.nan
    with pytest.raises(NonFiniteLoss, match=r"the parameter linear\.weight is not finite"):
        run.save()
    frozen = Recorder()
    frozen.bound = nn.Parameter(torch.tensor([math.inf]), requires_grad=False)  # may be
    training(tmp_path / "frozen", frozen).run()


# Recipes, processes, compilation.


def test_the_rate_rises_and_falls() -> None:
    recipe = Recipe(200, 128, 1e-3, warmup=5 / 200, floor=0.01)
    rates = [recipe.rate_at(epoch / 200) for epoch in range(201)]
    assert rates[0] == 0 and rates[-1] == pytest.approx(1e-5)
    assert rates[:6] == sorted(rates[:6]) and rates[5:] == sorted(rates[5:], reverse=True)
    assert Recipe(1, 1, 0.5, warmup=0, floor=1).rate_at(0.3) == 0.5
    linear = Recipe(1, 1, 2.0, warmup=0.1, floor=0.0, decay="linear")
    found = [linear.rate_at(p) for p in (0, 0.05, 0.1, 0.55, 1.0)]
    assert found == pytest.approx([0.0, 1.0, 2.0, 1.0, 0.0])


def test_the_optimiser_is_the_one_named() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    options: dict[str, Any] = {"weight_decay": 0.3, "betas": (0.8, 0.9)}
    found = Recipe(1, 1, 0.1, optimizer="adam", **options).build_optimizer(model)
    assert type(found) is torch.optim.Adam and found.defaults["betas"] == (0.8, 0.9)
    groups = Recipe(1, 1, 0.1, decayed="matrices", **options).build_optimizer(model).param_groups
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert [decays[id(p)] for p in model.parameters()] == [0.3, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (Recipe, {"epochs": 0}, "epochs must be >= 1, got 0"),
        (Recipe, {"batch": 2.5}, "batch must be an integer, got"),
        (Recipe, {"rate": math.nan}, "rate .* got nan"),
        (Recipe, {"warmup": 2}, r"warmup must lie in \[0, 1\], got 2"),
        (Recipe, {"average": 1}, r"average must lie in \[0, 1\), got 1"),
        (Recipe, {"clip": 0}, "clip must be > 0 or None, got 0"),
        (Recipe, {"optimizer": "sgd"}, "optimizer must be one of .* got 'sgd'"),
        (Recipe, {"decay": "steps"}, "decay must be one of"),
        (Recipe, {"decayed": "none"}, "decayed must be one of"),
        (Recipe, {"iterations": (3, 2)}, r"iterations .* got \(3, 2\)"),
        (Recipe, {"iterations": (3,)}, r"iterations .* got \(3,\)"),
        (Recipe, {"iterations": (1, 2, 3)}, r"iterations .* got \(1, 2, 3\)"),
        (Recipe, {"iterations": (None, 3)}, "iterations must be an integer, got None"),
        (start_processes, {"devices": 0}, "devices must be >= 1, got 0"),
        (start_processes, {"accelerator": "abacus"}, "accelerator must be one of .* 'abacus'"),
        (start_processes, {"precision": "8-bit"}, "precision must be one of .* got '8-bit'"),
    ],
)
def test_bad_recipes_and_processes_are_refused(
    make: Any, changes: dict[str, Any], message: str
) -> None:
    given = {"epochs": 1, "batch": 1, "rate": 0.1} if make is Recipe else {}
    with pytest.raises((TypeError, ValueError), match=message):
        make(**(given | changes))


def test_loggers_are_given_the_rows(tmp_path: Path) -> None:
    loggers = require("lightning_fabric.loggers", extra="training")
    logger = loggers.CSVLogger(tmp_path / "logs", name="", version="", flush_logs_every_n_steps=1)
    run = training(tmp_path / "c", fabric=start_processes(accelerator="cpu", loggers=logger))
    run.run()
    logged = table(tmp_path / "logs" / "metrics.csv")
    assert [row["loss"] for row in logged] == [row["loss"] for row in run.history]


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
    for count, outputs in zip((3, 7, 12), expected, strict=True):
        torch.testing.assert_close(model(images, iterations=count), outputs)
    assert 1 <= counter.frame_count <= 3  # by the index: the first, and all later ones
    plain, x = nn.Linear(3, 2), torch.ones(4, 3)
    torch.testing.assert_close(compile_step(plain, backend=counter)(x), plain(x))  # whole


# What is told of the solves of an epoch.


@pytest.mark.parametrize("adjoint", [solvers.Implicit(), None, solvers.OneStep()])
def test_solves_are_counted(adjoint: Any) -> None:
    torch.manual_seed(0)
    layer = DEQ(0.2 * ReLUFeedForward(4, 8) + Quadratic(), adjoint=adjoint)
    counts, same = SolveCounts(nn.Sequential(layer)), lambda tensor, _: tensor
    counts.add()
    assert math.isnan(counts.means(same)["converged"])  # nothing was solved
    out = layer(torch.randn(2, 3, 4))
    if adjoint is not None:
        out.square().sum().backward()
    counts.add()
    means = counts.means(same)
    assert means["converged"] == 1.0 and means["evaluations"] > 1
    adjoints = [means[f"adjoint_{name}"] for name in ("converged", "products", "residual")]
    if isinstance(adjoint, solvers.Implicit):
        assert adjoints[0] == 1.0 and adjoints[1] > 0 and 0 < adjoints[2] < 1e-2
    else:
        assert all(map(math.isnan, adjoints))
    assert SolveCounts(nn.Linear(2, 2)).means(same) == {}


BOARDS = load_sudoku(6, 5, source="generated", more=0, seed=0)
TEXT = split_text("letters", ["the cat sat on the mat and the rat sat on the cat, " * 8], 0.2)
PIXELS = torch.rand(70, 2, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.zeros(70, dtype=torch.int64)
IMAGES = ImageData("noise", 1, PIXELS[:50], LABELS[:50], PIXELS[50:], LABELS[50:])
TASKS: dict[str, Task] = {
    "boards": SudokuCompletion(BOARDS, SudokuSymmetries(), batch=2),
    "givens": SudokuCompletion(BOARDS, givens=(30, 34)),
    "text": NextToken(TEXT, 10, windows=7, batch=3),
    "images": MaskedImages(IMAGES, 2, batch=6),
}


def batch(task: Task, seed: int = 0) -> tuple[Tensor, Tensor]:
    return task.augmented(task.inputs, task.targets, torch.Generator().manual_seed(seed))


class Guess(nn.Module):
    """Logits or pixels that are a fixed function of the inputs."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        classes = {"NextToken": len(TEXT.alphabet)}.get(type(task).__name__, 9)
        self.images = isinstance(task, MaskedImages)
        self.table = torch.randn(30, classes, generator=torch.Generator().manual_seed(2))

    def forward(self, inputs: Tensor, iterations: int = 1) -> Tensor:
        return inputs.nan_to_num(0.5 / iterations) if self.images else self.table[inputs]


@pytest.mark.parametrize("name", TASKS)
def test_batches_are_drawn_from_the_generator_and_measures_add_up(name: str) -> None:
    task = TASKS[name]
    first, again, other = batch(task), batch(task), batch(task, 1)
    assert all(a.equal(b) for a, b in zip(first, again, strict=True)) or name == "images"
    assert not first[0].nan_to_num(-1).equal(other[0].nan_to_num(-1))
    model = Guess(task)
    found = task.evaluate(model)
    assert tuple(found) == task.names and not model.training
    parts = [task.evaluate(model, rank, 23) for rank in range(23)]  # some have no sample
    for key, pair in found.items():
        total = [sum(part[key][place] for part in parts) for place in (0, 1)]
        assert total == pytest.approx(list(pair), rel=1e-5)


def test_the_loss_of_boards_is_summed_over_unknown_cells_and_averaged_over_answers() -> None:
    task = SudokuCompletion(BOARDS)
    puzzles, solutions = task.inputs, task.targets
    logits = torch.randn(3, len(puzzles), 81, 9, generator=torch.Generator().manual_seed(0))
    single = [
        F.cross_entropy(each.flatten(0, 1), solutions.flatten() - 1, reduction="none")
        for each in logits
    ]
    expected = torch.stack(single)[:, (puzzles == 0).flatten()].sum(1)
    torch.testing.assert_close(task.loss(logits[0], puzzles, solutions), expected[0])
    torch.testing.assert_close(task.loss(logits, puzzles, solutions), expected.mean())
    assert task.terms(puzzles, solutions) == int((puzzles == 0).sum())


def test_measures_of_boards_whose_mistakes_are_known() -> None:
    unknown = BOARDS.test_puzzles == 0
    answers = BOARDS.test_solutions.clone()
    cells = [(board, int(unknown[board].nonzero()[k])) for board, k in ((1, 0), (1, 3), (4, 2))]
    cells.append((2, int((~unknown[2]).nonzero()[0])))  # a given
    for place in cells:
        answers[place] = answers[place] % 9 + 1
    task = SudokuCompletion(BOARDS)
    found = task.measures(F.one_hot(answers - 1, 9) * 20.0, *task.tests())
    number = int(unknown.sum())
    assert found["cell_accuracy"] == (number - 3, number) and found["solved_boards"] == (3, 5)


def test_givens_are_drawn_anew_and_then_symmetries() -> None:
    task = SudokuCompletion(BOARDS, givens=(30, 34))
    drawn = [batch(task, seed)[0] for seed in range(40)]
    assert set(torch.cat([(each != 0).sum(1) for each in drawn]).tolist()) == set(range(30, 35))
    for each in drawn:
        assert ((each == task.inputs) | (task.inputs == 0)).all()
        assert ((each == task.targets) | (each == 0)).all()
    few = reveal_up_to(BOARDS.train_puzzles, BOARDS.train_solutions, 5, torch.Generator())
    assert torch.equal(few, BOARDS.train_puzzles)  # more givens are kept
    turned = SudokuCompletion(BOARDS, SudokuSymmetries(), givens=(30, 34)).to(torch.device("cpu"))
    puzzles, solutions = batch(turned)
    assert solved(solutions).all() and not torch.equal(solutions, task.targets)
    assert ((puzzles == solutions) | (puzzles == 0)).all() and ((puzzles != 0).sum(1) >= 30).all()


def test_boards_are_learned_by_a_solver_with_several_answers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = BoardSolver(units().tolist(), features=8, width=16, iterations=6, window=3)
    task, recipe = SudokuCompletion(BOARDS, givens=(40, 70)), Recipe(3, 3, 1e-2, iterations=(3, 6))
    training = Training(model, task, recipe, tmp_path / "run")
    training.run()
    assert training.history[-1]["loss"] < training.history[0]["loss"]
    assert training.summary().startswith("training ")
    number = torch.tensor([[78], [79], [80], [80], [80]])  # givens: one to three unknown cells
    boards, answers = BOARDS.test_puzzles, BOARDS.test_solutions
    boards = reveal_up_to(boards, answers, number, torch.Generator().manual_seed(0))
    model.eval()

    def share(answer: Tensor) -> float:
        right, unknown = board_counts(answer.argmax(-1) + 1, boards, answers)
        return (right == unknown).double().mean().item()

    def after(iterations: int) -> float:
        """In the same batches: rounding decides between equal logits."""
        with torch.no_grad():
            return share(torch.cat([model(b, iterations=iterations) for b in boards.split(2)]))

    found = solved_after(model, boards, answers, (1, 4), batch=2)
    assert found == [after(1), after(4)]
    solution = model.solve(
        boards, solver=solvers.Forward(), tolerance=solvers.Tolerance(rtol=RTOL), max_steps=9,
        stop="converged", on_failure="ignore",
    )  # fmt: skip
    ends = (solution.converged, solution.evaluations)
    expected = [share(solution.value), *(each.double().mean().item() for each in ends)]
    own = solved_when_converged(model, boards, answers, 9, batch=2)
    assert own == pytest.approx(expected)


def test_windows_are_of_the_text_and_their_targets_one_symbol_later() -> None:
    task = NextToken(TEXT, 10)
    assert len(task.inputs) == (len(TEXT.train) - 1) // 10
    text = TEXT.decode(TEXT.train)
    inputs, targets = batch(task)
    for window, following in zip(inputs, targets, strict=True):
        assert torch.equal(window[1:], following[:-1])
        assert TEXT.decode(window) + TEXT.decode(following[-1:]) in text
    short = NextToken(split_text("short", ["abcdefghijklmnopqrst"], 0.5), 7, samples=200)
    inputs, targets = batch(short)
    assert set(inputs[:, 0].tolist()) == {0, 1, 2} and targets.max() == 9  # nothing is left out


@pytest.mark.parametrize(("masked", "most"), [(0.4, 6), (0.01, 1), (0.99, 15)])
def test_so_many_patches_are_hidden(masked: float, most: int) -> None:
    task = MaskedImages(IMAGES, 2, masked=masked)
    inputs, targets = task.tests()
    assert hidden_patches(inputs, 2).sum(1).tolist() == [most] * 20
    assert task.terms(inputs, targets) == 20 * most
    inputs, targets = batch(task)
    assert torch.equal(targets, IMAGES.train_images)
    assert torch.equal(inputs[~inputs.isnan()], targets[~inputs.isnan()])
    varied = hidden_patches(inputs, 2).sum(1)
    assert varied.min() >= 1 and varied.max() <= most and len(varied.unique()) > most / 2


def test_the_loss_of_images_is_that_of_hidden_pixels() -> None:
    task = MaskedImages(IMAGES, 4, masked=0.7)
    inputs, targets = batch(task)
    outputs = torch.randn(targets.shape, generator=torch.Generator().manual_seed(2))
    outputs.requires_grad_()
    loss = task.loss(torch.where(inputs.isnan(), outputs, torch.inf), inputs, targets)
    errors = (outputs - targets).square()[inputs.isnan()].sum() / 32  # pixels of a patch
    torch.testing.assert_close(loss, errors)
    (gradient,) = torch.autograd.grad(task.loss(outputs, inputs, targets), outputs)
    wanted = torch.where(inputs.isnan(), 2 * (outputs.detach() - targets) / 32, 0.0)
    torch.testing.assert_close(gradient, wanted)


def test_the_psnr_of_fixed_masks() -> None:
    task = MaskedImages(IMAGES, 2, batch=6)
    inputs, targets = task.tests()
    hidden = inputs.isnan()
    each = (targets - 0.5).square().where(hidden, 0.0).sum((1, 2, 3)) / hidden.sum((1, 2, 3))
    found = task.evaluate(Guess(task))
    assert found["test_loss"][0] / found["test_loss"][1] == pytest.approx(each.mean().item())
    decibels = -10 * each.double().log10()
    assert found["test_psnr"] == pytest.approx((decibels.sum().item(), 20), rel=1e-6)
    assert task.evaluate(Guess(task), iterations=2) != found
    perfect = task.measures(targets, inputs, targets)
    assert perfect["test_loss"][0] == 0 and perfect["test_psnr"][0] == pytest.approx(100 * 20)
    assert len(MaskedImages(IMAGES, 2, test=7).tests()[0]) == 7


def test_a_training_learns_what_hidden_patches_hold(tmp_path: Path) -> None:
    """Two kinds of image, black and white: one visible patch tells the hidden ones."""
    bright = (torch.arange(96) % 2).float().view(-1, 1, 1, 1).expand(-1, 1, 4, 4).contiguous()
    labels = torch.zeros(96, dtype=torch.int64)
    data = ImageData("two", 1, bright[:64], labels[:64], bright[64:], labels[64:])
    torch.manual_seed(0)
    backbone = HyperSET(16, 2, 16, iterations=2, initial_step=0.1, time_dim=8)
    recipe = Recipe(epochs=40, batch=16, rate=0.02, iterations=(1, 3))
    model, task = MaskedImageModel(backbone, 4, 1, patch=2), MaskedImages(data, 2, masked=0.5)
    training = Training(model, task, recipe, tmp_path / "run")
    before = training.evaluate()["test_loss"]
    training.run()
    assert before > 0.2  # the best constant has 0.25
    assert training.history[-1]["test_loss"] < 0.02 and training.history[-1]["test_psnr"] > 17


@pytest.mark.parametrize(
    ("kind", "data", "options", "message"),
    [
        (SudokuCompletion, BOARDS, {"givens": (20, 19)}, "givens must"),
        (SudokuCompletion, BOARDS, {"givens": (17, 81)}, "givens must"),
        (NextToken, TEXT, {"length": 82}, "length must be below the 82 symbols for validation"),
        (NextToken, TEXT, {"length": 10, "windows": 0}, "windows must be >= 1"),
        (MaskedImages, IMAGES, {"patch": 2, "masked": math.nan}, r"masked must lie in \(0, 1\)"),
        (MaskedImages, IMAGES, {"patch": 3}, "patch must divide .* got 3"),
        (MaskedImages, IMAGES, {"patch": 8}, "patch must leave 2 patches"),
        (MaskedImages, IMAGES, {"patch": 2, "test": 0}, "test must be >= 1, got 0"),
    ],
)
def test_wrong_options_are_named(kind: Any, data: Any, options: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        kind(data, **options)


def pool_step(pool: CarriedStates, number: int, seed: int = 0) -> Tensor:
    """A step of ``number`` iterations on two fresh boards, whose states count the iterations."""
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = BOARDS.train_puzzles[:2], BOARDS.train_solutions[:2]
    index, inputs, targets, states = pool.join(inputs, targets, generator)
    before = torch.cat([torch.zeros(2, 81, 9, 1), states.view(-1, 81, 9, 1)])
    pool.put(index, inputs, targets, before + number, number, generator)
    return index


def test_carried_boards_age_and_retire() -> None:
    """A state that counts its iterations says how old its board is."""
    pool = CarriedStates(4, lives=(30, 60), noise=0.0)
    assert len(pool_step(pool, 10)) == 0 and len(pool) == 2
    retired = 0
    for seed in range(1, 40):
        before = pool.ages.clone()
        index = pool_step(pool, 10, seed)
        assert len(index) == 2 and len(pool) == 4
        assert torch.equal(pool._rows[2][:, 0, 0, 0], pool.ages.float())
        assert int(pool.ages.max()) < 60 and int(pool.ages.min()) >= 10
        retired += int((pool.ages[: len(before)] < before).sum())
    # A life is 30 to 60 iterations, a visit has 10.
    assert 39 * 2 * 10 / 70 <= retired <= 39 * 2 * 10 / 20
    for options in ({"size": 0}, {"lives": (9, 3)}, {"noise": -1.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            CarriedStates(**options)  # type: ignore[arg-type]


def test_a_training_with_carried_states_resumes_to_the_bit(tmp_path: Path) -> None:
    def training(name: str) -> Training:
        torch.manual_seed(0)
        model = BoardSolver(units().tolist(), features=4, width=4, iterations=5, window=2)
        task = SudokuCompletion(BOARDS, givens=(30, 34), carried=CarriedStates(3, (6, 12)))
        return Training(model, task, Recipe(2, 2, 1e-2, iterations=(2, 5)), tmp_path / name)

    whole, half, rest = training("a"), training("b"), training("b")
    whole.run()
    half._run_epoch()
    half.save()
    rest.resume()
    rest.run()
    assert equal(rest.model, whole.model)
    assert len(whole.task.carried) == 3  # type: ignore[attr-defined]
