"""The example of a memory as a density: pictures, table, mistakes in one line."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path
from typing import Any

import pytest

for module in ("sklearn", "matplotlib", "tqdm"):
    pytest.importorskip(module, reason="the example needs the extra [examples]")

PATH = Path(__file__).resolve().parents[2] / "implicit_attn/programs/systems/hopfield_density.py"


@pytest.fixture(scope="module")
def example() -> Any:
    found = importlib.util.spec_from_file_location("example_hopfield_density", PATH)
    assert found is not None and found.loader is not None
    script = importlib.util.module_from_spec(found)
    found.loader.exec_module(script)
    return script


def test_pictures_and_a_table(
    example: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quick = example.EXPERIMENTS["memory-density"]
    fewer = tuple(
        (flag, kind, {"--starts": 1, "--steps": 5}.get(flag, value), meaning)
        for flag, kind, value, meaning in quick.options
    )
    monkeypatch.setitem(example.EXPERIMENTS, "memory-density", quick._replace(options=fewer))
    out = tmp_path / "new"
    example.main(["--noises", "0.2", "0.12", "--counts", "4", "12", "--out", str(out)])
    said = capsys.readouterr().out
    for name in ("digits.png", "density.png"):
        assert (out / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert str(out / name) in said
    with (out / "digits.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["noise"]) for row in rows] == 6 * [0.12] + 6 * [0.2]
    error = {row["method"]: float(row["error"]) for row in rows[:6]}
    nats = {row["method"]: float(row["log_likelihood"]) for row in rows[:6]}
    assert error["noisy"] == pytest.approx(1, abs=0.02)
    # The memory of clean images beats every baseline there, the fitted one the mean image alone.
    baselines = ("mean image", "nearest neighbour", "best linear")
    assert error["memory of clean images"] < 0.9 * min(error[name] for name in baselines)
    assert error["memory fitted to noisy images"] < 0.9 * error["mean image"]
    assert nats["memory of clean images"] > nats["best linear"] > nats["mean image"]
    assert nats["memory fitted to noisy images"] > nats["mean image"]


@pytest.mark.parametrize(
    ("option", "value"),
    [("--noises", "0"), ("--noises", "x"), ("--counts", "0"), ("--seed", "-1"), ("--out", "a\0b")],
)
def test_a_wrong_value_ends_in_one_line(
    example: Any, option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        example.main([option, value])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1 and f"argument {option}" in said
