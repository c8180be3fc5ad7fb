"""Backbones that repeat their layers, and what layers with softmax attention share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.energies.heads import head_width
from implicit_attn.energies.tokens import check_mask, check_state, hide
from solvers.core.checks import require_choice, require_count

ORDERS = ("blocks", "cyclic")
BEYOND = ("extrapolate", "hold")


class RecurrentLayer(nn.Module):
    """Base of a layer that is applied repeatedly and is told the number of the iteration."""

    def context(self, x0: Tensor, times: Tensor) -> Any:
        """What all iterations share: computed once from the input (B, N, d) and the times (T,)."""
        return None

    def advance(self, z: Tensor, context: Any, index: int, mask: Tensor | None = None) -> Tensor:
        """The state (B, N, d) after the iteration at ``times[index]``, ``index`` from 0."""
        raise NotImplementedError(f"{type(self).__name__} must define advance")


class RecurrentBackbone(nn.Module):
    """``layers`` one after the other, each ``iterations`` times.

    Args:
        dim: features d of a token.
        layers: modules with ``context`` and ``advance`` (see ``RecurrentLayer``).
        iterations: T of each layer in training; a call may ask for any other number.
        order: "blocks" repeats the first layer T times, then the second; "cyclic" goes T times
            through all layers.
        beyond: what a layer is told after time T: "extrapolate" the true time, "hold" T.

    Shapes: tokens (B, N, d) -> (B, N, d); ``mask`` (B, N) bool, False for masked tokens, which keep
    their input and influence no other token.
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
        self.dim = require_count("dim", dim)
        self.layers: Any = nn.ModuleList(layers)
        self.iterations = require_count("iterations", iterations)
        self.order = require_choice("order", order, ORDERS)
        self.beyond = require_choice("beyond", beyond, BEYOND)

    def forward(
        self, x: Tensor, *, iterations: int | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """The tokens after ``iterations`` of each layer, by default as many as in training."""
        return self._run(x, iterations, mask, None)

    def states(
        self, x: Tensor, *, iterations: int | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """The input and the state after each iteration: (1 + layers * iterations, B, N, d)."""
        states = [x]
        self._run(x, iterations, mask, states)
        return torch.stack(states)

    def schedule(self, iterations: int) -> list[tuple[int, int]]:
        """Pairs (layer, its iteration from 0) in the order in which they are made."""
        number = len(self.layers)
        if self.order == "blocks":
            return [(layer, index) for layer in range(number) for index in range(iterations)]
        return [(layer, index) for index in range(iterations) for layer in range(number)]

    def _run(
        self, x: Tensor, iterations: int | None, mask: Tensor | None, states: list[Tensor] | None
    ) -> Tensor:
        count = self.iterations if iterations is None else require_count("iterations", iterations)
        check_state(x, type(self).__name__, dim=self.dim, tokens=True)
        check_mask(mask, x, type(self).__name__, features=1)
        times = torch.arange(1, count + 1, device=x.device)
        if self.beyond == "hold":
            times = times.clamp_max(self.iterations)
        z = hide(x, mask)
        contexts = [layer.context(z, times) for layer in self.layers]
        for layer, index in self.schedule(count):
            z = self.layers[layer].advance(z, contexts[layer], index, mask)
            if states is not None:
                states.append(keep_masked(z, x, mask))
        return keep_masked(z, x, mask)

    def extra_repr(self) -> str:
        return f"iterations={self.iterations}, order={self.order}, beyond={self.beyond}"


def keep_masked(z: Tensor, x: Tensor, mask: Tensor | None) -> Tensor:
    """``z`` (B, N, d) with the masked tokens of ``x``."""
    return z if mask is None else torch.where(mask.unsqueeze(-1), z, x)


class HeadsLayer(RecurrentLayer):
    """Base of the layers: multi-head attention, the norm before it, and that of the second part."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, head_width(dim, heads, None)
        self.attention_norm, self.feedforward_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def split(self, tokens: Tensor) -> Tensor:
        """(B, N, k heads p) -> (B, k heads, N, p)."""
        return tokens.unflatten(-1, (-1, self.width)).transpose(1, 2)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """``softmax(p^-1/2 Q K^T) V`` of each head, from (B, heads, N, p) to (B, N, heads p)."""
        pairs = None
        if mask is not None:
            # A token may attend to itself even where it is masked: no row of the softmax is empty.
            itself = torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
            pairs = mask[:, None, None, :] | itself
        scale = self.width**-0.5
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=pairs, scale=scale)
        return attended.transpose(1, 2).flatten(2)
