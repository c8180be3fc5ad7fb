"""Bi-softmax by Triton kernels: memory linear in the number of tokens, on CUDA devices.

The functions trust their arguments, which ``dispatch.bisoftmax`` has checked; the formulas are there. Names:
``S = beta Z Z^T``, L its log-sum-exps by rows, ``P = exp(S - L)``; ``H V`` the product with the Hessian, r
the row means that it needs. The ``normaliser`` is ``2^boost exp(-L)`` where scores are bounded, else L in
base 2, and ``peaks`` its maximum for each head. Products take the dtype of ``z`` and accumulate in float32;
float32 products are split into three TF32 ones. Set ``TRITON_INTERPRET=1`` before Triton is imported to run
the kernels on the CPU, slowly.

Tile sizes come from a static table. Nothing is tuned at run time: the same shapes take the same kernel, so
results repeat bit by bit.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

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
OLDEST_TRITON = (3, 3)  # that compiles all kernels; setup.cfg says so, too
INTERPRETED = bool(kernels.INTERPRETED)
LOG2E = math.log2(math.e)
_LARGEST_ROW_STRIDE = 1 << 23  # offsets inside a tile are of 32 bits

# --- tiles ----------------------------------------------------------------------------------------


class Tiles(NamedTuple):
    """Rows that a program owns, columns that it processes at a time, warps and pipeline stages."""

    rows: int
    columns: int
    warps: int
    stages: int


# In the interpreter, rows and columns differ, and small problems have several tiles of both.
INTERPRETER = Tiles(128, 64, 4, 1)
# (kernel, bytes of a number) -> largest padded width: tiles for Hopper, on which the kernels ran.
# According to ptxas for sm_90, few registers spill, and two programs fit on a multiprocessor where possible.
# Float32 products are split in registers, so their tiles are small.
HOPPER = {
    ("lse", 2): {128: Tiles(128, 64, 4, 3), 256: Tiles(128, 64, 8, 2)},
    ("lse", 4): {64: Tiles(64, 64, 4, 2), 128: Tiles(64, 32, 4, 1), 256: Tiles(32, 32, 8, 1)},
    ("gradient", 2): {64: Tiles(128, 64, 4, 3), 128: Tiles(64, 64, 4, 3), 256: Tiles(128, 64, 8, 2)},
    ("gradient", 4): {64: Tiles(64, 32, 4, 2), 128: Tiles(64, 16, 4, 1), 256: Tiles(32, 32, 8, 1)},
    ("curvature", 2): {
        64: Tiles(64, 64, 4, 3), 128: Tiles(64, 64, 4, 2), 256: Tiles(128, 32, 8, 1),
    },
    ("free curvature", 2): {
        64: Tiles(64, 64, 4, 3), 128: Tiles(64, 32, 4, 3), 256: Tiles(128, 32, 8, 1),
    },
    # With 8 warps on 16 columns Triton 3.6 reads beyond the shared memory.
    ("curvature", 4): {128: Tiles(64, 16, 4, 1), 256: Tiles(16, 16, 4, 1)},
}  # fmt: skip
_SAME = {"causal": "gradient", "mean": "curvature"}
# Tiles for other cards, for which the kernels have only been compiled; they need at most 99 KiB on the chip.
OTHERS = {
    2: {64: Tiles(64, 32, 8, 2), 128: Tiles(32, 32, 4, 2), 256: Tiles(32, 32, 4, 1)},
    4: {128: Tiles(32, 32, 4, 1), 256: Tiles(16, 16, 4, 1)},
}


@cache
def tiles(kernel: str, width: int, size: int, capability: int) -> Tiles:
    """Return the tiles of a kernel that iterates over columns.

    Args:
        width: padded head width.
        size: bytes of a number.
        capability: the device's, 10 major + minor.
    """
    by_width = OTHERS[size]
    if capability // 10 == 9:
        name = _SAME.get(kernel, kernel)
        by_width = HOPPER.get((name, size)) or HOPPER["curvature", size]
    return next(chosen for largest, chosen in by_width.items() if width <= largest)


@cache
def capability_of(device: int) -> int:
    """Return the compute capability of a CUDA device, 10 major + minor."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


