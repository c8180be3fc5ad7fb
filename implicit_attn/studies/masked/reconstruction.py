"""The error of a model of hidden patches by its iterations, for one run and for several beside."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from implicit_attn.studies.masked.baselines import BASELINES
from implicit_attn.studies.masked.figures import draw_errors, draw_filling
from implicit_attn.studies.tables import Table, format_table, write_table
from implicit_attn.training import MaskedImages
from solvers.core.checks import require_count

MULTIPLES = (0.25, 0.5, 1.0, 1.5, 2.0, 4.0)  # of the iterations of training
SHOWN = (1, 2, 4, 8, 12, 24)  # iterations of the pictures
IMAGES = 8  # in the pictures
GAUSSIAN = "Gaussian, linear"
ERRORS, FILLINGS = "errors.csv", "fillings.csv"
TASK = ("data", "images", "hidden", "patches", "normalised")  # columns that tell what was measured


def error_by_iterations(model: nn.Module, task: MaskedImages, numbers: Sequence[int]) -> Table:
    """Rows of iterations and the task's measures on its test images.

    Raises:
        ValueError: a number of iterations is below 1.
    """
    rows = []
    for iterations in numbers:
        found = task.evaluate(model, 0, 1, require_count("iterations", iterations))
        means = {name: total / number for name, (total, number) in found.items()}
        rows.append({"iterations": iterations, **means})
    return rows


def error_of_fillings(task: MaskedImages) -> Table:
    """Rows of the ``BASELINES`` and their measures on the task's test images.

    Raises:
        ValueError: the task standardises patches, which no filling knows how to do.
    """
    if task.normalise:
        raise ValueError("normalise must be False: fillings are in pixels")
    inputs, targets = task.test_images()
    rows = []
    for name, fill in BASELINES.items():
        found = task.measures(fill(task.data.train_images, inputs), inputs, targets)
        means = {key: total / number for key, (total, number) in found.items()}
        rows.append({"filling": name, **means})
    return rows


def filled_images(
    model: nn.Module, task: MaskedImages, numbers: Sequence[int], images: int = IMAGES
) -> dict[str, Tensor]:
    """The first test images, the same with hidden patches NaN, and filled in after iterations.

    Returns:
        Rows of images (n, C, S, S) by their labels; the Gaussian's filling where there is one.
    """
    inputs, targets = (part[:images] for part in task.test_images())
    rows = {"image": targets, "visible": inputs}
    model.eval()
    for iterations in numbers:
        with torch.no_grad():
            pixels = task.to_pixels(model(inputs, iterations=iterations), targets)
        label = f"{iterations} iteration{'s' * (iterations > 1)}"
        rows[label] = torch.where(inputs.isnan(), pixels.to(inputs.dtype), inputs)
    if not task.normalise:
        rows[GAUSSIAN] = BASELINES[GAUSSIAN](task.data.train_images, inputs)
    return rows


def report_run(
    model: nn.Module, task: MaskedImages, *, name: str, iterations: int, seed: int, out: Path
) -> None:
    """Print and write what one training reached: tables, the curve of its error, pictures.

    Args:
        name: of the model, for the table and ``--compare``.
        iterations: of training, for a random number their typical one.
        seed: of the training.
        out: an existing folder; it gets ``errors.csv``, ``fillings.csv``, ``errors.png`` and
            ``filling.png``.
    """
    numbers = sorted({max(1, round(each * iterations)) for each in MULTIPLES})
    parameters = sum(parameter.numel() for parameter in model.parameters())
    run = dict(zip(TASK, _measured(task), strict=True))
    run |= {"model": name, "parameters": parameters, "seed": seed}
    found = error_by_iterations(model, task, numbers)
    errors = [{**run, "training": iterations, **row} for row in found]
    write_table(out / ERRORS, errors)
    print(f"\n{name}, {parameters} parameters; trained with {iterations} iterations")
    print(format_table(found))
    fillings: Table = []
    if not task.normalise:
        fillings = error_of_fillings(task)
        write_table(out / FILLINGS, fillings)
        print(f"\n{format_table(fillings)}")
    title = f"{task.data.name}: {task.most} of {task.patches} patches hidden"
    draw_errors(out / "errors.png", title, {name: [errors]}, fillings)
    rows = filled_images(model, task, SHOWN)
    labels = {
        row["iterations"]: row["test_loss"] for row in error_by_iterations(model, task, SHOWN)
    }
    note = ", with each patch's true mean and deviation" * task.normalise
    known = [row["test_loss"] for row in fillings if row["filling"] == GAUSSIAN]
    draw_filling(out / "filling.png", f"{title}, {name}{note}", rows, [*labels.values(), *known])


def compare_runs(folders: Sequence[Path], out: Path) -> Table:
    """Print and write the errors of earlier runs, a row a model: ``comparison.csv`` and ``.png``.

    Args:
        folders: of runs on the same data, which :func:`report_run` wrote to.
        out: folder for the comparison; made where there is none.

    Returns:
        Rows of model, parameters, number of seeds, error with the iterations of training (mean, least
        and most over the seeds), PSNR, and the error with each multiple of the iterations as a share
        of that with 1.

    Raises:
        FileNotFoundError: a folder holds no such run.
        ValueError: the runs are of different data, hide other patches, or measure other errors; or
            those of one model differ in more than the seed, or do not differ in it.
    """
    runs = [_read(folder / ERRORS) for folder in folders]
    fillings = [_read(folder / FILLINGS) for folder in folders if (folder / FILLINGS).is_file()]
    names = {run[0]["data"] for run in runs}
    measured = {tuple(run[0].get(name) for name in TASK) for run in runs}
    if len(measured) > 1 or any(each != fillings[0] for each in fillings[1:]):
        found = "; ".join(sorted(", ".join(map(str, each)) for each in measured))
        raise ValueError(
            f"runs must be of the same hidden patches, got {', '.join(TASK)} = {found}"
        )
    models: dict[str, list[Table]] = {}
    for run in sorted(runs, key=lambda rows: int(rows[0]["seed"])):
        models.setdefault(run[0]["model"], []).append(run)
    for name, some in models.items():
        _check_seeds(name, some)
    table = [_summary(name, runs) for name, runs in models.items()]
    out.mkdir(parents=True, exist_ok=True)
    write_table(out / "comparison.csv", table)
    print(format_table(table))
    shown = fillings[0] if fillings else []
    print(f"\n{format_table(shown)}" if shown else "")
    title = f"{names.pop()}: error of hidden patches by iterations at test time"
    draw_errors(out / "comparison.png", title, models, shown)
    return table


def _measured(task: MaskedImages) -> tuple[Any, ...]:
    """The values of ``TASK``."""
    images = len(task.test_images()[0])
    return task.data.name, images, task.most, task.patches, int(task.normalise)


def _check_seeds(name: str, runs: Sequence[Table]) -> None:
    """Runs of one model become a row, so they must be alike but for the seed."""
    kinds = {(run[0]["parameters"], run[0]["training"]) for run in runs}
    seeds = [run[0]["seed"] for run in runs]
    if len(kinds) > 1 or len(set(seeds)) < len(seeds):
        raise ValueError(
            f"runs of {name} must differ in the seed alone, got seeds {seeds} and (parameters, "
            f"iterations of training) {sorted(kinds)}"
        )


def _summary(name: str, runs: Sequence[Table]) -> dict[str, Any]:
    """A row of ``compare_runs`` for the runs of one model."""

    def at(run: Table, multiple: float, key: str = "test_loss") -> float:
        number = max(1, round(multiple * run[0]["training"]))
        return next(row[key] for row in run if row["iterations"] == number)

    errors = [at(run, 1.0) for run in runs]
    row: dict[str, Any] = {
        "model": name,
        "parameters": runs[0][0]["parameters"],
        "seeds": len(runs),
    }
    row |= {"error": sum(errors) / len(runs), "least": min(errors), "most": max(errors)}
    if "test_psnr" in runs[0][0]:
        row["psnr"] = sum(at(run, 1.0, "test_psnr") for run in runs) / len(runs)
    for multiple in MULTIPLES:
        ratios = [at(run, multiple) / at(run, 1.0) for run in runs]
        row[f"x{multiple:g}"] = sum(ratios) / len(ratios)
    return row


def _read(path: Path) -> Table:
    """The rows of a CSV file, with numbers as numbers."""
    with path.open(newline="") as file:
        return [{key: _number(value) for key, value in row.items()} for row in csv.DictReader(file)]


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
