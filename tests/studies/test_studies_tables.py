"""Tables, accuracy against evaluations, and the pictures."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from cases.deq import make, tokens
from implicit_attn import DEQ, GradientStep
from implicit_attn.energies import Quadratic
from implicit_attn.studies import (
    accuracy_by_evaluations,
    format_table,
    solve_history,
    write_table,
)
from implicit_attn.studies.plots import training_report
from solvers import Anderson, Forward, Tolerance

PNG = b"\x89PNG\r\n\x1a\n"


def sign_layer() -> DEQ:
    """From zero half way to x in each step, so that evaluations matter in a known way."""
    return DEQ(GradientStep(Quadratic(), 0.5), solver=Forward(), init="zeros")


def threshold(z: Tensor) -> Tensor:
    """Class 1 where the state has come beyond 0.8."""
    score = z[:, 0] - 0.8
    return torch.stack([-score, score], dim=1)


def study(budgets: list[int], **options: Any) -> list[dict[str, Any]]:
    x = torch.linspace(0.0, 2.0, 41).unsqueeze(1)
    labels = (x[:, 0] > 0.8).long()
    return accuracy_by_evaluations(
        sign_layer(), lambda images: images, threshold, x, labels, budgets, **options
    )


def test_accuracy_against_evaluations() -> None:
    """After k evaluations the state is (1 - 2^-(k-1)) x: class 1 where that exceeds 0.8."""
    budgets = [1, 2, 3, 4, 8, 30]
    table = study(budgets)
    x = torch.linspace(0.0, 2.0, 41)
    for row, budget in zip(table, budgets, strict=True):
        reached = (1 - 0.5 ** (budget - 1)) * x
        expected = ((reached > 0.8) == (x > 0.8)).double().mean().item()
        assert row["evaluations"] == budget
        assert row["accuracy"] == pytest.approx(expected)
        energy = 0.5 * (reached - x).square().mean().item()
        assert row["energy"] == pytest.approx(energy, rel=1e-4, abs=1e-9)
    residuals = [row["residual"] for row in table]
    assert residuals == sorted(residuals, reverse=True)
    assert table[-1]["accuracy"] == 1.0


def test_batches_do_not_matter() -> None:
    whole, parts = study([1, 3, 9]), study([1, 3, 9], batch_size=7)
    for first, second in zip(whole, parts, strict=True):
        assert first == pytest.approx(second)


def test_other_solver_and_layer_without_energy() -> None:
    layer = make("update")
    x = tokens(batch=6)
    labels = torch.tensor([0, 1, 2, 3, 0, 1])
    for solver in (None, Anderson(memory=2)):
        table = accuracy_by_evaluations(
            layer, lambda t: t, lambda z: z.mean(1), x, labels, [2, 20], solver=solver
        )
        columns = {"evaluations", "accuracy", "loss", "residual"}
        assert [set(row) for row in table] == [columns] * 2
        assert table[1]["residual"] < 1e-6
    assert layer.max_steps == 50
    assert layer.on_failure == "warn"


def test_budget_is_a_cap() -> None:
    """A row tells what a solve with that budget returns."""
    layer = make("gradient")
    x, labels = 3 * tokens(batch=4), torch.tensor([0, 1, 2, 3])

    def classify(z: Tensor) -> Tensor:
        assert not z.requires_grad
        return z.mean(1)

    table = accuracy_by_evaluations(layer, lambda t: t, classify, x, labels, [3, 5, 7])
    for row in table:
        budget = row["evaluations"]
        solution = layer.solve(
            x, max_steps=budget, tolerance=Tolerance(rtol=0.0), on_failure="ignore"
        )
        assert int(solution.evaluations.max()) <= budget
        loss = cross_entropy(solution.value.mean(1), labels)
        assert row["loss"] == pytest.approx(loss.item(), rel=1e-12)
        assert row["residual"] == pytest.approx(solution.residual.median().item(), rel=1e-12)


@pytest.mark.parametrize("budgets", [[0], [-1], [2.5]])
def test_bad_budgets(budgets: list[int]) -> None:
    with pytest.raises((ValueError, TypeError), match=r"max_steps|budget"):
        study(budgets)


def test_no_images() -> None:
    with pytest.raises(ValueError, match="images"):
        accuracy_by_evaluations(
            sign_layer(), lambda t: t, threshold, torch.zeros(0, 1), torch.zeros(0).long(), [1]
        )


TABLE: list[dict[str, Any]] = [
    {"name": "a", "count": 1, "share": 0.123456},
    {"name": "longer, with a comma", "count": 20000, "share": 1e-9},
]


def test_write_table(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    write_table(path, TABLE)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == ["a", "longer, with a comma"]
    assert [float(row["share"]) for row in rows] == [0.123456, 1e-9]
    assert path.read_bytes().count(b"\n") == 3


def test_bad_tables(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="table must have at least one row"):
        write_table(tmp_path / "empty.csv", [])
    with pytest.raises(ValueError, match="other"):
        write_table(tmp_path / "uneven.csv", [{"a": 1}, {"a": 1, "other": 2}])


def test_format_table() -> None:
    lines = format_table(TABLE).split("\n")
    assert len(lines) == 3
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split() == ["name", "count", "share"]
    assert lines[1].split() == ["a", "1", "0.1235"]
    assert lines[2].endswith("1e-09")
    assert format_table([]) == "(empty)"


def report(path: Path, epochs: int = 3, **changes: Any) -> None:
    history = [
        {"epoch": k + 1, "loss": 1 / (k + 1), "test_accuracy": 0.5 + 0.1 * k, "converged": 1.0}
        for k in range(epochs)
    ]
    convergence, _ = solve_history(make("gradient"), tokens(batch=5))
    tables: dict[str, Any] = {
        "epochs": history, "convergence": convergence, "extrapolation": study([1, 2, 4])
    }  # fmt: skip
    training_report(path, "a title", **tables | changes, rtol=1e-3, trained_evaluations=4.0)


@pytest.mark.parametrize("epochs", [1, 3])
def test_report_is_a_picture(tmp_path: Path, epochs: int) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    path = tmp_path / "report.png"
    report(path, epochs)
    content = path.read_bytes()
    assert content.startswith(PNG)
    width, height = (int.from_bytes(content[i : i + 4], "big") for i in (16, 20))
    assert width > 1000 and height > 600
    assert len(content) > 20_000  # not an empty canvas


def test_reports_do_not_pile_up(tmp_path: Path) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="the picture needs matplotlib")
    before = len(pyplot.get_fignums())
    report(tmp_path / "a.png")
    report(tmp_path / "b.png")
    assert len(pyplot.get_fignums()) == before


def test_report_of_extreme_numbers(tmp_path: Path) -> None:
    """A perfect solve has residual 0, and a layer at its fixed point no fall of energy to show."""
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    x = tokens()
    table, _ = solve_history(DEQ(GradientStep(Quadratic())), x)
    assert table[-1]["residual"] == 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report(tmp_path / "a.png", convergence=table)
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


def test_report_of_a_layer_without_energy(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    table, _ = solve_history(make("update"), tokens())
    report(tmp_path / "a.png", convergence=table)
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)
