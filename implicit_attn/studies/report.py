"""The report on a trained classifier: a figure, tables, and their text."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

import solvers
from implicit_attn.data import ImageData
from implicit_attn.deq import DEQ
from implicit_attn.studies.evaluations import accuracy_by_evaluations, solve_history
from implicit_attn.studies.figures.spins import spin_report
from implicit_attn.studies.figures.training import training_report
from implicit_attn.studies.tables import Table, format_table, write_table

CONVERGENCE_IMAGES = 256  # test images whose convergence is drawn


class Classifier(Protocol):
    """A module whose ``layer`` stands between ``tokens`` and ``classify``."""

    layer: DEQ

    def tokens(self, images: Tensor) -> Tensor: ...

    def classify(self, z: Tensor) -> Tensor: ...

    def eval(self) -> Any: ...


def write_report(
    model: Classifier,
    data: ImageData,
    epochs: Table,
    folder: str | Path,
    title: str,
    rtol: float,
    couplings: list[Any] | None = None,
) -> str:
    """Convergence and accuracy of a trained model on its test images.

    Writes ``report.png``, ``epochs.csv``, ``convergence.csv`` (of :func:`solve_history`) and
    ``extrapolation.csv`` (of :func:`accuracy_by_evaluations`).

    Args:
        model: the trained classifier; it is put into evaluation mode.
        data: whose test images are used.
        epochs: rows with epoch, loss, test_accuracy, converged (share of training samples) and
            evaluations (median).
        folder: where the files go; created if missing.
        title: of the figure.
        rtol: tolerance of training.
        couplings: of a spin classifier: (N, N) norms between its sites, before training and after
            every epoch; drawn in place of the energy.

    Returns:
        The convergence and extrapolation tables as text.
    """
    model.eval()
    trained = max(1, int(epochs[-1]["evaluations"]))
    convergence, solution = _convergence(model, data, rtol)
    extrapolation = accuracy_by_evaluations(
        model.layer,
        model.tokens,
        model.classify,
        data.test_images,
        data.test_labels,
        budgets_around(trained),
    )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tables = {"epochs": epochs, "convergence": convergence, "extrapolation": extrapolation}
    for name, table in tables.items():
        write_table(folder / f"{name}.csv", table)
    path = folder / "report.png"
    settings = {"rtol": rtol, "trained_evaluations": trained}
    if couplings is None:
        training_report(path, title, epochs, convergence, extrapolation, **settings)
    else:
        spin_report(path, title, epochs, convergence, extrapolation, couplings, **settings)
    shown = convergence[:: max(1, len(convergence) // 12)]
    return (
        f"\nConvergence in float64 on {solution.status.numel()} test images "
        f"({solution.summary()}):\n{format_table(shown)}\n"
        f"\nAccuracy against evaluations at test time:\n{format_table(extrapolation)}"
    )


def _convergence(model: Classifier, data: ImageData, rtol: float) -> tuple[Table, solvers.Solution]:
    exact: Any = copy.deepcopy(model)
    exact.double()  # resolves small differences of energies
    with torch.no_grad():
        tokens = exact.tokens(data.test_images[:CONVERGENCE_IMAGES].double())
    return solve_history(
        exact.layer,
        tokens,
        tolerance=solvers.Tolerance(rtol=min(1e-6, rtol)),
        max_steps=100,
        on_failure="ignore",
    )


def budgets_around(trained: int) -> list[int]:
    """Powers of two below ``trained``, and 1, 2 and 4 times ``trained``."""
    powers = {2**k for k in range(20) if 2**k < trained}
    return sorted(powers | {trained, 2 * trained, 4 * trained})
