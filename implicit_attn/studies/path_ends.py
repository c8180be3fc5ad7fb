"""The study of paths: is the end of an iteration the same from every start (path independence)?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import solvers
from implicit_attn.studies.subjects import Subject, subject_of
from implicit_attn.studies.tables import (
    BLUE,
    GREY,
    ORANGE,
    Study,
    Table,
    median_and_largest,
)

SAME = 1e-2  # relative distance up to which two ends count as one
START = "input"  # the start with whose end the others are compared
SMALLEST = 1e-12  # smaller distances are drawn here: a logarithmic axis has no zero
RTOL, MAX_STEPS = 1e-6, 300  # to which each start is solved


@dataclass(frozen=True)
class Paths(Study):
    """What :func:`paths` finds.

    Attributes:
        summary: rows with run, start, distance (median of ``|z - z_input| / |z_input|``),
            distance_90 (90 % quantile), distance_largest, same (share of samples within 1e-2),
            residual (median) and energy (mean) where they are defined, and with targets agreement
            (share of predictions equal to those from the input) and accuracy.
        samples: rows with run, start, sample, distance.
    """

    summary: Table
    samples: Table
    printed = ("summary",)
    size = (12, 8.6)

    def draw(self, figure: Any) -> None:
        """A row of panels for each run: distances of the ends, and agreement of the predictions."""
        runs = list(dict.fromkeys(row["run"] for row in self.summary))
        axes = figure.subplots(len(runs), 2, squeeze=False)
        for panels, name in zip(axes, runs, strict=True):
            _draw_distances(panels[0], name, [row for row in self.samples if row["run"] == name])
            _draw_agreement(panels[1], name, [row for row in self.summary if row["run"] == name])


def paths(
    layer: Any,
    x: Any = None,
    targets: Tensor | None = None,
    *,
    starts: int = 2,
) -> Paths:
    """Where a layer ends from its input, from zero and from random starts, in float64.

    An equilibrium is solved from each start to 1e-6. An unrolled model is run from each start, its
    input being the same, for as many iterations as in training and for four times as many.

    Args:
        layer, x: as for :func:`convergence`; the state must be one tensor.
        targets: labels (B,) of the model's outputs; None: without predictions.
        starts: number of random starts, Gaussian with the RMS of each sample's usual start.
    """
    subject = subject_of(layer, x, targets).exact()
    backbone = subject.recurrence
    options: Any = {"tolerance": solvers.Tolerance(rtol=RTOL), "max_steps": MAX_STEPS}
    options["on_failure"] = "ignore"
    runs: dict[str, Callable[[Any, Any, Tensor], Tensor]] = {}
    if backbone is None:
        layer = subject.layer
        runs["equilibrium"] = lambda x, mask, z0: layer.solve(x, mask, z0=z0, **options).value
    else:
        for number in (subject.trained, 4 * subject.trained):
            run = partial(backbone, iterations=number)
            runs[f"{number} iterations"] = lambda x, mask, z0, run=run: run(x, z0=z0)
    summary: Table = []
    samples: Table = []
    for name, run in runs.items():
        rows, distances = _compare(subject, run, starts)
        summary += [{"run": name, **row} for row in rows]
        samples += [{"run": name, **row} for row in distances]
    return Paths(summary, samples)


def starts_like(z: Tensor, random: int, seed: int = 0) -> dict[str, Tensor]:
    """``z`` (B, ...) itself, zero, and Gaussian starts with each sample's RMS."""
    generator = torch.Generator().manual_seed(seed)
    size = z.flatten(1).square().mean(1).sqrt().reshape(-1, *([1] * (z.dim() - 1)))
    starts = {START: z, "zero": torch.zeros_like(z)}
    for number in range(1, random + 1):
        noise = torch.randn(z.shape, generator=generator, dtype=z.dtype).to(z.device)
        starts[f"random {number}"] = size * noise
    return starts


