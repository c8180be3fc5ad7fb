"""Hyper-SET as a backbone: unrolled, or solved for its equilibrium."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from implicit_attn.deq import DEQ
from implicit_attn.energies.hyperset import HyperSETEnergy
from implicit_attn.models.backbones import RecurrentBackbone
from implicit_attn.updates.hyperset import HyperSETLayer
from implicit_attn.updates.official import OfficialHyperSETLayer, build_step_network
from solvers.core.checks import require_count, require_flag

OFFICIAL = {"gains", "step_network", "descent"}  # what only the official code's layer has


@dataclass(frozen=True)
class Trajectory:
    """States, energies and features along the iterations; entry t is after t iterations.

    Attributes:
        states: (1 + T, B, N, d).
        attention_energy, feedforward_energy: (1 + T, B), of the layer that makes the next step (of
            the last one for the last state).
        features: (1 + T, B, heads, N, p), the normalised projections ``RMSNorm(W_h^T x)``.
    """

    states: Tensor
    attention_energy: Tensor
    feedforward_energy: Tensor
    features: Tensor


class HyperSET(RecurrentBackbone):
    """Hyper-SET as published: one shared layer (or a few), unrolled.

    Args:
        dim, heads: features d of a token, attention heads.
        memories: columns M of D (the paper: d for images, 4 d for Sudoku).
        layers: number of layers with weights and step sizes of their own.
        share_steps: all layers take their step sizes from one network, as in the official code.
        iterations: of each layer.
        beyond: as for ``RecurrentBackbone``. Time-dependent step sizes are smooth functions
            of the time, so that later times than in training mean something; low-rank differences
            stay at their last.
        step_size: "conditioned-state" (the paper's choice for classification), "conditioned-input"
            (for Sudoku and masked images), "learned" or "fixed".
        options: further arguments of ``HyperSETLayer``: initial_step, time_dim, attention,
            feedforward, head_dim, epsilon, lora_rank, lora_scale, beta; or of
            ``OfficialHyperSETLayer``: gains, step_network, descent.

    Shapes: tokens (B, N, d) -> (B, N, d).

    Source: Hu, Zou, Xu, "Hyper-SET" (https://arxiv.org/abs/2502.11646).
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        memories: int,
        *,
        layers: int = 1,
        iterations: int = 12,
        beyond: str = "extrapolate",
        step_size: str = "conditioned-state",
        share_steps: bool = False,
        **options: Any,
    ) -> None:
        options |= {"step_size": step_size, "iterations": iterations}
        number = require_count("layers", layers)
        shared = None
        if require_flag("share_steps", share_steps):
            more = {"initial": options.pop("initial_step", None)}
            more["time_dim"] = options.pop("time_dim", 512)
            network = options.pop("step_network", "paper")
            shared = options["step_size"] = build_step_network(network, step_size, dim, **more)
        kind = OfficialHyperSETLayer if OFFICIAL & options.keys() else HyperSETLayer
        made = [kind(dim, heads, memories, **options) for _ in range(number)]
        super().__init__(dim, made, iterations, beyond=beyond)
        self.step_sizes = shared

    def trajectory(
        self, x: Tensor, *, iterations: int | None = None, mask: Tensor | None = None
    ) -> Trajectory:
        """States, energies and subspace features along the iterations from ``x`` (B, N, d)."""
        count = self.iterations if iterations is None else iterations
        states = self.states(x, iterations=count, mask=mask)
        plan = self.schedule(count)
        rows = [
            self.layers[layer].observe(z, index, mask)
            for z, (layer, index) in zip(states, [*plan, plan[-1]], strict=True)
        ]
        return Trajectory(states, *(torch.stack(column) for column in zip(*rows, strict=True)))


class HyperSETEquilibrium(nn.Module):
    """The minimiser of ``HyperSETEnergy`` for the input tokens, found by a ``DEQ`` layer.

    Args:
        dim, heads, memories: as for ``HyperSET``.
        iterations: evaluations per sample, an upper bound that a call may change.
        layer: further arguments for ``DEQ`` (solver, tolerance, adjoint, on_failure, ...).
        options: further arguments of ``HyperSETEnergy``: attention, feedforward, head_dim, norm,
            bound, weight, maximum, context.

    Shapes: tokens (B, N, d) -> (B, N, d), the equilibrium for that input. The attribute ``layer`` is
    the ``DEQ``; ``layer.last`` tells how the latest solve went.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        memories: int,
        *,
        iterations: int = 50,
        layer: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        energy = HyperSETEnergy(dim, heads, memories, **options)
        self.dim, self.iterations = dim, require_count("iterations", iterations)
        settings: dict[str, Any] = {"max_steps": iterations} | (layer or {})
        self.layer = DEQ(energy, **settings)

    def forward(
        self, x: Tensor, *, iterations: int | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """The equilibrium, or the best state found in ``iterations`` evaluations per sample."""
        if iterations is None:
            return self.layer(x, mask)
        return self.layer.solve(x, mask, max_steps=iterations).value
