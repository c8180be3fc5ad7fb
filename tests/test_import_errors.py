"""Imports that cannot work say why: a hidden package, a missing one; and the logs that stay silent."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import implicit_attn
import solvers
from implicit_attn import kernels
from implicit_attn.shadow import check

ROOT = Path(__file__).resolve().parents[1]


ITSELF = "from implicit_attn import DEQ\nprint('ran')"


@pytest.mark.parametrize(
    ("file", "text", "script"),
    [
        ("solvers.py", "print('ran')", "mine.py"),  # a file beside a script of the user
        ("solvers.py", ITSELF, "mine.py"),
        ("solvers.py", ITSELF, "solvers.py"),  # the script itself
        ("solvers/__init__.py", ITSELF, "mine.py"),
    ],
    ids=["file", "file-that-imports-us", "script", "folder-that-imports-us"],
)
def test_another_module_named_solvers_is_refused(
    file: str, text: str, script: str, tmp_path: Path
) -> None:
    """Told before torch is imported, and before a circular import could be blamed."""
    other = tmp_path / file
    other.parent.mkdir(exist_ok=True)
    other.write_text(text)
    (tmp_path / "mine.py").write_text("import implicit_attn")
    here = Path(implicit_attn.__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(here)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1 and not done.stdout
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: implicit_attn comes with a package solvers")
    assert str(other) in last and "Rename or move" in last


def test_a_folder_without_a_file_is_named() -> None:
    other = types.ModuleType("solvers")
    other.__path__ = ["/work/of/mine/solvers"]
    with pytest.raises(ImportError, match="found /work/of/mine/solvers"):
        check(other)
    check(solvers)


def test_the_bridge_says_that_torchdeq_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchdeq"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchdeq", None)
    monkeypatch.delitem(sys.modules, "solvers.torchdeq_bridge", raising=False)
    with pytest.raises(
        ImportError, match=r"torchdeq_bridge needs torchdeq.*pip install \"\.\[torchdeq\]\""
    ):
        importlib.import_module("solvers.torchdeq_bridge")


@pytest.mark.parametrize("name", ["implicit_attn", "solvers"])
def test_the_logs_are_silent_unless_asked(name: str) -> None:
    log = logging.getLogger(name)
    assert any(isinstance(handler, logging.NullHandler) for handler in log.handlers)
    assert log.level == logging.NOTSET


def test_the_choice_of_a_kernel_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    z = torch.randn(1, 2, 5, 4)
    with caplog.at_level(logging.INFO, logger="implicit_attn"):
        kernels.bisoftmax(z, 1.0)
    assert not caplog.records
    with caplog.at_level(logging.DEBUG, logger="implicit_attn"):
        kernels.bisoftmax(z, 1.0)
        kernels.frozen_key_attention(z, z, 1.0)
    chosen = kernels.explain(z, 1.0)
    assert f"bi-softmax: {chosen.backend} ({chosen.reason})" in caplog.messages
    assert any(text.startswith("frozen keys: ") for text in caplog.messages)
