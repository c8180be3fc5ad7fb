"""What makes the equilibrium block learn: the block with one thing changed, a row each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import solvers
from implicit_attn import EquilibriumBlock

Build = Callable[[int, int, int], nn.Module]


class FirstStep(nn.Module):
    """The block's first gradient step from zero in place of its equilibrium: an explicit layer."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.block = EquilibriumBlock(dim, heads)

    def forward(self, x: Tensor) -> Tensor:
        energy = self.block.energy
        with parametrize.cached():
            given = energy.prepare(F.rms_norm(x, x.shape[-1:]))
            return x - energy.grad(torch.zeros_like(x), given)


def _changed(change: Callable[[EquilibriumBlock], Any], tokens: int, dim: int, heads: int) -> Any:
    block = EquilibriumBlock(dim, heads)
    with torch.no_grad():
        change(block)
    return block


def _options(options: dict[str, Any], tokens: int, dim: int, heads: int) -> nn.Module:
    return EquilibriumBlock(dim, heads, **options)


def _solved(options: dict[str, Any]) -> Build:
    """Another solve: ``options`` of the DEQ inside."""
    return partial(_options, {"layer": {"on_failure": "ignore"} | options})


def _one_context(block: EquilibriumBlock) -> None:
    block.energy.context = lambda x, answer: x  # type: ignore[method-assign]


def _peaked_start(block: EquilibriumBlock) -> None:
    attention: Any = block.energy.attention
    attention.query.weight *= 10.0


def _no_score_norm(block: EquilibriumBlock) -> None:
    attention: Any = block.energy.attention
    attention.score_norm = None


def _unbounded(block: EquilibriumBlock) -> None:
    energy: Any = block.energy
    for projection in (energy.attention.state, energy.memory.projection):
        parametrize.remove_parametrizations(projection, "weight", leave_parametrized=False)
    block.deq.on_failure = "ignore"


def _fixed_temperature(block: EquilibriumBlock) -> None:
    attention: Any = block.energy.attention
    attention.temperatures.raw.requires_grad_(False)


def _first_step(tokens: int, dim: int, heads: int) -> nn.Module:
    return FirstStep(dim, heads)


ABLATIONS: dict[str, Build] = {
    "first step": _first_step,
    "attention of x": partial(_changed, _one_context),
    "no norm of q, k": partial(_changed, _no_score_norm),
    "peaked start": partial(_changed, _peaked_start),
    "fixed temperature": partial(_changed, _fixed_temperature),
    "unbounded": partial(_changed, _unbounded),
    "curvature .1 .8": partial(_options, {"curvature": (0.1, 0.8)}),
    "curvature .8 .1": partial(_options, {"curvature": (0.8, 0.1)}),
    "curvature .1 .1": partial(_options, {"curvature": (0.1, 0.1)}),
    "gelu": partial(_options, {"activation": "gelu"}),
    "output map": partial(_options, {"state_dim": 64, "hidden": 96}),
    "tolerance 1e-1": _solved({"tolerance": solvers.Tolerance(1e-1)}),
    "tolerance 1e-2": _solved({"tolerance": solvers.Tolerance(1e-2)}),
    "tolerance 1e-4": _solved({"tolerance": solvers.Tolerance(1e-4)}),
    "one-step gradient": _solved({"adjoint": solvers.OneStep()}),
    "phantom gradient": _solved({"adjoint": solvers.Phantom(3)}),
    "L-BFGS": _solved({"solver": solvers.LBFGS()}),
}
