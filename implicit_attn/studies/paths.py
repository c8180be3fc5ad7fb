"""Path independence: is the end the same wherever the way starts?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import solvers
from implicit_attn.studies.recurrence import run_from
from implicit_attn.studies.subjects import Subject
from implicit_attn.studies.tables import Table

SAME = 1e-2  # relative distance up to which two ends count as one
START = "input"  # with whose end the others are compared


def starts_for(x: Tensor, random: int = 2, seed: int = 0) -> dict[str, Tensor]:
    """Starts like ``x`` (B, ...): the input, zero, and normal ones of each sample's own size."""
    generator = torch.Generator().manual_seed(seed)
    size = x.flatten(1).square().mean(1).sqrt().reshape(-1, *([1] * (x.dim() - 1)))
    starts = {START: x, "zero": torch.zeros_like(x)}
    for number in range(1, random + 1):
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device)
        starts[f"random {number}"] = size * noise
    return starts


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
    """Where the way ends from several starts, against where it ends from one of them.

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
        Rows with start, distance (median), distance_90, distance_largest, same (share of samples),
        agreement (share of predictions that are the reference's), and residual (median) and energy
        (mean) where they are given; and rows with start, sample, distance.

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
            row: dict[str, Any] = {"start": name, **_spread(distance)}
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
    """Path independence of an equilibrium, solved to ``rtol``; accuracy of each start besides."""
    layer = subject.layer
    with torch.no_grad():
        x = subject.tokens(subject.inputs)
        prepared = layer.update.prepare(x)

    def solve(z0: Tensor) -> Tensor:
        tolerance = solvers.Tolerance(rtol=rtol)
        options: Any = {"tolerance": tolerance, "max_steps": max_steps, "on_failure": "ignore"}
        return layer.solve(x, z0=z0, **options).value

    def residual(z: Tensor) -> Tensor:
        image = layer.update(z, prepared).flatten(1)
        return (image - z.flatten(1)).norm(dim=1) / image.norm(dim=1)

    return _of(subject, x, solve, random, residual)


def paths_of_recurrence(
    subject: Subject, iterations: int, *, random: int = 2
) -> tuple[Table, Table]:
    """Path independence of an unrolled model after ``iterations``; accuracy of each start besides.

    The layers are told the same input whatever the start.
    """
    backbone = subject.recurrence
    if backbone is None:
        raise TypeError(f"subject must be an unrolled model, got {type(subject.model)}")
    with torch.no_grad():
        x = subject.tokens(subject.inputs)
    return _of(subject, x, lambda z0: run_from(backbone, x, z0, iterations)[-1], random, None)


def _of(
    subject: Subject,
    x: Tensor,
    solve: Callable[[Tensor], Tensor],
    random: int,
    residual: Callable[[Tensor], Tensor] | None,
) -> tuple[Table, Table]:
    ends: list[Tensor] = []

    def kept(z0: Tensor) -> Tensor:
        ends.append(solve(z0))
        return ends[-1]

    given = subject.energy
    energy = None if given is None else lambda z: given(z, x)
    summary, samples = path_independence(
        kept, starts_for(x, random), subject.classify, residual=residual, energy=energy
    )
    with torch.no_grad():
        for row, end in zip(summary, ends, strict=True):
            found = subject.measure(subject.classify(end), subject.inputs, subject.targets)
            above, below = found["accuracy"]
            row["accuracy"] = (above.sum() / below.sum()).item()
    return summary, samples


def _spread(values: Tensor) -> dict[str, float]:
    values = values.double()
    return {
        "distance": values.median().item(),
        "distance_90": values.quantile(0.9).item(),
        "distance_largest": values.max().item(),
    }
