"""Sums over whole rows of ``S = beta Z Z^T``, one program per block of rows, for any scores and masks.

The log-sum-exps, and the mean tangents ``r_i = sum_j P_ij T_ij`` of the Hessian-vector product. Bounded
scores need no running maximum; ``triangle`` has a cheaper way for them. The causal kernel also returns
``o = P Z`` of the row softmax (the forward pass of Dao, "FlashAttention-2",
https://arxiv.org/abs/2307.08691).
"""

# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false, reportOperatorIssue=false
# (Triton compiles the kernels; a checker sees the Python in them: numbers for constexpr, branches.)
from __future__ import annotations

import triton
import triton.language as tl

from implicit_attn.kernels.bi_softmax.triton.tiles import (
    LN2,
    LOWEST,
    exp_boosted,
    head_of,
    kept_rows,
    load_tile,
    product,
    scores,
    store_row_values,
    store_tile,
    tangents,
    token_count,
)


@triton.jit
def online(total, peak, score, BOOST: tl.constexpr):
    """One step of a softmax with running maximum: exponentials, factor of the old sums, peak, total."""
    higher = tl.maximum(peak, tl.max(score, 1))
    fading = tl.exp2(peak - higher)
    exponential = exp_boosted(score - higher[:, None], BOOST)
    return exponential, fading, higher, total * fading + tl.sum(exponential, 1)


@triton.jit
def lse_kernel(
    z, keep, extent, lse, normaliser, heads, tokens, width, blocks, scale, stride_b, stride_h,
    stride_n,
    UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    EVEN: tl.constexpr, EVEN_WIDTH: tl.constexpr, BOUNDED: tl.constexpr, BOOST: tl.constexpr,
):  # fmt: skip
    """``L_i``; in ``normaliser`` ``exp(-L_i)`` if ``BOUNDED``, else ``L_i`` in base 2.

    Grid (samples * heads * blocks,).
    """
    index = tl.program_id(0) // blocks
    first = (tl.program_id(0) % blocks) * ROWS
    width, stride_n = width * UNIT, stride_n * UNIT
    head = head_of(z, index, heads, stride_b * UNIT, stride_h * UNIT)
    count = token_count(extent, index // heads, tokens)
    own = load_tile(head, first, count, width, stride_n, ROWS, WIDTH, EVEN, EVEN_WIDTH)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], LOWEST, tl.float32)
    counted = 0
    for start in range(0, count, COLUMNS):
        other = load_tile(head, start, count, width, stride_n, COLUMNS, WIDTH, EVEN, EVEN_WIDTH)
        score = scores(own, other) * scale
        if keep is not None or not EVEN:
            kept = kept_rows(keep, index // heads, start, count, tokens, COLUMNS)
            score += tl.where(kept, 0.0, float("-inf"))[None, :]
            counted += tl.sum(kept.to(tl.int32))
        if BOUNDED:
            total += tl.sum(tl.exp2(score), 1)
        else:
            _, _, peak, total = online(total, peak, score, 0)
    kept = kept_rows(keep, index // heads, first, count, tokens, ROWS)
    total = tl.where(kept, total, 1.0)
    value = tl.log2(total)
    if BOUNDED:
        store_row_values(normaliser, (2.0**BOOST) / total, index, first, tokens, ROWS)
        if counted == 1:  # log exp S has the rounding of 1, not that of S
            wide = own.to(tl.float32)
            value = tl.where(kept, tl.sum(wide * wide, 1) * scale, 0.0)
    else:
        value += tl.where(kept, peak, 0.0)
        store_row_values(normaliser, value, index, first, tokens, ROWS)
    store_row_values(lse, value * LN2, index, first, tokens, ROWS)


@triton.jit
def _causal_sums(
    total, peak, gathered, own, head, keep, sample, rows, begin, end, count, tokens, width, scale,
    stride_n,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr, EVEN_WIDTH: tl.constexpr,
    DIAGONAL: tl.constexpr, BOOST: tl.constexpr,
):  # fmt: skip
    """Sums of the exponentials over ``begin <= j < end``, and of their products with ``z_j``."""
    for start in range(begin, end, COLUMNS):
        other = load_tile(head, start, count, width, stride_n, COLUMNS, WIDTH, EVEN, EVEN_WIDTH)
        kept = kept_rows(keep, sample, start, count, tokens, COLUMNS)
        score = scores(own, other) * scale
        score += tl.where(kept, 0.0, float("-inf"))[None, :]
        if DIAGONAL:
            columns = start + tl.arange(0, COLUMNS)
            score = tl.where(columns[None, :] <= rows[:, None], score, float("-inf"))
        exponential, fading, peak, total = online(total, peak, score, BOOST)
        gathered = product(exponential.to(other.dtype), other, gathered * fading[:, None])
    return total, peak, gathered


@triton.jit
def causal_rows_kernel(
    z, keep, extent, lse, normaliser, gathered_rows, heads, tokens, width, blocks, scale, stride_b,
    stride_h, stride_n,
    UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    EVEN: tl.constexpr, EVEN_WIDTH: tl.constexpr, BOOST: tl.constexpr,
):  # fmt: skip
    """``L_i`` and ``o_i = sum_{j <= i} P_ij z_j`` (float32, contiguous); the longest rows first."""
    index = tl.program_id(0) // blocks
    first = (blocks - 1 - tl.program_id(0) % blocks) * ROWS
    width, stride_n = width * UNIT, stride_n * UNIT
    head = head_of(z, index, heads, stride_b * UNIT, stride_h * UNIT)
    sample = index // heads
    count = token_count(extent, sample, tokens)
    rows = first + tl.arange(0, ROWS)
    own = load_tile(head, first, count, width, stride_n, ROWS, WIDTH, EVEN, EVEN_WIDTH)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], LOWEST, tl.float32)
    gathered = tl.zeros([ROWS, WIDTH], tl.float32)
    for DIAGONAL in tl.static_range(2):
        begin, end = (first, first + ROWS) if DIAGONAL else (0, first)
        total, peak, gathered = _causal_sums(
            total, peak, gathered, own, head, keep, sample, rows, begin, tl.minimum(end, count),
            count, tokens, width, scale, stride_n, COLUMNS, WIDTH, EVEN, EVEN_WIDTH, DIAGONAL,
            BOOST,
        )  # fmt: skip
    kept = kept_rows(keep, sample, first, count, tokens, ROWS)
    total = tl.where(kept, total, 1.0)
    value = tl.where(kept, tl.log2(total) - BOOST + peak, 0.0)
    store_row_values(normaliser, value, index, first, tokens, ROWS)
    store_row_values(lse, value * LN2, index, first, tokens, ROWS)
    gathered = tl.where(kept[:, None], gathered / total[:, None], 0.0)
    store_tile(gathered_rows, gathered, index, first, tokens, tokens, width, ROWS, WIDTH)


