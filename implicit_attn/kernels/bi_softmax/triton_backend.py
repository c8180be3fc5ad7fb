"""Bi-softmax by Triton kernels: memory linear in the number of tokens, on CUDA devices.

The functions trust their arguments, which ``dispatch.bisoftmax`` has checked; the formulas are there. Names:
``S = beta Z Z^T``, L its log-sum-exps by rows, ``P = exp(S - L)``; ``H V`` the product with the Hessian, r
the row means that it needs. The ``normaliser`` is ``2^boost exp(-L)`` where scores are bounded, else L in
base 2, and ``peaks`` its maximum for each head. Products take the dtype of ``z`` and accumulate in float32;
float32 products are split into three TF32 ones. Set ``TRITON_INTERPRET=1`` before Triton is imported to run
the kernels on the CPU, slowly.

Tile sizes come from static tables by kernel, head width, bytes per number and architecture. Nothing is tuned
at run time: the same shapes take the same kernel, so results repeat bit by bit.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
import triton
from torch import Tensor

from implicit_attn.kernels.arguments import within_exponent, zero_masked
from implicit_attn.kernels.bi_softmax import triton_kernels as kernels
from implicit_attn.kernels.bi_softmax.triton_single_tile import (
    small_gradient_kernel,
    small_hvp_kernel,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST_HEAD = 256
LARGEST_SINGLE_TILE = 128  # tokens
OLDEST_TRITON = (3, 3)  # that compiles all kernels; setup.cfg says so, too
INTERPRETED = bool(kernels.INTERPRETED)
LOG2E = math.log2(math.e)
_LARGEST_ROW_STRIDE = 1 << 23  # offsets inside a tile are of 32 bits

# --- what kernels are launched with -------------------------------------------------------------------


@dataclass(frozen=True)
class Tiles:
    """Rows a program owns, columns it takes at a time, warps, depth of the software pipeline."""

    rows: int
    columns: int
    warps: int
    stages: int


# The interpreter checks the arithmetic, with rows and columns that differ and several of both.
INTERPRETER = Tiles(128, 64, 4, 1)

# (kernel, bytes of a number) -> largest padded width: tiles, for Hopper.
# Chosen by what ptxas reports for sm_90: no or little spilling, two programs or more on a
# multiprocessor where that can be had. Float32 products are split in registers: their tiles are small.
Table = dict[tuple[str, int], dict[int, Tiles]]
_HOPPER: Table = {
    ("lse", 2): {64: Tiles(128, 64, 4, 3), 128: Tiles(128, 64, 4, 3), 256: Tiles(128, 64, 8, 2)},
    ("lse", 4): {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 32, 4, 1), 256: Tiles(32, 32, 8, 1)},
    ("gradient", 2): {64: Tiles(128, 64, 4, 3), 128: Tiles(64, 64, 4, 3), 256: Tiles(128, 64, 8, 2)},
    ("gradient", 4): {64: Tiles(64, 32, 4, 2), 128: Tiles(64, 16, 4, 1), 256: Tiles(32, 32, 8, 1)},
    ("curvature", 2): {
        64: Tiles(64, 64, 4, 3), 128: Tiles(64, 64, 4, 2), 256: Tiles(128, 32, 8, 1),
    },
    ("free curvature", 2): {64: Tiles(64, 64, 4, 3), 128: Tiles(64, 32, 4, 3)},
    # Never 8 warps on 16 columns: Triton 3.6 reads beyond the shared memory there.
    ("curvature", 4): {128: Tiles(64, 16, 4, 1), 256: Tiles(16, 16, 4, 1)},
    ("single tile", 2): {128: Tiles(128, 128, 4, 1), 256: Tiles(128, 128, 8, 1)},
    ("single tile", 4): {256: Tiles(128, 128, 4, 1)},
}  # fmt: skip
# What differs on other cards with much memory on the chip: B200 and its kin, and A100.
_BLACKWELL: Table = {
    ("curvature", 2): {128: Tiles(64, 64, 8, 2), 256: Tiles(64, 32, 8, 1)},
    ("free curvature", 2): {64: Tiles(64, 32, 4, 2), 128: Tiles(64, 32, 8, 2)},
    ("causal", 2): {64: Tiles(64, 64, 4, 3)},
}
_AMPERE: Table = {
    ("lse", 2): {64: Tiles(128, 64, 4, 3), 128: Tiles(64, 64, 4, 3)},
    ("gradient", 2): {64: Tiles(64, 64, 4, 3), 128: Tiles(64, 32, 4, 3)},
    ("causal", 2): {64: Tiles(64, 32, 4, 3), 128: Tiles(64, 32, 8, 2)},
    ("curvature", 2): {64: Tiles(64, 32, 4, 3), 128: Tiles(32, 32, 4, 2)},
}
# For every kernel of several tiles on cards with as little as 99 KiB on the chip: the others before
# Hopper, and the later consumer cards (capability 12).
_LESS_ON_CHIP: Table = {
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


@cache
def tiles(kernel: str, width: int, size: int, capability: int) -> Tiles:
    """The tiles of a kernel of the table, given the padded head width and the bytes of a number.

    ``capability`` is the device's, 10 major + minor.
    """
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
        """Of the device, 10 major + minor."""
        return capability_of(self.z.device.index)

    def read(self, v: Tensor | None) -> tuple[tuple[Tensor, ...], int, list[int]]:
        """``z``, and ``v`` where given; the unit of widths and strides; the strides in it.

        The strides are those of samples, heads and tokens. The unit tells the kernels what divides them:
        Triton sees by itself where all are multiples of 16, and loads 16 bytes at a time; with this it
        does so for 8 as well (4 for float32).
        """
        tensors = (self.z,) if v is None else (self.z, v)
        strides = [each for x in tensors for each in x.stride()[:3]]
        common = math.gcd(16, self.z.shape[3], *strides)
        unit = 1 if common == 16 else common
        return tensors, unit, [each // unit for each in strides]

    def sizes(self, blocks: int, unit: int) -> tuple[int, int, int, int, float]:
        """Heads a sample, tokens, width, blocks a head and scale, as most kernels take them."""
        _, heads, tokens, width = self.z.shape
        return heads, tokens, width // unit, blocks, self.scale

    def tiles(self, kernel: str) -> Tiles:
        if INTERPRETED:
            return INTERPRETER
        return tiles(kernel, self.padded_width, self.z.element_size(), self.capability)

    def constants(self, shape: Tiles) -> dict[str, Any]:
        """Options of every kernel with tiles, with those of the compiler."""
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
        """Weights are scaled by this power of two: small ones of float16 would underflow."""
        return 14 if self.z.dtype == torch.float16 else 0

    def by_rows(self, kernel: str, unit: int) -> tuple[int, dict[str, Any]]:
        """Blocks of rows a head, and the options of a kernel that owns rows and goes over columns."""
        shape = self.tiles(kernel)
        options = {"UNIT": unit, "ROWS": shape.rows, "COLUMNS": shape.columns, "BOOST": self.boost}
        options |= self.even(shape) | self.constants(shape)
        return _ceil(self.tokens, shape.rows), options


@cache
def capability_of(device: int) -> int:
    """Compute capability of a CUDA device, 10 major + minor."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def readable(x: Tensor) -> Tensor:
    """``x``, or a copy, with contiguous rows and offsets that fit."""
    fits = x.stride(3) == 1 and x.stride(2) <= _LARGEST_ROW_STRIDE
    return x if fits or x.shape[3] == 1 else x.contiguous()


