"""One function per launch: tensors in, tensors filled. The problem is never empty here."""

# pyright: reportArgumentType=false, reportCallIssue=false
# (Launches add options of the compiler, and constants in place of constexpr.)
from __future__ import annotations

import torch
import triton
from torch import Tensor

from implicit_attn.kernels.bi_softmax.triton.atomic import atomic_gradient_kernel
from implicit_attn.kernels.bi_softmax.triton.gradient import causal_columns_kernel, gradient_kernel
from implicit_attn.kernels.bi_softmax.triton.hvp import curvature_kernel
from implicit_attn.kernels.bi_softmax.triton.lse import causal_rows_kernel, lse_kernel
from implicit_attn.kernels.bi_softmax.triton.mean import mean_kernel
from implicit_attn.kernels.bi_softmax.triton.problem import Problem
from implicit_attn.kernels.bi_softmax.triton.small import small_gradient_kernel
from implicit_attn.kernels.bi_softmax.triton.small_hvp import small_hvp_kernel
from implicit_attn.kernels.bi_softmax.triton.triangle import (
    triangle_kernel,
    triangle_lse_kernel,
    triangle_mean_kernel,
)

# Slots of partial sums a head, at most; and programs enough to fill a large card.
MOST_SLICES, PROGRAMS = 32, 1024


