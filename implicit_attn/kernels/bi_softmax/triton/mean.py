"""The mean tangents ``r_i = sum_j P_ij T_ij`` of the Hessian-vector product, row by row.

For any scores and masks: the softmax is normalised on the way, with a running maximum unless the
scores are bounded. ``triton_triangle`` has the cheaper way for bounded scores.
"""

# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false, reportOperatorIssue=false
# (Triton compiles the kernels; a checker sees the Python in them: numbers for constexpr, branches.)
from __future__ import annotations

import triton
import triton.language as tl

from implicit_attn.kernels.bi_softmax.triton.lse import LOWEST, online
from implicit_attn.kernels.bi_softmax.triton.tiles import (
    counting,
    head_of,
    load_tile,
    scores,
    store_row_values,
    tangents,
    token_count,
)


@triton.jit
def _mean_step(
    weighted, total, peak, z_own, v_own, z_other, v_other, counts, rows, start, scale,
    COLUMNS: tl.constexpr, ON_DIAGONAL: tl.constexpr, BOUNDED: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Sums of the exponentials, with and without the tangents, over one more tile."""
    score = scores(z_own, z_other, PRECISION, UPCAST) * scale
    score += tl.where(counts, 0.0, float("-inf"))[None, :]
    if ON_DIAGONAL:
        columns = start + tl.arange(0, COLUMNS)
        score = tl.where(columns[None, :] <= rows[:, None], score, float("-inf"))
    tangent = tangents(z_own, v_own, z_other, v_other, PRECISION, UPCAST)
    if BOUNDED:
        exponential = tl.exp2(score)
        total += tl.sum(exponential, 1)
        weighted += tl.sum(exponential * tangent, 1)
    else:
        exponential, fading, peak, total = online(total, peak, score, 0)
        weighted = weighted * fading + tl.sum(exponential * tangent, 1)
    return weighted, total, peak


@triton.jit
def _mean_sums(
    weighted, total, peak, z, v, keep, sample, first, begin, end, count, tokens, width, scale,
    z_stride_n, z_stride_p, v_stride_n, v_stride_p,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
    EVEN_WIDTH: tl.constexpr, HAS_MASK: tl.constexpr, ON_DIAGONAL: tl.constexpr,
    BOUNDED: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The same over ``begin <= j < end``."""
    rows = first + tl.arange(0, ROWS)
    z_own = load_tile(z, first, count, width, z_stride_n, z_stride_p, ROWS, WIDTH, EVEN, EVEN_WIDTH)
    v_own = load_tile(v, first, count, width, v_stride_n, v_stride_p, ROWS, WIDTH, EVEN, EVEN_WIDTH)
    for start in range(begin, end, COLUMNS):
        z_other = load_tile(
            z, start, count, width, z_stride_n, z_stride_p, COLUMNS, WIDTH, EVEN, EVEN_WIDTH
        )
        v_other = load_tile(
            v, start, count, width, v_stride_n, v_stride_p, COLUMNS, WIDTH, EVEN, EVEN_WIDTH
        )
        counts = counting(keep, sample, start, count, tokens, COLUMNS, HAS_MASK)
        weighted, total, peak = _mean_step(
            weighted, total, peak, z_own, v_own, z_other, v_other, counts, rows, start, scale,
            COLUMNS, ON_DIAGONAL, BOUNDED, PRECISION, UPCAST,
        )  # fmt: skip
    return weighted, total, peak


@triton.jit
def mean_kernel(
    z, v, keep, extent, cotangent, mean, rows_of, heads, tokens, width, blocks, scale, beta,
    z_stride_b, z_stride_h, z_stride_n, z_stride_p, v_stride_b, v_stride_h, v_stride_n, v_stride_p,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
    EVEN_WIDTH: tl.constexpr, HAS_MASK: tl.constexpr, HAS_EXTENT: tl.constexpr,
    HAS_COTANGENT: tl.constexpr, CAUSAL: tl.constexpr, BOUNDED: tl.constexpr,
    BOOST: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """``r_i`` less ``beta a_i``; in ``rows_of`` the share of a row if ``BOUNDED``, else ``L_i``.

    Grid (samples * heads * blocks,); the longest rows of a causal mask first.
    """
    index = tl.program_id(0) // blocks
    first = (blocks - 1 - tl.program_id(0) % blocks) * ROWS
    sample = index // heads
    z = head_of(z, index, heads, z_stride_b, z_stride_h)
    v = head_of(v, index, heads, v_stride_b, v_stride_h)
    count = token_count(extent, sample, tokens, HAS_EXTENT)
    weighted = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], LOWEST, tl.float32)
    end = count
    if CAUSAL:
        end = tl.minimum(first, count)
    weighted, total, peak = _mean_sums(
        weighted, total, peak, z, v, keep, sample, first, 0, end, count, tokens, width, scale,
        z_stride_n, z_stride_p, v_stride_n, v_stride_p, ROWS, COLUMNS, WIDTH, EVEN, EVEN_WIDTH,
        HAS_MASK, False, BOUNDED, PRECISION, UPCAST,
    )  # fmt: skip
    if CAUSAL:
        weighted, total, peak = _mean_sums(
            weighted, total, peak, z, v, keep, sample, first, first,
            tl.minimum(first + ROWS, count), count, tokens, width, scale,
            z_stride_n, z_stride_p, v_stride_n, v_stride_p, ROWS, COLUMNS, WIDTH, EVEN, EVEN_WIDTH,
            HAS_MASK, True, BOUNDED, PRECISION, UPCAST,
        )  # fmt: skip
    counts = counting(keep, sample, first, count, tokens, ROWS, HAS_MASK)
    total = tl.where(counts, total, 1.0)
    if BOUNDED:
        store_row_values(rows_of, (2.0**BOOST) / total, index, first, tokens, ROWS)
    else:
        value = tl.where(counts, peak, 0.0) + tl.log2(total)
        store_row_values(rows_of, value, index, first, tokens, ROWS)
    value = tl.where(counts, beta * (weighted / total), 0.0)
    if HAS_COTANGENT:
        rows = first + tl.arange(0, ROWS)
        at = tl.cast(index, tl.int64) * tokens + rows
        value -= beta * tl.load(cotangent + at, mask=rows < tokens, other=0.0)
    store_row_values(mean, value, index, first, tokens, ROWS)
