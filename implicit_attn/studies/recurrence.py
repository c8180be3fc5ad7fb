"""An unrolled model at any number of iterations, from any start, and stopped sample by sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import solvers
from implicit_attn.models import RecurrentBackbone
from implicit_attn.studies.measures import Pool
from implicit_attn.studies.subjects import Subject
from implicit_attn.studies.tables import Table

RTOLS = (0.3, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01, 0.005, 0.003, 0.002, 0.001)


def run_from(backbone: RecurrentBackbone, x: Tensor, z0: Tensor, iterations: int) -> Tensor:
    """The states of the recurrence for input ``x`` from another start than ``x``.

    Args:
        backbone: what is repeated.
        x: (B, N, d) what the layers are told as their input.
        z0: (B, N, d) where the recurrence starts.
        iterations: of each layer, >= 1.

    Returns:
        (1 + layers * iterations, B, N, d), the start first.
    """
    times = torch.arange(1, iterations + 1, device=x.device)
    if backbone.beyond == "hold":
        times = times.clamp_max(backbone.iterations)
    contexts = [layer.context(x, times) for layer in backbone.layers]
    states = [z0]
    for layer, index in backbone.schedule(iterations):
        states.append(backbone.layers[layer].advance(states[-1], contexts[layer], index))
    return torch.stack(states)


def relative_changes(states: Tensor) -> Tensor:
    """``|z_t - z_t-1| / |z_t|`` of states (1 + T, B, ...), (T, B)."""
    new, old = states[1:].flatten(2), states[:-1].flatten(2)
    tiny = torch.finfo(states.dtype).tiny
    return (new - old).norm(dim=2) / new.norm(dim=2).clamp_min(tiny)


def stopping_times(changes: Tensor, rtol: float) -> Tensor:
    """For changes (T, B) the first t = 1 .. T with a change of at most ``rtol``, else T; (B,)."""
    small = changes <= rtol
    first = small.to(torch.int64).argmax(dim=0) + 1
    return torch.where(small.any(dim=0), first, changes.shape[0])


def accuracy_by_iterations(subject: Subject, iterations: Sequence[int]) -> Table:
    """Measures, residual and energy of an unrolled model after so many iterations of each layer.

    Returns:
        Rows with evaluations, the measures, residual (median of the last relative change) and
        energy (mean), where there is one. An evaluation is one iteration of each layer.
    """
    backbone = _backbone(subject)
    table: Table = []
    pools = [Pool() for _ in iterations]
    residuals: list[list[Tensor]] = [[] for _ in iterations]
    energies: list[list[Tensor]] = [[] for _ in iterations]
    energy = subject.energy
    for inputs, targets in subject.parts():
        with torch.no_grad():
            x = subject.tokens(inputs)
            for k, (z, change) in enumerate(_states_after(backbone, x, iterations)):
                pools[k].add(subject.measure(subject.classify(z), inputs, targets))
                residuals[k].append(change)
                if energy is not None:
                    energies[k].append(energy(z, x))
    for k, count in enumerate(iterations):
        row: dict[str, Any] = {"evaluations": count, **pools[k].means()}
        row["residual"] = torch.cat(residuals[k]).median().item()
        if energy is not None:
            row["energy"] = torch.cat(energies[k]).mean().item()
        table.append(row)
    return table


def adaptive_stopping(
    subject: Subject, most: int, rtols: Sequence[float] = RTOLS
) -> tuple[Table, Table]:
    """Each sample stops by itself when its relative change (or residual) is small enough.

    Args:
        subject: unrolled, or an equilibrium, then by its own solver.
        most: iterations that a sample may have.
        rtols: where to stop.

    Returns:
        Rows with rtol, evaluations (mean per sample), evaluations_90, stopped (share of samples
        that met rtol), and the measures; and rows with rtol, evaluations, samples: how many samples
        took so many.
    """
    taken: list[list[Tensor]] = [[] for _ in rtols]
    met = [0.0] * len(rtols)
    pools = [Pool() for _ in rtols]
    for inputs, targets in subject.parts():
        with torch.no_grad():
            stops = _stops(subject, subject.tokens(inputs), most, rtols)
            for k, (z, times, share) in enumerate(stops):
                pools[k].add(subject.measure(subject.classify(z), inputs, targets))
                taken[k].append(times)
                met[k] += share * len(inputs) / len(subject.inputs)
    table: Table = []
    depths: Table = []
    for k, rtol in enumerate(rtols):
        times = torch.cat(taken[k])
        row = {"rtol": rtol, "evaluations": times.double().mean().item()}
        row["evaluations_90"] = times.double().quantile(0.9).item()
        table.append(row | {"stopped": met[k], **pools[k].means()})
        values, counts = times.unique(return_counts=True)
        pairs = zip(values.tolist(), counts.tolist(), strict=True)
        depths += [{"rtol": rtol, "evaluations": t, "samples": n} for t, n in pairs]
    return table, depths


def _stops(
    subject: Subject, x: Tensor, most: int, rtols: Sequence[float]
) -> list[tuple[Tensor, Tensor, float]]:
    """For each tolerance the states at the stop, the evaluations, the share that met it."""
    if subject.recurrence is None:
        layer = subject.layer
        found = []
        for rtol in rtols:
            tolerance = solvers.Tolerance(rtol=rtol)
            solution = layer.solve(x, tolerance=tolerance, max_steps=most, on_failure="ignore")
            share = solution.converged.double().mean().item()
            found.append((solution.value, solution.evaluations, share))
        return found
    pairs = list(_states_after(subject.recurrence, x, range(1, most + 1)))
    states = torch.stack([z for z, _ in pairs])
    changes = torch.stack([change for _, change in pairs])
    samples = torch.arange(len(x), device=x.device)
    found = []
    for rtol in rtols:
        times = stopping_times(changes, rtol)
        share = (changes <= rtol).any(dim=0).double().mean().item()
        found.append((states[times - 1, samples], times, share))
    return found


def _states_after(
    backbone: RecurrentBackbone, x: Tensor, iterations: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """State (B, N, d) and last change (B,) after each number of iterations of every layer."""
    number = len(backbone.layers)
    if number == 1 or backbone.order == "cyclic":  # longer runs pass through the shorter ones' ends
        rounds = backbone.states(x, iterations=max(iterations))[::number]
        changes = relative_changes(rounds)
        return [(rounds[count], changes[count - 1]) for count in iterations]
    found = []
    for count in iterations:
        states = backbone.states(x, iterations=count)
        found.append((states[-1], relative_changes(states[-2:])[0]))
    return found


def _backbone(subject: Subject) -> RecurrentBackbone:
    backbone = subject.recurrence
    if backbone is None:
        raise TypeError(f"subject must be an unrolled model, got {type(subject.model)}")
    return backbone