@torch.no_grad()
def _compare(
    subject: Subject, run: Callable[[Any, Any, Tensor], Tensor], random: int
) -> tuple[Table, Table]:
    layer, inputs = subject.layer, subject.inputs
    x, mask = subject.given(inputs)
    if subject.recurrence is not None:
        usual = x
    else:  # whatever its ``init`` and its energy make of the input
        usual = layer.solve(
            x, mask, max_steps=1, solver=solvers.Forward(), on_failure="ignore"
        ).value
    if not isinstance(usual, Tensor):
        raise TypeError(f"layer must have a state of one tensor, got a {type(usual).__name__}")
    ends = {name: run(x, mask, z0) for name, z0 in starts_like(usual, random).items()}
    target = ends[START].flatten(1)
    size = target.norm(dim=1).clamp_min(torch.finfo(target.dtype).tiny)
    judged = ends if subject.targets is not None else {}
    outputs = {name: subject.outputs(inputs, end) for name, end in judged.items()}
    summary: Table = []
    samples: Table = []
    for name, end in ends.items():
        distance = (end.flatten(1) - target).norm(dim=1) / size
        row: dict[str, Any] = {"start": name, **median_and_largest("distance", distance)}
        row["same"] = (distance <= SAME).double().mean().item()
        if outputs:
            same = outputs[name].argmax(-1) == outputs[START].argmax(-1)
            row["agreement"] = same.double().mean().item()
        if subject.recurrence is None:
            image = layer.update(end, layer.update.prepare(x, mask=mask), mask=mask).flatten(1)
            residual = (image - end.flatten(1)).norm(dim=1) / image.norm(dim=1)
            row["residual"] = residual.median().item()
        energy = subject.energy(end, x, mask)
        if energy is not None:
            row["energy"] = energy.mean().item()
        if outputs and subject.targets is not None:
            row["accuracy"] = subject.measure(outputs[name], inputs, subject.targets)["accuracy"]
        summary.append(row)
        samples += [
            {"start": name, "sample": k, "distance": value}
            for k, value in enumerate(distance.tolist())
        ]
    return summary, samples


def _draw_distances(axes: Any, name: str, samples: Table) -> None:
    """The cumulative distribution over the samples, a curve for each start."""
    distances: dict[str, list[float]] = {}
    for row in samples:
        if row["start"] != START:
            distances.setdefault(row["start"], []).append(max(row["distance"], SMALLEST))
    for start, values in distances.items():
        values.sort()
        share = [100 * (k + 1) / len(values) for k in range(len(values))]
        axes.step([values[0], *values], [0.0, *share], where="post", label=f"from {start}")
    axes.axvline(SAME, color=GREY, linestyle=":", label="counted as the same point")
    least = min(values[0] for values in distances.values())
    largest = max(values[-1] for values in distances.values())
    axes.set(
        xlabel=f"relative distance to the end from {START}",
        ylabel="share of samples up to there, %",
        xscale="log",
        xlim=(min(1e-3, 0.5 * least), max(10.0, 2 * largest)),
        title=f"Distance of the ends: {name}",
    )
    axes.legend(frameon=False)


def _draw_agreement(axes: Any, name: str, summary: Table) -> None:
    starts = [row["start"] for row in summary]
    bars = {"same": ("same end", GREY)} if "agreement" not in summary[0] else {}
    bars |= {
        "agreement": (f"same prediction as from {START}", BLUE),
        "accuracy": ("accuracy", ORANGE),
    }
    shown = [(key, *look) for key, look in bars.items() if key in summary[0]]
    width = 0.76 / len(shown)
    for number, (key, label, color) in enumerate(shown):
        places = [k + (number - (len(shown) - 1) / 2) * width for k in range(len(starts))]
        shares = [100 * row[key] for row in summary]
        drawn = axes.bar(places, shares, width=width, color=color, label=label)
        axes.bar_label(drawn, fmt="%.1f", fontsize=8)
    axes.set_xticks(range(len(starts)), [f"from {start}" for start in starts])
    axes.set(ylabel="share of samples, %", title=f"Samples: {name}", ylim=(0, 118))
    axes.legend(frameon=False, loc="upper right", ncols=2)
