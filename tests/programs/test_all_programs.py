"""Every program of the package runs, so that none drifts from the library."""

from __future__ import annotations

import csv
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from implicit_attn.console.tables import RUN, TRAIN
from implicit_attn.programs import solve_sudoku, sudoku
from implicit_attn.programs.systems import bare_attention, sudoku_potts

ROOT = Path(__file__).resolve().parent.parent.parent
# How to run each program in a few seconds; {out} is an empty folder.
ARGUMENTS: dict[str, list[str]] = {
    "bare-attention": ["--steps", "40", "--rate", "0.1", "--batch", "32", "--limit", "300"],
    "classify": [
        "--limit", "64", "--epochs", "1", "--dim", "8", "--heads", "2", "--memories", "8",
        "--patch", "4", "--readout", "class", "--out", "{out}",
    ],
    "easy-to-hard": ["--size", "4", "--steps", "60", "--tests", "20"],
    "potts-recovery": [
        "--data", "tree", "--sites", "5", "--colours", "3", "--samples", "400", "--test", "100",
        "--methods", "linear", "softmax", "recycled", "--steps", "150", "--masked", "3",
        "--few", "50", "--out", "{out}",
    ],
    "solve-sudoku": [
        "--source", "generated", "--train", "110", "--test", "2", "--epochs", "1", "--features", "4",
        "--width", "8", "--iterations", "2", "--window", "1", "--batch", "60", "--boards", "2",
        "--out", "{out}",
    ],
    "sudoku": [
        "--source", "generated", "--train", "8", "--test", "4", "--epochs", "1", "--dim", "8",
        "--heads", "2", "--width", "16", "--iterations", "2", "--save-every", "1", "--out", "{out}",
    ],
    "sudoku-potts": [
        "--source", "generated", "--train", "8", "--test", "4", "--steps", "20", "--anneal", "100",
        "--out", "{out}",
    ],
    "tap-vs-exact": [
        "--models", "2", "--ising", "5", "--potts", "3", "--strengths", "1.5", "0.5", "--out", "{out}",
    ],
    "vit-images": [
        "--limit", "64", "--epochs", "2", "--dim", "8", "--heads", "2", "--patch", "4",
        "--iterations", "2", "--random-iterations", "1", "3", "--out", "{out}",
    ],
}  # fmt: skip
ELSEWHERE = {
    "hopfield-density",
    "language-model",
    "masked-images",
    "mnist-spins",
}  # tests of their own
NEEDS = {
    "bare-attention": ("sklearn", "tqdm"),
    "classify": ("sklearn", "safetensors", "matplotlib", "tqdm"),
    "potts-recovery": ("matplotlib", "tqdm"),
    "solve-sudoku": ("safetensors", "tqdm", "lightning_fabric"),
    "sudoku": ("safetensors", "tqdm", "lightning_fabric"),
    "sudoku-potts": ("safetensors",),
    "tap-vs-exact": ("matplotlib", "tqdm"),
    "vit-images": ("sklearn", "safetensors", "tqdm", "lightning_fabric"),
}


def words(name: str, out: Path) -> list[str]:
    return [argument.replace("{out}", str(out)) for argument in ARGUMENTS[name]]


def run(name: str, out: Path) -> str:
    """What ``implicit-attn train`` or ``run`` prints."""
    kind = "train" if name in TRAIN else "run"
    result = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-m", "implicit_attn", kind, name, *words(name, out)],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_every_program_is_listed_and_run() -> None:
    folder = ROOT / "implicit_attn" / "programs"
    for listed, place in ((TRAIN, folder), (RUN, folder / "systems")):
        there = {path.stem.replace("_", "-") for path in place.glob("[!_]*.py")}
        assert there == set(listed)
    assert set(ARGUMENTS) | ELSEWHERE == {*TRAIN, *RUN}


def test_class_token_readout(tmp_path: Path) -> None:
    for module in NEEDS["classify"]:
        pytest.importorskip(module, reason="the program needs the extra [examples]")
    output = run("classify", tmp_path / "new" / "folder")
    assert "class readout" in output
    assert (tmp_path / "new" / "folder" / "report.png").exists()


