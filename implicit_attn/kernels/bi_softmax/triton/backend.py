"""Bi-softmax by Triton kernels: memory linear in the number of tokens, on CUDA devices.

The functions trust their arguments, which ``dispatch`` has checked. The formulas are there and in the
kernels' own files. Products take the dtype of ``z`` and accumulate in float32; float32 products are
split into three TF32 ones. Set ``TRITON_INTERPRET=1`` before Triton is imported to run the kernels on
the CPU, slowly.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import triton
from torch import Tensor

from implicit_attn.kernels.arguments import LARGEST_EXPONENT, within_exponent, zero_masked
from implicit_attn.kernels.bi_softmax.triton import launch
from implicit_attn.kernels.bi_softmax.triton.arguments import (
    INTERPRETED,
    LARGEST_SINGLE_TILE,
    LaunchArguments,
    capability_of,
    device_of,
    readable,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST_HEAD = 256
OLDEST_TRITON = (3, 3)  # that compiles all kernels; setup.cfg says so, too
_TRIANGULAR_FROM = 1024  # tokens from which half the tiles outweigh the second launch


def supports(z: Tensor, mask: Tensor | None = None) -> str | None:
    """Why these kernels do not take ``z`` (B, H, N, p) and ``mask`` (B, N); None where they do."""
    if z.dtype not in DTYPES:
        return f"the Triton kernels take float32, bfloat16 and float16, got {z.dtype}"
    if not 1 <= z.shape[3] <= WIDEST_HEAD:
        return f"the Triton kernels take head widths from 1 to {WIDEST_HEAD}, got {z.shape[3]}"
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
        return f"the kernels need Triton {oldest} or newer, found {triton.__version__}"
    if not z.is_cuda:
        return f"Triton needs a CUDA device (or TRITON_INTERPRET=1), z is on {z.device}"
    if torch.version.hip is not None:
        return "the kernels are written for NVIDIA devices"
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
    triangular: bool | None = None,
    single_tile: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """``dispatch.bisoftmax`` for what ``supports`` takes, not empty; both results are contiguous.

    ``triangular`` finds ``L`` from half of the tiles (None: where ``limit`` and the registers allow it,
    from 1024 tokens), ``single_tile`` takes the kernel that holds a whole head of up to 128 tokens on
    the chip (None: where its registers suffice); ValueError where they are not possible.
    """
    # A single token needs its peak: log exp S would have the rounding of 1.
    given = _arguments(z, beta, mask, causal, None if z.shape[2] == 1 else limit)
    triangular = _wants_triangle(given, "triangle", triangular)
    out = _contiguous_like(z)
    lse = torch.empty(z.shape[:3], dtype=torch.float32, device=z.device)
    with device_of(z):
        if _wants_single_tile(given, "gradient", single_tile):
            launch.single_tile_gradient(given, out, lse)
            return out, lse
        given = _zero_masked(given)
        normaliser = torch.empty_like(lse)
        if causal:
            launch.causal_gradient(given, lse, normaliser, out)
            return out, lse
        (launch.triangle_lse if triangular else launch.row_lse)(given, lse, normaliser)
        launch.gradient(given, normaliser, out)
    return out, lse


def bisoftmax_hvp(
    z: Tensor,
    v: Tensor,
    beta: float,
    mask: Tensor | None = None,
    causal: bool = False,
    lse: Tensor | None = None,
    lse_cotangent: Tensor | None = None,
    *,
    limit: float | None = None,
    triangular: bool | None = None,
    single_tile: bool | None = None,
) -> Tensor:
    """``H V + beta (diag(a) P + P^T diag(a)) Z``, contiguous, for the cotangent ``a`` of the lse.

    ``triangular`` finds the mean tangents from half of the tiles; only then ``lse`` is used, and found
    first where it is None. Else as ``bisoftmax_forward``.
    """
    given = _arguments(z, beta, mask, causal, limit)
    triangular = _wants_triangle(given, "tangents", triangular)
    out = _contiguous_like(z)
    lse, cotangent = (
        None if t is None else t.to(torch.float32).contiguous() for t in (lse, lse_cotangent)
    )
    with device_of(z):
        v = readable(v)
        if _wants_single_tile(given, "hvp", single_tile):
            launch.single_tile_hvp(given, v, cotangent, out)
            return out
        given, v = _zero_masked(given), zero_masked(v, mask)
        mean = torch.empty(z.shape[:3], dtype=torch.float32, device=z.device)
        normaliser = torch.empty_like(mean)
        if triangular:
            if lse is None:
                lse = torch.empty_like(mean)
                launch.triangle_lse(given, lse, normaliser)
            launch.triangle_mean(given, v, lse, cotangent, mean, normaliser)
        else:
            launch.row_mean(given, v, cotangent, mean, normaliser)
        launch.curvature(given, v, normaliser, mean, out)
    return out


def _contiguous_like(z: Tensor) -> Tensor:
    """Unfilled. The strides of ``z`` are not kept: compilers are promised contiguous results, and
    offsets within a tile are of 32 bits, which a wide row stride would overflow.
    """
    return torch.empty(z.shape, dtype=z.dtype, device=z.device)


def _arguments(
    z: Tensor,
    beta: float,
    mask: Tensor | None,
    causal: bool,
    limit: float | None,
) -> LaunchArguments:
    keep = None if mask is None else mask.contiguous().view(torch.uint8)
    return LaunchArguments(readable(z), float(beta), keep, None, causal, within_exponent(limit))


def _wants_single_tile(given: LaunchArguments, kernel: str, single_tile: bool | None) -> bool:
    if single_tile and given.tokens > LARGEST_SINGLE_TILE:
        raise ValueError(
            f"single_tile holds at most {LARGEST_SINGLE_TILE} tokens, got {given.tokens}"
        )
    if single_tile is not None:
        return single_tile
    return given.fits_one_tile(kernel)


def _wants_triangle(given: LaunchArguments, kernel: str, triangular: bool | None) -> bool:
    if triangular and not given.by_reciprocals:
        raise ValueError(
            f"triangular needs a limit of at most {LARGEST_EXPONENT} and no causal mask"
        )
    if triangular is not None or not given.by_reciprocals or given.tokens < _TRIANGULAR_FROM:
        return bool(triangular)
    return given.halves(kernel)


def _zero_masked(given: LaunchArguments) -> LaunchArguments:
    """With zeros at masked tokens: tiled kernels then need the mask at the ends only; an extent."""
    keep = given.keep
    if keep is None:
        return given
    z = given.z.masked_fill((keep == 0)[:, None, :, None], 0.0)
    positions = torch.arange(1, keep.shape[1] + 1, dtype=torch.int32, device=keep.device)
    extent = (positions * keep).amax(1)
    return replace(given, z=z, extent=extent)
