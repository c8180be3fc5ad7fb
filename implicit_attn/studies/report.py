"""The report on a trained classifier: a figure, tables, and their text."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

import solvers
from implicit_attn.data import ImageData
from implicit_attn.deq import DEQ
from implicit_attn.studies.comparison.solves import accuracy_within, watched, with_energies
from implicit_attn.studies.evaluations import accuracy_by_evaluations, solve_history
from implicit_attn.studies.figures.spins import spin_report
from implicit_attn.studies.figures.training import training_report
from implicit_attn.studies.tables import Table, format_table, write_table

CONVERGENCE_IMAGES = 256  # test images whose convergence is drawn


def write_report(
    model: nn.Module,
    data: ImageData,
    epochs: Table,
    folder: str | Path,
    title: str,
    rtol: float,
    couplings: list[Any] | None = None,
    *,
    explicit: tuple[str, float] | None = None,
) -> str:
    """Convergence and accuracy of a trained model on its test images.

    Writes ``report.png``, ``epochs.csv``, ``convergence.csv`` (of :func:`solve_history`, of the first
    layer) and ``extrapolation.csv``: of :func:`accuracy_by_evaluations` for a model whose ``layer``
    stands between ``tokens`` and ``classify``, and of ``comparison.solves.accuracy_within`` for others.

    Args:
        model: the trained classifier, images (B, C, H, W) -> logits, with ``DEQ`` layers in it; it is
            put into evaluation mode.
        data: whose test images are used.
        epochs: rows with epoch, loss, test_accuracy, converged (share of training samples) and
            evaluations (median).
        folder: where the files go; created if missing.
        title: of the figure.
        rtol: tolerance of training.
        couplings: of a spin classifier: (N, N) norms between its sites, before training and after
            every epoch; drawn in place of the energy.
        explicit: name and test accuracy of a model without solves, drawn beside the accuracies.

    Returns:
        The convergence and extrapolation tables as text, and how many predictions change.
    """
    model.eval()
    trained = max(1, int(epochs[-1]["evaluations"]))
    convergence, solution = _convergence(model, data, rtol)
    extrapolation = _extrapolation(model, data, budgets_around(trained))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tables = {"epochs": epochs, "convergence": convergence, "extrapolation": extrapolation}
    for name, table in tables.items():
        write_table(folder / f"{name}.csv", table)
    path = folder / "report.png"
    settings: dict[str, Any] = {"rtol": rtol, "trained_evaluations": trained}
    if couplings is None:
        settings["explicit"] = explicit
        training_report(path, title, epochs, convergence, extrapolation, **settings)
    else:
        spin_report(path, title, epochs, convergence, extrapolation, couplings, **settings)
    shown = convergence[:: max(1, len(convergence) // 12)]
    return (
        f"\nConvergence in float64 on {solution.status.numel()} test images "
        f"({solution.summary()}):\n{format_table(shown)}\n"
        f"\nAccuracy against evaluations at test time:\n{format_table(extrapolation)}"
        f"{_on_more_evaluations(extrapolation, trained)}"
    )


def _extrapolation(model: Any, data: ImageData, budgets: list[int]) -> Table:
    """Accuracy within these numbers of evaluations, for either form of model."""
    samples = data.test_images, data.test_labels
    if isinstance(getattr(model, "layer", None), DEQ):
        return accuracy_by_evaluations(model.layer, model.tokens, model.classify, *samples, budgets)
    return accuracy_within(model, *samples, budgets)


def _convergence(model: nn.Module, data: ImageData, rtol: float) -> tuple[Table, solvers.Solution]:
    exact = copy.deepcopy(model).double()  # resolves small differences of energies
    with torch.no_grad(), watched(exact) as solves:
        exact(data.test_images[:CONVERGENCE_IMAGES].double())
    first = solves[0]
    with with_energies(first.layer):
        return solve_history(
            first.layer,
            first.x,
            first.mask,
            tolerance=solvers.Tolerance(rtol=min(1e-6, rtol)),
            max_steps=100,
            on_failure="ignore",
        )


def _on_more_evaluations(extrapolation: Table, trained: int) -> str:
    """What the predictions do beyond the evaluations of training, where that is known."""
    most = extrapolation[-1]
    if "unchanged" not in most:
        return ""
    return (
        f"\nWith {most['evaluations']} evaluations, {most['evaluations'] / trained:g} times those of "
        f"training, {100 * most['unchanged']:.2f} % of the predictions are what they were."
    )


def budgets_around(trained: int) -> list[int]:
    """Powers of two below ``trained``, and 1, 2 and 4 times ``trained``."""
    powers = {2**k for k in range(20) if 2**k < trained}
    return sorted(powers | {trained, 2 * trained, 4 * trained})
