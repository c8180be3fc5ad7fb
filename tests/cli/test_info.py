"""``implicit-attn info``, and the requirements it reads."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from implicit_attn import info, kernels
from implicit_attn.cli import main
from implicit_attn.optional import installed_version, requirements
from solvers.native import library

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


def test_what_info_says(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["info"])
    text = capsys.readouterr().out
    for title in ("versions", "devices", "kernels", "folders", "extras"):
        assert f"{title}\n  " in text
    assert torch.__version__ in text and sys.executable in text
    chosen = kernels.explain(torch.zeros(8, 4, 64, 16), 1.0)
    assert f"bi-softmax, 64 tokens x 16: {chosen.backend} ({chosen.reason})" in text
    assert f"{folders / 'data'} (no such folder)" in text


def test_data_are_found_where_they_are_read(folders: Path) -> None:
    for name in ("mnist/train-images-idx3-ubyte.gz", "sudoku/sudoku17.npz", "text/austen.txt.xz"):
        path = folders / "data" / name
        path.parent.mkdir(parents=True)
        path.touch()
    (folders / "cache/implicit-attn").mkdir(parents=True)
    rows = dict(info.folders())
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
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    rows = dict(info.folders())
    assert list(rows) == ["data", "data cache", "triton cache"]
    assert rows["data"].startswith("cannot be read: ") and str(folders / "data") in rows["data"]
    assert all("home directory" in row for name, row in rows.items() if name != "data")


def test_the_engine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dict(info.kernels())["native engine"] == library.told()
    monkeypatch.setattr(library, "engine", lambda: None)
    assert "without a C++ compiler" in dict(info.kernels())["native engine"]


def requires(found: list[str] | None) -> Callable[[str], list[str] | None]:
    def answer(name: str) -> list[str] | None:
        assert name == "implicit-attn"
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    return answer


def test_extras_include_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", requires(LINES))
    assert requirements() == {
        "": ["torch", "numpy"],
        "training": ["tqdm"],
        "examples": ["pillow", "tqdm"],
        "all": ["pillow", "tqdm"],
        "gpu": ["triton"],
    }
    monkeypatch.setattr(info, "installed_version", {"pillow": "1", "triton": "2"}.get)
    assert dict(info.extras()) == {
        "all": "without tqdm",
        "examples": "without tqdm",
        "gpu": "installed",
        "training": "without tqdm",
    }


def test_a_folder_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", requires(None))
    assert requirements() == {}
    assert "is not installed" in dict(info.extras())["unknown"]
    assert installed_version("torch") == torch.__version__
    assert installed_version("no-such-distribution-xyz") is None
