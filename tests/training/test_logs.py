"""What a run leaves in its logs, also where it was killed and resumed."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from cases.training import Recorder, toy_data
from implicit_attn.training import CsvLog, Recipe, TensorBoardLog, Training

for module in ("safetensors", "tqdm", "lightning_fabric"):
    pytest.importorskip(module, reason="needs the extra [training]")


def test_csv_rows_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    log = CsvLog(tmp_path, every=2)
    log.start(0, 0)
    for step in range(1, 8):
        log.step(step, {"loss": step / 4, "rate": 0.5})
    log.epoch(7, {"epoch": 1, "test_accuracy": 0.25})
    assert (tmp_path / "epochs.csv").read_text() == "step,epoch,test_accuracy\n7,1,0.25\n"
    whole = (tmp_path / "steps.csv").read_text()
    assert whole == "step,loss,rate\n2,0.5,0.5\n4,1.0,0.5\n6,1.5,0.5\n"
    (tmp_path / "steps.csv").write_text(whole + "8,2.")  # the process was killed in the middle
    log.start(5, 0)
    assert (tmp_path / "steps.csv").read_text() == "step,loss,rate\n2,0.5,0.5\n4,1.0,0.5\n"
    assert not (tmp_path / "epochs.csv").exists()
    log.step(6, {"loss": 1.5, "rate": 0.5})
    assert (tmp_path / "steps.csv").read_text() == whole


@pytest.mark.parametrize(
    ("every", "error", "message"),
    [
        (0, ValueError, "every must be >= 1, got 0"),
        (-1, ValueError, "every must be >= 1, got -1"),
        (2.5, TypeError, r"every must be an integer, got 2\.5"),
        (True, TypeError, "every must be an integer, got True"),
    ],
)
@pytest.mark.parametrize("log", [CsvLog, TensorBoardLog])
def test_logs_refuse_a_bad_interval(
    tmp_path: Path, log: Any, every: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        log(tmp_path, every)


def test_a_measured_epoch_that_the_checkpoint_does_not_hold_is_dropped(tmp_path: Path) -> None:
    log = CsvLog(tmp_path, every=1)
    log.start(0, 0)
    for step in range(1, 5):
        log.step(step, {"epoch": (step + 1) // 2, "loss": 0.5})
    for epoch in (1, 2):
        log.epoch(2 * epoch, {"epoch": epoch, "loss": 0.5})
    steps, epochs = ((tmp_path / f"{name}.csv").read_text() for name in ("steps", "epochs"))
    log.start(4, 2)
    assert (tmp_path / "epochs.csv").read_text() == epochs
    log.start(4, 1)  # the last step of the second epoch was saved, its measures were not
    assert (tmp_path / "epochs.csv").read_text() == "step,epoch,loss\n2,1,0.5\n"
    assert (tmp_path / "steps.csv").read_text() == steps


class StopAfterEpoch:
    """A log that ends a training by an error once an epoch was written, before it is saved."""

    def __init__(self, at: int) -> None:
        self.at = at

    def start(self, step: int, epochs: int) -> None:
        """Nothing to do."""

    def step(self, step: int, values: dict[str, Any]) -> None:
        """Nothing to do."""

    def epoch(self, step: int, values: dict[str, Any]) -> None:
        if values["epoch"] == self.at:
            raise RuntimeError("stopped")

    def close(self) -> None:
        """Nothing to do."""


@pytest.mark.parametrize("at", [1, 2])
def test_stopped_between_the_row_of_an_epoch_and_its_checkpoint(tmp_path: Path, at: int) -> None:
    def training(*more: Any) -> Training:
        torch.manual_seed(0)
        logs = [CsvLog(tmp_path, every=1), *more]
        recipe = Recipe(3, 5, 0.1)  # two batches an epoch
        path = tmp_path / "checkpoint"
        return Training(Recorder(), toy_data(), recipe, path, save_every=2, logs=logs)

    with pytest.raises(RuntimeError, match="stopped"):
        training(StopAfterEpoch(at)).run()
    resumed = training()
    resumed.resume()
    assert (resumed.steps, len(resumed.history)) == (2 * at, at - 1)
    resumed.run()
    with (tmp_path / "epochs.csv").open(newline="") as file:
        assert [(row["step"], row["epoch"]) for row in csv.DictReader(file)] == [
            ("2", "1"), ("4", "2"), ("6", "3"),
        ]  # fmt: skip
