"""The gradient ``(P + P^T) Z`` from the log-sum-exps: one program per block of rows.

With ``k_ij = exp(S_ij - c)`` and ``a_i = exp(c - L_i)`` the weight of a pair is
``P_ij + P_ji = k_ij (a_i + a_j)``, one exponential. As ``|S_ij| <= max L =: M`` (``L_i >= S_ii``), one
``c`` per head serves up to ``M`` about 110; beyond, the kernel takes two exponentials.
"""

# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false, reportOperatorIssue=false
# (Triton compiles the kernels; a checker sees the Python in them: numbers for constexpr, branches.)
from __future__ import annotations

import triton
import triton.language as tl

from implicit_attn.kernels.bi_softmax.triton.tiles import (
    RECIPROCAL,
    SEPARATE,
    SHIFTED,
    WIDEST_PEAK,
    exp_boosted,
    head_of,
    kept_rows,
    load_tile,
    product,
    scores,
    shift_of,
    store_tile,
    sum_of_weights,
    token_count,
    weighing,
)


@triton.jit
def _gather(
    gathered, own, z, normaliser, first, count, tokens, width, scale, shift, stride_n,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
    EVEN_WIDTH: tl.constexpr, FORM: tl.constexpr, BOOST: tl.constexpr,
):  # fmt: skip
    """Add ``(P_ij + P_ji) z_j`` of ``j < count``; ``normaliser``: ``L`` (base 2) or ``exp(-L)``."""
    rows = first + tl.arange(0, ROWS)
    here = weighing(tl.load(normaliser + rows, mask=rows < tokens, other=0.0), shift, BOOST, FORM)
    for start in range(0, count, COLUMNS):
        other = load_tile(z, start, count, width, stride_n, COLUMNS, WIDTH, EVEN, EVEN_WIDTH)
        columns = start + tl.arange(0, COLUMNS)
        there = tl.load(normaliser + columns, mask=columns < tokens, other=0.0)
        there = weighing(there, shift, BOOST, FORM)
        score = scores(own, other) * scale
        # Where z_j is zero (padding) the weight is finite and adds nothing.
        weight = sum_of_weights(score, here, there, shift, FORM, BOOST).to(other.dtype)
        gathered = product(weight, other, gathered)
    return gathered


@triton.jit
def gradient_kernel(
    z, keep, extent, normaliser, peaks, out, heads, tokens, width, blocks, scale, stride_b,
    stride_h, stride_n,
    UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    EVEN: tl.constexpr, EVEN_WIDTH: tl.constexpr, BOUNDED: tl.constexpr, BOOST: tl.constexpr,
):  # fmt: skip
    """``(P + P^T) Z`` without a causal mask; grid (samples * heads * blocks,).

    ``normaliser``: ``exp(-L)`` if ``BOUNDED``, else ``L`` (base 2). Two loops, one of which makes no
    step: a branch around a loop would keep ptxas from overlapping its tensor-core products.
    """
    index = tl.program_id(0) // blocks
    first = (tl.program_id(0) % blocks) * ROWS
    sample = index // heads
    width, stride_n = width * UNIT, stride_n * UNIT
    head = head_of(z, index, heads, stride_b * UNIT, stride_h * UNIT)
    normaliser += tl.cast(index, tl.int64) * tokens
    count = token_count(extent, sample, tokens)
    own = load_tile(head, first, count, width, stride_n, ROWS, WIDTH, EVEN, EVEN_WIDTH)
    gathered = tl.zeros([ROWS, WIDTH], tl.float32)
    if BOUNDED:
        gathered = _gather(
            gathered, own, head, normaliser, first, count, tokens, width, scale, 0.0, stride_n,
            ROWS, COLUMNS, WIDTH, EVEN, EVEN_WIDTH, RECIPROCAL, BOOST,
        )  # fmt: skip
    else:
        peak = tl.load(peaks + index)
        near = peak <= WIDEST_PEAK
        shift = shift_of(tl.where(near, peak, 0.0))
        gathered = _gather(
            gathered, own, head, normaliser, first, tl.where(near, count, 0), tokens, width, scale,
            shift, stride_n, ROWS, COLUMNS, WIDTH, EVEN, EVEN_WIDTH, SHIFTED, BOOST,
        )  # fmt: skip
        gathered = _gather(
            gathered, own, head, normaliser, first, tl.where(near, 0, count), tokens, width, scale,
            0.0, stride_n, ROWS, COLUMNS, WIDTH, EVEN, EVEN_WIDTH, SEPARATE, BOOST,
        )  # fmt: skip
    kept = kept_rows(keep, sample, first, count, tokens, ROWS)
    gathered = tl.where(kept[:, None], gathered * (2.0**-BOOST), 0.0)
    store_tile(out, gathered, index, first, tokens, tokens, width, ROWS, WIDTH)


