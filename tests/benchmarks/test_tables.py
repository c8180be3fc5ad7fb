"""The tables of the benchmarks: of boards, of cost, of trained models; what layers learn."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
import tyro

from benchmarks import boards, cost, learning, trainings
from benchmarks.learning import ABLATIONS, ROWS, perform, task_of
from benchmarks.trainings import Run
from implicit_attn.data.sudoku import units
from implicit_attn.models import build_model, save_model

# benchmarks/trainings.py has put the examples on the path.
Images = importlib.import_module("train_images").Images
Language = importlib.import_module("train_language").Language

# A board solver at its fixed points, and every method.


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The file of a small board solver that has learned nothing."""
    monkeypatch.setenv("IMPLICIT_ATTN_DATA", str(tmp_path))  # boards are generated, from few
    monkeypatch.setattr("implicit_attn.data.sudoku.BASES", 8)
    torch.manual_seed(0)
    specification = {
        "kind": "board-solver", "groups": units().tolist(), "cells": 81, "colours": 9,
        "features": 4, "width": 4, "iterations": 4, "window": 2,
    }  # fmt: skip
    path = tmp_path / "solver.safetensors"
    settings = {"model": specification, "data": "", "train": 9, "seed": 0}
    save_model(path, build_model(specification), settings)
    return str(path)


def test_tables_of_a_solver_at_its_fixed_points(
    weights: str, capsys: pytest.CaptureFixture[str]
) -> None:
    boards.fixed_points(weights, boards=2, answers=2, longest=4)
    text = capsys.readouterr().out
    assert "| 17 givens | 2 | 0.0 | 0.0 |" in text and "8 guesses" in text
    assert "| 17 to 34 | 2 | consistent | 0.0 |" in text


def test_every_method_has_a_row(weights: str, capsys: pytest.CaptureFixture[str]) -> None:
    boards.sudoku(weights, test=3, boards=2, train=9, fit_steps=2)
    lines = capsys.readouterr().out.splitlines()
    _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
    shares = {row[0]: [float(cell) for cell in row[2:]] for row in rows[1:]}
    assert len(shares) > 5
    assert all(0 <= share <= 100 for each in shares.values() for share in each)
    assert shares["true graph: with decimation"][-2] == 100  # 34 givens
    assert set(shares["board solver, 64 iterations (16x)"]) == {0}  # untrained


# Implicit memory does not grow; the curves are made.


def test_what_implicit_layers_save_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "ITERATIONS", (2, 12))
    # Weights are kept anyway, and do not count.
    for name, (run, module) in cost.ways(2, 8, 2).items():
        weights = list(module.parameters())
        x = torch.ones(1, 3, 8, requires_grad=True)
        counted = cost.saved_bytes(lambda run=run, x=x: run(x), [])
        own = cost.saved_bytes(lambda run=run, x=x: run(x), weights)
        assert weights and own < counted, name
    rows = cost.measure_memory(2, 5, 8, 2)
    saved = {(row["way"], row["iterations"]): row["saved MB"] for row in rows}
    assert saved["implicit", 2] == saved["implicit", 12] > 0
    for way in ("unrolled", "transformer layers"):
        assert saved[way, 12] > 2 * saved[way, 2], way


def test_curves_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "BASE", {"B": 2, "N": 4, "d": 8})
    rows = cost.measure_curves(1, {"N": (5,)})
    assert [row["layer"] for row in rows] == list(cost.COLORS)
    assert all(row["converged"] == 1 and row["ms"] > 0 for row in rows)
    assert all(row["evaluations"] > 1 and row["backward"] > 0 for row in rows[:2])
    assert rows[2]["evaluations"] == 1


# Tables of trained models: command lines, how runs go on, differences of curves.


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """The runs that a table asks for; none is trained."""
    seen: list[Run] = []

    def note(runs: list[Run], *_: object) -> list[Run]:
        seen.extend(runs)
        raise SystemExit

    monkeypatch.setattr(trainings, "perform", note)
    return seen


