"""The paths study: is the end of an iteration the same from every start (path independence)?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import solvers
from implicit_attn.models import RecurrentBackbone
from implicit_attn.studies.subjects import Subject
from implicit_attn.studies.tables import Table, median_and_largest

SAME = 1e-2  # relative distance up to which two ends count as one
START = "input"  # the start with whose end the others are compared


def starts_for(x: Tensor, random: int = 2, seed: int = 0) -> dict[str, Tensor]:
    """Starts like ``x`` (B, ...): the input, zero, and Gaussian ones with each sample's RMS."""
    generator = torch.Generator().manual_seed(seed)
    size = x.flatten(1).square().mean(1).sqrt().reshape(-1, *([1] * (x.dim() - 1)))
    starts = {START: x, "zero": torch.zeros_like(x)}
    for number in range(1, random + 1):
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device)
        starts[f"random {number}"] = size * noise
    return starts


def run_from(backbone: RecurrentBackbone, x: Tensor, z0: Tensor, iterations: int) -> Tensor:
    """The states of a recurrence with input ``x`` (B, N, d) that starts at ``z0`` (B, N, d).

    They are (1 + layers * iterations, B, N, d), the start first, with ``iterations`` of each layer.
    """
    times = torch.arange(1, iterations + 1, device=x.device)
    if backbone.beyond == "hold":
        times = times.clamp_max(backbone.iterations)
    contexts = [layer.context(x, times) for layer in backbone.layers]
    states = [z0]
    for layer, index in backbone.schedule(iterations):
        states.append(backbone.layers[layer].advance(states[-1], contexts[layer], index))
    return torch.stack(states)


def path_independence(
    solve: Callable[[Tensor], Tensor],
    starts: Mapping[str, Tensor],
    classify: Callable[[Tensor], Tensor],
    *,
    reference: str = START,
    same: float = SAME,
    residual: Callable[[Tensor], Tensor] | None = None,
    energy: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Table, Table]:
    """Distances of the ends from several starts to the end from one of them.

    The distance of two ends is ``|z - z_ref| / |z_ref|``, sample by sample.

    Args:
        solve: start (B, ...) -> end, like the start.
        starts: by name, ``reference`` among them.
        classify: end -> logits (B, ..., classes).
        reference: the start with whose end the others are compared.
        same: distance up to which two ends are the same point.
        residual: end -> (B,), how far the end is from a fixed point.
        energy: end -> (B,).

    Returns:
        Rows with start, distance (median), distance_90 (90 % quantile), distance_largest, same
        (share of samples), agreement (share of predictions equal to the reference's), and residual
        (median) and energy (mean) where they are given; and rows with start, sample, distance.

    Raises:
        ValueError: ``reference`` is not among the starts.
    """
    if reference not in starts:
        raise ValueError(f"reference must be one of {tuple(starts)}, got {reference!r}")
    with torch.no_grad():
        ends = {name: solve(start) for name, start in starts.items()}
        target = ends[reference].flatten(1)
        size = target.norm(dim=1).clamp_min(torch.finfo(target.dtype).tiny)
        chosen = classify(ends[reference]).argmax(-1)
        summary: Table = []
        samples: Table = []
        for name, end in ends.items():
            distance = (end.flatten(1) - target).norm(dim=1) / size
            row: dict[str, Any] = {"start": name, **median_and_largest("distance", distance)}
            row["same"] = (distance <= same).double().mean().item()
            row["agreement"] = (classify(end).argmax(-1) == chosen).double().mean().item()
            if residual is not None:
                row["residual"] = residual(end).median().item()
            if energy is not None:
                row["energy"] = energy(end).mean().item()
            summary.append(row)
            samples += [
                {"start": name, "sample": k, "distance": value}
                for k, value in enumerate(distance.tolist())
            ]
    return summary, samples


def paths_of_layer(
    subject: Subject, *, random: int = 2, rtol: float = 1e-6, max_steps: int = 300
) -> tuple[Table, Table]:
    """Path independence of an equilibrium from the input, zero and ``random`` random starts.

    Args:
        subject: with an equilibrium layer.
        random: number of random starts.
        rtol: relative residual to which each start is solved.
        max_steps: evaluations per sample, at most.

    Returns:
        The tables of :func:`path_independence`; the first one has the column accuracy besides.
    """
    layer = subject.layer
    options: Any = {"tolerance": solvers.Tolerance(rtol=rtol), "max_steps": max_steps}

    def solve(x: Tensor, z0: Tensor) -> Tensor:
        return layer.solve(x, z0=z0, on_failure="ignore", **options).value

    def residual(z: Tensor, x: Tensor) -> Tensor:
        image = layer.update(z, layer.update.prepare(x)).flatten(1)
        return (image - z.flatten(1)).norm(dim=1) / image.norm(dim=1)

    return _with_accuracy(subject, solve, random, residual)


def paths_of_recurrence(
    subject: Subject, iterations: int, *, random: int = 2
) -> tuple[Table, Table]:
    """Path independence of an unrolled model after ``iterations`` of each layer.

    The input of the layers is the same for every start. Tables as of :func:`paths_of_layer`.

    Raises:
        TypeError: the model is not unrolled.
    """
    backbone = subject.require_recurrence()
    return _with_accuracy(subject, lambda x, z0: run_from(backbone, x, z0, iterations)[-1], random)


def _with_accuracy(
    subject: Subject,
    solve: Callable[[Tensor, Tensor], Tensor],
    random: int,
    residual: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> tuple[Table, Table]:
    """Path independence with the accuracy at each end ``solve(x, z0)``."""
    energy = subject.energy
    with torch.no_grad():
        x = subject.tokens(subject.inputs)
        ends = {name: solve(x, z0) for name, z0 in starts_for(x, random).items()}
        summary, samples = path_independence(
            lambda end: end,
            ends,
            subject.classify,
            residual=None if residual is None else lambda z: residual(z, x),
            energy=None if energy is None else lambda z: energy(z, x),
        )
        for row, end in zip(summary, ends.values(), strict=True):
            found = subject.measure(subject.classify(end), subject.inputs, subject.targets)
            right, number = found["accuracy"]
            row["accuracy"] = (right.sum() / number.sum()).item()
    return summary, samples
