"""The table of Sudoku by every method, on a few boards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("safetensors", reason="weights are read from a file")

from benchmarks.boards import sudoku
from implicit_attn.checkpoint import save_checkpoint
from implicit_attn.data.sudoku import units
from implicit_attn.models import build_model


def test_every_method_has_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("IMPLICIT_ATTN_DATA", str(tmp_path))  # boards are generated
    torch.manual_seed(0)
    specification = {
        "kind": "board-solver", "groups": units().tolist(), "cells": 81, "colours": 9,
        "features": 4, "width": 4, "iterations": 4, "window": 2,
    }  # fmt: skip
    path = tmp_path / "solver.safetensors"
    model = build_model(specification)
    save_checkpoint(path, model, progress={"settings": {"model": specification}})
    sudoku.main(str(path), test=3, boards=2, train=9, fit_steps=2)
    lines = capsys.readouterr().out.splitlines()
    head, *rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line
    ]
    assert head[:2] == ["method", "boards"] and {"30", "34", "mixed"} <= set(head)
    names = [row[0] for row in rows[1:]]
    assert names[0] == "naked and hidden singles"
    assert "board solver, 1 iterations (0.25x)" in names
    assert "board solver, 64 iterations (16x)" in names
    assert "true graph: with decimation" in names and "learned, factored, annealed" in names
    shares = {row[0]: [float(cell) for cell in row[2:]] for row in rows[1:]}
    assert all(0 <= share <= 100 for each in shares.values() for share in each)
    assert shares["true graph: with decimation"][-2] == 100  # 34 givens
    assert shares["board solver, 64 iterations (16x)"] == [0] * len(head[2:])  # untrained


def test_weights_of_another_model_are_refused() -> None:
    with pytest.raises(SystemExit, match="must be of a board solver, got a"):
        sudoku.main("digits-hyperset")
