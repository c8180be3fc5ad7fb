"""The example of hidden patches: a training, its files, a resumed run, and what it refuses."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from implicit_attn.checkpoint import read_progress
from implicit_attn.models import MaskedImageModel, load_model

for module in ("sklearn", "safetensors", "matplotlib", "tqdm", "lightning_fabric"):
    pytest.importorskip(module, reason="the example needs the extra [examples]")

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "implicit_attn/programs/masked_images.py"))
TINY = [
    "--limit", "48", "--test", "20", "--epochs", "1", "--dim", "8", "--heads", "2", "--patch", "4",
    "--iterations", "2", "--random-iterations", "1", "3",
]  # fmt: skip


def test_a_run_a_resume_and_a_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    with torch.random.fork_rng(devices=[]):
        SCRIPT["main"]([*TINY, "--out", str(out)])
    printed = capsys.readouterr().out
    assert "48 training and 20 test images, 2 of 4 patches hidden" in printed
    assert re.search(r"hyperset, \d+ parameters; trained with 2 iterations", printed)
    assert "Gaussian, linear" in printed
    model, progress = load_model(out / "weights.safetensors")
    assert isinstance(model, MaskedImageModel)
    assert progress["settings"]["model"]["backbone"]["step_size"] == "conditioned-input"
    before = read_progress(out / "checkpoint.safetensors")["history"]
    with torch.random.fork_rng(devices=[]):
        SCRIPT["main"]([*TINY, "--out", str(out), "--resume"])  # nothing is left to train
    assert read_progress(out / "checkpoint.safetensors")["history"] == before
    capsys.readouterr()
    SCRIPT["main"](["--compare", str(out), "--out", str(tmp_path)])
    assert re.search(r"hyperset +\d+ +1 ", capsys.readouterr().out)
    assert (tmp_path / "comparison.png").exists()


def test_small_models_are_of_one_size() -> None:
    sizes = {}
    data = SCRIPT["load"]("digits")
    for name in ("hyperset", "hyperset-equilibrium", "transformer", "energy-transformer"):
        options = SCRIPT["arguments"](["--model", name])
        with torch.device("meta"):
            model = SCRIPT["build_model"](SCRIPT["specification"](options, data))
        sizes[name] = sum(each.numel() for each in model.parameters())
    assert max(sizes.values()) < 1.03 * min(sizes.values()), sizes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--masked", "1"], "--masked"),
        (["--masked", "nan"], "--masked"),
        (["--test", "0"], "--test"),
        (["--patch", "3"], "patch must divide"),
        (["--patch", "8"], "patch must leave 2 patches"),
        (["--rtol", "0.1"], "--rtol is for hyperset-equilibrium"),
        (
            ["--model", "hyperset-equilibrium", "--random-iterations", "2", "4"],
            "--random-iterations",
        ),
        (["--positions", "none"], "--positions"),
        (
            ["--dim", "6", "--heads", "2", "--positions", "sinusoidal"],
            "dim must be a multiple of 4",
        ),
        (["--compare", "nowhere"], "--compare"),
    ],
)
def test_mistakes_are_named(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with torch.random.fork_rng(devices=[]), pytest.raises(SystemExit) as stop:
        SCRIPT["main"]([*words, "--out", str(tmp_path)])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and message in said and len(said.splitlines()) == 1, said
