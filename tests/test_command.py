"""The command ``implicit-attn``: demo, weights, info."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import implicit_attn
from implicit_attn.cli import main


def test_the_weights_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["weights"])
    text = capsys.readouterr().out
    for row in implicit_attn.pretrained_models().values():
        assert row.command in text and f"{row.parameters:,} parameters" in text
    main(["weights", "path", "mnist-spins"])
    assert Path(capsys.readouterr().out.strip()).is_file()


@pytest.mark.defect("C6")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "required: command"),
        ("train", "invalid choice"),
        ("demo --epochs x", "--epochs"),
        ("demo --out /proc/nowhere", "/proc"),
        ("weights path mnist_spins", "nearest: mnist-spins"),
    ],
)
def test_a_wrong_word_ends_in_one_line(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(words.split())
    assert end.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert "error: " in lines[-1] and said in lines[-1]


def test_info_names_versions_devices_kernels_and_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sudoku").mkdir()
    monkeypatch.setenv("IMPLICIT_ATTN_DATA", str(tmp_path))
    main(["info"])
    text = capsys.readouterr().out
    for part in ("PyTorch version", "Python version", "kernels", "folders", f"{tmp_path}: sudoku"):
        assert part in text
    assert f"implicit-attn {implicit_attn.__version__}" in text


@pytest.mark.slow
def test_the_command_is_installed_and_survives_a_closed_pipe() -> None:
    words = [sys.executable, "-m", "implicit_attn"]
    shown = subprocess.run([*words, "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout == f"implicit-attn {implicit_attn.__version__}\n"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*words, "weights"], stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert done.returncode == 1 and b"Traceback" not in done.stderr


@pytest.mark.slow
def test_the_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for package in ("matplotlib", "sklearn"):
        pytest.importorskip(package, reason="the demo needs the extra [examples]")
    main(f"demo --epochs 1 --steps 2 --boards 2 --out {tmp_path}".split())
    names = {path.name for path in tmp_path.iterdir()}
    parts = ("one-energy", "sudoku", "own-energy")
    assert names == {f"{part}.{kind}" for part in parts for kind in ("csv", "png")}
    assert "a quarter missing" in capsys.readouterr().out
