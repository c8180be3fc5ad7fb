"""The command ``implicit-attn``: its help, its mistakes, what it imports, and what it hands on."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from implicit_attn.console import command, demo
from implicit_attn.console.command import main
from implicit_attn.console.tables import COMMANDS, GROUPS, RUN, TRAIN
from implicit_attn.programs import classify
from implicit_attn.studies import command as studies
from implicit_attn.studies.experiments.registry import EXPERIMENTS
from implicit_attn.weights import pretrained_models, weights_path

PROGRAMS = [(group, name) for group, names in GROUPS.items() for name in names]


def said(words: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    """What a command line prints that ends with this exit code."""
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == code
    found = capsys.readouterr()
    return found.err if code else found.out


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ([], COMMANDS),
        (["train"], TRAIN),
        (["run"], RUN),
        (["study"], {*studies.STUDIES, *EXPERIMENTS, "trade-off"}),
        (["weights", "path"], pretrained_models()),
    ],
    ids=["top", "train", "run", "study", "weights"],
)
def test_the_help_of_a_group_names_all_of_it(
    words: list[str], names: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said([*words, "--help"], capsys)
    assert text.startswith(f"usage: {' '.join(['implicit-attn', *words])} ")
    plain = "".join(text.split())  # lines are broken at hyphens
    assert [name for name in names if name not in plain] == []


@pytest.mark.parametrize(("group", "name"), PROGRAMS)
def test_the_help_of_a_program(group: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It calls itself by the words that started it, and its text shows examples of them."""
    text = said([group, name, "--help"], capsys)
    assert text.startswith(f"usage: implicit-attn {group} {name} [-h]")
    module = command.program_of(group, name)
    assert f"    implicit-attn {group} {name}" in module.__doc__


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "implicit-attn: error: a command is missing: one of demo, train, "),
        (["trian"], "implicit-attn: error: argument COMMAND: invalid choice: 'trian'"),
        (["train"], "implicit-attn train: error: a program is missing: one of classify, "),
        (["train", "x"], "implicit-attn train: error: argument PROGRAM: invalid choice: 'x'"),
        (["train", "--fast", "sudoku"], "implicit-attn train: error: unrecognized arguments: --fast"),
        (["train", "sudoku", "--dim", "0"], "implicit-attn train sudoku: error: argument --dim: "),
        (["run", "tap-vs-exact", "--x"], "implicit-attn run tap-vs-exact: error: unrecognized"),
        (["study", "geometry", "--samples", "0"], "implicit-attn study geometry: error: argument --s"),
        (["study", "geometry", "--weights", "digits"], "implicit-attn study: error: argument --weights"),
        (["info", "all"], "implicit-attn info: error: unrecognized arguments: all"),
        (["weights", "path", "mnist_hyperset"], "implicit-attn weights: error: name must be that of"),
        (["--print-completion", "fish"], "implicit-attn: error: argument --print-completion: invalid"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_mistake_is_one_line(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(words, capsys, code=2)
    assert text.startswith(line) and text.count("\n") == 1


def test_a_sub_command_is_imported_when_it_is_asked_for() -> None:
    check = (
        "import sys\nfrom implicit_attn.console.command import main\n"
        "try: main([{!r}, '--help'])\nexcept SystemExit: pass\n"
        "print([m for m in sys.modules if m.startswith(('implicit_attn.programs.', "
        "'implicit_attn.studies', 'implicit_attn.training', 'implicit_attn.console.'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", check.format("train")], capture_output=True, text=True, check=True
    )
    loaded = set(ast.literal_eval(done.stdout.splitlines()[-1]))
    assert loaded == {
        "implicit_attn.console.command",
        "implicit_attn.console.tables",
        "implicit_attn.programs.systems",  # whose own programs are not there
    }


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(["--version"], capsys).startswith("implicit-attn ")


@pytest.mark.parametrize(
    ("words", "handed"),
    [
        ([], ["--overwrite"]),
        (["--epochs", "1"], ["--epochs", "1", "--overwrite"]),
        (["--resume"], ["--resume"]),
        (["--resu"], ["--resu"]),
        (["--overwrite"], ["--overwrite"]),
    ],
)
def test_the_demo_replaces_its_last_report(
    words: list[str], handed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[list[str]] = []
    monkeypatch.setattr(demo.classify, "main", found.append)
    main(["demo", *words])
    assert found == [handed]
    classify.command_line().parse_args(handed)


def test_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    main(["weights"])
    text = capsys.readouterr().out
    for name, row in pretrained_models().items():
        assert f"{name}: {row.title}" in text and f"{row.parameters:,} parameters" in text
    main(["weights", "path", "mnist-spins"])
    assert Path(capsys.readouterr().out.strip()) == weights_path("mnist-spins")


def test_an_output_that_is_closed_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """``implicit-attn weights >&-``: Python has no sys.stdout then, and print() says nothing."""
    monkeypatch.setattr(sys, "stdout", None)
    main(["weights", "path", "mnist-spins"])


def test_studies_have_both_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        studies.main(["geometry", "--samples", "0"])
    assert capsys.readouterr().err.startswith("python -m implicit_attn.studies geometry: error: ")
