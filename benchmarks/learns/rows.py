"""The rows of the table: what is put between the embedding and the readout.

A row makes one layer, tokens (B, N, dim) -> the same shape; several are stacked with weights of
their own. Sizes are chosen so that a layer of width 64 has about the encoder layer's 33.5k parameters
where the row's kind allows it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import solvers
from benchmarks.learns.ablations import ABLATIONS
from implicit_attn import DEQ, EquilibriumBlock
from implicit_attn.energies import HyperSETEnergy
from implicit_attn.models import HyperSET
from implicit_attn.updates import MeanFieldAttention, SoftmaxCouplingAttention

DIM, HEADS = 64, 4
RATES = (3e-3, 6e-3, 1.2e-2)  # the same choice for every row
PENALTIES = (0.1, 1.0, 10.0)  # of the logistic regression, scikit-learn's C
SOLVE: dict[str, Any] = {
    "tolerance": solvers.Tolerance(1e-3),
    "max_steps": 60,
    "on_failure": "ignore",
}


@dataclass(frozen=True)
class Row:
    """One way to make a layer.

    Attributes:
        build: (tokens N, dim, heads) -> one layer; None for the logistic regression, which has no
            layers, no tokens and no seed.
        rates: learning rates to choose from; penalties C for the logistic regression.
        stacks: whether several layers are another model than one.
    """

    build: Callable[[int, int, int], nn.Module] | None
    rates: tuple[float, ...]
    stacks: bool = True

    @property
    def regression(self) -> bool:
        return self.build is None


class Residual(nn.Module):
    """``x + branch(norm(x))``."""

    def __init__(self, dim: int, branch: nn.Module) -> None:
        super().__init__()
        self.norm, self.branch = nn.LayerNorm(dim), branch

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(self.norm(x))


class AcrossTokens(nn.Module):
    """A network over the tokens of each channel, (B, N, d) -> the same shape."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x.mT).mT


class UnitSize(nn.Module):
    """Tokens of root mean square 1, without weights."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:])


def network(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


def identity(tokens: int, dim: int, heads: int) -> nn.Module:
    return nn.Identity()


def per_token(tokens: int, dim: int, heads: int) -> nn.Module:
    """The encoder layer's size without anything that tells a token of the others."""
    return Residual(dim, network(dim, 4 * dim))


def mixer(tokens: int, dim: int, heads: int) -> nn.Module:
    """A layer of MLP-Mixer (Tolstikhin et al., https://arxiv.org/abs/2105.01601), at that size."""
    across = Residual(dim, AcrossTokens(network(tokens, dim)))
    return nn.Sequential(across, Residual(dim, network(dim, 7 * dim // 2)))


def encoder(tokens: int, dim: int, heads: int) -> nn.Module:
    return nn.TransformerEncoderLayer(dim, heads, 2 * dim, 0.0, norm_first=True, batch_first=True)


def hyperset(tokens: int, dim: int, heads: int) -> nn.Module:
    return HyperSET(dim, heads, 2 * dim, iterations=12)


def mean_field(tokens: int, dim: int, heads: int) -> nn.Module:
    """Couplings of its own for every pair of places, so their number grows with ``(N dim)^2``."""
    return nn.Sequential(UnitSize(), DEQ(MeanFieldAttention(tokens, dim, bound=0.9), **SOLVE))


def couplings(tokens: int, dim: int, heads: int) -> nn.Module:
    return nn.Sequential(UnitSize(), DEQ(SoftmaxCouplingAttention(dim, heads), **SOLVE))


def equilibrium(tokens: int, dim: int, heads: int) -> nn.Module:
    """The minimum of Hyper-SET's energy, which sees x only in ``1/2 |z - x|^2``."""
    return nn.Sequential(UnitSize(), DEQ(HyperSETEnergy(dim, heads, 2 * dim), **SOLVE))


def equilibrium_inside(tokens: int, dim: int, heads: int) -> nn.Module:
    """The same energy, whose memories and heads see x, too."""
    energy = HyperSETEnergy(dim, heads, 2 * dim, context=True)
    return nn.Sequential(UnitSize(), DEQ(energy, **SOLVE))


def block(tokens: int, dim: int, heads: int) -> nn.Module:
    return EquilibriumBlock(dim, heads)


def block_alone(tokens: int, dim: int, heads: int) -> nn.Module:
    """The block without attention, and with hidden units for as many parameters."""
    return EquilibriumBlock(dim, heads, 4 * dim, attention=None)


ROWS: dict[str, Row] = {
    "logistic": Row(None, PENALTIES, stacks=False),
    "identity": Row(identity, RATES, stacks=False),
    "per-token": Row(per_token, RATES),
    "mixer": Row(mixer, RATES),
    "encoder": Row(encoder, RATES),
    "hyperset": Row(hyperset, RATES),
    "mean-field": Row(mean_field, RATES),
    "couplings": Row(couplings, RATES),
    "equilibrium": Row(equilibrium, RATES),
    "equilibrium-inside": Row(equilibrium_inside, RATES),
    "block": Row(block, RATES),
    "block-no-attention": Row(block_alone, RATES),
}
MAIN_ROWS = tuple(ROWS)
# One rate for all: what is compared is the block with the block.
ROWS |= {f"block, {name}": Row(build, (6e-3,)) for name, build in ABLATIONS.items()}


def layers_of(row: str, number: int, tokens: int, dim: int = DIM, heads: int = HEADS) -> nn.Module:
    """``number`` layers of a row, one after the other."""
    build = ROWS[row].build
    if build is None:
        raise ValueError(f"row must be one with layers, got {row!r}")
    made = [build(tokens, dim, heads) for _ in range(number)]
    return made[0] if number == 1 else nn.Sequential(*made)
