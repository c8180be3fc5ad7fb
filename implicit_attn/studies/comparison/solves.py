"""The solves inside a model's forward pass: watched, or limited to a number of evaluations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import solvers
from implicit_attn.deq import DEQ
from implicit_attn.studies.subjects import Pool, measure_classes
from implicit_attn.studies.tables import Table
from implicit_attn.updates.gradient_step import EnergyStep

OPTIONS = ("max_steps", "tolerance", "on_failure")


class Solve(NamedTuple):
    """One solve: the layer, its input and mask, and the state that it returned."""

    layer: DEQ
    x: Any
    mask: Tensor | None
    z: Any


def equilibria(model: nn.Module) -> list[DEQ]:
    """The equilibrium layers of a model, in the order of its modules."""
    return [module for module in model.modules() if isinstance(module, DEQ)]


@contextmanager
def with_energies(model: nn.Module) -> Iterator[None]:
    """Within, solves keep energies also where they need none."""
    found = [layer.update for layer in equilibria(model)]
    steps = [update for update in found if isinstance(update, EnergyStep)]
    before = [step.monitored for step in steps]
    try:
        for step in steps:
            step.monitored = True
        yield
    finally:
        for step, monitored in zip(steps, before, strict=True):
            step.monitored = monitored


@contextmanager
def watched(model: nn.Module) -> Iterator[list[Solve]]:
    """Collects what the forward passes within the block solve, in their order."""
    found: list[Solve] = []

    def keep(layer: Any, given: tuple[Any, ...], named: dict[str, Any], z: Any) -> None:
        arguments = dict(zip(("x", "mask"), given, strict=False)) | named
        found.append(Solve(layer, arguments["x"], arguments.get("mask"), z))

    with ExitStack() as hooks:
        hooks.enter_context(with_energies(model))
        for layer in equilibria(model):
            handle = layer.register_forward_hook(keep, with_kwargs=True)
            hooks.callback(handle.remove)
        yield found


@contextmanager
def limited(model: nn.Module, evaluations: int, rtol: float = 0.0) -> Iterator[None]:
    """Within the block every solve ends after ``evaluations`` a sample, or at ``rtol``."""
    layers = equilibria(model)
    before = [[getattr(layer, name) for name in OPTIONS] for layer in layers]
    try:
        for layer in layers:
            layer.max_steps, layer.on_failure = evaluations, "ignore"
            layer.tolerance = solvers.Tolerance(rtol=rtol)
        with with_energies(model):
            yield
    finally:
        for layer, values in zip(layers, before, strict=True):
            for name, value in zip(OPTIONS, values, strict=True):
                setattr(layer, name, value)


def latest_residual(model: nn.Module) -> Tensor | None:
    """(B,): the largest residual that the layers' latest solves left of each sample."""
    found = [each.last.residual for each in equilibria(model) if each.last is not None]
    return torch.stack(found).amax(0) if found else None


def latest_energy(model: nn.Module) -> Tensor | None:
    """(B,): the sum of the layers' energies in their latest solves; None where one has none."""
    found = [None if each.last is None else each.last.energy for each in equilibria(model)]
    known = [energy for energy in found if energy is not None]
    return torch.stack(known).sum(0) if known and len(known) == len(found) else None


def accuracy_within(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    budgets: Sequence[int],
    *,
    batch_size: int = 256,
) -> Table:
    """Accuracy of a model whose layers may spend so many evaluations a sample, each of them.

    The tolerance is zero, so a sample ends early only where rounding allows no better residual.
    Unlike :func:`implicit_attn.studies.accuracy_by_evaluations` this takes a model of any form.

    Args:
        model: images (B, ...) -> logits (B, classes); put into evaluation mode.
        images, labels: (N, ...) and (N,) int64.
        budgets: numbers of evaluations, each >= 1.
        batch_size: images at once.

    Returns:
        Rows with evaluations, accuracy, loss, unchanged (share of the predictions that are those of
        the model as it stands, with its own tolerance), residual (median) and energy (mean).

    Raises:
        ValueError: there are no images, or no equilibrium layer in the model.
    """
    if len(images) == 0:
        raise ValueError("images must hold at least one image, got none")
    if not equilibria(model):
        raise ValueError(f"model must hold a DEQ layer, got a {type(model).__name__} without one")
    model.eval()
    table: Table = []
    with torch.no_grad():
        parts = list(zip(images.split(batch_size), labels.split(batch_size), strict=True))
        usual = [model(part).argmax(1) for part, _ in parts]
        for budget in budgets:
            pool = Pool()
            residuals, energies = [], []
            with limited(model, budget):
                for (part, answers), choice in zip(parts, usual, strict=True):
                    logits = model(part)
                    same = (logits.argmax(1) == choice).double()
                    measures = measure_classes(logits, part, answers)
                    pool.add({**measures, "unchanged": (same, torch.ones_like(same))})
                    residuals.append(latest_residual(model))
                    energies.append(latest_energy(model))
            row: dict[str, Any] = {"evaluations": budget, **pool.means()}
            row["residual"] = _joined(residuals).median().item()
            if all(energy is not None for energy in energies):
                row["energy"] = _joined(energies).mean().item()
            table.append(row)
    return table


def _joined(parts: list[Tensor | None]) -> Tensor:
    return torch.cat([part for part in parts if part is not None])
