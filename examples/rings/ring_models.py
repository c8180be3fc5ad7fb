"""Models of rings, (B, N, 2) to logits of two classes: one block at its fixed point, or layers of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn import DEQ, Update

FORBIDDEN = -1e4  # a score whose exponential is zero; infinity would be refused as a layer's input


class RingBias(nn.Module):
    """Biases of the pairs of a ring: ``forward(N)`` -> (heads, N, N), the same for every position.

    A learned number for each head and each offset in {-1, 0, 1}. ``local``: further pairs are masked.
    Otherwise all pairs see each other, with ``-exp(s) n`` added, n the positions back from i to j around
    the ring; the slopes ``exp(s)`` of the heads are learned from 1/2, 1/4, 1/8, ...

    Source: linear biases that extend to longer inputs: Press, Smith, Lewis, "Train short, test long"
    (2022), https://arxiv.org/abs/2108.12409.
    """

    def __init__(self, heads: int, local: bool) -> None:
        super().__init__()
        starts = -torch.arange(1, heads + 1) * torch.log(torch.tensor(2.0))
        self.slopes = None if local else nn.Parameter(starts)
        self.table = nn.Parameter(torch.randn(heads, 3))

    def forward(self, size: int) -> Tensor:
        places, half = torch.arange(size), (size - 1) // 2
        behind = places[:, None] - places[None, :]
        offsets = (behind + half) % size - half  # the shorter way round
        near = offsets.clamp(-1, 1)
        table = self.table[:, near + 1]
        if self.slopes is None:
            return table.masked_fill(near != offsets, FORBIDDEN)
        return table * (near == offsets) - self.slopes.exp()[:, None, None] * (behind % size)


class Surroundings(NamedTuple):
    """The input of a :class:`CellBlock`: cells x (B, N, d) and biases of pairs, ([B,] heads, N, N)."""

    cells: Tensor
    bias: Tensor


class CellBlock(Update):
    r"""``h = x + A(LN(z))``, ``h + W_2 relu(W_1 LN(h))``: what cells take from others is added to x.

    A is attention with scores ``q_i . k_j / sqrt(d / heads) + b_ij``, with 2 d hidden units W_1. With
    ``x = z`` it is a pre-norm layer of a transformer; with another x, the input of a fixed point, which
    begins at 0. All parts but x are bounded, so the map z -> f(z, x) has a fixed point whatever the weights.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries_keys_values = nn.Linear(dim, 3 * dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)
        self.widen, self.narrow = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.attention_norm, self.feedforward_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def initial(self, x: Surroundings) -> Tensor:
        return torch.zeros_like(x.cells)

    def forward(self, z: Tensor, x: Any = None) -> Tensor:  # type: ignore[override]
        normed = self.attention_norm(z)
        made = self.queries_keys_values(normed).unflatten(2, (3 * self.heads, -1)).transpose(1, 2)
        query, key, value = made.chunk(3, dim=1)  # (B, heads, N, d / heads) each
        # Written out: with a bias that learns, the fused kernel is not to be had on the CPU.
        weights = ((query * query.shape[3] ** -0.5) @ key.mT + x.bias).softmax(dim=3)
        h = x.cells + self.output((weights @ value).transpose(1, 2).flatten(2))
        return h + self.narrow(F.relu(self.widen(self.feedforward_norm(h))))


class EquilibriumRing(nn.Module):
    r"""Classes of the positions of a ring from the fixed point ``z* = f(z*, x)`` of a local block.

    Each evaluation lets a position look at its neighbours and reads the input anew; nothing depends on
    the length of the ring or the place on it. ``forward`` iterates from zero and is differentiated
    through all ``iterations``, more than a small ring needs, so that what is found must stay. ``layer``
    solves for it by any solver.

    Source: input injection and random numbers of iterations for extrapolation: Bansal et al. (2022),
    https://arxiv.org/abs/2202.05826; fixed points that do not depend on the start: Anil et al. (2022),
    https://arxiv.org/abs/2211.09961.
    """

    def __init__(self, dim: int, heads: int, iterations: int = 32) -> None:
        super().__init__()
        self.iterations = iterations
        self.embedding = nn.Linear(2, dim)
        self.bias = RingBias(heads, local=True)
        self.layer = DEQ(CellBlock(dim, heads), max_steps=iterations, on_failure="ignore")
        self.norm = nn.LayerNorm(dim)
        self.readout = nn.Linear(dim, 2)

    def encode(self, inputs: Tensor) -> Surroundings:
        """What every evaluation sees of the inputs (B, N, 2)."""
        bias = self.bias(inputs.shape[1]).expand(len(inputs), -1, -1, -1)
        return Surroundings(self.embedding(inputs), bias)

    def decode(self, state: Tensor) -> Tensor:
        """Logits (B, N, 2) of a state (B, N, d)."""
        return self.readout(self.norm(state))

    def forward(self, inputs: Tensor, *, iterations: int | None = None) -> Tensor:
        """Logits after ``iterations`` evaluations from zero."""
        x = self.encode(inputs)
        z = self.layer.update.initial(x)
        for _ in range(self.iterations if iterations is None else iterations):
            z = self.layer.update(z, x)
        return self.decode(z)


class LayeredRing(nn.Module):
    """Pre-norm layers with weights and biases of their own, each a :class:`CellBlock` with ``x = z``.

    ``local``: positions look at their neighbours, not at all others.
    """

    def __init__(self, dim: int, heads: int, layers: int, local: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Linear(2, dim)
        self.blocks: Any = nn.ModuleList(CellBlock(dim, heads) for _ in range(layers))
        self.biases: Any = nn.ModuleList(RingBias(heads, local) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.readout = nn.Linear(dim, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        z = self.embedding(inputs)
        for block, bias in zip(self.blocks, self.biases, strict=True):
            z = block(z, Surroundings(z, bias(inputs.shape[1])))
        return self.readout(self.norm(z))
