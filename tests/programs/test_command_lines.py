"""Mistakes on a command line: one line that names the option, exit code 2, never a traceback.

Every script and every study is run inside the test process; nothing is trained here.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cases.studies import specification, write_weights
from implicit_attn.checkpoint import save_checkpoint
from implicit_attn.checkpoint.files import RunLock
from implicit_attn.command_line import Parser, command, mistakes, refuse_huge
from implicit_attn.models import build_model
from implicit_attn.studies import command as study_commands
from implicit_attn.studies.command import main as studies
from implicit_attn.training.claims import NotClaimed
from implicit_attn.training.finite import NonFiniteLoss
from implicit_attn.training.loop import Interrupted

for module in ("sklearn", "safetensors", "matplotlib", "tqdm", "lightning_fabric"):
    pytest.importorskip(module, reason="the examples need the extra [examples]")

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPTS = (
    "bare_attention", "classify", "easy_to_hard", "mnist_spins", "potts_recovery", "solve_sudoku", "sudoku",
    "sudoku_potts", "tap_vs_exact", "vit_images", "wrap_your_energy",
)  # fmt: skip
TRAINING = ("classify", "mnist_spins", "sudoku", "vit_images")
RECURRENT = ("sudoku", "vit_images")
STUDIES = ("convergence", "extrapolation", "paths", "geometry", "trade-off")
HUGE = "1" + 30 * "0"


def path_of(name: str) -> Path:
    """Of a program in the package, or of an example."""
    folders = ("implicit_attn/programs", "implicit_attn/programs/systems", "examples")
    return next(
        path for path in (ROOT / folder / f"{name}.py" for folder in folders) if path.exists()
    )


def load_script(name: str) -> Any:
    found = importlib.util.spec_from_file_location(f"line_{name}", path_of(name))
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


MODULES = {name: load_script(name) for name in SCRIPTS if name != "wrap_your_energy"}


def start(name: str, arguments: list[str]) -> None:
    """The program of that name, a script or a study."""
    if name in STUDIES:
        studies([name, *arguments])
    elif name in MODULES:
        MODULES[name].main(arguments)
    else:
        runpy.run_path(str(path_of(name)), run_name="__main__")


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., str]:
    """Runs a program that must refuse its arguments; returns the line that it says."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(name: str, *arguments: str | Path) -> str:
        words = [str(each) for each in arguments]
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
        handler = signal.getsignal(signal.SIGINT)
        try:
            with pytest.raises(SystemExit) as stop:
                start(name, words)
        finally:
            signal.signal(signal.SIGINT, handler)
        said = capsys.readouterr().err
        assert stop.value.code == 2, said
        lines = said.splitlines()
        assert len(lines) == 1 and len(said) < 1100, said
        assert re.match(rf"(\S*{name}\.py|python -m implicit_attn\.studies.*): error: ", said), said
        return said

    return run


def rows(names: tuple[str, ...], table: dict[str, tuple[str, ...]]) -> list[tuple[str, str, str]]:
    return [
        (name, option, value)
        for name in names
        for option, values in table.items()
        for value in values
    ]


