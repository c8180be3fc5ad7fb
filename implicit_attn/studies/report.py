"""The report on a trained classifier: tables, text, one picture."""

from __future__ import annotations

import copy
from pathlib import Path

import torch

import solvers
from implicit_attn.data import ImageData
from implicit_attn.models import PatchClassifier
from implicit_attn.studies.convergence import solve_history
from implicit_attn.studies.extrapolation import accuracy_by_evaluations
from implicit_attn.studies.plots import training_report
from implicit_attn.studies.tables import Table, format_table, write_table

SAMPLE = 256  # test images whose convergence is drawn


def write_report(
    model: PatchClassifier,
    data: ImageData,
    epochs: Table,
    folder: str | Path,
    title: str,
    rtol: float,
) -> str:
    """Study a trained model on its test images; write ``report.png`` and three CSV tables.

    Args:
        model: the trained classifier, evaluated as it is.
        data: whose test images are used.
        epochs: rows with epoch, loss, test_accuracy, converged and evaluations (median).
        folder: where the files go.
        title: of the picture.
        rtol: tolerance of training.

    Returns:
        The tables as text.
    """
    model.eval()
    exact = copy.deepcopy(model).double()  # so that energies are known well beyond their fall
    with torch.no_grad():
        tokens = exact.tokens(data.test_images[:SAMPLE].double())
    convergence, solution = solve_history(
        exact.layer,
        tokens,
        tolerance=solvers.Tolerance(rtol=min(1e-6, rtol)),
        max_steps=100,
        on_failure="ignore",
    )
    trained = max(1, int(epochs[-1]["evaluations"]))
    powers = {2**k for k in range(20) if 2**k < trained}
    extrapolation = accuracy_by_evaluations(
        model.layer,
        model.tokens,
        model.classify,
        data.test_images,
        data.test_labels,
        sorted(powers | {trained, 2 * trained, 4 * trained}),
    )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tables = {"epochs": epochs, "convergence": convergence, "extrapolation": extrapolation}
    for name, table in tables.items():
        write_table(folder / f"{name}.csv", table)
    training_report(
        folder / "report.png", title, *tables.values(), rtol=rtol, trained_evaluations=trained
    )
    shown = convergence[:: max(1, len(convergence) // 12)]
    return (
        f"\nConvergence in float64 on {len(tokens)} test images ({solution.summary()}):\n"
        f"{format_table(shown)}\n"
        f"\nAccuracy against evaluations at test time:\n{format_table(extrapolation)}"
    )
