"""Pictures of the tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from implicit_attn.optional import require
from implicit_attn.studies.tables import Table

WINDOW = 10.0  # points of accuracy that are drawn below the best
BLUE, ORANGE, GREEN, GREY = "#2f6db3", "#d9772b", "#3a8f5c", "#777777"


def training_report(
    path: str | Path,
    title: str,
    epochs: Table,
    convergence: Table,
    extrapolation: Table,
    *,
    rtol: float,
    trained_evaluations: float,
) -> None:
    """Four panels: training, residual, energy, accuracy against test-time evaluations.

    Args:
        path: of the PNG.
        title: of the figure.
        epochs: rows with epoch, loss, test_accuracy and converged (share of training samples).
        convergence: of :func:`implicit_attn.studies.solve_history`.
        extrapolation: of :func:`implicit_attn.studies.accuracy_by_evaluations`.
        rtol: tolerance of training, drawn as a line.
        trained_evaluations: median evaluations per sample in training, drawn as a line.
    """
    pyplot = pyplot_without_screen()
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    figure.suptitle(title, fontsize=13)
    draw_training(axes[0, 0], epochs)
    draw_residual(axes[0, 1], convergence, rtol)
    draw_energy(axes[1, 0], convergence)
    draw_extrapolation(axes[1, 1], extrapolation, trained_evaluations)
    figure.savefig(Path(path), dpi=130)
    pyplot.close(figure)


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
    axes.legend(handles=lines, frameon=False, loc="center right")


def draw_residual(axes: Any, convergence: Table, rtol: float) -> None:
    """Median and 10-90 % band of the best residual so far."""
    steps = [row["evaluation"] for row in convergence]
    low = [row["residual_10"] for row in convergence]
    high = [row["residual_90"] for row in convergence]
    axes.fill_between(steps, low, high, color=BLUE, alpha=0.2, label="10 % to 90 % of samples")
    axes.plot(steps, [row["residual"] for row in convergence], color=BLUE, label="median")
    axes.axhline(rtol, color=GREY, linestyle="--", label="tolerance in training")
    axes.set(
        xlabel="evaluations of energy and gradient",
        ylabel="relative residual |f(z) - z| / |f(z)|",
        yscale="log",
        title="How the equilibrium is found",
    )
    axes.legend(frameon=False)


def draw_energy(axes: Any, convergence: Table) -> None:
    """Median over the samples of the energy above each one's own final value; it must fall."""
    axes.set(
        xlabel="evaluations of energy and gradient",
        ylabel="energy above its final value (median)",
        title="The energy falls along the way",
    )
    rows = [row for row in convergence if "energy_above" in row]
    if not rows:
        axes.text(0.5, 0.5, "this layer has no energy", ha="center", transform=axes.transAxes)
        return
    rows = [row for row in rows if row["energy_above"] > 0] or rows
    steps = [row["evaluation"] for row in rows]
    above = [row["energy_above"] for row in rows]
    axes.plot(steps, above, color=GREEN, marker="o", markersize=3)
    if min(above) > 0:
        axes.set_yscale("log")


def draw_extrapolation(axes: Any, extrapolation: Table, trained_evaluations: float) -> None:
    """Test accuracy against evaluations allowed per sample."""
    budgets = [row["evaluations"] for row in extrapolation]
    accuracy = [100 * row["accuracy"] for row in extrapolation]
    axes.plot(budgets, accuracy, color=ORANGE, marker="o")
    axes.axvline(trained_evaluations, color=GREY, linestyle="--", label="median in training")
    axes.set_xscale("log", base=2)
    # Powers of two get a label, and the largest budget; a neighbour of one of them would overlap.
    named = [b for b in budgets if b & (b - 1) == 0 or b == budgets[-1]]
    axes.set_xticks(named, [str(budget) for budget in named])
    axes.minorticks_off()
    axes.set(
        xlabel="evaluations per sample at test time",
        ylabel="test accuracy, %",
        title="More iterations at test time",
    )
    # The first evaluations are far below the rest, whose differences are what the figure is about.
    top, lowest = max(accuracy), min(accuracy)
    if top - lowest > WINDOW:
        axes.set_ylim(top - WINDOW, top + 0.05 * WINDOW)
        low = [
            f"{b}: {a:.1f} %" for b, a in zip(budgets, accuracy, strict=True) if a < top - WINDOW
        ]
        axes.text(0.03, 0.04, "below:\n" + "\n".join(low), transform=axes.transAxes, va="bottom")
    axes.legend(loc="lower right")


def pyplot_without_screen() -> Any:
    """``matplotlib.pyplot`` that draws to files."""
    require("matplotlib", extra="examples").use("Agg")
    return require("matplotlib.pyplot", extra="examples")


def say_nothing(axes: Any, why: str) -> None:
    """A panel that has nothing to show says why."""
    axes.text(0.5, 0.5, why, ha="center", transform=axes.transAxes)
    axes.set(xticks=[], yticks=[], xlabel="")