def parts(tokens: int) -> tuple[int, int]:
    """Rows of the two parts of a small problem; the second may be none."""
    first = max(16, int(triton.next_power_of_2(tokens)))
    half = first // 2
    rest = tokens - half
    if half >= 32 and (rest <= half // 2 or first > 64):
        return half, max(16, int(triton.next_power_of_2(rest)))
    return first, 0


def small_gradient(problem: Problem, out: Tensor, lse: Tensor) -> None:
    z, (first, second) = problem.z, parts(problem.tokens)
    shape = problem.tiles("small")
    small_gradient_kernel[(problem.heads,)](
        z, *problem.pads, lse, out, z.shape[1], problem.tokens, z.shape[3], problem.scale,
        *z.stride(), *out.stride(), FIRST=first, SECOND=second,
        HAS_MASK=problem.keep is not None, CAUSAL=problem.causal, BOUNDED=problem.shares, BOOST=problem.boost,
        num_warps=shape.warps, num_stages=shape.stages, **problem.constants,
    )  # fmt: skip


def small_hvp(problem: Problem, v: Tensor, cotangent: Tensor | None, out: Tensor) -> None:
    z, (first, second) = problem.z, parts(problem.tokens)
    shape = problem.tiles("small")
    small_hvp_kernel[(problem.heads,)](
        z, v, *problem.pads, z if cotangent is None else cotangent, out,
        z.shape[1], problem.tokens, z.shape[3], problem.scale, problem.beta,
        *z.stride(), *v.stride(), *out.stride(), FIRST=first, SECOND=second,
        HAS_MASK=problem.keep is not None, HAS_COTANGENT=cotangent is not None,
        CAUSAL=problem.causal, BOUNDED=problem.shares,
        BOOST=problem.boost,
        num_warps=shape.warps, num_stages=shape.stages, **problem.constants,
    )  # fmt: skip


def row_lse(problem: Problem, lse: Tensor, rows_of: Tensor) -> None:
    """``L`` from all tiles; ``rows_of``: its shares if the scores are bounded, else in base 2."""
    z, shape = problem.z, problem.tiles("lse")
    blocks = triton.cdiv(problem.tokens, shape.rows)
    lse_kernel[(problem.heads * blocks,)](
        z, *problem.pads, lse, rows_of, z.shape[1], problem.tokens, z.shape[3], blocks, problem.scale,
        *z.stride(), ROWS=shape.rows, COLUMNS=shape.columns,
        EVEN=problem.even(shape.rows, shape.columns), EVEN_WIDTH=problem.even_width,
        HAS_MASK=problem.keep is not None, BOUNDED=problem.bounded, BOOST=problem.boost,
        num_warps=shape.warps, num_stages=shape.stages, **problem.constants,
    )  # fmt: skip


def _triangle(problem: Problem, v: Tensor | None) -> tuple[Tensor, int, int]:
    """Slots of partial sums, their number a head, and the block."""
    z, shape = problem.z, problem.tiles("triangle" if v is None else "tangents")
    tangent, v = v is not None, z if v is None else v
    block = shape.rows
    blocks = triton.cdiv(problem.tokens, block)
    slices = int(min(blocks, MOST_SLICES, triton.cdiv(PROGRAMS, problem.heads)))
    slots = torch.empty(
        (problem.heads * slices, problem.tokens), dtype=torch.float32, device=z.device
    )
    triangle_kernel[(problem.heads * slices,)](
        z, v, *problem.pads, slots, z.shape[1], problem.tokens, z.shape[3], slices, problem.scale,
        *z.stride(), *v.stride(), TANGENT=tangent, BLOCK=block, EVEN=problem.even(block),
        EVEN_WIDTH=problem.even_width, HAS_MASK=problem.keep is not None,
        num_warps=shape.warps, num_stages=shape.stages, **problem.constants,
    )  # fmt: skip
    return slots, slices, block


def triangle_lse(problem: Problem, lse: Tensor, shares: Tensor) -> None:
    """``L`` and ``shares`` from half of the tiles."""
    slots, slices, block = _triangle(problem, None)
    blocks = triton.cdiv(problem.tokens, block)
    keep, extent = problem.pads
    triangle_lse_kernel[(problem.heads * blocks,)](
        slots, keep, extent, lse, shares, problem.z.shape[1], problem.tokens, blocks, slices,
        BLOCK=block, BOOST=problem.boost,
        HAS_MASK=problem.keep is not None, HAS_EXTENT=problem.extent is not None,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


def triangle_mean(
    problem: Problem, v: Tensor, lse: Tensor, cotangent: Tensor | None, mean: Tensor, shares: Tensor
) -> None:
    """``r`` and ``shares`` from half of the tiles."""
    slots, slices, block = _triangle(problem, v)
    blocks = triton.cdiv(problem.tokens, block)
    triangle_mean_kernel[(problem.heads * blocks,)](
        slots, problem.pads[1], lse, lse if cotangent is None else cotangent, mean, shares,
        problem.z.shape[1], problem.tokens, blocks, slices, problem.beta, BLOCK=block,
        HAS_EXTENT=problem.extent is not None, HAS_COTANGENT=cotangent is not None,
        BOOST=problem.boost, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


def row_mean(
    problem: Problem, v: Tensor, cotangent: Tensor | None, mean: Tensor, rows_of: Tensor
) -> None:
    """``r`` from all tiles that the mask leaves; ``rows_of`` as from ``row_lse``."""
    z, shape = problem.z, problem.tiles("mean")
    blocks = triton.cdiv(problem.tokens, shape.rows)
    mean_kernel[(problem.heads * blocks,)](
        z, v, *problem.pads, mean if cotangent is None else cotangent, mean, rows_of,
        z.shape[1], problem.tokens, z.shape[3], blocks, problem.scale, problem.beta,
        *z.stride(), *v.stride(), ROWS=shape.rows, COLUMNS=shape.columns,
        EVEN=problem.even(shape.rows, shape.columns), EVEN_WIDTH=problem.even_width,
        HAS_MASK=problem.keep is not None, HAS_COTANGENT=cotangent is not None,
        CAUSAL=problem.causal, BOUNDED=problem.shares, BOOST=problem.boost,
        num_warps=shape.warps, num_stages=shape.stages, **problem.constants,
    )  # fmt: skip


def gradient(problem: Problem, rows_of: Tensor, out: Tensor) -> None:
    """``(P + P^T) Z`` from the shares if the scores are bounded, else from ``L`` (base 2)."""
    z, shape = problem.z, problem.tiles("gradient")
    blocks = triton.cdiv(problem.tokens, shape.rows)
    peaks = rows_of if problem.bounded else rows_of.amax(-1)
    gradient_kernel[(problem.heads * blocks,)](
        z, *problem.pads, rows_of, peaks, out, z.shape[1], problem.tokens, z.shape[3], blocks,
        problem.scale, *z.stride(), *out.stride(),
        ROWS=shape.rows, COLUMNS=shape.columns, EVEN=problem.even(shape.rows, shape.columns),
        EVEN_WIDTH=problem.even_width, HAS_MASK=problem.keep is not None,
        BOUNDED=problem.bounded, BOOST=problem.boost,
        num_warps=shape.warps, num_stages=shape.stages, **problem.constants,
    )  # fmt: skip


def atomic_gradient(problem: Problem, shares: Tensor, out: Tensor) -> None:
    """``(P + P^T) Z`` from half of the tiles, in an order that changes from run to run."""
    z, shape = problem.z, problem.tiles("atomic")
    blocks = triton.cdiv(problem.tokens, shape.rows)
    total = torch.zeros(z.shape, dtype=torch.float32, device=z.device)
    atomic_gradient_kernel[(problem.heads * blocks,)](
        z, problem.pads[1], shares, total, z.shape[1], problem.tokens, z.shape[3], blocks,
        problem.scale, *z.stride(), BLOCK=shape.rows, EVEN=problem.even(shape.rows),
        EVEN_WIDTH=problem.even_width, BOOST=problem.boost,
        num_warps=shape.warps, num_stages=shape.stages, **problem.constants,
    )  # fmt: skip
    if problem.keep is not None:
        total.masked_fill_((problem.keep == 0)[:, None, :, None], 0.0)
    out.copy_(total)


def causal_gradient(problem: Problem, lse: Tensor, rows_of: Tensor, out: Tensor) -> None:
    """A pass over the rows, which also finds ``L``, then one over the columns."""
    z, shape = problem.z, problem.tiles("causal")
    blocks = triton.cdiv(problem.tokens, shape.rows)
    rows = torch.empty(z.shape, dtype=torch.float32, device=z.device)
    common = {
        "ROWS": shape.rows, "COLUMNS": shape.columns, "BOOST": problem.boost,
        "EVEN": problem.even(shape.rows, shape.columns), "EVEN_WIDTH": problem.even_width,
        "HAS_MASK": problem.keep is not None, "num_warps": shape.warps,
        "num_stages": shape.stages, **problem.constants,
    }  # fmt: skip
    sizes = (z.shape[1], problem.tokens, z.shape[3], blocks, problem.scale)
    grid = (problem.heads * blocks,)
    causal_rows_kernel[grid](z, *problem.pads, lse, rows_of, rows, *sizes, *z.stride(), **common)
    causal_columns_kernel[grid](
        z, *problem.pads, rows_of, rows, out, *sizes, *z.stride(), *out.stride(), **common
    )


def curvature(problem: Problem, v: Tensor, rows_of: Tensor, mean: Tensor, out: Tensor) -> None:
    """``H V`` from ``r`` and from the shares if the scores are bounded, else from ``L`` (base 2)."""
    z, shape = problem.z, problem.tiles("curvature")
    blocks = triton.cdiv(problem.tokens, shape.rows)
    peaks = rows_of if problem.shares or problem.causal else rows_of.amax(-1)
    curvature_kernel[(problem.heads * blocks,)](
        z, v, *problem.pads, rows_of, mean, peaks, out, z.shape[1],
        problem.tokens, z.shape[3], blocks, problem.scale, problem.beta,
        *z.stride(), *v.stride(), *out.stride(), ROWS=shape.rows, COLUMNS=shape.columns,
        EVEN=problem.even(shape.rows, shape.columns), EVEN_WIDTH=problem.even_width,
        HAS_MASK=problem.keep is not None, BOUNDED=problem.shares, CAUSAL=problem.causal,
        BOOST=problem.boost,
        num_warps=shape.warps, num_stages=shape.stages, **problem.constants,
    )  # fmt: skip
