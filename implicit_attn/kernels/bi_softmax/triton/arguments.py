"""What the Triton kernels are launched with: tile sizes, strides, constants of the compilation.

Tile sizes come from static tables by kernel, head width, bytes per number and architecture. Nothing
is tuned at run time: the same shapes take the same kernel, so results repeat bit by bit.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
from torch import Tensor

from implicit_attn.kernels.bi_softmax.triton import tiles as in_kernels

INTERPRETED = bool(in_kernels.INTERPRETED)
LOG2E = math.log2(math.e)
# Offsets inside a tile are of 32 bits.
_LARGEST_ROW_STRIDE = 1 << 23


@dataclass(frozen=True)
class Tiles:
    """Rows a program owns, columns it takes at a time, warps, depth of the software pipeline."""

    rows: int
    columns: int
    warps: int
    stages: int


LARGEST_SINGLE_TILE = 128  # tokens

# The interpreter checks the arithmetic, with rows and columns that differ and several of both.
INTERPRETER = Tiles(128, 64, 4, 1)

# (kernel, bytes of a number) -> largest padded width: tiles, for Hopper. The triangle has square ones.
# Chosen by what ptxas reports for sm_90: no or little spilling, two programs or more on a
# multiprocessor where that can be had. Float32 products are split in registers: their tiles are small.
_TABLE = {
    ("lse", 2): {64: Tiles(128, 64, 4, 3), 128: Tiles(128, 64, 4, 3), 256: Tiles(128, 64, 8, 2)},
    ("lse", 4): {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 32, 4, 1), 256: Tiles(32, 32, 8, 1)},
    ("triangle", 2): {64: Tiles(64, 64, 4, 3), 128: Tiles(64, 64, 4, 2), 256: Tiles(64, 64, 4, 2)},
    ("triangle", 4): {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 64, 4, 1), 256: Tiles(32, 32, 8, 1)},
    ("tangents", 2): {128: Tiles(64, 64, 4, 2), 256: Tiles(64, 64, 8, 1)},
    ("tangents", 4): {128: Tiles(32, 32, 4, 1), 256: Tiles(32, 32, 8, 1)},
    ("gradient", 2): {64: Tiles(128, 64, 4, 3), 128: Tiles(64, 64, 4, 3), 256: Tiles(128, 64, 8, 2)},
    ("gradient", 4): {64: Tiles(64, 32, 4, 2), 128: Tiles(64, 16, 4, 1), 256: Tiles(32, 32, 8, 1)},
    ("curvature", 2): {128: Tiles(64, 64, 4, 2), 256: Tiles(128, 32, 8, 1)},
    ("curvature", 4): {64: Tiles(64, 16, 4, 1), 128: Tiles(64, 16, 8, 1), 256: Tiles(16, 16, 4, 1)},
    ("atomic", 2): {64: Tiles(64, 64, 4, 3), 128: Tiles(64, 64, 4, 2), 256: Tiles(64, 64, 8, 1)},
    ("atomic", 4): {128: Tiles(32, 32, 4, 1), 256: Tiles(32, 32, 8, 1)},
    ("single tile", 2): {128: Tiles(128, 128, 4, 1), 256: Tiles(128, 128, 8, 1)},
    ("single tile", 4): {256: Tiles(128, 128, 4, 1)},
}  # fmt: skip
# For every kernel of several tiles on cards with as little as 99 KiB on the chip: those before
# Hopper, and of the later ones the consumer cards (capability 12). 9 and 10 have 227 KiB.
_LARGE_CHIPS = (9, 10)
_LESS_ON_CHIP = {
    2: {64: Tiles(64, 32, 4, 2), 128: Tiles(64, 32, 4, 1), 256: Tiles(32, 32, 4, 1)},
    4: {128: Tiles(32, 32, 4, 1), 256: Tiles(16, 16, 4, 1)},
}
# Kernels that take the tiles of another one.
_SAME = {"causal": "gradient", "mean": "curvature"}


def tiles(kernel: str, width: int, size: int, capability: int) -> Tiles:
    """The tiles of a kernel of the table, given the padded head width and the bytes of a number.

    ``capability`` is the major version of the device's; 0: the interpreter.
    """
    if capability == 0:
        return INTERPRETER
    less = capability not in _LARGE_CHIPS and kernel != "single tile"
    table = _LESS_ON_CHIP[size] if less else _TABLE[_SAME.get(kernel, kernel), size]
    return next(chosen for largest, chosen in table.items() if width <= largest)


@dataclass(frozen=True)
class LaunchArguments:
    """What the kernels of one call share."""

    z: Tensor  # (B, H, N, p) as from ``readable``
    beta: float
    keep: Tensor | None  # (B, N) uint8, 0 at masked tokens
    extent: Tensor | None  # (B,) int32, the tokens of a sample before its padding
    causal: bool  # row i is restricted to columns j <= i
    bounded: bool  # exp of the scores needs no row maximum

    @property
    def heads(self) -> int:
        return self.z.shape[0] * self.z.shape[1]

    @property
    def tokens(self) -> int:
        return self.z.shape[2]

    @property
    def scale(self) -> float:
        return self.beta * LOG2E

    @property
    def by_reciprocals(self) -> bool:
        """Whether the weights of a pair are ``exp(S) (a_i + a_j)`` with ``a = exp(-L)`` stored."""
        return self.bounded and not self.causal

    @cached_property
    def padded_width(self) -> int:
        return max(16, int(triton.next_power_of_2(self.z.shape[3])))

    @cached_property
    def capability(self) -> int:
        """Major version of the device; 0: interpreted."""
        return 0 if INTERPRETED else torch.cuda.get_device_capability(self.z.device)[0]

    def sizes(self, blocks: int) -> tuple[int, int, int, int, float]:
        """Heads a sample, tokens, width, blocks a head and scale, as most kernels take them."""
        return self.z.shape[1], self.tokens, self.z.shape[3], blocks, self.scale

    def tiles(self, kernel: str) -> Tiles:
        return tiles(kernel, self.padded_width, self.z.element_size(), self.capability)

    def constants(self, shape: Tiles) -> dict[str, Any]:
        """Options of every tiled kernel, with those of the compiler."""
        return {
            "WIDTH": self.padded_width,
            "enable_fp_fusion": self.bounded,
            "num_warps": shape.warps,
            "num_stages": shape.stages,
        }

    def even(self, shape: Tiles) -> dict[str, bool]:
        """Whether no tile reaches beyond the last token, and none beyond the last feature."""
        whole = self.tokens % shape.rows == 0 and self.tokens % shape.columns == 0
        width = self.padded_width == self.z.shape[3]
        return {"EVEN": self.extent is None and whole, "EVEN_WIDTH": width}

    @property
    def boost(self) -> int:
        """Weights are held larger by this power of two: small ones of float16 would be lost."""
        return 14 if self.z.dtype == torch.float16 else 0

    def by_rows(self, kernel: str) -> tuple[int, dict[str, Any]]:
        """Blocks of rows a head, and all options of a kernel that owns rows and goes over columns."""
        shape = self.tiles(kernel)
        options = {"ROWS": shape.rows, "COLUMNS": shape.columns, "BOOST": self.boost}
        return -(-self.tokens // shape.rows), options | self.even(shape) | self.constants(shape)

    def halves(self, kernel: str) -> bool:
        """Whether sums from half of the tiles, "triangle" or "tangents", fit in the registers."""
        widest = {"triangle": 128, "tangents": 32}[kernel]
        return self.z.element_size() == 2 or self.padded_width <= widest

    def fits_one_tile(self, kernel: str) -> bool:
        """Whether one program holds a whole head: "gradient" or "hvp"; else the registers spill."""
        tokens, width = self.tokens, self.padded_width
        if self.z.element_size() == 4:
            return tokens <= 64 and width <= 64
        if kernel == "gradient":
            return tokens <= 64 or (tokens <= LARGEST_SINGLE_TILE and width <= 128)
        return (tokens <= 64 and width <= 128) or (tokens <= 96 and width <= 64)


def readable(x: Tensor) -> Tensor:
    """``x``, or a copy, with contiguous rows and offsets that fit."""
    fits = x.stride(3) == 1 and x.stride(2) <= _LARGEST_ROW_STRIDE
    return x if fits or x.shape[3] == 1 else x.contiguous()


def device_of(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Kernels are launched on the current device, which need not be that of ``x``."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
