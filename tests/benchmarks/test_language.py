"""The comparison of language models: its command lines, its resumption, its claims, its figure."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("safetensors", reason="the benchmark trains by an example of [examples]")
pytest.importorskip("tqdm", reason="the benchmark trains by an example of [examples]")
pytest.importorskip("lightning_fabric", reason="the benchmark trains by an example of [examples]")
pytest.importorskip("matplotlib", reason="the benchmark trains by an example of [examples]")

from benchmarks.language import equilibrium, forms
from benchmarks.language.claims import differences, lines, verdicts
from benchmarks.language.figure import draw
from benchmarks.language.rows import CONTROLS, EXAMPLE, FORMS
from benchmarks.trainings import runs
from benchmarks.trainings.runs import Run
from implicit_attn.cli import main, read
from implicit_attn.command_line import Parser
from implicit_attn.programs.language_model import Language


def planned(*words: str) -> list[Run]:
    return forms.plan(forms.parser().parse_args(list(words)))


def test_what_is_planned() -> None:
    made = planned()
    assert len(made) == sum(sum(row.seeds.values()) for row in (*FORMS, *CONTROLS))
    assert len({run.folder for run in made}) == len(made)
    assert [run.seed for run in made if run.size == "small"] == sorted(
        run.seed for run in made if run.size == "small"
    )
    few = planned("--size", "small", "--rows", "plain", "newton-taylor-no-value", "--steps", "24")
    assert [(run.row, run.seed) for run in few] == [
        ("plain", 0), ("newton-taylor-no-value", 0), ("plain", 1),
    ]  # fmt: skip
    assert few[0].words[-3:] == ("--steps", "24", "evaluate_every=2")
    rates = planned("--rate", "1e-3", "--seeds", "1", "--size", "tiny")
    by_row = {run.row: run.words for run in rates}
    assert by_row["plain"][-2:] == ("--rate", "0.001")
    assert by_row["plain, rate 6e-3"][-2:] == ("--rate", "6e-3")


def test_the_program_takes_every_command_line() -> None:
    ours = [*planned(), *equilibrium.plan(equilibrium.parser().parse_args([]))]
    found = [read(Language, run.command[1:]).further() for run in ours]
    orders = [each["order"] for run, each in zip(ours, found, strict=True) if "order" in run.row]
    assert orders and not any(orders)
    assert {each["length"] for each in found} == {64, 128}


def a_run(row: str, seed: int = 0) -> Run:
    return Run("tiny", row, seed, ("--steps", "3"), EXAMPLE)


def test_runs_are_resumed_and_failures_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, pathlib\n"
        "out = pathlib.Path(sys.argv[sys.argv.index('--out') + 1])\n"
        "if '--resume' in sys.argv: (out / 'weights.safetensors').write_text('')\n"
        "elif out.name.endswith('1'): print('told why'); sys.exit(3)\n"
        "else: (out / 'checkpoint.safetensors').write_text('')\n"
    )
    monkeypatch.setattr(runs, "TRAIN", (sys.executable, str(script)))
    wanted, folder = [a_run("plain"), a_run("plain", 1)], tmp_path / "out"
    options = SimpleNamespace(out=folder, table=False, workers=2)
    shown: list[list[Run]] = []
    with pytest.raises(SystemExit) as stop:
        runs.perform(Parser(), options, wanted, lambda _, done: shown.append(done))
    said = capsys.readouterr()
    assert stop.value.code == 1 and not shown
    assert "ended with 3: told why" in said.err and "no run of this table is done" in said.out
    assert not runs.is_done(wanted[0], folder)  # it was interrupted, and goes on now
    with pytest.raises(SystemExit):
        runs.perform(Parser(), options, wanted, lambda _, done: shown.append(done))
    assert shown == [[wanted[0]]]
    assert json.loads((folder / "tiny-plain-0" / "words.json").read_text()) == ["--steps", "3"]
    with pytest.raises(ValueError, match="run with other options"):
        runs.is_done(Run("tiny", "plain", 0, ("--steps", "4"), EXAMPLE), folder)


CURVES = {
    a_run("plain"): {1: 3.0, 2: 2.0},
    a_run("plain", 1): {1: 3.1, 2: 2.1},
    a_run("momentum"): {1: 2.9, 2: 1.9},
    a_run("momentum", 1): {1: 3.2, 2: 2.0},
    a_run("nesterov"): {1: 2.9, 2: 2.05},
    a_run("light-newton-taylor"): {1: 3.0, 2: 2.005},
}


def test_claims_are_of_pairs_with_one_seed() -> None:
    apart = differences(CURVES, "tiny", "momentum", "plain")
    assert apart[0] == pytest.approx({1: -0.1, 2: -0.1})
    assert apart[1] == pytest.approx({1: 0.1, 2: -0.1})
    found = verdicts(CURVES, "tiny")
    assert [line.split(": ")[1].split(" (")[0] for line in found] == [
        "seen at the end", "not seen", "not seen", "not measured", "not measured", "seen",
    ]  # fmt: skip
    assert "(-0.1000 -0.1000; below at 3 of 4 evaluations)" in found[0]
    table = lines(CURVES, dict.fromkeys(CURVES, 5), "tiny")
    assert [row["form"] for row in table] == [
        "plain",
        "momentum",
        "nesterov",
        "light-newton-taylor",
    ]
    assert table[1]["loss"] == "1.9500" and table[1]["above plain"] == "-0.1000 -0.1000"


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    draw(tmp_path / "forms.png", CURVES)
    assert (tmp_path / "forms.png").read_bytes()[:4] == b"\x89PNG"


@pytest.fixture
def trained(tmp_path: Path) -> Any:
    """A function that trains a tiny model by the example in this process."""
    text = tmp_path / "tale.txt"
    text.write_text("The cat sat on the mat. " * 40)
    tiny = ["--steps", "2", "--batch", "2"]
    options = ["dim=8", "heads=2", "length=8", "windows=3", "evaluate_every=1"]

    def train(run: Run, *words: str) -> None:
        out = ["--text", str(text), "--out", str(tmp_path / run.folder), "--accelerator", "cpu"]
        own = replace(run, words=(*tiny, *words, *options))
        main(["train", *own.command, *out])

    with torch.random.fork_rng(devices=[]):
        yield train


def test_tables_of_trained_models(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = SimpleNamespace(out=tmp_path, text=str(tmp_path / "tale.txt"), figure=None)
    made = [a_run("one block, 1e-3"), a_run("drawn, last 4, 1e-3"), a_run("plain")]
    trained(made[0], "layers=1")
    trained(made[1], *equilibrium.ROWS["drawn, last 4"][0])
    trained(made[2], "layers=1")
    capsys.readouterr()
    equilibrium.show(options, made[:2])
    header, _, block, drawn = capsys.readouterr().out.splitlines()
    names = [name.strip() for name in header.split("|")]
    cells = [
        dict(zip(names, map(str.strip, row.split("|")), strict=True)) for row in (block, drawn)
    ]
    assert cells[0]["parameters"] == cells[1]["parameters"]
    assert cells[0]["mean"] == cells[0]["12"] and not cells[0]["48"]
    assert float(cells[1]["48"]) == pytest.approx(float(cells[1]["12"]), abs=0.1)
    assert float(cells[1]["residual"]) < 0.5
    forms.show(options, made[2:])
    assert "| tiny | plain | " in capsys.readouterr().out
