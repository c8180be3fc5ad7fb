"""The examples ported from torchdeq: the same losses by both libraries, and every engine runs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("sklearn", reason="the digits need the extra [examples]")
FOLDER = Path(__file__).resolve().parents[2] / "examples" / "torchdeq"
SIZES = {
    "language_model": ["--dim", "16", "--heads", "2", "--length", "12", "--batch", "4"],
    "multiscale_digits": ["--channels", "4", "--batch", "8"],
}


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A program of the folder as a module, with the modules that it imports from there."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("engines", *SIZES, "compare"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def loaded(name: str) -> ModuleType:
        found = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        monkeypatch.setitem(sys.modules, name, module)
        found.loader.exec_module(module)
        return module

    with torch.random.fork_rng(devices=[]):
        yield loaded
    for name in ("engines", *SIZES, "compare"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", SIZES)
def test_losses_agree_by_every_engine(name: str, load: Any) -> None:
    """Twelve steps of training: within 1 % of torchdeq's at each of them, and they fall."""
    example = load(name)
    records = {
        engine: example.run(
            example.command_line().parse_args(
                ["--engine", engine, "--steps", "12", "--rate", "5e-3", *SIZES[name]]
            ),
            report=0,
        )
        for engine in ("torchdeq", "bridge", "ours")
    }
    expected = records["torchdeq"]
    assert sum(expected.losses[6:]) < sum(expected.losses[:6])
    for engine in ("bridge", "ours"):
        found = records[engine]
        for mine, other in zip(found.losses, expected.losses, strict=True):
            assert abs(mine - other) < 0.01 * other
        assert max(found.residuals) <= 1e-3
        assert sum(found.forward) <= sum(expected.forward)
        assert sum(found.backward) <= sum(expected.backward)


def test_the_comparison_prints_its_table(load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    load("compare").main(["--example", "digits", "--seeds", "1", "--steps", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[2:]] == [
        "torchdeq", "bridge", "ours", "ours, as exact",
    ]  # fmt: skip
    assert all(float(line[-7:]) < 1.1e-3 for line in lines[2:])
    assert "0.00 %" in lines[2]


@pytest.mark.parametrize("name", SIZES)
def test_the_program_runs(name: str, load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    load(name).main(["--steps", "2", *SIZES[name]])
    assert "step   2  loss" in capsys.readouterr().out
