"""What the Triton kernels are launched with: tile sizes, strides, constants of the compilation.

Tile sizes come from static tables by kernel, head width, bytes per number and architecture. Nothing
is tuned at run time: the same shapes take the same kernel, so results repeat bit by bit.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from functools import cache, cached_property
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
Table = dict[tuple[str, int], dict[int, Tiles]]
_HOPPER: Table = {
    ("lse", 2): {64: Tiles(128, 64, 4, 3), 128: Tiles(128, 64, 4, 3), 256: Tiles(128, 64, 8, 2)},
    ("lse", 4): {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 32, 4, 1), 256: Tiles(32, 32, 8, 1)},
    ("triangle", 2): {64: Tiles(64, 64, 4, 3), 128: Tiles(64, 64, 4, 3), 256: Tiles(64, 64, 4, 2)},
    ("triangle", 4): {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 64, 4, 1), 256: Tiles(32, 32, 8, 1)},
    ("tangents", 2): {64: Tiles(64, 64, 4, 3), 128: Tiles(64, 64, 8, 2), 256: Tiles(64, 64, 8, 1)},
    ("tangents", 4): {128: Tiles(32, 32, 4, 1), 256: Tiles(32, 32, 8, 1)},
    ("gradient", 2): {64: Tiles(128, 64, 4, 3), 128: Tiles(64, 64, 4, 3), 256: Tiles(128, 64, 8, 2)},
    ("gradient", 4): {64: Tiles(64, 32, 4, 2), 128: Tiles(64, 16, 4, 1), 256: Tiles(32, 32, 8, 1)},
    ("curvature", 2): {
        64: Tiles(64, 64, 4, 3), 128: Tiles(64, 64, 4, 2), 256: Tiles(128, 32, 8, 1),
    },
    ("free curvature", 2): {64: Tiles(64, 64, 4, 3), 128: Tiles(64, 32, 4, 3)},
    ("curvature", 4): {64: Tiles(64, 16, 4, 1), 128: Tiles(64, 16, 8, 1), 256: Tiles(16, 16, 4, 1)},
    ("single tile", 2): {128: Tiles(128, 128, 4, 1), 256: Tiles(128, 128, 8, 1)},
    ("single tile", 4): {256: Tiles(128, 128, 4, 1)},
}  # fmt: skip
# What differs on other cards with much memory on the chip: B200 and its kin, and A100.
_BLACKWELL: Table = {
    ("tangents", 2): {128: Tiles(64, 64, 8, 2)},
    ("curvature", 2): {128: Tiles(64, 64, 8, 2), 256: Tiles(64, 32, 8, 1)},
    ("free curvature", 2): {64: Tiles(64, 32, 4, 2), 128: Tiles(64, 32, 8, 2)},
    ("causal", 2): {64: Tiles(64, 64, 4, 3)},
}
_AMPERE: Table = {
    ("lse", 2): {64: Tiles(128, 64, 4, 3), 128: Tiles(64, 64, 4, 3)},
    ("triangle", 2): {64: Tiles(64, 64, 4, 3), 128: Tiles(64, 64, 4, 2)},
    ("gradient", 2): {64: Tiles(64, 64, 4, 3), 128: Tiles(64, 32, 4, 3)},
    ("causal", 2): {64: Tiles(64, 32, 4, 3), 128: Tiles(64, 32, 8, 2)},
    ("curvature", 2): {64: Tiles(64, 32, 4, 3), 128: Tiles(32, 32, 4, 2)},
}
# For every kernel of several tiles on cards with as little as 99 KiB on the chip: the others before
# Hopper, and the later consumer cards (capability 12).
_LESS_ON_CHIP: Table = {
    ("tangents", 2): {128: Tiles(32, 32, 4, 2), 256: Tiles(32, 32, 8, 1)},
    ("single tile", 2): {256: Tiles(128, 128, 8, 1)},
    ("", 2): {64: Tiles(64, 32, 4, 2), 128: Tiles(64, 32, 4, 1), 256: Tiles(32, 32, 4, 1)},
    ("", 4): {128: Tiles(32, 32, 4, 1), 256: Tiles(16, 16, 4, 1)},
}
# Kernels that take the tiles of another one.
_SAME = {"causal": "gradient", "mean": "curvature", "free curvature": "curvature"}


def tables(capability: int) -> tuple[Table, ...]:
    """Where to look for tiles of a device of this capability, such as 90, in this order."""
    if capability == 80:
        return _AMPERE, _LESS_ON_CHIP, _HOPPER
    if capability // 10 == 9:
        return (_HOPPER,)
    if capability // 10 in (10, 11):
        return _BLACKWELL, _HOPPER
    return _LESS_ON_CHIP, _HOPPER


def tiles(kernel: str, width: int, size: int, capability: int) -> Tiles:
    """The tiles of a kernel of the table, given the padded head width and the bytes of a number.

    ``capability`` is the device's, 10 major + minor; 0: the interpreter.
    """
    if capability == 0:
        return INTERPRETER
    return _tiles(kernel, width, size, capability)


@cache
def _tiles(kernel: str, width: int, size: int, capability: int) -> Tiles:
    names = [kernel]
    while names[-1] in _SAME:
        names.append(_SAME[names[-1]])
    if kernel != "single tile":
        names.append("")  # of any kernel of several tiles
    for table in tables(capability):
        for name in names:
            for largest, chosen in table.get((name, size), {}).items():
                if width <= largest:
                    return chosen
    raise AssertionError(f"no tiles for {kernel}, width {width}, {size} bytes")


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
        """Of the device, 10 major + minor; 0: interpreted."""
        return 0 if INTERPRETED else capability_of(self.z.device.index)

    def unit(self, *others: Tensor) -> int:
        """What widths and strides are counted in, so that the kernels know what divides them.

        Triton sees by itself where all are multiples of 16, and loads 16 bytes at a time; with this it
        does so for 8 as well (4 for float32).
        """
        strides = [each for x in (self.z, *others) for each in x.stride()[:3]]
        common = math.gcd(16, self.z.shape[3], *strides)
        return 1 if common == 16 else common

    def sizes(self, blocks: int, unit: int) -> tuple[int, int, int, int, float]:
        """Heads a sample, tokens, width, blocks a head and scale, as most kernels take them."""
        _, heads, tokens, width = self.z.shape
        return heads, tokens, width // unit, blocks, self.scale

    def tiles(self, kernel: str) -> Tiles:
        return tiles(kernel, self.padded_width, self.z.element_size(), self.capability)

    def constants(self, shape: Tiles) -> dict[str, Any]:
        """Options of every tiled kernel, with those of the compiler; not to be changed."""
        return _constants(shape, self.padded_width, self.bounded)

    def even(self, shape: Tiles) -> dict[str, bool]:
        """Whether no tile reaches beyond the last token, and none beyond the last feature."""
        whole = self.tokens % shape.rows == 0 and self.tokens % shape.columns == 0
        width = self.padded_width == self.z.shape[3]
        return {"EVEN": self.extent is None and whole, "EVEN_WIDTH": width}

    @property
    def boost(self) -> int:
        """Weights are held larger by this power of two: small ones of float16 would be lost."""
        return 14 if self.z.dtype == torch.float16 else 0

    def by_rows(self, kernel: str, unit: int) -> tuple[int, dict[str, Any]]:
        """Blocks of rows a head, and the options of a kernel that owns rows and goes over columns."""
        shape = self.tiles(kernel)
        options = {"UNIT": unit, "ROWS": shape.rows, "COLUMNS": shape.columns, "BOOST": self.boost}
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


@cache
def _constants(shape: Tiles, padded_width: int, bounded: bool) -> dict[str, Any]:
    return {
        "WIDTH": padded_width,
        "enable_fp_fusion": bounded,
        "num_warps": shape.warps,
        "num_stages": shape.stages,
    }


@cache
def capability_of(device: int) -> int:
    """Compute capability of a CUDA device, 10 major + minor."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def in_units(x: Tensor, unit: int) -> tuple[int, ...]:
    """Strides of samples, heads and tokens."""
    strides = x.stride()[:3]
    return strides if unit == 1 else tuple(each // unit for each in strides)


def readable(x: Tensor) -> Tensor:
    """``x``, or a copy, with contiguous rows and offsets that fit."""
    fits = x.stride(3) == 1 and x.stride(2) <= _LARGEST_ROW_STRIDE
    return x if fits or x.shape[3] == 1 else x.contiguous()


def device_of(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Kernels are launched on the current device, which need not be that of ``x``."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