@pytest.mark.parametrize(
    ("show", "program", "number"),
    [(trainings.forms, Language, 41), (trainings.equilibrium, Language, 51),
     (trainings.cifar10, Images, 4), (trainings.masked, Images, 12)],
)  # fmt: skip
def test_the_scripts_take_every_command_line(
    show: object, program: type, number: int, planned: list[Run]
) -> None:
    with pytest.raises(SystemExit):
        show()  # type: ignore[operator]
    assert len({run.folder(Path()) for run in planned}) == len(planned) == number
    for run in planned:
        assert tyro.cli(program, args=run.command[1:]).seed == run.seed


@pytest.mark.slow
def test_runs_are_made_once_and_failures_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The cat sat on the mat. " * 40)
    sizes = (
        "--steps 2 --batch 2 --dim 8 --heads 2 --length 8 --windows 3 --evaluate-every 1 --layers 1"
    )
    words = (trainings.LANGUAGE, "--text", str(text), *sizes.split())
    good, bad = Run("plain", 0, words, "tiny"), Run("bad", 0, (*words, "--heads", "7"))
    assert trainings.perform([good, bad], tmp_path, 2) == [good]
    assert "bad-0: ended with 1" in capsys.readouterr().err
    assert trainings.perform([good], tmp_path, 2) == [good]
    with pytest.raises(SystemExit, match="run with other options"):
        trainings.perform([Run("plain", 0, (*words, "--dim", "4"), "tiny")], tmp_path, 2)
    losses = {good: trainings.read_losses(good.folder(tmp_path))}
    assert list(losses[good]) == [1, 2]
    assert trainings.lines(losses, "tiny", tmp_path)[0]["form"] == "plain"
    found = trainings.judged(good.folder(tmp_path), str(text))
    assert set(found) == {"parameters", "12", "seconds"}  # a stack has one number


# What layers learn.


@pytest.mark.parametrize("row", [name for name, build in (ROWS | ABLATIONS).items() if build])
def test_a_row_trains_every_weight(row: str) -> None:
    torch.manual_seed(0)
    build = (ROWS | ABLATIONS)[row]
    assert build is not None
    layer, x = build(5, 8, 2), torch.randn(3, 5, 8, requires_grad=True)
    out = layer(x)
    assert out.shape == x.shape
    (out * torch.randn_like(out)).sum().backward()
    for weight in [x, *(each for each in layer.parameters() if each.requires_grad)]:
        assert weight.grad is not None and weight.grad.isfinite().all()


def test_no_test_image_is_trained_on() -> None:
    for name in ("digits", "same-different"):
        task = task_of(name, None)
        seen, unseen = (
            {row.numpy().tobytes() for row in part[0]} for part in (task.train, task.test)
        )
        assert not seen & unseen


def test_a_command_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"tasks": ("digits",), "rows": ("logistic", "first step", "block")}
    options |= {"limit": 100, "epochs": 1, "seeds": 2, "rates": (1e-3, 3e-3), "out": tmp_path}
    options |= {"readouts": ("class",)}
    threads, asked = torch.get_num_threads(), list[learning.Run]()

    def until_the_sixth(run: learning.Run) -> dict[str, object]:
        asked.append(run)
        if len(asked) == 6:
            raise KeyboardInterrupt
        return perform(run)

    monkeypatch.setattr(learning, "perform", until_the_sixth)
    try:
        with pytest.raises(KeyboardInterrupt):
            learning.main(**options)  # type: ignore[arg-type]
        rows = learning.main(**options)  # type: ignore[arg-type]
    finally:
        torch.set_num_threads(threads)
    assert len(asked) == len(set(asked)) + 1 == 1 + (3 + 1) + 2 * (2 + 2)
    assert [row["row"] for row in rows] == ["logistic", "first step", "block"]
    assert rows[2]["converged (worst epoch)"] == 1.0 and "evaluations" not in rows[1]