COUNTS = ("0", "-1", "2.5", "nan", "x", "", HUGE)
RATES = ("nan", "-1", "inf", "-inf", "1e400", "x", "1e300")
VALUES = [
    *rows(TRAINING, {
        "--epochs": COUNTS, "--batch": COUNTS, "--rate": RATES, "--dim": COUNTS,
        "--seed": ("-1", str(2**70), str(2**63), "1.5"), "--out": ("", "a\0b", 5000 * "a"),
    }),
    *rows(RECURRENT, {
        "--heads": (*COUNTS, "3", "7"), "--width": COUNTS, "--layers": COUNTS,
        "--iterations": COUNTS, "--weight-decay": RATES, "--initial-step": ("nan", "inf", "1e300"),
        "--lora-rank": ("-1", HUGE), "--devices": COUNTS, "--save-every": COUNTS,
        "--log-every": COUNTS, "--accelerator": ("tpu",), "--precision": ("8",),
        "--model": ("resnet",), "--preset": ("large",),
    }),
    *rows(("classify", "mnist_spins"), {
        "--rtol": RATES, "--max-steps": COUNTS, "--bound": (*RATES, "0"),
    }),
    *rows(("classify",), {
        "--heads": (*COUNTS, "3"), "--patch": (*COUNTS, "3", "16"), "--memories": COUNTS,
        "--layers": (*COUNTS, "101"), "--dropout": ("2", "1", "-1", "nan"), "--model": ("vit",),
        "--baselines": ("some",), "--readout": ("last",),
        "--maximum": (*RATES, "0", "0.5"), "--limit": COUNTS[1:], "--data": ("imagenet",), "--stem": ("x",),
    }),
    *rows(("mnist_spins",), {"--limit": COUNTS, "--data": ("fashion_mnist", "digits")}),
    *rows(("vit_images",), {"--limit": COUNTS, "--patch": (*COUNTS, "3")}),
    *rows(("sudoku",), {
        "--train": (*COUNTS, str(10**9)), "--test": COUNTS, "--dropout": ("2", "1", "-1", "nan"),
    }),
    *rows(("solve_sudoku",), {
        "--window": ("33",), "--weights": ("missing.safetensors",),
        "--figure": ("board.txt", "/proc/nope/a.gif"),
    }),
    *rows(("sudoku_potts",), {
        "--train": (*COUNTS, str(10**9)), "--test": COUNTS, "--steps": COUNTS, "--anneal": COUNTS,
        "--source": ("none",), "--seed": ("-1", str(2**70)), "--out": ("", "a\0b"),
        "--weights": ("", "a\0b", "missing.safetensors"), "--solver": ("logic",), "--graph": ("some",),
    }),
    *rows(("potts_recovery",), {
        "--samples": COUNTS, "--steps": COUNTS, "--sites": (*COUNTS, "1"), "--methods": ("cubic", "sink-0"),
        "--data": ("grid",), "--few": ("0", "30000"), "--seeds": ("-1",), "--out": ("", "a\0b"),
    }),
    *rows(("tap_vs_exact",), {
        "--models": COUNTS, "--ising": (*COUNTS, "30"), "--potts": COUNTS,
        "--states": (*COUNTS, "1", "1000"), "--strengths": (*RATES, "0"),
        "--seed": ("-1", str(2**70)), "--out": ("", "a\0b"),
    }),
    *rows(("bare_attention",), {
        "--rule": ("oja",), "--cap": (*RATES, "0"), "--steps": COUNTS, "--batch": COUNTS, "--limit": COUNTS,
        "--rate": (*RATES, "0"), "--seed": ("-1", str(2**70)), "--threads": ("0", "x"),
    }),
    *rows(("wrap_your_energy",), {"--steps": ("-1", "nan", HUGE)}),
    *rows(STUDIES, {
        "--samples": COUNTS, "--data": ("imagenet",), "--out": ("", "a\0b", 5000 * "a"),
        "--weights": ("", "a\0b", "missing.safetensors", 5000 * "a"),
    }),
    *rows(("convergence",), {
        "--rtol": (*RATES, "0"), "--max-steps": COUNTS, "--spectra": COUNTS,
    }),
    *rows(("extrapolation",), {"--factor": COUNTS}),
    *rows(("paths",), {"--starts": COUNTS}),
    *rows(("geometry",), {"--iterations": COUNTS}),
    *rows(("trade-off",), {
        "--depth": COUNTS, "--layers": (*COUNTS, "5"), "--epochs": COUNTS, "--rate": RATES,
        "--seeds": COUNTS,
    }),
]  # fmt: skip


def named(option: str, line: str) -> bool:
    return re.search(rf"{option}(?![\w-])", line) is not None


@pytest.mark.defect("C6")
@pytest.mark.parametrize(
    ("name", "option", "value"),
    VALUES,
    ids=[f"{name}{option}={value[:12]!r}" for name, option, value in VALUES],
)
def test_a_wrong_value(
    name: str, option: str, value: str, refused: Callable[..., str], tmp_path: Path
) -> None:
    out = [] if name in ("bare_attention", "wrap_your_energy") else ["--out", tmp_path / "out"]
    assert named(option, refused(name, *out, option, value))
    assert not (tmp_path / "out" / "checkpoint.safetensors").exists()


