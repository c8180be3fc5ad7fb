"""Tile sizes, chosen from static tables: by kernel, head width, bytes per number, architecture.

Nothing is tuned at run time: the same shapes take the same kernel, so results repeat bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """Rows a program owns, columns it takes at a time, warps, depth of the software pipeline."""

    rows: int
    columns: int
    warps: int
    stages: int


MOST_ON_CHIP = 128  # tokens

# The interpreter checks the arithmetic, with rows and columns that differ and several of both.
INTERPRETER = Tiles(128, 64, 4, 1)

# (kernel, bytes of a number) -> largest padded width: tiles, for Hopper. The triangle has square ones.
# Chosen by what ptxas reports for sm_90: no or little spilling, two programs or more on a
# multiprocessor where that can be had. A float32 product is three TF32 ones with operands split in
# registers, so its tiles are small; over a width of WIDEST_SPLIT that spills, and the ordinary
# float32 units do the products.
WIDEST_SPLIT = 128
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
    ("small", 2): {128: Tiles(128, 128, 4, 1), 256: Tiles(128, 128, 8, 1)},
    ("small", 4): {256: Tiles(128, 128, 4, 1)},
}  # fmt: skip
# For every kernel but the small ones on cards with as little as 99 KiB on the chip: those before
# Hopper, and of the later ones the consumer cards (capability 12). 9 and 10 have 227 KiB.
_LARGE_CHIPS = (9, 10)
_LESS_ON_CHIP = {
    2: {64: Tiles(64, 32, 4, 2), 128: Tiles(64, 32, 4, 1), 256: Tiles(32, 32, 4, 1)},
    4: {128: Tiles(32, 32, 4, 1), 256: Tiles(16, 16, 4, 1)},
}
# Kernels that take the tiles of another one.
_SAME = {"causal": "gradient", "mean": "curvature"}


def tiles(kernel: str, width: int, size: int, capability: int) -> Tiles:
    """The tiles of a kernel.

    Args:
        kernel: its name in the table.
        width: padded head width.
        size: bytes of a number.
        capability: major version of the device's compute capability; 0: the interpreter.
    """
    if capability == 0:
        return INTERPRETER
    less = capability not in _LARGE_CHIPS and kernel != "small"
    table = _LESS_ON_CHIP[size] if less else _TABLE[_SAME.get(kernel, kernel), size]
    return next(chosen for largest, chosen in table.items() if width <= largest)


def halves(kernel: str, width: int, size: int) -> bool:
    """Whether sums from half of the tiles, "triangle" or "tangents", fit in the registers."""
    widest = {"triangle": 128, "tangents": 32}[kernel]
    return size == 2 or width <= widest


def on_chip(kernel: str, tokens: int, width: int, size: int) -> bool:
    """Whether one program holds a whole head: "gradient" or "hvp"; else the registers spill.

    Two launches are then better than one. Arguments as for ``tiles``.
    """
    if tokens > MOST_ON_CHIP:
        return False
    if size == 4:
        return tokens <= 64 and width <= 64
    if tokens <= 64:
        return kernel == "gradient" or width <= 128
    if kernel == "gradient":
        return width <= 128
    return tokens <= 96 and width <= 64
