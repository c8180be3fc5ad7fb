"""The command implicit-attn: its help, its mistakes in one line, what it imports, how it ends; info."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from implicit_attn import cli, kernels
from implicit_attn.cli import COMMANDS, main, one_line, read
from implicit_attn.optional import installed_version, requirements
from implicit_attn.programs import mistakes
from implicit_attn.programs.boards import PRESET
from implicit_attn.programs.images import PAPER, SMALL, SMALL_DIGITS
from implicit_attn.weights import pretrained_models, weights_path
from solvers import native

pytest.importorskip("tyro", reason="options are read by tyro")


def said(words: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    """What a command line prints that ends with this exit code."""
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == code
    found = capsys.readouterr()
    return found.err if code else found.out


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Of everything together, of a group, and of each command, which is imported for it."""
    main(["--version"])
    assert capsys.readouterr().out.startswith("implicit-attn ")
    main(["--help"])
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in COMMANDS)
    main(["train", "--help"])
    shown = capsys.readouterr().out
    assert all((f"\n  {name} " in shown) == name.startswith("train ") for name in COMMANDS)
    for name in COMMANDS:
        if name in ("info", "weights"):
            main([name, "--help"])
            shown = capsys.readouterr().out
        else:
            shown = said([*name.split(), "--help"], capsys)
        assert shown.startswith(f"usage: implicit-attn {name}")


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("train vit-images", SMALL_DIGITS),
        ("train vit-images --data mnist", SMALL),
        ("train vit-images --data nothing", SMALL_DIGITS),
        ("train vit-images --data mnist --preset paper", PAPER),
        ("train solve-sudoku", PRESET),
    ],
)
def test_the_help_shows_the_defaults_of_the_preset(
    words: str, values: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that the program takes with the other words of the line."""
    shown = " ".join(said([*words.split(), "--help"], capsys).replace("│", " ").split())
    assert "None)" not in shown
    for name in ("epochs", "batch", "rate"):
        text = shown.partition(f" --{name} {{None}}|")[2].partition(" --")[0]
        assert text.endswith(f"(default: {values[name]})"), text


@pytest.mark.defect("C6")
@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", "implicit-attn: error: command must be followed by one of demo, train, study, weights"),
        ("train", "implicit-attn: error: train must be followed by one of classify, vit-images"),
        ("train x", "implicit-attn: error: train must be followed by one of classify"),
        ("train sudoku --fast", "implicit-attn train sudoku: error: Unrecognized options: --fast"),
        ("train sudoku --epochs 0", "implicit-attn train sudoku: error: argument --epochs: "),
        ("train sudoku --epochs x", "implicit-attn train sudoku: error: Error parsing --epochs"),
        ("train classify --data cifar", "implicit-attn train classify: error: invalid choice 'cifar'"),
        ("study paths --samples 0", "implicit-attn study paths: error: argument --samples: "),
        ("study paths --weights digits", "implicit-attn study paths: error: no checkpoint at digits"),
        ("study trade-off --depth 4 --layers 3", "implicit-attn study trade-off: error: argument --la"),
        ("info all", "implicit-attn info: error: info takes no options"),
        ("weights path mnist_hyperset", "implicit-attn weights: error: name must be that of"),
        ("weights all", "implicit-attn weights: error: weights takes nothing or: path NAME"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(words.split(), capsys, code=2)
    assert text.startswith(line) and text.count("\n") == 1


@dataclass(kw_only=True)
class Numbers:
    """Of every kind that a command has."""

    count: int = 3
    seed: int = 0
    most: int | None = None
    rate: float = 0.5
    pair: tuple[int, int] = (1, 2)


@pytest.mark.defect("C6")
@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("--count 7 --seed 0 --rate 0 --pair 4 5", Numbers(count=7, rate=0.0, pair=(4, 5))),
        ("--most 9 --rate 1e-3", Numbers(most=9, rate=1e-3)),
        ("--most None", Numbers()),
        *[(f"--count {bad}", "count") for bad in ("0", "2.5", "1e3", "½")],
        *[(f"--seed {bad}", "seed") for bad in ("-1",)],
        *[(f"--rate {bad}", "rate") for bad in ("-1", "nan", "1e400")],
        *[(f"--pair {bad}", "pair") for bad in ("1", "0 2")],
        ("--most 0", "most"),
        ("--cuont 3", "cuont"),
        ("--count 3 extra", "extra"),
    ],
)
def test_the_reading_of_numbers(words: str, found: Any) -> None:
    if isinstance(found, Numbers):
        assert read(Numbers, words.split()) == found
        return
    with pytest.raises(ValueError, match=found) as error:
        read(Numbers, words.split())
    assert "\n" not in str(error.value)


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


def test_info_and_weights_need_none_of_the_extras() -> None:
    """And a command that needs one says which."""
    check = (
        "import sys\n"
        "for name in ('tyro', 'tqdm', 'matplotlib', 'sklearn', 'lightning_fabric', 'pooch'):\n"
        "    sys.modules[name] = None\n"
        "from implicit_attn.cli import main\n"
        "main(['info']); main(['weights']); main(['train', 'classify'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=False
    )
    assert "versions\n" in done.stdout and "austen-language: " in done.stdout
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("implicit-attn train classify: error: tyro could not be imported")
    assert 'pip install ".[training]"' in done.stderr


# How programs end, by the one context that all of them run in.


def run_under(error: BaseException) -> None:
    with one_line("p", {"heads"}):
        raise error


@pytest.mark.defect("C6")
@pytest.mark.parametrize(
    ("error", "code", "text"),
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
    error: BaseException, code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        run_under(error)
    assert stop.value.code == code and capsys.readouterr().err == text


@pytest.mark.parametrize("error", [ValueError("a"), KeyError("a"), RuntimeError("a"), TypeError()])
def test_a_fault_of_the_program_keeps_its_traceback(error: Exception) -> None:
    with pytest.raises(type(error)):
        run_under(error)
    with pytest.raises(SystemExit) as stop, mistakes(first=False, kinds=(Exception,)):
        raise error  # of a further process, which leaves the message to the first
    assert stop.value.code == 0


# ``implicit-attn info``, and the requirements it reads.


LINES = [
    "torch>=2.6",
    "numpy<3,>=1.26",
    'tqdm<5,>=4.66; extra == "training"',
    'implicit-attn[training]; extra == "examples"',
    'pillow<14,>=10; extra == "examples"',
    'implicit-attn[examples,training]; extra == "all"',
    'triton<4,>=3.3; platform_system == "Linux" and extra == "gpu"',
]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("IMPLICIT_ATTN_DATA", str(tmp_path / "data"))
    return tmp_path


def test_what_info_says(
    folders: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["info"])
    text = capsys.readouterr().out
    assert native.told() in text
    for title in ("versions", "devices", "kernels", "folders", "extras"):
        assert f"{title}\n  " in text
    assert torch.__version__ in text and sys.executable in text
    chosen = kernels.explain(torch.zeros(8, 4, 64, 16), 1.0)
    assert f"bi-softmax, 64 tokens x 16: {chosen.backend} ({chosen.reason})" in text
    assert f"{folders / 'data'} (no such folder)" in text
    monkeypatch.setattr(native, "engine", lambda: None)
    assert "without a C++ compiler" in dict(cli.kernels())["native engine"]


def test_data_are_found_where_they_are_read(folders: Path) -> None:
    for name in ("mnist/train-images-idx3-ubyte.gz", "sudoku/sudoku17.npz", "text/austen.txt.xz"):
        path = folders / "data" / name
        path.parent.mkdir(parents=True)
        path.touch()
    (folders / "cache/implicit-attn").mkdir(parents=True)
    rows = dict(cli.folders())
    assert rows["data"] == f"{folders / 'data'}: mnist, sudoku, texts"
    assert rows["data cache"].endswith("implicit-attn: no data set")


def test_a_folder_that_cannot_be_read_is_told_and_the_others_follow(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "is_dir", closed)
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.delenv("XDG_CACHE_HOME")
    rows = dict(cli.folders())
    assert list(rows) == ["data", "data cache"]
    assert rows["data"].startswith("cannot be read: ") and str(folders / "data") in rows["data"]
    assert "home directory" in rows["data cache"]


def test_extras_include_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", {"implicit-attn": LINES}.get)
    assert requirements() == {
        "": ["torch", "numpy"],
        "training": ["tqdm"],
        "examples": ["pillow", "tqdm"],
        "all": ["pillow", "tqdm"],
        "gpu": ["triton"],
    }
    monkeypatch.setattr(cli, "installed_version", {"pillow": "1", "triton": "2"}.get)
    assert dict(cli.extras()) == {
        "all": "without tqdm",
        "examples": "without tqdm",
        "gpu": "installed",
        "training": "without tqdm",
    }


def test_a_folder_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert requirements() == {}
    assert "is not installed" in dict(cli.extras())["unknown"]
    assert installed_version("torch") == torch.__version__
    assert installed_version("no-such-distribution-xyz") is None