def test_sudoku_potts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Eight boards under symmetries show the graph; a board is printed; weights are read again."""
    for module in NEEDS["sudoku-potts"]:
        pytest.importorskip(module, reason="the program needs the extra [examples]")
    output = run("sudoku-potts", tmp_path / "new")
    assert "100.0% of the 810 strongest pairs" in output
    assert len(re.findall(r"^(?:[\d.][ |]+){9} +(?:\d[ |]*){9}$", output, re.MULTILINE)) == 9
    losses = [float(each) for each in re.findall(r"pseudo-likelihood (\S+) nats", output)]
    assert losses[-1] < losses[0] < math.log(9)
    weights = tmp_path / "new" / "weights.safetensors"
    main = sudoku_potts.main
    with torch.random.fork_rng(devices=[]):
        main([*words("sudoku-potts", tmp_path / "other"), "--weights", str(weights)])
    again = capsys.readouterr().out
    assert "nats" not in again and not (tmp_path / "other").exists()
    graph = "100.0% of the 810 strongest pairs"
    assert output[output.index(graph) :] == again[again.index(graph) :]
    messages = ["--solver", "belief-propagation"]
    main([*words("sudoku-potts", tmp_path / "other"), *messages, "--graph", "true"])
    by_rules = capsys.readouterr().out
    assert "strongest" not in by_rules and re.search(r"4 puzzles, (75|100)\.0% solved", by_rules)


def test_solve_sudoku(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training, its table by givens and iterations, and the same table from the weights alone."""
    for module in NEEDS["solve-sudoku"]:
        pytest.importorskip(module, reason="the program needs the extra [examples]")
    monkeypatch.setattr("implicit_attn.data.sudoku.BASES", 8)  # that are generated each for itself
    main = sudoku.main
    options = words("solve-sudoku", tmp_path / "new")
    with torch.random.fork_rng(devices=[]):
        main(["--model", "board-solver", *options])
    output = capsys.readouterr().out
    assert "learned from their solutions: 27 groups of 9 cells" in output
    table = output[output.index("\ngenerated Sudoku, ") + 1 :]
    marks = [float(each) for each in table.splitlines()[3].split()[3:-3]]
    assert marks == [1, 1, 2, 4, 8, 16, 32]
    rows = [line.split() for line in table.splitlines()[4:]]
    assert [row[0] for row in rows][:2] == ["25", "30"] and {len(row) for row in rows} == {13}
    weights = ["--weights", str(tmp_path / "new" / "weights.safetensors")]
    main = solve_sudoku.main
    with torch.random.fork_rng(devices=[]):
        main([*words("solve-sudoku", tmp_path / "other"), *weights])
    again = capsys.readouterr().out
    assert table.strip() == again.strip() and not (tmp_path / "other").exists()


def test_potts_recovery(tmp_path: Path) -> None:
    """The table is printed and written; the head without softmax is nearer to the tree."""
    for module in NEEDS["potts-recovery"]:
        pytest.importorskip(module, reason="the program needs the extra [examples]")
    output = run("potts-recovery", tmp_path / "new")
    assert "5 sites, 3 colours, 400 samples" in output
    assert (tmp_path / "new" / "tree-0.png").exists()
    with (tmp_path / "new" / "tree-0-methods.csv").open(newline="") as file:
        linear, softmax, _ = list(csv.DictReader(file))
    assert float(linear["coupling_error"]) < float(softmax["coupling_error"])


def test_tap_vs_exact(tmp_path: Path) -> None:
    """A table and a CSV for each family, sorted by strength, and the picture."""
    for module in NEEDS["tap-vs-exact"]:
        pytest.importorskip(module, reason="the program needs the extra [examples]")
    output = run("tap-vs-exact", tmp_path / "new")
    assert "Ising, N = 5" in output and "Potts, 3 states, N = 3" in output
    assert (tmp_path / "new" / "report.png").exists()
    for name in ("ising", "potts"):
        with (tmp_path / "new" / f"{name}.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [float(row["strength"]) for row in rows] == [0.5, 1.5]
        assert float(rows[0]["tap_mean"]) < float(rows[0]["naive_mean"])


@pytest.mark.parametrize(
    ("name", "expected", "counts"),
    [
        ("vit-images", r"digits, hyperset, \d+ parameters: test accuracy", [1, 2, 4]),
        ("sudoku", r"generated Sudoku, hyperset, \d+ parameters", [2, 4, 8]),
    ],
)
def test_recurrent_models(name: str, expected: str, counts: list[int], tmp_path: Path) -> None:
    """Logs, checkpoint and weights, and measures at other numbers of iterations."""
    for module in NEEDS[name]:
        pytest.importorskip(module, reason="the program needs the extra [examples]")
    output = run(name, tmp_path / "new")
    assert re.search(expected, output), output
    assert [int(n) for n in re.findall(r"^ +(\d+)  .*\d %$", output, re.MULTILINE)] == counts
    for kept in ("checkpoint.safetensors", "weights.safetensors", "epochs.csv"):
        assert (tmp_path / "new" / kept).exists()


def test_easy_to_hard(tmp_path: Path) -> None:
    """It learns; larger rings take more iterations; a picture in letters."""
    output = run("easy-to-hard", tmp_path)
    found = re.search(r"loss ([\d.]+) -> ([\d.]+) on rings of up to 4", output)
    assert found is not None and float(found[2]) < float(found[1]), output
    assert re.findall(r"^ +(\d+)  +\d+%", output, re.MULTILINE) == ["4", "8", "16"]
    picture = re.findall(r"^ +\d+  ([#.]{8})$", output, re.MULTILINE)
    assert len(picture) == 10 and picture[-1].count("#") >= picture[0].count("#")


def test_bare_attention(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hidden patch is guessed better than by its mean, and the overlap has a maximum on the way."""
    for module in NEEDS["bare-attention"]:
        pytest.importorskip(module, reason="the program needs the extra [examples]")
    monkeypatch.setattr(sys, "argv", ["bare-attention", *ARGUMENTS["bare-attention"]])
    with torch.random.fork_rng(devices=[]):
        bare_attention.main()
    output = capsys.readouterr().out
    guess, mean = (float(value) for value in re.findall(r": +error ([\d.]+)", output)[:2])
    assert guess < 0.95 * mean
    overlaps = [float(value) for value in re.findall(r"overlap .* ([\d.]+)", output)]
    assert len(overlaps) == 8
    assert max(overlaps[1:4]) > max(overlaps[0], overlaps[-1])
