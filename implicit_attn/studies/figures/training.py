"""The figure of a training: loss, convergence, energy, accuracy at test time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from implicit_attn.studies.figures.canvas import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    draw_band,
    drawing,
    leave_empty,
    show_best,
    write_in_corner,
)
from implicit_attn.studies.tables import Table


def training_report(
    path: str | Path,
    title: str,
    epochs: Table,
    convergence: Table,
    extrapolation: Table,
    *,
    rtol: float,
    trained_evaluations: float,
    explicit: tuple[str, float] | None = None,
) -> None:
    """Four panels: training, residual, energy, accuracy against test-time evaluations.

    Args:
        path, title: of the figure, a PNG.
        epochs: rows with epoch, loss, test_accuracy and converged (share of training samples).
        convergence: of :func:`implicit_attn.studies.solve_history`.
        extrapolation: of :func:`implicit_attn.studies.accuracy_by_evaluations`.
        rtol: tolerance of training, drawn as a line.
        trained_evaluations: median evaluations per sample in training, drawn as a line.
        explicit: name and test accuracy of a model without solves, drawn as a line.
    """
    with drawing(path, title, (11, 7.5), dpi=130) as figure:
        axes = figure.subplots(2, 2)
        draw_training(axes[0, 0], epochs)
        draw_residual(axes[0, 1], convergence, rtol)
        draw_energy(axes[1, 0], convergence)
        draw_extrapolation(axes[1, 1], extrapolation, trained_evaluations, explicit)


def draw_training(axes: Any, epochs: Table) -> None:
    """Loss and test accuracy per epoch, with the share of converged training samples."""
    number = [row["epoch"] for row in epochs]
    lines = axes.plot(number, [row["loss"] for row in epochs], color=BLUE, label="loss")
    axes.set(xlabel="epoch", ylabel="training loss", yscale="log", title="Training")
    axes.xaxis.get_major_locator().set_params(integer=True)
    right = axes.twinx()
    accuracy = [100 * row["test_accuracy"] for row in epochs]
    converged = [100 * row["converged"] for row in epochs]
    lines += right.plot(number, accuracy, color=ORANGE, label="test accuracy")
    label = "training samples converged"
    lines += right.plot(number, converged, color=GREEN, linestyle=":", label=label)
    right.set_ylabel("%")
    lowest = min(*accuracy, *converged)
    right.set_ylim(max(0.0, 5 * ((lowest - 2) // 5)), 100.5)
    # Between the accuracies, which are above, and the loss, which falls below.
    axes.legend(handles=lines, frameon=False, loc="center right", bbox_to_anchor=(1.0, 0.63))


def draw_residual(axes: Any, convergence: Table, rtol: float) -> None:
    """Median and band of the best residual so far."""
    label = "10 % to 90 % of samples"
    draw_band(axes, convergence, "evaluation", "residual", BLUE, "median", band_label=label)
    axes.axhline(rtol, color=GREY, linestyle="--", label="tolerance in training")
    axes.set(
        xlabel="evaluations of energy and gradient",
        ylabel="relative residual |f(z) - z| / |f(z)|",
        yscale="log",
        title="Convergence to the equilibrium",
    )
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False)


def draw_energy(axes: Any, convergence: Table) -> None:
    """Median over the samples of the energy above each one's own final value."""
    axes.set(
        xlabel="evaluations of energy and gradient",
        ylabel="energy above its final value (median)",
        title="Descent of the energy",
    )
    axes.xaxis.get_major_locator().set_params(integer=True)
    rows = [row for row in convergence if "energy_above" in row]
    if not rows:
        leave_empty(axes, "this layer has no energy")
        return
    rows = [row for row in rows if row["energy_above"] > 0] or rows
    steps = [row["evaluation"] for row in rows]
    above = [row["energy_above"] for row in rows]
    axes.plot(steps, above, color=GREEN, marker="o", markersize=3)
    if min(above) > 0:
        axes.set_yscale("log")


def draw_extrapolation(
    axes: Any,
    extrapolation: Table,
    trained_evaluations: float,
    explicit: tuple[str, float] | None = None,
) -> None:
    """Test accuracy against evaluations allowed per sample."""
    budgets = [row["evaluations"] for row in extrapolation]
    accuracy = [100 * row["accuracy"] for row in extrapolation]
    axes.plot(budgets, accuracy, color=ORANGE, marker="o")
    others: list[float] = []
    if explicit is not None:
        others = [100 * explicit[1]]
        axes.axhline(others[0], color=BLUE, linestyle=":", label=f"{explicit[0]}, no solve")
    axes.axvline(trained_evaluations, color=GREY, linestyle="--", label="median in training")
    axes.set_xscale("log", base=2)
    # Powers of two get a label, and the largest budget; a neighbour of one of them would overlap.
    named = [b for b in budgets if b & (b - 1) == 0 or b == budgets[-1]]
    axes.set_xticks(named, [str(budget) for budget in named])
    axes.minorticks_off()
    axes.set(
        xlabel="evaluations per sample at test time (1: the start of the solve)",
        ylabel="test accuracy, %",
        title="Accuracy against evaluations at test time",
    )
    bottom = show_best(axes, [*accuracy, *others], others)
    if bottom is not None:
        pairs = zip(budgets, accuracy, strict=True)
        hidden = [f"{budget}: {value:.1f} %" for budget, value in pairs if value < bottom]
        write_in_corner(axes, "below:\n" + "\n".join(hidden))
    axes.legend(loc="best")