COMBINATIONS = [
    ("classify", ["--dim", "7"], "--heads"),
    ("classify", ["--model", "hyperset", "--layers", "2"], "--layers"),
    ("classify", ["--model", "hyperset", "--readout", "mean"], "--readout"),
    ("classify", ["--bound", "3"], "--bound"),
    ("classify", ["--dim", "65536", "--layers", "100"], "--dim"),
    ("vit_images", ["--dim", "7"], "--heads"),
    ("vit_images", ["--dim", "9", "--heads", "3"], "--dim"),
    ("sudoku", ["--dim", "30", "--heads", "4"], "--heads"),
    ("sudoku", ["--model", "crate", "--heads", "3"], "--heads"),
    ("sudoku", ["--source", "list", "--train", "100000"], "--train|--source"),
    ("solve_sudoku", ["--givens", "30", "20"], "--givens"),
    ("solve_sudoku", ["--source", "generated", "--train", "5", "--test", "1"], "--train"),
    ("sudoku", ["--model", "board-solver", "--givens", "30", "81"], "--givens"),
    ("sudoku", ["--model=board-solver", "--layers", "2"], "--layers"),
    ("solve_sudoku", ["--features", "65536", "--width", "65536"], "--features"),
    ("vit_images", ["--dim", "65536", "--layers", "1000"], "--dim"),
    ("sudoku", ["--dim", "65536", "--width", "65536", "--layers", "100"], "--dim"),
    ("mnist_spins", ["--shipped", "--epochs", "3"], "--epochs"),
    ("tap_vs_exact", ["--ising", "3", "--potts", "20", "--models", "1"], "--potts"),
    ("trade-off", ["--depth", "4", "--layers", "3"], "--layers"),
    ("trade-off", ["--weights", "a", "--seeds", "2"], "--seeds"),
    ("classify", ["--flight"], "--flight"),
    ("vit_images", ["--dim"], "--dim"),
]


@pytest.mark.defect("C6")
@pytest.mark.parametrize(("name", "arguments", "option"), COMBINATIONS)
def test_values_that_do_not_fit_each_other(
    name: str, arguments: list[str], option: str, refused: Callable[..., str], tmp_path: Path
) -> None:
    assert named(option, refused(name, "--out", tmp_path / "out", *arguments))


