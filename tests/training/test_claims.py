"""One run at a time in a folder, none over another's files, and mistakes found before anything else."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cases.training import Recorder, toy_data
from implicit_attn.checkpoint import load_checkpoint, read_progress, save_checkpoint
from implicit_attn.training import CsvLog, Recipe, Training

for module in ("sklearn", "safetensors", "tqdm", "lightning_fabric"):
    pytest.importorskip(module, reason="needs the extra [examples]")

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ("classify", "mnist_spins", "sudoku", "vit_images")


def script(name: str) -> Any:
    """The example as a module, whose data must not be read."""
    found = importlib.util.spec_from_file_location(
        f"claimed_{name}", ROOT / f"implicit_attn/programs/{name}.py"
    )
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    for reader in ("load", "load_sudoku", "resolve_source"):
        if hasattr(module, reader):
            setattr(module, reader, too_early)
    return module


class TooEarly(Exception):
    """The data were read."""


def too_early(*_: Any, **__: Any) -> None:
    raise TooEarly


def start(name: str, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a script ends before it reads its data."""
    with pytest.raises(SystemExit) as stop:
        script(name).main(list(arguments))
    assert stop.value.code == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    return line


def training(path: Path, *logs: Any, model: Recorder | None = None, **options: Any) -> Training:
    torch.manual_seed(0)
    recipe = Recipe(3, 5, 0.1)
    model = Recorder() if model is None else model
    return Training(model, toy_data(), recipe, path, {"some": 1}, logs=logs, **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.defect("B2")
@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("place", ["file", "below a file", "no such device"])
def test_a_folder_that_cannot_be_written_is_found_first(
    name: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file")
    out = {"file": taken, "below a file": taken / "run", "no such device": Path("/proc/none/run")}
    if place == "no such device" and not Path("/proc").is_dir():
        pytest.skip("no /proc")
    assert "--out" in start(name, capsys, "--out", str(out[place]))
    assert taken.read_text() == "a file"


@pytest.mark.defect("B2")
@pytest.mark.parametrize("place", ["file", "folder in its place"])
def test_a_training_finds_it_before_its_first_step(tmp_path: Path, place: str) -> None:
    (tmp_path / "taken").write_text("a file")
    (tmp_path / "folder").mkdir()
    path = tmp_path / "taken" / "run" if place == "file" else tmp_path / "folder"
    run = training(path)
    with pytest.raises(ValueError, match="cannot be written"):
        run.run()
    assert run.steps == 0
    assert run.model.images == []


@pytest.mark.defect("B6")
@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("left", ["checkpoint.safetensors", "weights.safetensors", "epochs.csv"])
def test_an_earlier_run_is_not_overwritten(
    name: str, left: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither a finished one nor one that may go on."""
    (tmp_path / left).write_text("a file of an earlier run")
    before = contents(tmp_path)
    line = start(name, capsys, "--out", str(tmp_path))
    assert "--out" in line and left in line and "--overwrite" in line and "--resume" in line
    assert contents(tmp_path) == before
    with pytest.raises(TooEarly):  # it would go on
        script(name).main(["--out", str(tmp_path), "--overwrite"])
    assert contents(tmp_path) == before  # nothing goes before the new run is ready
    line = start(name, capsys, "--out", str(tmp_path), "--overwrite", "--resume")
    assert "not allowed with argument" in line


@pytest.mark.defect("C4")
@pytest.mark.defect("B4")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_damaged_checkpoint_is_found_first(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "checkpoint.safetensors"
    arguments = ["--out", str(tmp_path), "--resume"]
    assert "nothing to resume" in start(name, capsys, *arguments)
    assert "nothing to resume" in start(name, capsys, "--out", str(tmp_path / "new"), "--resume")
    assert list(tmp_path.iterdir()) == []
    training(path).run()
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    line = start(name, capsys, *arguments)
    assert "argument --resume" in line and str(path) in line and "damaged" in line
    save_checkpoint(path, Recorder(), progress={"epoch": 1})
    assert "holds no settings" in start(name, capsys, *arguments)


class Second:
    """A log that starts a second run at a step of the first."""

    def __init__(self, second: Callable[[], object]) -> None:
        self.second = second

    def start(self, step: int, epochs: int) -> None:
        """Nothing to do."""

    def step(self, step: int, values: dict[str, Any]) -> None:
        if step == 3:
            self.second()

    def epoch(self, step: int, values: dict[str, Any]) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


@pytest.mark.defect("B6")
@pytest.mark.parametrize("how", ["anew", "resume", "overwrite"])
def test_two_runs_do_not_mix(tmp_path: Path, how: str) -> None:
    path = tmp_path / "two" / "checkpoint"
    alone = tmp_path / "alone"
    training(alone / "checkpoint", CsvLog(alone, 1)).run()

    def second() -> None:
        other = training(path, CsvLog(path.parent, 1))
        if how == "resume":
            other.resume()
        with pytest.raises(ValueError, match="two is in use by another run"):
            other.run(overwrite=how == "overwrite")

    training(path, CsvLog(path.parent, 1), Second(second)).run()
    assert (path.parent / "steps.csv").read_text() == (alone / "steps.csv").read_text()
    assert [p.name for p in path.parent.iterdir() if p.suffix == ".lock"] == []


@pytest.mark.defect("B6")
@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("how", [(), ("--resume",), ("--overwrite",)], ids=str)
def test_a_script_leaves_a_folder_in_use_alone(
    name: str, how: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "checkpoint.safetensors"
    lines: list[str] = []

    def second() -> None:
        before = contents(tmp_path)
        lines.append(start(name, capsys, "--out", str(tmp_path), *how))
        assert contents(tmp_path) == before

    training(path, Second(second)).run()
    assert "argument --out" in lines[0] and "in use by another run" in lines[0]


@pytest.mark.defect("B6")
def test_a_finished_training_is_overwritten_only_if_told(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    training(path, CsvLog(tmp_path, 1)).run()
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="is there already: resume that run, overwrite it"):
        training(path, CsvLog(tmp_path, 1)).run()
    assert contents(tmp_path) == before
    again = training(path, CsvLog(tmp_path, 1))
    again.run(overwrite=True)
    again.run()  # its own
    assert contents(tmp_path)["steps.csv"] == before["steps.csv"]


def test_a_run_can_be_resumed_from_its_beginning(tmp_path: Path) -> None:
    """Killed before its first epoch is over, or by the second interruption."""
    path = tmp_path / "checkpoint"
    whole = training(tmp_path / "whole")
    whole.run()

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        training(path, Second(stop), save_every=1000).run()
    resumed = training(path)
    resumed.resume()
    assert resumed.steps == 2  # the third step was not saved
    resumed.run()
    assert torch.equal(resumed.model.linear.weight, whole.model.linear.weight)


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda progress: progress.pop(name)


def put(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda progress: progress.update(values)


PROGRESS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    **{
        f"{name} missing": (without(name), name)
        for name in ("epoch", "batch", "sums", "seconds", "history", "observations", "solves")
    },
    "settings missing": (without("settings"), "settings"),
    "epoch float": (put(epoch=1.0), r"epoch must be an integer from 0 to 3, got 1\.0"),
    "epoch beyond": (put(epoch=4), "epoch must be .* got 4"),
    "epoch a flag": (put(epoch=True), "epoch must be .* got True"),
    "batch negative": (put(batch=-1), "batch must be .* got -1"),
    "batch beyond": (put(batch=3), "batch must be an integer from 0 to 2, got 3"),
    "sums a list": (put(sums=[1, 2]), "sums"),
    "sums short": (put(sums={"loss": 1.0}), "sums"),
    "sums nan": (put(sums={"loss": math.nan, "terms": 1}), "sums"),
    "seconds a text": (put(seconds="3"), "seconds"),
    "seconds no float holds": (put(seconds=10**400), "seconds must be a number"),
    "history short": (put(history=[]), "history must be a list of 3"),
    "history of texts": (put(history=["a", "b", "c"]), "history has no epoch 1"),
    "history without loss": (lambda p: p["history"][1].pop("loss"), "loss of epoch 2"),
    "history turned": (lambda p: p["history"].reverse(), "no epoch 1 in its place"),
    "observations a dict": (put(observations={}), "observations"),
    "solves a list": (put(solves=[]), "solves"),
    "solves others": (put(solves={"sums": {"solves": 1}, "spent": [0]}), "solves"),
    "spent text": (put(solves={"sums": {}, "spent": ["x"]}), "number of solves"),
}


@pytest.mark.defect("B1")
@pytest.mark.defect("B4")
@pytest.mark.parametrize("name", PROGRESS)
def test_broken_progress_changes_nothing(tmp_path: Path, name: str) -> None:
    path = tmp_path / "checkpoint"
    training(path).run()
    run = training(path)
    progress = load_checkpoint(path, run.model, run.optimizer)
    change, message = PROGRESS[name]
    change(progress)
    save_checkpoint(path, run.model, run.optimizer, progress)
    other = training(path)
    before = {key: value.clone() for key, value in other.model.state_dict().items()}
    torch.manual_seed(5)
    random = torch.get_rng_state()
    with pytest.raises(ValueError, match=rf"(?s)checkpoint.*{message}"):
        other.resume()
    assert (other.steps, other.history, other.optimizer.state_dict()["state"]) == (0, [], {})
    assert torch.equal(torch.get_rng_state(), random)
    for key, value in other.model.state_dict().items():
        assert torch.equal(value, before[key])


@pytest.mark.defect("B4")
def test_steps_without_an_optimizer_state_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    training(path).run()
    fresh = training(path)
    save_checkpoint(path, fresh.model, fresh.optimizer, read_progress(path))
    with pytest.raises(ValueError, match="no optimizer state of the steps that were made"):
        training(path).resume()


def test_progress_survives_json(tmp_path: Path) -> None:
    """What a run keeps is what JSON gives back: the checks above see the same."""
    path = tmp_path / "checkpoint"
    training(path).run()
    progress = read_progress(path)
    assert json.loads(json.dumps(progress)) == progress