def device_of(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Kernels are launched on the current device, which need not be that of ``x``."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


# --- one function a launch, which fills the tensors given for results; no tensor is empty here ---------


def launch(kernel: Any, programs: int, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """``args`` are tensors, numbers and None; ``options`` constants, and what the compiler is told."""
    kernel[(programs,)](*args, **options)


def _ceil(total: int, part: int) -> int:
    return -(-total // part)


def parts(tokens: int) -> tuple[int, int]:
    """Rows of the two parts of a single tile; the second may be none."""
    first = max(16, int(triton.next_power_of_2(tokens)))
    half = first // 2
    rest = tokens - half
    if half >= 32 and (rest <= half // 2 or first > 64):
        return half, max(16, int(triton.next_power_of_2(rest)))
    return first, 0


def _single_tile(
    kernel: Any, given: LaunchArguments, v: Tensor | None, tensors: tuple[Tensor | None, ...]
) -> None:
    """Launch a kernel that holds a whole head; ``tensors`` are those of its own."""
    read, unit, strides = given.read(v)
    _, heads, tokens, width = given.z.shape
    numbers = (heads, tokens, width // unit, given.scale, *(() if v is None else (given.beta,)))
    first, second = parts(tokens)
    options = {"UNIT": unit, "FIRST": first, "SECOND": second, "CAUSAL": given.causal}
    options |= {"BOUNDED": given.by_reciprocals, "BOOST": given.boost}
    options |= given.constants(given.tiles("single tile"))
    launch(kernel, given.heads, (*read, given.keep, *tensors, *numbers, *strides), options)


def _over_columns(
    kernel: Any,
    name: str,
    given: LaunchArguments,
    v: Tensor | None,
    tensors: tuple[Tensor | None, ...],
    **options: bool,
) -> None:
    """Launch a kernel that owns blocks of rows and goes over columns, with the tiles of ``name``.

    All take their arguments in this order; ``tensors`` are those of their own, ``options`` constants.
    """
    read, unit, strides = given.read(v)
    blocks, constants = given.by_rows(name, unit)
    numbers = (*given.sizes(blocks, unit), *(() if v is None else (given.beta,)))
    args = (*read, given.keep, given.extent, *tensors, *numbers, *strides)
    launch(kernel, given.heads * blocks, args, constants | options)


def row_lse(given: LaunchArguments, lse: Tensor, normaliser: Tensor) -> None:
    """``L`` from all tiles; ``normaliser``: the module's text says what it is."""
    tensors = (lse, normaliser)
    _over_columns(kernels.lse_kernel, "lse", given, None, tensors, BOUNDED=given.bounded)


def row_mean(
    given: LaunchArguments, v: Tensor, cotangent: Tensor | None, mean: Tensor, normaliser: Tensor
) -> None:
    """``r`` from all tiles that the mask leaves; ``normaliser`` as from ``row_lse``."""
    tensors = (cotangent, mean, normaliser)
    options = {"CAUSAL": given.causal, "BOUNDED": given.by_reciprocals}
    _over_columns(kernels.mean_kernel, "mean", given, v, tensors, **options)


def gradient(given: LaunchArguments, normaliser: Tensor, out: Tensor) -> None:
    """``(P + P^T) Z``; ``normaliser`` as from ``row_lse``."""
    peaks = normaliser if given.bounded else normaliser.amax(-1)
    tensors = (normaliser, peaks, out)
    _over_columns(kernels.gradient_kernel, "gradient", given, None, tensors, BOUNDED=given.bounded)


def causal_gradient(given: LaunchArguments, lse: Tensor, normaliser: Tensor, out: Tensor) -> None:
    """A pass over the rows, which also finds ``L``, then one over the columns."""
    rows = torch.empty(given.z.shape, dtype=torch.float32, device=given.z.device)
    for kernel, tensors in (
        (kernels.causal_rows_kernel, (lse, normaliser, rows)),
        (kernels.causal_columns_kernel, (normaliser, rows, out)),
    ):
        _over_columns(kernel, "causal", given, None, tensors)


def curvature(
    given: LaunchArguments, v: Tensor, normaliser: Tensor, mean: Tensor, out: Tensor
) -> None:
    """``H V`` from ``r`` and the normaliser that came with it."""
    name = "curvature" if given.by_reciprocals else "free curvature"
    shifted = not given.by_reciprocals and not given.causal
    peaks = normaliser.amax(-1) if shifted else normaliser
    tensors = (normaliser, mean, peaks, out)
    options = {"BOUNDED": given.by_reciprocals, "CAUSAL": given.causal}
    _over_columns(kernels.curvature_kernel, name, given, v, tensors, **options)


# --- the backend --------------------------------------------------------------------------------------


def lacks(z: Tensor, mask: Tensor | None = None) -> str | None:
    """Why these kernels do not take ``z`` (B, H, N, p) and ``mask`` (B, N); None where they do."""
    if z.dtype not in DTYPES:
        return f"the Triton kernels support float32, bfloat16 and float16, got {z.dtype}"
    if not 1 <= z.shape[3] <= WIDEST_HEAD:
        return f"the Triton kernels support head widths of 1 to {WIDEST_HEAD}, got {z.shape[3]}"
    if z.numel() // max(z.shape[3], 1) >= 1 << 31:
        return f"B * H * N must be less than 2^31, got the shape {tuple(z.shape)}"
    if mask is not None and mask.device != z.device:
        return f"mask must be on the device of z, {z.device}, got {mask.device}"
    return _device_reason(z)


def _device_reason(z: Tensor) -> str | None:
    if INTERPRETED:
        return None if z.device.type in ("cpu", "cuda") else f"z is on {z.device}"
    if _version(triton.__version__) < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        return f"the kernels need Triton {oldest} or newer, got {triton.__version__}"
    if not z.is_cuda:
        return f"Triton needs a CUDA device (or TRITON_INTERPRET=1), got {z.device}"
    if torch.version.hip is not None:
        return "the kernels need an NVIDIA device"
    capability = capability_of(z.device.index)
    if capability < 80:
        return f"the kernels need compute capability 8.0 or more, {z.device} has {capability / 10}"
    return None


@cache
def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def bisoftmax_forward(
    z: Tensor,
    beta: float,
    mask: Tensor | None = None,
    causal: bool = False,
    limit: float | None = None,
    *,
    single_tile: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """``dispatch.bisoftmax`` for what ``lacks`` takes, not empty; both results are contiguous.

    ``single_tile`` takes the kernel that holds a whole head of up to 128 tokens on the chip (None: where
    its registers suffice); ValueError where it is not possible.
    """
    # A single token needs its peak: log exp S would have the rounding of 1.
    given = _arguments(z, beta, mask, causal, None if z.shape[2] == 1 else limit)
    out = _contiguous_like(z)
    lse = torch.empty(z.shape[:3], dtype=torch.float32, device=z.device)
    with device_of(z):
        if _wants_single_tile(given, "gradient", single_tile):
            _single_tile(small_gradient_kernel, given, None, (lse, out))
            return out, lse
        given = _zero_masked(given)
        normaliser = torch.empty_like(lse)
        if causal:
            causal_gradient(given, lse, normaliser, out)
            return out, lse
        row_lse(given, lse, normaliser)
        gradient(given, normaliser, out)
    return out, lse


def bisoftmax_hvp(
    z: Tensor,
    v: Tensor,
    beta: float,
    mask: Tensor | None = None,
    causal: bool = False,
    limit: float | None = None,
    lse: Tensor | None = None,
    lse_cotangent: Tensor | None = None,
    *,
    single_tile: bool | None = None,
) -> Tensor:
    """``H V + beta (diag(a) P + P^T diag(a)) Z``, contiguous, for the cotangent ``a`` of the lse.

    ``lse``, which other backends use, is found again in the pass for r. Else as ``bisoftmax_forward``.
    """
    given, out, cotangent = _arguments(z, beta, mask, causal, limit), _contiguous_like(z), None
    if lse_cotangent is not None:
        cotangent = lse_cotangent.to(torch.float32).contiguous()
    with device_of(z):
        v = readable(v)
        if _wants_single_tile(given, "hvp", single_tile):
            _single_tile(small_hvp_kernel, given, v, (cotangent, out))
            return out
        given, v = _zero_masked(given), zero_masked(v, mask)
        mean = torch.empty(z.shape[:3], dtype=torch.float32, device=z.device)
        normaliser = torch.empty_like(mean)
        row_mean(given, v, cotangent, mean, normaliser)
        curvature(given, v, normaliser, mean, out)
    return out


def _contiguous_like(z: Tensor) -> Tensor:
    """Unfilled. The strides of ``z`` are not kept: compilers are promised contiguous results, and
    offsets within a tile are of 32 bits, which a wide row stride would overflow.
    """
    return torch.empty(z.shape, dtype=z.dtype, device=z.device)


def _arguments(
    z: Tensor, beta: float, mask: Tensor | None, causal: bool, limit: float | None
) -> LaunchArguments:
    keep = None if mask is None else mask.contiguous().view(torch.uint8)
    return LaunchArguments(readable(z), float(beta), keep, None, causal, within_exponent(limit))


def _wants_single_tile(given: LaunchArguments, kernel: str, single_tile: bool | None) -> bool:
    """Whether one program holds a whole head, "gradient" or "hvp": where its registers do not spill."""
    tokens, width = given.tokens, given.padded_width
    if single_tile and tokens > LARGEST_SINGLE_TILE:
        raise ValueError(f"single_tile holds at most {LARGEST_SINGLE_TILE} tokens, got {tokens}")
    if single_tile is not None:
        return single_tile
    if given.z.element_size() == 4:
        return tokens <= 64 and width <= 64
    if kernel == "gradient":
        return tokens <= 64 or (tokens <= LARGEST_SINGLE_TILE and width <= 128)
    return (tokens <= 64 and width <= 128) or (tokens <= 96 and width <= 64)


def _zero_masked(given: LaunchArguments) -> LaunchArguments:
    """With masked tokens zero and each sample's length: kernels then need the mask at the ends only."""
    keep = given.keep
    if keep is None:
        return given
    z = given.z.masked_fill((keep == 0)[:, None, :, None], 0.0)
    positions = torch.arange(1, keep.shape[1] + 1, dtype=torch.int32, device=keep.device)
    extent = (positions * keep).amax(1)
    return replace(given, z=z, extent=extent)
