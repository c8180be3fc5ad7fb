"""The report on a trained classifier: training, convergence, energy, accuracy at test time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from implicit_attn.studies.converging import (
    draw_energies,
    draw_residuals,
    solve_curves,
    twice_differentiable,
)
from implicit_attn.studies.extrapolating import accuracy_by_evaluations
from implicit_attn.studies.subjects import Subject
from implicit_attn.studies.tables import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    Study,
    Table,
    show_best,
)

OWN = "the layer's solver"
CONVERGENCE_SAMPLES = 256  # whose convergence is drawn


@dataclass(frozen=True)
class Report(Study):
    """What :func:`report` finds.

    Attributes:
        epochs: rows with epoch, loss, test_accuracy, converged (share of training samples) and
            evaluations (median).
        convergence: the curves of :class:`Convergence` for the layer's own solver, in float64.
        extrapolation: of :func:`accuracy_by_evaluations`.
        rtol, trained: tolerance and median evaluations per sample in training.
        couplings: of a spin classifier: (N, N) norms between its sites, before training and after
            every epoch; drawn in place of the energy. None: there are none.
        explicit: name and accuracy of a model without solves, drawn beside the accuracies.
    """

    epochs: Table
    convergence: Table
    extrapolation: Table
    rtol: float
    trained: int
    couplings: tuple[Any, ...] | None = None
    explicit: tuple[str, float] | None = None
    printed = ("extrapolation",)
    size = (13, 8)

    def draw(self, figure: Any) -> None:
        """Four panels; of spins three, and their couplings below."""
        if self.couplings is None:
            panels = list(figure.subplots(2, 2).flat)
            draw_energies(panels.pop(2), self.convergence, {OWN: BLUE})
        else:
            upper, lower = figure.subfigures(2, 1)
            panels = list(upper.subplots(1, 3))
            draw_couplings(lower, self.couplings)
        draw_training(panels[0], self.epochs)
        draw_residuals(panels[1], self.convergence, {OWN: BLUE}, self.rtol)
        panels[1].legend(frameon=False)
        draw_accuracy(panels[2], self.extrapolation, self.trained, self.explicit)


def report(
    subject: Subject, couplings: Any = None, *, explicit: tuple[str, float] | None = None
) -> Report:
    """Training, convergence and accuracy of a trained classifier on its test samples.

    Args:
        subject: a model with a ``DEQ``, test samples with targets, and the history of its training.
        couplings, explicit: as in :class:`Report`.

    Raises:
        ValueError: the subject has no history.
    """
    if not subject.history:
        raise ValueError("subject must have the history of its training, got none")
    few = subject.inputs[:CONVERGENCE_SAMPLES]
    exact = replace(subject, inputs=few, targets=None).exact()
    with torch.no_grad(), twice_differentiable(exact.model):
        own = {OWN: (exact.layer, exact.layer.solver)}
        convergence = solve_curves(own, *exact.given(exact.inputs), max_steps=100)
    budgets = budgets_around(subject.trained)
    return Report(
        subject.history,
        convergence,
        accuracy_by_evaluations(subject, budgets),
        subject.rtol,
        subject.trained,
        None if couplings is None else tuple(couplings),
        explicit,
    )


def budgets_around(trained: int) -> list[int]:
    """Powers of two below ``trained``, and 1, 2 and 4 times ``trained``."""
    powers = {2**k for k in range(20) if 2**k < trained}
    return sorted(powers | {trained, 2 * trained, 4 * trained})


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


def draw_accuracy(
    axes: Any, table: Table, trained: float, explicit: tuple[str, float] | None
) -> None:
    """Test accuracy against evaluations allowed per sample."""
    budgets = [row["evaluations"] for row in table]
    accuracy = [100 * row["accuracy"] for row in table]
    axes.plot(budgets, accuracy, color=ORANGE, marker="o")
    others: list[float] = []
    if explicit is not None:
        others = [100 * explicit[1]]
        axes.axhline(others[0], color=BLUE, linestyle=":", label=f"{explicit[0]}, no solve")
    axes.axvline(trained, color=GREY, linestyle="--", label="median in training")
    axes.set_xscale("log", base=2)
    # Powers of two get a label, and the largest budget; a neighbour of one of them would overlap.
    named = [b for b in budgets if b & (b - 1) == 0 or b == budgets[-1]]
    axes.set_xticks(named, [str(budget) for budget in named])
    axes.minorticks_off()
    axes.set(
        xlabel="evaluations per sample at test time\n(1: the start of the solve)",
        ylabel="test accuracy, %",
        title="Accuracy by evaluations",
    )
    show_best(axes, [*accuracy, *others])
    axes.legend(loc="best")


def draw_couplings(figure: Any, couplings: tuple[Any, ...]) -> None:
    """Matrices of norms before, during and after training, and the last one as a graph."""
    last = len(couplings) - 1
    moments = sorted({0, max(1, last // 4), last} & set(range(last + 1)))
    axes = figure.subplots(1, len(moments) + 1)
    top = max(float(np.max(couplings[k])) for k in moments)
    image = None
    for panel, k in zip(axes, moments, strict=False):
        image = panel.imshow(np.asarray(couplings[k]), cmap="viridis", vmin=0.0, vmax=top)
        name = "before training" if k == 0 else f"after epoch {k}"
        panel.set(title=f"Couplings {name}", xlabel="site j (0: class token)")
        panel.locator_params(integer=True)
    axes[0].set_ylabel("site i")
    shared = list(axes[: len(moments)])
    figure.colorbar(image, ax=shared, label="$|J_{ij}|$ (Frobenius)", location="bottom", shrink=0.5)
    draw_coupling_graph(axes[-1], np.asarray(couplings[-1]))


def draw_coupling_graph(axes: Any, norms: Any, share: float = 0.35) -> None:
    """The strongest couplings (N, N) as lines between the sites, site 0 beside the grid."""
    side = round((len(norms) - 1) ** 0.5)
    places = [(-1.4, (side - 1) / 2)] + [(float(k % side), k // side) for k in range(side * side)]
    rows, columns = np.triu_indices(len(norms), 1)
    strength = norms[rows, columns]
    least, widest = np.quantile(strength, 1 - share), float(strength.max()) or 1.0
    for i, j, value in zip(rows, columns, strength, strict=True):
        if value >= least:
            (x0, y0), (x1, y1) = places[i], places[j]
            color, relative = ORANGE if i == 0 else BLUE, float(value) / widest
            look: Any = {"linewidth": 4 * relative**2, "alpha": 0.75 * relative}
            axes.plot([x0, x1], [y0, y1], color=color, **look)
    axes.scatter(*zip(*places, strict=True), s=90, color=[ORANGE] + [BLUE] * side**2, zorder=3)
    below: Any = {"textcoords": "offset points", "ha": "center", "va": "top"}
    axes.annotate("class\ntoken", places[0], (0, -12), **below)
    axes.invert_yaxis()
    axes.set_aspect("equal")
    axes.set_axis_off()
    axes.set_title(f"Strongest {100 * share:.0f} % of couplings,\nsites at their positions")
