"""Backbones that repeat shared layers: tokens in, tokens out, as many iterations as asked for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from implicit_attn.energies.checks import check_count, check_mask, check_state
from implicit_attn.energies.tokens import hide

ORDERS = ("blocks", "cyclic")
BEYOND = ("extrapolate", "hold")


class RecurrentLayer(nn.Module):
    """A layer that is repeated: one iteration at a time, told which."""

    def prepare(self, x0: Tensor, times: Tensor) -> Any:
        """What all iterations share: computed once from the input (B, N, d) and the times (T,)."""
        return None

    def advance(self, z: Tensor, context: Any, index: int, mask: Tensor | None = None) -> Tensor:
        """The state (B, N, d) one iteration on, the one at ``times[index]``, from 0."""
        raise NotImplementedError(f"{type(self).__name__} must define advance")


class RecurrentBackbone(nn.Module):
    """``layers`` one after the other, each ``iterations`` times.

    Args:
        dim: features d of a token.
        layers: modules with ``prepare`` and ``advance`` (see ``RecurrentLayer``).
        iterations: T of each layer in training; a call may ask for any other number.
        order: "blocks" repeats the first layer T times, then the second; "cyclic" goes T times
            through all layers.
        beyond: what a layer is told after time T: "extrapolate" the true time, "hold" T.

    Shapes: tokens (B, N, d) -> (B, N, d); ``mask`` (B, N) bool, True where a token counts: the
    others stay as they are and influence nobody.
    """

    def __init__(
        self,
        dim: int,
        layers: Iterable[nn.Module],
        iterations: int = 12,
        *,
        order: str = "blocks",
        beyond: str = "extrapolate",
    ) -> None:
        super().__init__()
        if order not in ORDERS:
            raise ValueError(f"order must be one of {ORDERS}, got {order!r}")
        if beyond not in BEYOND:
            raise ValueError(f"beyond must be one of {BEYOND}, got {beyond!r}")
        self.dim = check_count(dim, "dim")
        self.layers: Any = nn.ModuleList(layers)
        self.iterations = check_count(iterations, "iterations")
        self.order, self.beyond = order, beyond

    def forward(
        self, x: Tensor, *, iterations: int | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """The tokens after ``iterations`` of each layer, by default as many as in training."""
        return self._run(x, iterations, mask, None)

    def states(
        self, x: Tensor, *, iterations: int | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """The input and the state after each iteration: (1 + layers * iterations, B, N, d)."""
        kept = [x]
        self._run(x, iterations, mask, kept)
        return torch.stack(kept)

    def schedule(self, iterations: int) -> list[tuple[int, int]]:
        """Which layer makes which of its iterations (from 0), in order."""
        number = len(self.layers)
        if self.order == "blocks":
            return [(layer, index) for layer in range(number) for index in range(iterations)]
        return [(layer, index) for index in range(iterations) for layer in range(number)]

    def _run(
        self, x: Tensor, iterations: int | None, mask: Tensor | None, kept: list[Tensor] | None
    ) -> Tensor:
        count = self.iterations if iterations is None else check_count(iterations, "iterations")
        check_state(x, type(self).__name__, dim=self.dim, tokens=True)
        check_mask(mask, x, type(self).__name__, features=1)
        times = torch.arange(1, count + 1, device=x.device)
        if self.beyond == "hold":
            times = times.clamp_max(self.iterations)
        z = hide(x, mask)
        contexts = [layer.prepare(z, times) for layer in self.layers]
        for layer, index in self.schedule(count):
            z = self.layers[layer].advance(z, contexts[layer], index, mask)
            if kept is not None:
                kept.append(_give_back(z, x, mask))
        return _give_back(z, x, mask)

    def extra_repr(self) -> str:
        return f"iterations={self.iterations}, order={self.order}, beyond={self.beyond}"


def _give_back(z: Tensor, x: Tensor, mask: Tensor | None) -> Tensor:
    """``z`` with what tokens that do not count held in ``x``."""
    return z if mask is None else torch.where(mask.unsqueeze(-1), z, x)
