"""The two training scripts: which model their options name, what they refuse, what they keep."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from implicit_attn.checkpoint import load_checkpoint, read_progress, save_checkpoint
from implicit_attn.data import ImageData, SudokuSymmetries, load_sudoku, unique_puzzles
from implicit_attn.models import BACKBONES, build_model
from implicit_attn.models.registry import SOLVED, WITHOUT_WIDTH
from implicit_attn.studies import open_subject
from implicit_attn.training.options import build_recipe

for module in ("sklearn", "safetensors", "tqdm", "lightning_fabric"):
    pytest.importorskip(module, reason="the examples need the extra [examples]")

ROOT = Path(__file__).resolve().parent.parent.parent
TINY = [
    "--train", "8", "--test", "5", "--epochs", "1", "--dim", "8", "--heads", "2", "--width", "16",
    "--iterations", "2", "--batch", "4",
]  # fmt: skip


def script(name: str) -> Any:
    """The example as a module."""
    found = importlib.util.spec_from_file_location(
        f"example_{name}", ROOT / f"implicit_attn/programs/{name}.py"
    )
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


SCRIPTS = {name: script(name) for name in ("vit_images", "sudoku")}


def parsed(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    return SCRIPTS[name].arguments()


def wanted(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The specification of the model that these arguments name."""
    options = parsed(name, arguments, monkeypatch)
    images, labels = torch.rand(2, 1, 8, 8), torch.zeros(2, dtype=torch.int64)
    data = [ImageData("small", 10, images, labels, images, labels)] if name == "vit_images" else []
    return SCRIPTS[name].specification(options, *data)