@pytest.mark.defect("C6")
@pytest.mark.parametrize("name", [*TRAINING, "tap_vs_exact", *STUDIES])
@pytest.mark.parametrize("below", ["", "inner"])
def test_a_file_in_the_place_of_the_folder(
    name: str, below: str, refused: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("kept")
    assert named("--out", refused(name, "--out", tmp_path / "file" / below))
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.defect("C6")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
@pytest.mark.parametrize("name", RECURRENT)
def test_no_card(name: str, refused: Callable[..., str], tmp_path: Path) -> None:
    line = refused(name, "--accelerator", "cuda", "--out", tmp_path)
    assert named("--accelerator", line) and "card" in line


@pytest.mark.defect("C6")
@pytest.mark.parametrize("name", RECURRENT)
def test_a_missing_package(
    name: str, refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    small = ["--dim", "8", "--heads", "2", "--width", "8", "--out", tmp_path]
    small += ["--source", "generated", "--train", "2", "--test", "2"] if name == "sudoku" else []
    line = refused(name, "--tensorboard", *small)
    assert named("--tensorboard", line) and "implicit-attn[tensorboard]" in line


@pytest.mark.defect("C6")
@pytest.mark.parametrize(
    ("name", "option"),
    [("classify", "--data"), ("mnist_spins", "--data"), ("vit_images", "--data"),
     ("sudoku", "--source"), ("trade-off", "--data")],
)  # fmt: skip
def test_no_data_folder(
    name: str,
    option: str,
    refused: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("IMPLICIT_ATTN_DATA", str(tmp_path / "typo"))
    chosen = ["--source", "list"] if name == "sudoku" else ["--data", "mnist"]
    line = refused(name, *chosen, "--out", tmp_path)
    assert named(option, line) and "IMPLICIT_ATTN_DATA" in line and "typo" in line


@pytest.mark.defect("C6")
@pytest.mark.parametrize("name", ["classify", *RECURRENT])
@pytest.mark.parametrize("content", [b"", b"x", 8 * b"\xff", b"PK\x03\x04" + bytes(100)])
def test_resume_of_a_damaged_checkpoint(
    name: str, content: bytes, refused: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "checkpoint.safetensors").write_bytes(content)
    small = ["--dim", "8", "--heads", "2", "--out", tmp_path, "--resume"]
    small += ["--source", "generated", "--train", "2", "--test", "2"] if name == "sudoku" else []
    line = refused(name, *small)
    assert named("--resume", line) and "checkpoint.safetensors" in line
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == content


@pytest.mark.defect("C6")
@pytest.mark.parametrize("study", STUDIES)
@pytest.mark.parametrize("kind", ["empty", "noise", "folder", "no specification", "cut"])
def test_damaged_weights(
    study: str, kind: str, refused: Callable[..., str], tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    if kind == "folder":
        path.mkdir()
    elif kind == "no specification":
        save_checkpoint(path, torch.nn.Linear(1, 1), progress={"settings": {"model": 3}})
    else:
        whole = write_weights(path, "hyperset").read_bytes()
        path.write_bytes({"empty": b"", "noise": os.urandom(500), "cut": whole[:-9]}[kind])
    line = refused(study, "--weights", path, "--out", tmp_path / "out")
    assert named("--weights", line) and "a.safetensors" in line


@pytest.mark.defect("C6")
@pytest.mark.parametrize(
    ("study", "backbone"),
    [("trade-off", "hyperset-equilibrium"), ("trade-off", "equilibrium"), ("geometry", "crate"),
     ("geometry", "transformer"), ("geometry", "equilibrium")],
)  # fmt: skip
def test_a_model_that_the_study_is_not_made_for(
    study: str, backbone: str, refused: Callable[..., str], tmp_path: Path
) -> None:
    path = write_weights(tmp_path / "a.safetensors", backbone)
    assert named("--weights", refused(study, "--weights", path, "--out", tmp_path))


BENCHMARKS = [
    *[(name, "--rounds", value) for name in ("bisoftmax", "bisoftmax_layer", "adaptive_tap")
      for value in COUNTS],
    *[("bisoftmax", "--shapes", value) for value in ("8", "8,4,65,0", "8,4,x,64", "1,2,3,4,5")],
    *[(name, "--device", value) for name in ("bisoftmax", "bisoftmax_layer")
      for value in ("tpu", "cuda:99", "")],
    ("bisoftmax", "--dtype", "int7"), ("bisoftmax_layer", "--dim", "7"),
    ("bisoftmax_layer", "--heads", "3"), ("adaptive_tap", "--scales", "nan"),
    ("adaptive_tap", "--site", "cube"), ("adaptive_tap", "--threads", "0"),
    *[("learning", option, value) for option in ("--epochs", "--workers", "--layers", "--seeds")
      for value in COUNTS],
    ("learning", "--limit", "1"), ("learning", "--rates", "0"), ("learning", "--tasks", "imagenet"),
    ("learning", "--rows", "resnet"), ("learning", "--out", ""),
]  # fmt: skip


@pytest.mark.defect("C6")
@pytest.mark.parametrize(("name", "option", "value"), BENCHMARKS)
def test_benchmarks(
    name: str,
    option: str,
    value: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(sys, "argv", [f"{name}.py", option, value])
    with pytest.raises(SystemExit) as stop:
        module.main()
    said = capsys.readouterr().err
    assert stop.value.code == 2 and len(said.splitlines()) == 1
    assert said.startswith(f"{name}.py: error: argument --")


@pytest.mark.defect("C6")
@pytest.mark.parametrize("name", ["layers", "other_problems", "learning"])
def test_a_benchmark_takes_no_unknown_option(name: str, tmp_path: Path) -> None:
    """Started as a file, from any folder, with nothing on the path."""
    pytest.importorskip("torchdeq")
    pytest.importorskip("scipy")
    result = subprocess.run(
        [sys.executable, str(ROOT / f"benchmarks/{name}.py"), "--nope"],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 2, result.stderr
    assert result.stderr == f"{name}.py: error: unrecognized arguments: --nope\n"
    assert not result.stdout


@pytest.mark.defect("C6")
def test_fashion_is_offered_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every data set that a script offers is one that the loaders know."""
    asked: list[str] = []

    def load(name: str) -> Any:
        asked.append(name)
        raise FileNotFoundError("not here")

    monkeypatch.setattr(MODULES["mnist_spins"], "load", load)
    with pytest.raises(SystemExit):
        MODULES["mnist_spins"].main(["--data", "fashion-mnist"])
    assert asked == ["fashion-mnist"]


def run_under(parser: Parser, error: BaseException) -> None:
    with command(parser):
        parser.parse_args(["--heads", "2"])
        raise error


@pytest.mark.defect("C6")
@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 1, ""),
        (SystemExit("heads must divide dim"), 2, "p: error: argument --heads: heads must divide dim\n"),
        (SystemExit("two\nlines"), 2, "p: error: two lines\n"),
        (SystemExit(130), 130, ""),
        (OSError(28, "No space left on device"), 2, "p: error: [Errno 28] No space left on device\n"),
        (MemoryError("1 TiB"), 2, "p: error: out of memory: choose smaller sizes (1 TiB)\n"),
        (torch.OutOfMemoryError("x"), 2, "p: error: out of memory: choose smaller sizes (x)\n"),
    ],
)  # fmt: skip
def test_how_a_program_ends(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = Parser(prog="p")
    parser.add_argument("--heads", type=int)
    with pytest.raises(SystemExit) as stop:
        run_under(parser, error)
    assert stop.value.code == code
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("error", [ValueError("a"), KeyError("a"), RuntimeError("a"), TypeError()])
def test_a_fault_of_the_program_keeps_its_traceback(error: Exception) -> None:
    with pytest.raises(type(error)):
        run_under_again(error)


def run_under_again(error: Exception) -> None:
    parser = Parser(prog="p")
    parser.add_argument("--heads", type=int)
    run_under(parser, error)


def test_further_processes_leave_the_message_to_the_first() -> None:
    with pytest.raises(SystemExit) as stop, mistakes(first=False):
        raise ValueError("said by the first one")
    assert stop.value.code == 0


@pytest.mark.defect("C6")
@pytest.mark.parametrize("name", TRAINING)
def test_no_program_ends_without_a_word(
    name: str, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A variable that another launcher left behind makes no further process of this one."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    for reader in ("load", "load_sudoku", "resolve_source"):
        monkeypatch.setattr(MODULES[name], reader, missing, raising=False)
    assert "no such data" in refused(name, "--out", tmp_path / "out")


def missing(*_: Any, **__: Any) -> None:
    raise FileNotFoundError("no such data")


@pytest.mark.defect("C6")
@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (NotClaimed("a/b is there already"), 2, "p: error: a/b is there already\n"),
        (NonFiniteLoss("loss is nan"), 2, "p: error: loss is nan\n"),
        (
            Interrupted("interrupted; a holds everything"),
            130,
            "p: interrupted; a holds everything\n",
        ),
    ],
)
def test_how_a_program_that_trains_ends(
    error: Exception, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = Parser(prog="p")
    parser.add_argument("--heads", type=int)
    with pytest.raises(SystemExit) as stop:
        run_under(parser, error)
    assert stop.value.code == code
    assert capsys.readouterr().err == said


@pytest.mark.defect("C6")
@pytest.mark.parametrize("name", ["tap_vs_exact", "convergence", "trade-off", "mnist_spins"])
def test_a_folder_that_cannot_be_written_is_refused_before_the_work(
    name: str, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, work in (
        (MODULES["tap_vs_exact"], "error_against_coupling"),
        (MODULES["mnist_spins"], "load_checkpoint"),
        (study_commands, "open_subject"),
        (study_commands, "load"),
    ):
        monkeypatch.setattr(module, work, too_early)
    options = ["--shipped"] if name == "mnist_spins" else []
    assert "argument --out: " in refused(name, *options, "--out", "/proc/nope")


def too_early(*_: Any, **__: Any) -> None:
    raise AssertionError("the work has begun")


@pytest.mark.defect("B6")
def test_the_study_of_shipped_weights_keeps_the_files_of_a_run(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module, written = MODULES["mnist_spins"], []
    monkeypatch.setattr(module, "load", lambda _: "data")
    monkeypatch.setattr(module, "report", lambda *_: written.append(sorted(tmp_path.iterdir())))
    for name in ("checkpoint.safetensors", "epochs.csv", "mine.txt"):
        (tmp_path / name).write_text("an earlier run's")
    said = refused("mnist_spins", "--shipped", "--out", tmp_path)
    assert "argument --out: " in said and "epochs.csv" in said and not written
    assert (tmp_path / "epochs.csv").read_text() == "an earlier run's"
    module.main(["--shipped", "--overwrite", "--out", str(tmp_path)])
    assert len(written) == 1
    # Neither the tables nor the checkpoint of another model beside the report; nothing else is touched.
    assert {p.name for p in written[0]} & {"checkpoint.safetensors", "epochs.csv"} == set()
    assert (tmp_path / "mine.txt").is_file()


@pytest.mark.defect("B6")
def test_the_study_of_shipped_weights_stays_out_of_a_folder_in_use(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    lock = RunLock(tmp_path / "checkpoint.safetensors")
    lock.acquire()
    try:
        assert "argument --out: " in refused("mnist_spins", "--shipped", "--out", tmp_path)
    finally:
        lock.release()


def test_a_model_that_fits_is_let_through() -> None:
    refuse_huge(lambda: build_model(specification("crate", iterations=2)))
    with pytest.raises(ValueError, match=r"dim is too large: .* GiB of parameters"):
        refuse_huge(lambda: torch.nn.Linear(2**20, 2**20))
