"""The MNIST example with spins: a short training, exact resume, and the shipped weights."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from implicit_attn.checkpoint import load_checkpoint, read_progress
from implicit_attn.data import load
from implicit_attn.models import SpinClassifier
from implicit_attn.training import accuracy
from implicit_attn.weights import weights_path

for module in ("safetensors", "matplotlib", "tqdm"):
    pytest.importorskip(module, reason="the example needs the extra [examples]")

ROOT = Path(__file__).resolve().parent.parent.parent
SHIPPED = weights_path("mnist-spins")
HAS_MNIST = (Path(os.environ.get("IMPLICIT_ATTN_DATA", "/nowhere")) / "mnist").is_dir()
needs_mnist = pytest.mark.skipif(not HAS_MNIST, reason="no MNIST under IMPLICIT_ATTN_DATA")


def run(*arguments: str) -> str:
    result = subprocess.run(
        [
            sys.executable,
            "-W",
            "error::UserWarning",
            "-m",
            "implicit_attn.programs.mnist_spins",
            *arguments,
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def table(path: Path) -> list[dict[str, float]]:
    with path.open(newline="") as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


@needs_mnist
def test_a_short_training_learns_and_reports(tmp_path: Path) -> None:
    output = run("--limit", "3000", "--epochs", "2", "--batch", "64", "--out", str(tmp_path))
    assert "25832 parameters" in output
    rows = table(tmp_path / "epochs.csv")
    assert rows[1]["loss"] < rows[0]["loss"]
    assert rows[1]["test_accuracy"] > 0.5
    assert all(row["converged"] >= 0.99 and row["adjoint_converged"] >= 0.99 for row in rows)
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    progress = read_progress(tmp_path / "weights.safetensors")
    assert len(progress["observations"]) == 3  # before training, and after each epoch
    norms = torch.tensor(progress["observations"])
    assert norms.shape == (3, 17, 17)
    # Symmetric; rounded to four digits, in which two sums in another order may differ by one.
    torch.testing.assert_close(norms, norms.mT, rtol=0.0, atol=1.5e-4)
    assert norms.diagonal(dim1=1, dim2=2).abs().max() == 0
    assert not torch.equal(norms[0], norms[2])


def shipped() -> tuple[SpinClassifier, dict[str, float]]:
    progress = read_progress(SHIPPED)
    model = SpinClassifier(dim=progress["settings"]["dim"], bound=progress["settings"]["bound"])
    load_checkpoint(SHIPPED, model)
    return model, progress["history"][-1]


def test_shipped_weights_fit_and_are_small() -> None:
    model, last = shipped()
    assert SHIPPED.stat().st_size < 200_000
    assert model.parameter_count <= 27_000
    assert last["test_accuracy"] >= 0.991
    assert last["converged"] >= 0.99


@pytest.mark.parametrize("option", [("--dim", "12"), ("--data", "fashion-mnist"), ("--resume",)])
def test_shipped_weights_take_no_settings(option: tuple[str, ...]) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "implicit_attn.programs.mnist_spins", "--shipped", *option],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 2
    assert f"takes no {option[0]}" in result.stderr


@needs_mnist
def test_shipped_weights_read_mnist() -> None:
    """What the file says about them is what they do."""
    model, last = shipped()
    data = load("mnist")
    right = accuracy(model, data.test_images, data.test_labels)
    assert right >= 0.991
    # Another machine rounds otherwise, which may tip a digit that lies on the border.
    assert abs(right - last["test_accuracy"]) <= 3e-4


@needs_mnist
def test_more_evaluations_do_not_hurt(tmp_path: Path) -> None:
    output = run("--shipped", "--out", str(tmp_path))
    assert "test accuracy 99." in output
    rows = table(tmp_path / "extrapolation.csv")
    trained, double, fourfold = rows[-3:]
    assert fourfold["evaluations"] == 2 * double["evaluations"] == 4 * trained["evaluations"]
    assert double["accuracy"] >= trained["accuracy"]
    assert fourfold["accuracy"] >= trained["accuracy"]
    assert fourfold["residual"] < 1e-5
