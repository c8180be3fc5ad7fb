"""The command on tiny models: the files that it writes, and what it says to mistakes."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cases.studies import specification, write_weights
from implicit_attn.checkpoint import read_progress, save_checkpoint
from implicit_attn.data import ImageData
from implicit_attn.models import build_model
from implicit_attn.studies import command, layers_of_depth, open_subject, subjects
from implicit_attn.studies.command import STUDIES, main
from implicit_attn.studies.figures.trade_off import seed_means, trade_off_figure
from implicit_attn.studies.subjects import DataDiffers

pytest.importorskip("matplotlib", reason="the studies draw")
pytest.importorskip("safetensors", reason="the studies read checkpoints")
pytest.importorskip("sklearn", reason="the studies run on the digits")
PNG = b"\x89PNG\r\n\x1a\n"
RUNS = {
    "convergence": (
        ["--samples", "4", "--max-steps", "12", "--spectra", "1"],
        ["curves", "costs", "steps", "eigenvalues"],
    ),
    "extrapolation": (
        ["--samples", "9", "--factor", "2"],
        ["curves", "reach", "adaptive", "depths"],
    ),
    "paths": (["--samples", "5", "--starts", "1"], ["summary", "samples"]),
    "geometry": (["--samples", "6", "--iterations", "4"], ["energies", "heads"]),
}


@pytest.mark.parametrize(
    ("study", "backbone"),
    [
        *((study, name) for study in RUNS for name in ("hyperset", "hyperset-equilibrium")),
        *((study, "equilibrium") for study in RUNS if study != "geometry"),
        *((study, "spin-transformer") for study in RUNS if study != "geometry"),
    ],
)
def test_study(
    study: str, backbone: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(RUNS) == set(STUDIES)
    single: dict[str, Any] = {"layers": 1} if backbone == "spin-transformer" else {}
    weights = write_weights(tmp_path / "tiny.safetensors", backbone, **single)
    options, tables = RUNS[study]
    out = tmp_path / "out"
    main([study, "--weights", str(weights), "--out", str(out), *options])
    picture = (out / f"{study}-tiny.png").read_bytes()
    assert picture.startswith(PNG) and len(picture) > 20_000
    for name in tables:
        with (out / f"{study}-tiny-{name}.csv").open(newline="") as file:
            assert len(list(csv.DictReader(file))) >= 1
    assert str(out / f"{study}-tiny.png") in capsys.readouterr().out


@pytest.mark.parametrize("study", [name for name in RUNS if name != "geometry"])
@pytest.mark.parametrize("backbone", ["spin-transformer", "equilibrium"])
def test_several_modules_have_no_one_state(
    study: str, backbone: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = write_weights(tmp_path / "tiny.safetensors", backbone, layers=2)
    with pytest.raises(SystemExit) as error:
        main([study, "--weights", str(weights), "--out", str(tmp_path), *RUNS[study][0]])
    said = capsys.readouterr().err
    assert error.value.code == 2 and "argument --weights: model must have one" in said
    assert "got 2" in said and "train with --layers 1" in said


@pytest.mark.defect("C6")
@pytest.mark.parametrize("backbone", ["transformer", "crate"])
def test_convergence_of_softmax_attention(backbone: str, tmp_path: Path) -> None:
    """Newton's method and the Jacobian differentiate twice, which fused attention refuses."""
    weights = write_weights(tmp_path / "tiny.safetensors", backbone)
    small = ["--samples", "2", "--max-steps", "4", "--spectra", "1"]
    main(["convergence", "--weights", str(weights), "--out", str(tmp_path), *small])
    assert (tmp_path / "convergence-tiny.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("words", [[], ["--weights", "digits-hyperset"]], ids=["default", "named"])
def test_shipped_weights_anywhere(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files go to ``runs/studies`` of the current folder."""
    monkeypatch.chdir(tmp_path)
    main(["geometry", "--samples", "3", *words])
    made = tmp_path / "runs" / "studies" / "geometry-digits-hyperset.png"
    assert made.read_bytes().startswith(PNG)


def test_trade_off_reads_weights(tmp_path: Path) -> None:
    paths = [
        write_weights(tmp_path / f"{k}.safetensors", "hyperset", layers=k, iterations=4 // k)
        for k in (4, 1)
    ]
    main(["trade-off", "--weights", *map(str, paths), "--out", str(tmp_path), "--samples", "8"])
    with (tmp_path / "trade-off-table.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [(row["layers"], row["iterations"], row["depth"]) for row in table] == [
        ("1", "4", "4"),
        ("4", "1", "4"),
    ]
    assert int(table[0]["parameters"]) < int(table[1]["parameters"])
    assert (tmp_path / "trade-off.png").read_bytes().startswith(PNG)


def test_trade_off_trains(tmp_path: Path) -> None:
    pytest.importorskip("lightning_fabric", reason="training needs it")
    main(
        ["trade-off", "--out", str(tmp_path), "--depth", "2", "--layers", "1", "2", "--epochs", "1"]
    )
    with (tmp_path / "trade-off-table.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["layers"] for row in table] == ["1", "2"]
    made = open_subject(tmp_path / "trade-off" / "2x1-seed0.safetensors")
    assert made.recurrence is not None and len(made.recurrence.layers) == 2


def test_depth() -> None:
    assert layers_of_depth(6) == [(1, 6), (2, 3), (3, 2), (6, 1)]
    with pytest.raises(ValueError, match="depth"):
        layers_of_depth(0)


def test_seeds_are_averaged(tmp_path: Path) -> None:
    rows = [
        {
            "layers": k,
            "iterations": 4 // k,
            "parameters": 100 * k,
            "accuracy": 0.5 + 0.1 * seed,
            "loss": 1.0 - seed / 4,
        }
        for k in (1, 2)
        for seed in (0, 1)
    ]
    rows[0]["accuracy"], rows[1]["loss"] = 0.25, 0.5  # of one layer alone
    once = {"layers": 4, "iterations": 1, "parameters": 400, "accuracy": 0.75, "loss": 0.5}
    one, two, four = seed_means([once, *reversed(rows)])
    assert [row["layers"] for row in (one, two, four)] == [1, 2, 4]
    assert [row["seeds"] for row in (one, two, four)] == [2, 2, 1]
    assert [row["parameters"] for row in (one, two, four)] == [100, 200, 400]
    assert one["accuracy"] == pytest.approx(0.425) and one["loss"] == pytest.approx(0.75)
    assert two["accuracy"] == pytest.approx(0.55) and two["loss"] == pytest.approx(0.875)
    assert four["accuracy"] == 0.75 and four["loss"] == 0.5
    trade_off_figure(tmp_path / "a.png", "two seeds", rows)
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


def test_trade_off_fits_its_layers_to_the_depth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No layers given: all divisors; given weights: nothing is asked of a depth."""
    monkeypatch.chdir(tmp_path)
    seen: list[Any] = []
    monkeypatch.setattr(command, "run_trade_off", seen.append)
    main(["trade-off", "--depth", "8"])
    main(["trade-off"])
    main(["trade-off", "--weights", "a.safetensors"])
    eight, default, read = seen
    assert (eight.depth, eight.layers) == (8, [1, 2, 4, 8])
    assert (default.depth, default.layers) == (12, [1, 2, 3, 4, 6, 12])
    assert (default.epochs, default.rate, default.seeds) == (6, 4e-3, 1)
    assert (read.samples, read.depth, read.layers) == (10_000, None, None)


def test_subject_of_a_checkpoint(tmp_path: Path) -> None:
    path = write_weights(tmp_path / "run" / "weights.safetensors", "hyperset-equilibrium")
    state = torch.get_rng_state()
    subject = open_subject(path, samples=7)
    assert torch.equal(state, torch.get_rng_state())
    assert subject.name == "run" and len(subject.inputs) == 7 and subject.trained == 4
    assert "digits" in subject.title and not subject.model.training
    assert open_subject(path).inputs.shape[0] > 300


def mistake(arguments: list[Any], capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says when it refuses."""
    with pytest.raises(SystemExit) as stop:
        main([str(each) for each in arguments])
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_subject_of_sudoku(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = {
        "kind": "sudoku",
        "backbone": {"name": "crate", "dim": 8, "heads": 2, "iterations": 2},
    }
    settings = {"data": "sudoku", "model": wanted, "source": "generated", "train": 4, "test": 3}
    path = tmp_path / "boards.safetensors"
    save_checkpoint(path, build_model(wanted), progress={"settings": settings})
    subject = open_subject(path)
    assert subject.inputs.shape == (3, 81) and subject.name == "boards"
    with pytest.raises(DataDiffers, match="solves Sudoku, data must be None, got 'digits'"):
        open_subject(path, "digits")
    line = mistake(["paths", "--weights", path, "--data", "digits", "--out", tmp_path], capsys)
    assert "argument --data: " in line and "solves Sudoku" in line
    with torch.no_grad():
        logits = subject.model(subject.inputs)
    assert set(subject.measure(logits, subject.inputs, subject.targets)) == {
        "accuracy",
        "cell_accuracy",
        "loss",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["geometry", "--weights", "missing.safetensors"], "no checkpoint at"),
        (["geometry", "--samples", "0"], "--samples: must be an integer >= 1"),
        (["trade-off", "--depth", "4", "--layers", "3"], "must divide"),
        (["trade-off", "--samples", "5"], "--samples needs --weights"),
        *[
            (["trade-off", "--weights", "a", f"--{name}", "2"], f"--{name} cannot be given with")
            for name in ("depth", "layers", "epochs", "rate", "seeds")
        ],
        (["flight"], "invalid choice"),
    ],
)
def test_mistakes(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        extra = [] if arguments == ["flight"] else ["--out", str(tmp_path)]
        main([*arguments, *extra])
    assert message in f"{stop.value}{capsys.readouterr().err}"


def test_sudoku_weights_keep_their_puzzles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trained on the list, studied where there is none: refused; older ones say "auto"."""
    monkeypatch.setenv("IMPLICIT_ATTN_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wanted = {"kind": "sudoku", "backbone": {"name": "crate", "dim": 8, "heads": 2}}
    paths: dict[str, Path] = {}
    for source in ("list", "auto"):
        settings = {"data": "sudoku", "model": wanted, "source": source, "train": 2, "test": 2}
        paths[source] = tmp_path / f"{source}.safetensors"
        save_checkpoint(paths[source], build_model(wanted), progress={"settings": settings})
    line = mistake(["paths", "--weights", paths["list"], "--out", tmp_path], capsys)
    assert "no list of puzzles at " in line and "IMPLICIT_ATTN_DATA" in line
    assert "generated Sudoku" in open_subject(paths["auto"]).title


def test_images_of_another_shape_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the name of the option, before the model sees them."""
    path = write_weights(tmp_path / "a.safetensors", "crate")
    digits = subjects.load("digits")
    images, labels = torch.rand(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64)
    others = {
        "mnist": ImageData("wide", 10, images, labels, images, labels),
        "fashion-mnist": replace(digits, name="fine", classes=11),
    }
    monkeypatch.setattr(subjects, "load", others.get)
    for name, message in (("mnist", "wide has (3, 8, 8)"), ("fashion-mnist", "of 11")):
        line = mistake(["paths", "--weights", path, "--data", name, "--out", tmp_path], capsys)
        assert "argument --data: " in line and message in line


def test_checkpoint_without_data(tmp_path: Path) -> None:
    wanted = specification("crate", iterations=2)
    path = tmp_path / "a.safetensors"
    save_checkpoint(path, build_model(wanted), progress={"settings": {"model": wanted}})
    with pytest.raises(ValueError, match="what data"):
        open_subject(path)
    assert open_subject(path, "digits").trained == 2


@pytest.mark.defect("B6")
def test_trade_off_trains_again(tmp_path: Path) -> None:
    """Its checkpoints are by-products: a second run, also with other settings, begins anew."""
    small = ["trade-off", "--out", str(tmp_path), "--depth", "1", "--epochs"]
    main([*small, "1"])
    table = tmp_path / "trade-off-table.csv"
    table.unlink()
    main([*small, "2"])
    assert table.is_file()
    saved = read_progress(tmp_path / "trade-off" / "1x1-seed0.safetensors")
    assert len(saved["history"]) == 2


@pytest.mark.defect("C6")
def test_trade_off_ends_in_one_line_where_the_loss_is_not_finite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["trade-off", "--out", str(tmp_path), "--depth", "1", "--rate", "1e6"])
    said = capsys.readouterr().err
    assert stop.value.code == 2
    assert ": error: " in said and "Traceback" not in said and said.count("error") == 1


@pytest.mark.parametrize("study", [*STUDIES, "trade-off"])
def test_help(study: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([study, "--help"])
    assert stop.value.code == 0
    assert "--weights" in capsys.readouterr().out