@triton.jit
def _column_sums(
    gathered, z_own, head, normaliser, rows, begin, end, count, tokens, width, scale, stride_n,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr, EVEN_WIDTH: tl.constexpr,
    DIAGONAL: tl.constexpr, BOOST: tl.constexpr,
):  # fmt: skip
    """Add ``P_ji z_j`` of ``begin <= j < end``; ``normaliser``: ``L`` (base 2)."""
    for start in range(begin, end, COLUMNS):
        z_other = load_tile(head, start, count, width, stride_n, COLUMNS, WIDTH, EVEN, EVEN_WIDTH)
        columns = start + tl.arange(0, COLUMNS)
        lse_other = tl.load(normaliser + columns, mask=columns < tokens, other=0.0)
        exponent = scores(z_own, z_other) * scale - lse_other[None, :]
        if DIAGONAL:
            exponent = tl.where(columns[None, :] >= rows[:, None], exponent, float("-inf"))
        weight = exp_boosted(exponent, BOOST)
        gathered = product(weight.to(z_other.dtype), z_other, gathered)
    return gathered


@triton.jit
def causal_columns_kernel(
    z, keep, extent, normaliser, gathered_rows, out, heads, tokens, width, blocks, scale, stride_b,
    stride_h, stride_n,
    UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    EVEN: tl.constexpr, EVEN_WIDTH: tl.constexpr, BOOST: tl.constexpr,
):  # fmt: skip
    """``o_i + sum_{j >= i} P_ji z_j``: the column term of a causal mask; the longest columns first."""
    index = tl.program_id(0) // blocks
    first = (tl.program_id(0) % blocks) * ROWS
    sample = index // heads
    width, stride_n = width * UNIT, stride_n * UNIT
    head = head_of(z, index, heads, stride_b * UNIT, stride_h * UNIT)
    normaliser += tl.cast(index, tl.int64) * tokens
    count = token_count(extent, sample, tokens)
    rows = first + tl.arange(0, ROWS)
    z_own = load_tile(head, first, count, width, stride_n, ROWS, WIDTH, EVEN, EVEN_WIDTH)
    gathered = tl.zeros([ROWS, WIDTH], tl.float32)
    for BEYOND in tl.static_range(2):
        begin, end = (first + ROWS, count) if BEYOND else (first, tl.minimum(first + ROWS, count))
        gathered = _column_sums(
            gathered, z_own, head, normaliser, rows, begin, end, count, tokens, width, scale,
            stride_n, COLUMNS, WIDTH, EVEN, EVEN_WIDTH, not BEYOND, BOOST,
        )  # fmt: skip
    gathered *= 2.0**-BOOST
    at = tl.cast(index, tl.int64) * tokens
    gathered += load_tile(
        gathered_rows + at * width, first, tokens, width, width, ROWS, WIDTH, False, False
    )
    kept = kept_rows(keep, sample, first, count, tokens, ROWS)
    gathered = tl.where(kept[:, None], gathered, 0.0)
    store_tile(out, gathered, index, first, tokens, tokens, width, ROWS, WIDTH)
