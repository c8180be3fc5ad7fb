"""Killed, resumed and split among processes: the same training."""

from __future__ import annotations

import csv
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from implicit_attn.checkpoint import read_progress
from implicit_attn.optional import require
from workers.training import SAVE_EVERY, SPOILT, STEPS, equilibrium, unrolled

for module in ("sklearn", "safetensors", "tqdm", "lightning_fabric"):
    pytest.importorskip(module, reason="needs the extra [examples]")

ROOT = Path(__file__).resolve().parents[2]
KILL_AT = 11  # the second batch of the fourth epoch of three; the latest checkpoint is of step 9


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
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def tensors(path: Path) -> dict[str, bytes]:
    loaded = require("safetensors.torch", extra="training").load_file(str(path))
    return {name: tensor.numpy().tobytes() for name, tensor in loaded.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run in one process."""
    folder = tmp_path_factory.mktemp("whole")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        unrolled(folder).run()
        equilibrium(folder).run()
    finally:
        torch.set_num_threads(threads)
    return folder


def test_the_run_learns_with_different_numbers_of_iterations(whole: Path) -> None:
    rows = table(whole / "steps.csv")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert {row["iterations"] for row in rows} == {1, 2, 3}
    epochs = table(whole / "epochs.csv")
    assert epochs[-1]["loss"] < 0.6 * epochs[0]["loss"]
    assert epochs[-1]["test_accuracy"] > 0.3


def test_killed_and_resumed_is_bit_identical(whole: Path, tmp_path: Path) -> None:
    result = run_worker(str(tmp_path), "--kill-at", str(KILL_AT))
    assert result.returncode == -signal.SIGKILL, result.stdout + result.stderr
    progress = read_progress(tmp_path / "checkpoint.safetensors")
    assert 3 * progress["epoch"] + progress["batch"] == 9 != KILL_AT
    assert len(table(tmp_path / "steps.csv")) == KILL_AT
    with (tmp_path / "steps.csv").open("a") as file:
        file.write("12,5,0.3")  # a line that was not finished
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        training = unrolled(tmp_path)
        training.resume()
        assert training.steps == 9
        training.run()
    finally:
        torch.set_num_threads(threads)
    name = "checkpoint.safetensors"
    assert tensors(tmp_path / name) == tensors(whole / name)
    assert (tmp_path / "steps.csv").read_text() == (whole / "steps.csv").read_text()
    first, second = table(whole / "epochs.csv"), table(tmp_path / "epochs.csv")
    for row in first + second:
        del row["seconds"]
    assert first == second


def test_checkpoints_come_as_often_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first step, every four steps and after each epoch of three."""
    training = unrolled(tmp_path)
    saved: list[int] = []
    monkeypatch.setattr(training, "save", lambda: saved.append(training.steps))
    training.run()
    every = {step for step in range(1, STEPS + 1) if step % SAVE_EVERY == 0 or step % 3 == 0}
    assert set(saved) == {0} | every


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same runs in two processes."""
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("torch was built without gloo")
    folder = tmp_path_factory.mktemp("split")
    result = run_worker(str(folder), "--devices", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def test_two_processes_train_as_one(whole: Path, split: Path) -> None:
    for folder, steps in ((Path(), STEPS), (Path("deq"), 6)):
        alone = table(whole / folder / "steps.csv")
        together = table(split / folder / "steps.csv")
        assert len(alone) == len(together) == steps
        for first, second in zip(alone, together, strict=True):
            assert abs(first.pop("loss") - second.pop("loss")) <= 1e-4, (folder, first)
            assert first == second  # rate, iterations, epoch
    alone, together = (table(each / "epochs.csv") for each in (whole, split))
    for first, second in zip(alone, together, strict=True):
        assert abs(first["test_accuracy"] - second["test_accuracy"]) <= 2 / 359


def test_two_processes_count_all_solves(whole: Path, split: Path) -> None:
    alone, together = (table(each / "deq" / "epochs.csv") for each in (whole, split))
    assert len(alone) == 2
    for first, second in zip(alone, together, strict=True):
        for name in ("converged", "adjoint_converged", "evaluations", "most_evaluations"):
            assert first[name] == second[name], name
        assert first["converged"] == 1.0
        assert first["adjoint_products"] == pytest.approx(second["adjoint_products"], rel=1e-2)


def test_a_gradient_that_one_process_spoils_stops_both(tmp_path: Path) -> None:
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("torch was built without gloo")
    result = run_worker(str(tmp_path), "--devices", "2", "--spoil", "1")
    assert result.returncode == 0, result.stdout + result.stderr
    ends = [(tmp_path / f"end-{rank}.txt").read_text() for rank in (0, 1)]
    assert ends[0] == ends[1]
    assert "the gradient's norm is nan in epoch 2, batch 3" in ends[0]
    training = unrolled(tmp_path)
    training.resume()
    assert training.steps == SPOILT
    assert all(bool(value.isfinite().all()) for value in training.model.parameters())