@pytest.mark.parametrize("model", BACKBONES)
def test_the_default_models_are_what_they_were(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Word for word, or runs that were started before could not be continued."""
    solved = model in SOLVED
    own = {"step_size": "conditioned-state", "initial_step": 0.1} if model == "hyperset" else {}
    backbone = {"name": model, "dim": 64, "heads": 4, "width": None}
    backbone |= {"iterations": 50 if solved else 12, **own}
    readout = "tokens" if model == "hyperset-equilibrium" else "class"
    shape = {"image_size": 8, "channels": 1, "classes": 10, "patch": 2}
    assert wanted("vit_images", ["--model", model], monkeypatch) == {
        "kind": "image-classifier", **shape, "stem": "conv", "readout": readout,
        "backbone": backbone,
    }  # fmt: skip
    own = own and {**own, "step_size": "conditioned-input"}
    backbone = {
        "name": model,
        "dim": 128,
        "heads": 4,
        "width": None if model in WITHOUT_WIDTH else 512,
    }
    backbone |= {"iterations": 50 if solved else 16, **own}
    assert wanted("sudoku", ["--model", model], monkeypatch) == {
        "kind": "sudoku", "start": "units", "dropout": 0.0, "backbone": backbone,
    }  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--attention", "softmax", "--feedforward", "gated", "--lora-rank", "2"],
            {"attention": "softmax", "feedforward": "gated", "lora_rank": 2},
        ),
        # What a preset says of a network's first step is not handed to steps without a network.
        (
            ["--preset", "paper", "--step-size", "fixed"],
            {"step_size": "fixed", "initial_step": None},
        ),
        (
            ["--step-size", "learned", "--initial-step", "0.2"],
            {"step_size": "learned", "initial_step": 0.2},
        ),
        (
            ["--step-size", "conditioned-input"],
            {"step_size": "conditioned-input", "initial_step": 0.1},
        ),
        (
            ["--model", "transformer", "--layers", "2", "--order", "cyclic"],
            {"layers": 2, "order": "cyclic"},
        ),
        (
            ["--model", "hyperset-equilibrium", "--attention", "linear", "--feedforward", "gelu"],
            {"attention": "linear", "feedforward": "gelu"},
        ),
        (["--model", "equilibrium", "--layers", "3"], {"name": "equilibrium", "layers": 3}),
        (
            ["--gains", "separate", "--step-network", "normed", "--share-steps", "--layers", "2"],
            {"gains": "separate", "step_network": "normed", "share_steps": True},
        ),
        (
            ["--descent", "adam", "--attention", "linear-tanh", "--feedforward", "gated-silu"],
            {"descent": "adam", "attention": "linear-tanh", "feedforward": "gated-silu"},
        ),
        (["--attention", "sigmoid-squared"], {"attention": "sigmoid-squared"}),
    ],
)
def test_variants_reach_the_model(
    name: str, arguments: list[str], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = ["--dim", "8", "--heads", "2", "--width", "8", "--iterations", "3"]
    found = wanted(name, [*arguments, *size], monkeypatch)
    assert found["backbone"].items() >= expected.items()
    build_model(found)


def test_positions_reach_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    found = wanted("vit_images", ["--positions", "learned", "--model", "crate"], monkeypatch)
    assert found["positions"] == "learned"
    assert isinstance(build_model(found).get_parameter("position"), torch.nn.Parameter)


def test_options_of_the_official_code_reach_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--pixel-norm", "--stem", "patch"]
    assert wanted("vit_images", words, monkeypatch)["pixel_norm"] is True
    assert build_model(wanted("vit_images", words, monkeypatch)).embed.norm is not None
    found = wanted("sudoku", ["--positions", "sincos", "--final-norm", "rms"], monkeypatch)
    assert {"positions": "sincos", "final_norm": "rms", "start": "random"}.items() <= found.items()
    assert isinstance(build_model(found).norm, torch.nn.RMSNorm)


BOTH = [
    (["--model", "transformer", "--attention", "sigmoid"], "--attention sigmoid .* transformer"),
    (["--model", "transformer", "--gains", "shared"], "--gains shared .* transformer"),
    (["--step-network", "raw", "--step-size", "fixed"], "step_network must be 'paper'"),
    (["--model", "crate", "--feedforward", "relu"], "--feedforward relu .* crate"),
    (["--model", "energy-transformer", "--step-size", "fixed"], "--step-size fixed .* energy-tra"),
    (["--model", "equilibrium", "--order", "cyclic"], "--order cyclic .* equilibrium"),
    (["--model", "equilibrium", "--attention", "sigmoid"], "--attention sigmoid .* equilibrium: att"),
    (["--model", "equilibrium", "--random-iterations", "2", "4"], "--random-iterations .* equili"),
    (["--model", "hyperset-equilibrium", "--layers", "2"], "--layers 2 .* hyperset-equilibrium"),
    (["--model", "hyperset-equilibrium", "--order", "cyclic"], "--order cyclic .* hyperset-equi"),
    (["--model", "hyperset-equilibrium", "--attention", "softmax"], "--attention softmax .* all t"),
    (["--model", "transformer", "--lora-rank", "1"], "--lora-rank 1 .* transformer"),
    (["--model", "transformer", "--initial-step", "0.1"], r"--initial-step 0\.1 .* transformer"),
    (["--model", "crate", "--width", "16"], "--width 16 .* crate"),
    (["--model", "spin-transformer", "--width", "16"], "--width 16 .* spin-transformer"),
    (["--model", "spin-transformer", "--order", "cyclic"], "--order cyclic .* spin-transformer"),
    (
        ["--model", "hyperset-equilibrium", "--random-iterations", "2", "4"],
        "--random-iterations .* hyperset-equilibrium",
    ),
    (["--step-size", "fixed", "--initial-step", "0"], "--initial-step 0.* must be finite and > 0"),
    (["--lora-rank", "-1"], "--lora-rank: must be an integer >= 0"),
    (["--random-iterations", "18", "6"], "--random-iterations must be LEAST <= MOST, got 18 6"),
    (["--random-iterations", "0", "6"], "--random-iterations: must be an integer >= 1"),
    (["--rate", "nan"], "--rate: must be a finite number >= 0, got 'nan'"),
    *[
        ([f"--{name}", value], f"--{name}: must be an integer >= 1, got '{value}'")
        for name, value in (
            ("log-every", "0"), ("save-every", "0"), ("iterations", "0"), ("epochs", "0"),
            ("batch", "-1"), ("dim", "0"), ("layers", "0"), ("devices", "0"), ("width", "2.5"),
        )
    ],
]  # fmt: skip
REFUSED = [
    *[(name, arguments, message) for name in SCRIPTS for arguments, message in BOTH],
    ("vit_images", ["--limit", "0"], "--limit: must be an integer >= 1, got '0'"),
    ("vit_images", ["--positions", "random"], "--positions: invalid choice"),
    ("vit_images", ["--rtol", "0.1"], "--rtol is for hyperset-equilibrium and equ"),
    ("sudoku", ["--start", "units", "--positions", "sincos"], "--start units is for learned posit"),
    ("sudoku", ["--train", "0"], "--train: must be an integer >= 1, got '0'"),
]


@pytest.mark.parametrize(("name", "arguments", "message"), REFUSED)
def test_what_would_be_ignored_or_fail_is_refused(
    name: str,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By the name of the option, before any data is read."""
    with pytest.raises(SystemExit) as stop:
        parsed(name, arguments, monkeypatch)
    assert stop.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_images_are_trained_with_variants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ["--dim", "8", "--heads", "2", "--patch", "4", "--iterations", "2", "--epochs", "1"]
    variants = ["--attention", "sigmoid", "--layers", "2", "--positions", "none"]
    where = ["--limit", "32", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["vit_images.py", *size, *variants, *where])
    SCRIPTS["vit_images"].main()
    output = capsys.readouterr().out
    assert output.startswith("data: digits, 32 training and ")
    subject = open_subject(tmp_path / "weights.safetensors", samples=8)
    assert subject.recurrence is not None and len(subject.recurrence.layers) == 2
    settings = read_progress(tmp_path / "weights.safetensors")["settings"]
    # They stand in the specification alone: a run without them has the settings it always had.
    assert not set(settings) & {"attention", "layers", "positions", "lora_rank", "order"}


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A list of 17 puzzles where the scripts look for it."""
    index = torch.arange(17) % 2
    puzzles, solutions = (boards[index] for boards in unique_puzzles(2, seed=0))
    generator = torch.Generator().manual_seed(0)
    puzzles, solutions = SudokuSymmetries()(puzzles, solutions, generator)
    path = tmp_path / "sudoku" / "sudoku17.npz"
    path.parent.mkdir()
    np.savez(path, puzzle=puzzles.numpy().astype("u1"), solution=solutions.numpy().astype("u1"))
    monkeypatch.setenv("IMPLICIT_ATTN_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return path


def play(out: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["sudoku.py", *TINY, "--out", str(out), *arguments])
    SCRIPTS["sudoku"].main()


def test_sudoku_keeps_its_puzzles(
    listed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The list, once taken, is not replaced by generated puzzles: neither in a study nor a resume."""
    out = listed.parent / "run"
    play(out, monkeypatch)
    assert capsys.readouterr().out.startswith("data: Sudoku, 17-clue list, 8 training and 5 test")
    weights = out / "weights.safetensors"
    assert read_progress(weights)["settings"]["source"] == "list"
    assert "17-clue list" in open_subject(weights).title
    play(out, monkeypatch, "--resume")
    listed.unlink()
    with pytest.raises(FileNotFoundError, match=r"no list of puzzles at .*IMPLICIT_ATTN_DATA"):
        open_subject(weights)
    with pytest.raises(SystemExit) as stop:
        play(out, monkeypatch, "--resume")
    assert stop.value.code == 2
    assert "made with other settings" in capsys.readouterr().err


def test_older_sudoku_runs_can_be_continued(
    listed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their settings say "auto", and nothing of where the puzzles came from."""
    out = listed.parent / "run"
    play(out, monkeypatch)
    path = out / "checkpoint.safetensors"
    options = parsed("sudoku", [*TINY, "--out", str(out)], monkeypatch)
    model = SCRIPTS["sudoku"].build(options)
    optimizer = build_recipe(options).build_optimizer(model)
    progress = load_checkpoint(path, model, optimizer, restore_random=False)
    progress["settings"]["source"] = "auto"
    save_checkpoint(path, model, optimizer, progress)
    capsys.readouterr()
    play(out, monkeypatch, "--resume")
    assert "17-clue list" in capsys.readouterr().out
    assert open_subject(out / "weights.safetensors").inputs.shape == (5, 81)


@pytest.mark.slow
def test_two_processes_report_once(tmp_path: Path) -> None:
    """All of them evaluate, each its share of the boards; one writes and prints."""
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("torch was built without gloo")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if "lo" in [name for _, name in socket.if_nameindex()]:
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    started = ["--source", "generated", "--devices", "2", "--accelerator", "cpu"]
    result = subprocess.run(
        [sys.executable, "-m", "implicit_attn.programs.sudoku", *TINY, *started, "--out", str(tmp_path)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    output = result.stdout
    assert result.returncode == 0, output + result.stderr
    for line in ("data: ", "5 test puzzles by iterations", "tables, checkpoint and weights"):
        assert output.count(line) == 1, output
    lines = re.findall(r"^ +(\d+)  test loss ([\d.]+)  cell.* ([\d.]+) %$", output, re.MULTILINE)
    assert [int(line[0]) for line in lines] == [2, 4, 8], output
    subject = open_subject(tmp_path / "weights.safetensors")
    known = load_sudoku(8, 5, source="generated", seed=0)
    assert torch.equal(subject.inputs, known.test_puzzles)
    with torch.no_grad():
        logits = subject.model(subject.inputs)
    loss, cells = subject.measure(logits, subject.inputs, subject.targets)["loss"]
    assert float(lines[0][1]) == pytest.approx((loss.sum() / cells.sum()).item(), abs=1e-3)