# --- launches -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """Arguments that the kernels of one call share; no tensor is empty."""

    z: Tensor  # (B, H, N, p) as from ``_readable``
    v: Tensor | None
    beta: float
    keep: Tensor | None  # (B, N) uint8, 0 at masked tokens
    extent: Tensor | None  # (B,) int32, the tokens of a sample before its padding
    causal: bool  # row i is restricted to columns j <= i
    bounded: bool  # exp of the scores needs no row maximum

    @property
    def by_reciprocals(self) -> bool:
        """Whether the weights of a pair are ``exp(S) (a_i + a_j)`` with ``a = exp(-L)`` stored."""
        return self.bounded and not self.causal

    @property
    def capability(self) -> int:
        return 90 if INTERPRETED else capability_of(self.z.device.index)

    @property
    def padded_width(self) -> int:
        return _power_of_2(self.z.shape[3])

    def single_tile(self, kernel: Any, *tensors: Tensor | None) -> None:
        """Launch a kernel that holds a whole head, with further arguments ``tensors``."""
        batch, heads, tokens, width = self.z.shape
        # The rows of the two parts of the tile; the second may be none.
        first, second = _power_of_2(tokens), 0
        rest = tokens - first // 2
        if first >= 64 and (rest <= first // 4 or first > 64):
            first, second = first // 2, _power_of_2(rest)
        many = self.capability // 10 != 9 or self.padded_width > 128
        warps = 8 if many and self.z.element_size() == 2 else 4
        options = {"FIRST": first, "SECOND": second, "CAUSAL": self.causal}
        options["BOUNDED"] = self.by_reciprocals
        sizes = (heads, tokens, width)
        self._launch(kernel, batch * heads, (self.keep, *tensors), sizes, options, warps, 1)

    def over_columns(
        self, kernel: Any, name: str, *tensors: Tensor | None, **options: bool
    ) -> None:
        """Launch a kernel that owns blocks of rows and iterates over columns, with the tiles of ``name``.

        All these kernels take arguments in this order; ``tensors`` and the constants ``options`` are further
        arguments.
        """
        batch, heads, tokens, width = self.z.shape
        shape = tiles(name, self.padded_width, self.z.element_size(), self.capability)
        if INTERPRETED:
            shape = INTERPRETER
        blocks = -(-tokens // shape.rows)
        whole = tokens % shape.rows == 0 and tokens % shape.columns == 0
        # Whether no tile extends beyond the last token or the last feature.
        even = {"EVEN": self.extent is None and whole, "EVEN_WIDTH": self.padded_width == width}
        constants = {"ROWS": shape.rows, "COLUMNS": shape.columns, **even, **options}
        tensors, sizes = (self.keep, self.extent, *tensors), (heads, tokens, width, blocks)
        programs = batch * heads * blocks
        self._launch(kernel, programs, tensors, sizes, constants, shape.warps, shape.stages)

    def _launch(
        self,
        kernel: Any,
        programs: int,
        tensors: tuple[Tensor | None, ...],
        sizes: tuple[int, ...],
        options: dict[str, Any],
        warps: int,
        stages: int,
    ) -> None:
        read = (self.z,) if self.v is None else (self.z, self.v)
        # The unit divides widths and strides. Triton itself detects multiples of 16 and then loads 16 bytes
        # at a time; with the unit it also does so for multiples of 8 (of 4 for float32).
        strides = [each for x in read for each in x.stride()[:3]]
        unit = math.gcd(16, self.z.shape[3], *strides)
        unit = 1 if unit == 16 else unit
        heads, tokens, width, *blocks = sizes
        betas = () if self.v is None else (self.beta,)
        numbers = (heads, tokens, width // unit, *blocks, self.beta * LOG2E, *betas)
        options |= {
            "UNIT": unit,
            "WIDTH": self.padded_width,
            # Weights are scaled by this power of two, because small ones would underflow in float16.
            "BOOST": 14 if self.z.dtype == torch.float16 else 0,
            "enable_fp_fusion": self.bounded,
            "num_warps": warps,
            "num_stages": stages,
        }
        args = (*read, *tensors, *numbers, *(each // unit for each in strides))
        launch(kernel, programs, args, options)


def launch(kernel: Any, programs: int, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Launch a kernel with tensors, numbers and None; ``options`` are constants and compiler options."""
    kernel[(programs,)](*args, **options)


def _power_of_2(number: int) -> int:
    """Return the next power of two, at least 16, the smallest side of a tensor core's product."""
    return max(16, int(triton.next_power_of_2(number)))


# --- the backend ----------------------------------------------------------------------------------


def lacks(z: Tensor, mask: Tensor | None = None) -> str | None:
    """Return why the kernels do not support ``z`` (B, H, N, p) and ``mask`` (B, N), or None if they do."""
    if z.dtype not in DTYPES:
        return f"the Triton kernels support float32, bfloat16 and float16, got {z.dtype}"
    if not 1 <= z.shape[3] <= WIDEST_HEAD:
        return f"the Triton kernels support head widths of 1 to {WIDEST_HEAD}, got {z.shape[3]}"
    if z.numel() // max(z.shape[3], 1) >= 1 << 31:
        return f"B * H * N must be less than 2^31, got the shape {tuple(z.shape)}"
    if mask is not None and mask.device != z.device:
        return f"mask must be on the device of z, {z.device}, got {mask.device}"
    if INTERPRETED:
        return None if z.device.type in ("cpu", "cuda") else f"z is on {z.device}"
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < OLDEST_TRITON:
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


def bisoftmax_forward(
    z: Tensor,
    beta: float,
    mask: Tensor | None = None,
    causal: bool = False,
    limit: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return gradient (B, H, N, p) in the dtype of ``z`` and lse (B, H, N) in float32, contiguous."""
    # For a single token, log exp S without its peak would have the rounding error of 1.
    call = _call(z, None, beta, mask, causal, None if z.shape[2] == 1 else limit)
    out = torch.empty_like(z, memory_format=torch.contiguous_format)
    lse = torch.empty(z.shape[:3], dtype=torch.float32, device=z.device)
    with _on_device_of(z):
        if fits_on_chip(call):
            call.single_tile(small_gradient_kernel, lse, out)
            return out, lse
        call, normaliser = _zero_masked(call), torch.empty_like(lse)
        if causal:  # a pass over the rows, which also finds L, then one over the columns
            rows = torch.empty(z.shape, dtype=torch.float32, device=z.device)
            call.over_columns(kernels.causal_rows_kernel, "causal", lse, normaliser, rows)
            call.over_columns(kernels.causal_columns_kernel, "causal", normaliser, rows, out)
            return out, lse
        bounded = call.bounded
        call.over_columns(kernels.lse_kernel, "lse", lse, normaliser, BOUNDED=bounded)
        peaks = normaliser if bounded else normaliser.amax(-1)
        tensors = (normaliser, peaks, out)
        call.over_columns(kernels.gradient_kernel, "gradient", *tensors, BOUNDED=bounded)
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
) -> Tensor:
    """Return ``H V + beta (diag(a) P + P^T diag(a)) Z``, contiguous, for the cotangent ``a`` of the lse.

    ``lse``, which other backends use, is computed again in the pass for r.
    """
    call, cotangent = _call(z, v, beta, mask, causal, limit), None
    out = torch.empty_like(z, memory_format=torch.contiguous_format)
    if lse_cotangent is not None:
        cotangent = lse_cotangent.to(torch.float32).contiguous()
    with _on_device_of(z):
        if fits_on_chip(call):
            call.single_tile(small_hvp_kernel, cotangent, out)
            return out
        call, simple = _zero_masked(call), call.by_reciprocals
        mean = torch.empty(z.shape[:3], dtype=torch.float32, device=z.device)
        normaliser = torch.empty_like(mean)
        options = {"CAUSAL": causal, "BOUNDED": simple}
        call.over_columns(kernels.mean_kernel, "mean", cotangent, mean, normaliser, **options)
        peaks = normaliser if simple or causal else normaliser.amax(-1)
        name, tensors = "curvature" if simple else "free curvature", (normaliser, mean, peaks, out)
        call.over_columns(kernels.curvature_kernel, name, *tensors, **options)
    return out


def fits_on_chip(call: Call) -> bool:
    """Return whether one program holds a whole head, so that its registers do not spill."""
    tokens, width = call.z.shape[2], call.padded_width
    if call.z.element_size() == 4:
        return tokens <= 64 and width <= 64
    if call.v is None:
        return tokens <= 64 or (tokens <= 128 and width <= 128)
    return (tokens <= 64 and width <= 128) or (tokens <= 96 and width <= 64)


def _call(
    z: Tensor,
    v: Tensor | None,
    beta: float,
    mask: Tensor | None,
    causal: bool,
    limit: float | None,
) -> Call:
    keep = None if mask is None else mask.contiguous().view(torch.uint8)
    v = None if v is None else _readable(v)
    return Call(_readable(z), v, float(beta), keep, None, causal, within_exponent(limit))


def _readable(x: Tensor) -> Tensor:
    """Return ``x``, or a copy, with contiguous rows and offsets that fit."""
    fits = x.stride(3) == 1 and x.stride(2) <= _LARGEST_ROW_STRIDE
    return x if fits or x.shape[3] == 1 else x.contiguous()


def _on_device_of(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context in which kernels are launched on the device of ``x``."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def _zero_masked(call: Call) -> Call:
    """Return the call with zeros at masked tokens and the length of each sample.

    Kernels then need the mask at the ends only.
    """
    if call.keep is None:
        return call
    mask = call.keep != 0
    v = None if call.v is None else zero_masked(call.v, mask)
    positions = torch.arange(1, mask.shape[1] + 1, dtype=torch.int32, device=mask.device)
    extent = (positions * call.keep).amax(1)
    return replace(call, z=zero_masked(call.z, mask), v=v, extent=extent)
