"""Log-sum-exp of the rows of ``S = beta Z Z^T``, one program per block of rows.

Bounded scores need no running maximum. The causal kernel also returns ``o = P Z`` of the row
softmax (the forward pass of Dao, "FlashAttention-2", arXiv 2307.08691).
"""

# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false, reportOperatorIssue=false
# (Triton compiles the kernels; a checker sees the Python in them: numbers for constexpr, branches.)
from __future__ import annotations

import triton
import triton.language as tl

from implicit_attn.kernels.bi_softmax.triton.tiles import (
    LN2,
    counting,
    head_of,
    load_tile,
    product,
    scores,
    store_row_values,
    store_tile,
    token_count,
)

LOWEST: tl.constexpr = tl.constexpr(-1.0e30)  # finite: LOWEST - LOWEST is 0


@triton.jit
def online(total, peak, score, BOOST: tl.constexpr):
    """One step of the running maximum: exponentials, the old part's factor, new peak and total."""
    higher = tl.maximum(peak, tl.max(score, 1))
    fading = tl.exp2(peak - higher)
    exponential = tl.exp2(score - (higher - BOOST)[:, None])
    return exponential, fading, higher, total * fading + tl.sum(exponential, 1)


@triton.jit
def lse_kernel(
    z, keep, extent, lse, rows_of, heads, tokens, width, blocks, scale, stride_b, stride_h, stride_n,
    stride_p,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
    EVEN_WIDTH: tl.constexpr, HAS_MASK: tl.constexpr, HAS_EXTENT: tl.constexpr,
    BOUNDED: tl.constexpr, BOOST: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """``L_i``; in ``rows_of`` its share if ``BOUNDED``, else it in base 2.

    Grid (samples * heads * blocks,).
    """
    index = tl.program_id(0) // blocks
    first = (tl.program_id(0) % blocks) * ROWS
    head = head_of(z, index, heads, stride_b, stride_h)
    count = token_count(extent, index // heads, tokens, HAS_EXTENT)
    mine = load_tile(head, first, count, width, stride_n, stride_p, ROWS, WIDTH, EVEN, EVEN_WIDTH)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], LOWEST, tl.float32)
    for start in range(0, count, COLUMNS):
        other = load_tile(
            head, start, count, width, stride_n, stride_p, COLUMNS, WIDTH, EVEN, EVEN_WIDTH
        )
        score = scores(mine, other, PRECISION, UPCAST) * scale
        if HAS_MASK or not EVEN:
            counts = counting(keep, index // heads, start, count, tokens, COLUMNS, HAS_MASK)
            score += tl.where(counts, 0.0, float("-inf"))[None, :]
        if BOUNDED:
            total += tl.sum(tl.exp2(score), 1)
        else:
            _, _, peak, total = online(total, peak, score, 0)
    counts = counting(keep, index // heads, first, count, tokens, ROWS, HAS_MASK)
    total = tl.where(counts, total, 1.0)
    value = tl.log2(total)
    if BOUNDED:
        store_row_values(rows_of, (2.0**BOOST) / total, index, first, tokens, ROWS)
    else:
        value += tl.where(counts, peak, 0.0)
        store_row_values(rows_of, value, index, first, tokens, ROWS)
    store_row_values(lse, value * LN2, index, first, tokens, ROWS)


@triton.jit
def _causal_step(
    total, peak, gathered, mine, other, rows, start, counts, scale,
    COLUMNS: tl.constexpr, DIAGONAL: tl.constexpr, BOOST: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    score = scores(mine, other, PRECISION, UPCAST) * scale
    score += tl.where(counts, 0.0, float("-inf"))[None, :]
    if DIAGONAL:
        columns = start + tl.arange(0, COLUMNS)
        score = tl.where(columns[None, :] <= rows[:, None], score, float("-inf"))
    exponential, fading, peak, total = online(total, peak, score, BOOST)
    gathered = product(
        exponential.to(other.dtype), other, gathered * fading[:, None], PRECISION, UPCAST
    )
    return total, peak, gathered


@triton.jit
def causal_rows_kernel(
    z, keep, extent, lse, rows_of, gathered_rows, heads, tokens, width, blocks, scale, stride_b, stride_h,
    stride_n, stride_p,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
    EVEN_WIDTH: tl.constexpr, HAS_MASK: tl.constexpr, HAS_EXTENT: tl.constexpr, BOOST: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """``L_i`` and ``o_i = sum_{j <= i} P_ij z_j`` (float32, contiguous); the longest rows first."""
    index = tl.program_id(0) // blocks
    first = (blocks - 1 - tl.program_id(0) % blocks) * ROWS
    head = head_of(z, index, heads, stride_b, stride_h)
    sample = index // heads
    count = token_count(extent, sample, tokens, HAS_EXTENT)
    rows = first + tl.arange(0, ROWS)
    mine = load_tile(head, first, count, width, stride_n, stride_p, ROWS, WIDTH, EVEN, EVEN_WIDTH)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], LOWEST, tl.float32)
    gathered = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, tl.minimum(first, count), COLUMNS):
        other = load_tile(
            head, start, count, width, stride_n, stride_p, COLUMNS, WIDTH, EVEN, EVEN_WIDTH
        )
        counts = counting(keep, sample, start, count, tokens, COLUMNS, HAS_MASK)
        total, peak, gathered = _causal_step(
            total, peak, gathered, mine, other, rows, start, counts, scale,
            COLUMNS, False, BOOST, PRECISION, UPCAST,
        )  # fmt: skip
    for start in range(first, tl.minimum(first + ROWS, count), COLUMNS):
        other = load_tile(
            head, start, count, width, stride_n, stride_p, COLUMNS, WIDTH, EVEN, EVEN_WIDTH
        )
        counts = counting(keep, sample, start, count, tokens, COLUMNS, HAS_MASK)
        total, peak, gathered = _causal_step(
            total, peak, gathered, mine, other, rows, start, counts, scale,
            COLUMNS, True, BOOST, PRECISION, UPCAST,
        )  # fmt: skip
    counts = counting(keep, sample, first, count, tokens, ROWS, HAS_MASK)
    total = tl.where(counts, total, 1.0)
    value = tl.where(counts, tl.log2(total) - BOOST + peak, 0.0)
    at = tl.cast(index, tl.int64) * tokens
    store_row_values(rows_of, value, index, first, tokens, ROWS)
    store_row_values(lse, value * LN2, index, first, tokens, ROWS)
    gathered = tl.where(counts[:, None], gathered / total[:, None], 0.0)
    store_tile(gathered_rows + at * width, gathered, first, tokens, width, width, 1, ROWS, WIDTH)
