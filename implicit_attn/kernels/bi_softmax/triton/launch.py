"""One function per launch, which fills the tensors given for results; no tensor is empty here."""

# pyright: reportArgumentType=false, reportCallIssue=false
# (Launches add options of the compiler, and constants in place of constexpr.)
from __future__ import annotations

import torch
import triton
from torch import Tensor

from implicit_attn.kernels.bi_softmax.triton.arguments import LaunchArguments
from implicit_attn.kernels.bi_softmax.triton.gradient import (
    atomic_gradient_kernel,
    causal_columns_kernel,
    gradient_kernel,
)
from implicit_attn.kernels.bi_softmax.triton.hvp import curvature_kernel
from implicit_attn.kernels.bi_softmax.triton.row_sums import (
    causal_rows_kernel,
    lse_kernel,
    mean_kernel,
)
from implicit_attn.kernels.bi_softmax.triton.single_tile import (
    small_gradient_kernel,
    small_hvp_kernel,
)
from implicit_attn.kernels.bi_softmax.triton.triangle import (
    triangle_kernel,
    triangle_lse_kernel,
    triangle_mean_kernel,
)

# Slots of partial sums a head, at most; and programs enough to fill a large card.
MOST_SLICES, PROGRAMS = 32, 1024


def parts(tokens: int) -> tuple[int, int]:
    """Rows of the two parts of a single tile; the second may be none."""
    first = max(16, int(triton.next_power_of_2(tokens)))
    half = first // 2
    rest = tokens - half
    if half >= 32 and (rest <= half // 2 or first > 64):
        return half, max(16, int(triton.next_power_of_2(rest)))
    return first, 0


def single_tile_gradient(given: LaunchArguments, out: Tensor, lse: Tensor) -> None:
    """``(P + P^T) Z`` and ``L``."""
    z, (first, second) = given.z, parts(given.tokens)
    small_gradient_kernel[(given.heads,)](
        z, given.keep, given.extent, lse, out, z.shape[1], given.tokens, z.shape[3], given.scale,
        *z.stride()[:3], FIRST=first, SECOND=second, CAUSAL=given.causal,
        BOUNDED=given.by_reciprocals, BOOST=given.boost,
        **given.constants(given.tiles("single tile")),
    )  # fmt: skip


def single_tile_hvp(
    given: LaunchArguments, v: Tensor, cotangent: Tensor | None, out: Tensor
) -> None:
    """``H V``."""
    z, (first, second) = given.z, parts(given.tokens)
    small_hvp_kernel[(given.heads,)](
        z, v, given.keep, given.extent, cotangent, out, z.shape[1], given.tokens, z.shape[3],
        given.scale, given.beta, *z.stride()[:3], *v.stride()[:3], FIRST=first, SECOND=second,
        CAUSAL=given.causal, BOUNDED=given.by_reciprocals, BOOST=given.boost,
        **given.constants(given.tiles("single tile")),
    )  # fmt: skip


def row_lse(given: LaunchArguments, lse: Tensor, normaliser: Tensor) -> None:
    """``L`` from all tiles; ``normaliser``: ``exp(-L)`` if scores are bounded, else ``L`` in base 2."""
    blocks, options = given.by_rows("lse")
    lse_kernel[(given.heads * blocks,)](
        given.z, given.keep, given.extent, lse, normaliser, *given.sizes(blocks),
        *given.z.stride()[:3], BOUNDED=given.bounded, **options,
    )  # fmt: skip


def _triangle(given: LaunchArguments, v: Tensor | None) -> tuple[Tensor, int, int]:
    """Slots of partial sums, their number a head, and the block."""
    shape = given.tiles("triangle" if v is None else "tangents")
    tangent, v = v is not None, given.z if v is None else v
    blocks = triton.cdiv(given.tokens, shape.rows)
    slices = int(min(blocks, MOST_SLICES, triton.cdiv(PROGRAMS, given.heads)))
    slots = torch.empty(
        (given.heads * slices, given.tokens), dtype=torch.float32, device=given.z.device
    )
    triangle_kernel[(given.heads * slices,)](
        given.z, v, given.keep, given.extent, slots, *given.sizes(slices), *given.z.stride()[:3],
        *v.stride()[:3], TANGENT=tangent, BLOCK=shape.rows, **given.even(shape),
        **given.constants(shape),
    )  # fmt: skip
    return slots, slices, shape.rows


def triangle_lse(given: LaunchArguments, lse: Tensor, reciprocals: Tensor) -> None:
    """``L`` and ``exp(-L)`` from half of the tiles."""
    slots, slices, block = _triangle(given, None)
    blocks = triton.cdiv(given.tokens, block)
    triangle_lse_kernel[(given.heads * blocks,)](
        slots, given.keep, given.extent, lse, reciprocals, given.z.shape[1], given.tokens, blocks,
        slices, BLOCK=block, BOOST=given.boost, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


def triangle_mean(
    given: LaunchArguments,
    v: Tensor,
    lse: Tensor,
    cotangent: Tensor | None,
    mean: Tensor,
    reciprocals: Tensor,
) -> None:
    """``r`` and ``exp(-L)`` from half of the tiles."""
    slots, slices, block = _triangle(given, v)
    blocks = triton.cdiv(given.tokens, block)
    triangle_mean_kernel[(given.heads * blocks,)](
        slots, given.extent, lse, cotangent, mean, reciprocals, given.z.shape[1], given.tokens,
        blocks, slices, given.beta, BLOCK=block, BOOST=given.boost, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip


def row_mean(
    given: LaunchArguments, v: Tensor, cotangent: Tensor | None, mean: Tensor, normaliser: Tensor
) -> None:
    """``r`` from all tiles that the mask leaves; ``normaliser`` as from ``row_lse``."""
    blocks, options = given.by_rows("mean")
    mean_kernel[(given.heads * blocks,)](
        given.z, v, given.keep, given.extent, cotangent, mean, normaliser, *given.sizes(blocks),
        given.beta, *given.z.stride()[:3], *v.stride()[:3], CAUSAL=given.causal,
        BOUNDED=given.by_reciprocals, **options,
    )  # fmt: skip


def gradient(given: LaunchArguments, normaliser: Tensor, out: Tensor) -> None:
    """``(P + P^T) Z``; ``normaliser`` as from ``row_lse``."""
    blocks, options = given.by_rows("gradient")
    peaks = normaliser if given.bounded else normaliser.amax(-1)
    gradient_kernel[(given.heads * blocks,)](
        given.z, given.keep, given.extent, normaliser, peaks, out, *given.sizes(blocks),
        *given.z.stride()[:3], BOUNDED=given.bounded, **options,
    )  # fmt: skip


def atomic_gradient(given: LaunchArguments, reciprocals: Tensor, out: Tensor) -> None:
    """``(P + P^T) Z`` from half of the tiles, in an order that changes from run to run."""
    z, shape = given.z, given.tiles("atomic")
    blocks = triton.cdiv(given.tokens, shape.rows)
    total = torch.zeros(z.shape, dtype=torch.float32, device=z.device)
    atomic_gradient_kernel[(given.heads * blocks,)](
        z, given.extent, reciprocals, total, *given.sizes(blocks), *z.stride()[:3],
        BLOCK=shape.rows, BOOST=given.boost, **given.even(shape), **given.constants(shape),
    )  # fmt: skip
    if given.keep is not None:
        total.masked_fill_((given.keep == 0)[:, None, :, None], 0.0)
    out.copy_(total)


def causal_gradient(given: LaunchArguments, lse: Tensor, normaliser: Tensor, out: Tensor) -> None:
    """A pass over the rows, which also finds ``L``, then one over the columns."""
    z, (blocks, options) = given.z, given.by_rows("causal")
    rows = torch.empty(z.shape, dtype=torch.float32, device=z.device)
    sizes, grid = given.sizes(blocks), (given.heads * blocks,)
    causal_rows_kernel[grid](
        z, given.keep, given.extent, lse, normaliser, rows, *sizes, *z.stride()[:3], **options
    )
    causal_columns_kernel[grid](
        z, given.keep, given.extent, normaliser, rows, out, *sizes, *z.stride()[:3], **options
    )


def curvature(
    given: LaunchArguments, v: Tensor, normaliser: Tensor, mean: Tensor, out: Tensor
) -> None:
    """``H V`` from ``r`` and the normaliser that came with it."""
    blocks, options = given.by_rows("curvature")
    shifted = not given.by_reciprocals and not given.causal
    peaks = normaliser.amax(-1) if shifted else normaliser
    curvature_kernel[(given.heads * blocks,)](
        given.z, v, given.keep, given.extent, normaliser, mean, peaks, out, *given.sizes(blocks),
        given.beta, *given.z.stride()[:3], *v.stride()[:3], BOUNDED=given.by_reciprocals,
        CAUSAL=given.causal, **options,
    )  # fmt: skip