@triton.jit
def _mean_sums(
    weighted, total, peak, z, v, keep, sample, first, begin, end, count, tokens, width, scale,
    z_stride_n, v_stride_n,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
    EVEN_WIDTH: tl.constexpr, ON_DIAGONAL: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Sums of the exponentials with and without the tangents, over ``begin <= j < end``."""
    rows = first + tl.arange(0, ROWS)
    z_own = load_tile(z, first, count, width, z_stride_n, ROWS, WIDTH, EVEN, EVEN_WIDTH)
    v_own = load_tile(v, first, count, width, v_stride_n, ROWS, WIDTH, EVEN, EVEN_WIDTH)
    for start in range(begin, end, COLUMNS):
        z_other = load_tile(z, start, count, width, z_stride_n, COLUMNS, WIDTH, EVEN, EVEN_WIDTH)
        v_other = load_tile(v, start, count, width, v_stride_n, COLUMNS, WIDTH, EVEN, EVEN_WIDTH)
        kept = kept_rows(keep, sample, start, count, tokens, COLUMNS)
        score = scores(z_own, z_other) * scale
        score += tl.where(kept, 0.0, float("-inf"))[None, :]
        if ON_DIAGONAL:
            columns = start + tl.arange(0, COLUMNS)
            score = tl.where(columns[None, :] <= rows[:, None], score, float("-inf"))
        tangent = tangents(z_own, v_own, z_other, v_other)
        if BOUNDED:
            exponential = tl.exp2(score)
            total += tl.sum(exponential, 1)
            weighted += tl.sum(exponential * tangent, 1)
        else:
            exponential, fading, peak, total = online(total, peak, score, 0)
            weighted = weighted * fading + tl.sum(exponential * tangent, 1)
    return weighted, total, peak


@triton.jit
def mean_kernel(
    z, v, keep, extent, cotangent, mean, normaliser, heads, tokens, width, blocks, scale, beta,
    z_stride_b, z_stride_h, z_stride_n, v_stride_b, v_stride_h, v_stride_n,
    UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    EVEN: tl.constexpr, EVEN_WIDTH: tl.constexpr, CAUSAL: tl.constexpr, BOUNDED: tl.constexpr,
    BOOST: tl.constexpr,
):  # fmt: skip
    """``r_i`` less ``beta a_i``; in ``normaliser`` what ``lse_kernel`` leaves there.

    Grid (samples * heads * blocks,); the longest rows of a causal mask first.
    """
    index = tl.program_id(0) // blocks
    first = (blocks - 1 - tl.program_id(0) % blocks) * ROWS
    sample = index // heads
    width, z_stride_n, v_stride_n = width * UNIT, z_stride_n * UNIT, v_stride_n * UNIT
    z = head_of(z, index, heads, z_stride_b * UNIT, z_stride_h * UNIT)
    v = head_of(v, index, heads, v_stride_b * UNIT, v_stride_h * UNIT)
    count = token_count(extent, sample, tokens)
    weighted = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], LOWEST, tl.float32)
    for ON_DIAGONAL in tl.static_range(2 if CAUSAL else 1):
        begin, end = (first, first + ROWS) if ON_DIAGONAL else (0, first if CAUSAL else count)
        weighted, total, peak = _mean_sums(
            weighted, total, peak, z, v, keep, sample, first, begin, tl.minimum(end, count), count,
            tokens, width, scale, z_stride_n, v_stride_n, ROWS, COLUMNS, WIDTH, EVEN, EVEN_WIDTH,
            ON_DIAGONAL, BOUNDED,
        )  # fmt: skip
    kept = kept_rows(keep, sample, first, count, tokens, ROWS)
    total = tl.where(kept, total, 1.0)
    if BOUNDED:
        store_row_values(normaliser, (2.0**BOOST) / total, index, first, tokens, ROWS)
    else:
        value = tl.where(kept, peak, 0.0) + tl.log2(total)
        store_row_values(normaliser, value, index, first, tokens, ROWS)
    value = tl.where(kept, beta * (weighted / total), 0.0)
    if cotangent is not None:
        rows = first + tl.arange(0, ROWS)
        at = tl.cast(index, tl.int64) * tokens + rows
        value -= beta * tl.load(cotangent + at, mask=kept, other=0.0)
    store_row_values(mean, value, index, first, tokens, ROWS)
