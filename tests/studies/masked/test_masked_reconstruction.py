"""The study of filled-in images: tables, pictures, and several runs beside each other."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from implicit_attn.data import ImageData
from implicit_attn.studies.masked.reconstruction import (
    SHOWN,
    compare_runs,
    error_by_iterations,
    error_of_fillings,
    filled_images,
    report_run,
)
from implicit_attn.studies.tables import write_table
from implicit_attn.training import MaskedImages

pytest.importorskip("matplotlib", reason="figures need it")

PIXELS = torch.rand(30, 3, 4, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.zeros(30, dtype=torch.int64)
DATA = ImageData("noise", 1, PIXELS[:20], LABELS[:20], PIXELS[20:], LABELS[20:])
TASK = MaskedImages(DATA, 2, masked=0.5)


class Halving(nn.Module):
    """Predicts ``0.5 + offset 2^-iterations``: the error falls with each iteration."""

    def __init__(self, offset: float = 0.4) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.tensor(offset))

    def forward(self, images: Tensor, iterations: int = 4) -> Tensor:
        return torch.full_like(images, 0.5) + self.offset * 0.5**iterations


def test_errors_are_those_of_the_task() -> None:
    model = Halving()
    rows = error_by_iterations(model, TASK, [1, 4])
    for row in rows:
        found = TASK.evaluate(model, 0, 1, row["iterations"])
        assert row["test_loss"] == found["test_loss"][0] / found["test_loss"][1]
    assert rows[1]["test_loss"] < rows[0]["test_loss"]
    fillings = {row["filling"]: row["test_loss"] for row in error_of_fillings(TASK)}
    assert len(fillings) == 5 and fillings["nearest training image"] > 1.5 * rows[1]["test_loss"]


def test_visible_pixels_are_never_touched() -> None:
    inputs, targets = (part[:4] for part in TASK.test_images())
    rows = filled_images(Halving(), TASK, [1, 2], 4)
    assert list(rows) == ["image", "visible", "1 iteration", "2 iterations", "Gaussian, linear"]
    for label, images in rows.items():
        assert torch.equal(images[~inputs.isnan()], targets[~inputs.isnan()])
        assert images.isnan().any() == (label == "visible")
    assert rows["1 iteration"][inputs.isnan()].unique().tolist() == [pytest.approx(0.7)]


def test_a_run_and_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, offset in enumerate((0.4, 0.6)):
        out = tmp_path / str(seed)
        out.mkdir()
        report_run(Halving(offset), TASK, name="halving", iterations=4, seed=seed, out=out)
        for name in ("errors.png", "filling.png", "errors.csv", "fillings.csv"):
            assert (out / name).stat().st_size > 0
    printed = capsys.readouterr().out
    assert "halving, 1 parameters; trained with 4 iterations" in printed
    with (tmp_path / "1" / "errors.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["iterations"]) for row in rows] == [1, 2, 4, 6, 8, 16]
    (row,) = compare_runs([tmp_path / "1", tmp_path / "0"], tmp_path / "new" / "both")
    errors = [
        error_by_iterations(Halving(offset), TASK, [1, 4, 16]) for offset in (0.4, 0.6)
    ]  # fmt: skip
    one = [rows[1]["test_loss"] for rows in errors]
    assert row["seeds"] == 2 and row["x1"] == 1.0
    assert row["error"] == pytest.approx(sum(one) / 2)
    assert (row["least"], row["most"]) == (pytest.approx(min(one)), pytest.approx(max(one)))
    for multiple, place in (("x0.25", 0), ("x4", 2)):
        shares = [rows[place]["test_loss"] / rows[1]["test_loss"] for rows in errors]
        assert row[multiple] == pytest.approx(sum(shares) / 2)
    assert row["x0.25"] > 1 > row["x4"]
    for name in ("comparison.csv", "comparison.png"):
        assert (tmp_path / "new" / "both" / name).stat().st_size > 0


def test_runs_of_other_patches_are_refused(tmp_path: Path) -> None:
    for name, masked in (("a", 0.5), ("b", 0.3)):
        (tmp_path / name).mkdir()
        table = error_of_fillings(MaskedImages(DATA, 2, masked=masked))
        write_table(tmp_path / name / "fillings.csv", table)
        write_table(tmp_path / name / "errors.csv", [{"data": "noise", "model": "a", "seed": 0}])
    with pytest.raises(ValueError, match="runs must be of the same hidden patches"):
        compare_runs([tmp_path / "a", tmp_path / "b"], tmp_path)
    with pytest.raises(FileNotFoundError):
        compare_runs([tmp_path / "c"], tmp_path)


def test_runs_that_are_not_alike_are_not_averaged(tmp_path: Path) -> None:
    """Errors in pixels beside those of standardised patches; a run twice; other iterations."""
    row = {"data": "noise", "images": 10, "hidden": 2, "patches": 4, "normalised": 0}
    row |= {"model": "a", "parameters": 1, "seed": 0, "training": 4, "iterations": 4}
    changes = {
        "plain": {}, "normalised": {"normalised": 1, "model": "b"},
        "fewer": {"images": 5, "model": "b"}, "longer": {"seed": 1, "training": 8},
    }  # fmt: skip
    for name, change in changes.items():
        (tmp_path / name).mkdir()
        write_table(tmp_path / name / "errors.csv", [row | change | {"test_loss": 0.5}])
    for name, said in (
        ("normalised", "same hidden patches"), ("fewer", "same hidden patches"),
        ("longer", "runs of a must differ in the seed alone"), ("plain", r"got seeds \[0, 0\]"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            compare_runs([tmp_path / "plain", tmp_path / name], tmp_path)


def test_standardised_patches_have_no_fillings(tmp_path: Path) -> None:
    task = MaskedImages(DATA, 2, masked=0.5, normalise=True)
    report_run(Halving(), task, name="halving", iterations=4, seed=0, out=tmp_path)
    assert not (tmp_path / "fillings.csv").exists() and (tmp_path / "filling.png").exists()
    assert list(filled_images(Halving(), task, SHOWN))[-1] == "24 iterations"
    with pytest.raises(ValueError, match="normalise must be False"):
        error_of_fillings(task)
