"""Hessian-vector product of the bi-softmax energy: the mean tangents ``r``, then the product.

With ``T = beta (V Z^T + Z V^T)``, symmetric, ``r_i = sum_j P_ij T_ij`` and ``W = P * (T - r)``:
``H V = (P + P^T) V + (W + W^T) Z``. A cotangent ``a`` of the log-sum-exps adds
``beta (diag(a) P + P^T diag(a)) Z``: the same with ``r - beta a`` for ``r``.
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
    both_weights,
    diagonal_weights,
    exp_boosted,
    head_of,
    kept_rows,
    load_tile,
    product,
    scores,
    shift_of,
    store_tile,
    tangents,
    tilted_product,
    token_count,
    weighing,
)

# Which tiles of a causal mask: all of an unmasked matrix, left of the diagonal, on it, right of it.
EVERYWHERE: tl.constexpr = tl.constexpr(0)
LEFT: tl.constexpr = tl.constexpr(1)
DIAGONAL: tl.constexpr = tl.constexpr(2)
RIGHT: tl.constexpr = tl.constexpr(3)


@triton.jit
def _weights(
    score, tangent, here, there, mean_own, mean_other, rows, columns, shift,
    WHERE: tl.constexpr, FORM: tl.constexpr, BOOST: tl.constexpr,
):  # fmt: skip
    """``P_ij + P_ji`` and ``W_ij + W_ji`` of a tile, restricted to the allowed pairs."""
    if WHERE == 1:
        weight = exp_boosted(score - here[:, None], BOOST)
        tilted = weight * (tangent - mean_own[:, None])
    elif WHERE == 3:
        weight = exp_boosted(score - there[None, :], BOOST)
        tilted = weight * (tangent - mean_other[None, :])
    else:
        if WHERE == 2:
            forward, backward = diagonal_weights(score, here, there, rows, columns, BOOST)  # pyright: ignore[reportGeneralTypeIssues]
        else:
            forward, backward = both_weights(score, here, there, shift, FORM, BOOST)  # pyright: ignore[reportGeneralTypeIssues]
        tilted = forward * (tangent - mean_own[:, None])
        tilted += backward * (tangent - mean_other[None, :])
        weight = forward + backward
    return weight, tilted


@triton.jit
def _curve(
    curved, z_own, v_own, z, v, normaliser, mean, first, begin, end, count, tokens, width, scale,
    beta, shift, z_stride_n, v_stride_n,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
    EVEN_WIDTH: tl.constexpr, WHERE: tl.constexpr, FORM: tl.constexpr, BOOST: tl.constexpr,
):  # fmt: skip
    """Add the terms of ``begin <= j < end`` to a block of rows.

    ``normaliser``: ``L`` (base 2) or ``exp(-L)``.
    """
    rows = first + tl.arange(0, ROWS)
    here = weighing(tl.load(normaliser + rows, mask=rows < tokens, other=0.0), shift, BOOST, FORM)
    mean_own = tl.load(mean + rows, mask=rows < tokens, other=0.0)
    for start in range(begin, end, COLUMNS):
        z_other = load_tile(z, start, count, width, z_stride_n, COLUMNS, WIDTH, EVEN, EVEN_WIDTH)
        v_other = load_tile(v, start, count, width, v_stride_n, COLUMNS, WIDTH, EVEN, EVEN_WIDTH)
        columns = start + tl.arange(0, COLUMNS)
        there = tl.load(normaliser + columns, mask=columns < tokens, other=0.0)
        there = weighing(there, shift, BOOST, FORM)
        mean_other = tl.load(mean + columns, mask=columns < tokens, other=0.0)
        score = scores(z_own, z_other) * scale
        tangent = tangents(z_own, v_own, z_other, v_other) * beta
        weight, tilted = _weights(
            score, tangent, here, there, mean_own, mean_other, rows, columns, shift, WHERE, FORM,
            BOOST,
        )  # fmt: skip
        curved = product(weight.to(v_other.dtype), v_other, curved)
        curved = tilted_product(tilted, z_other, curved)
    return curved


@triton.jit
def curvature_kernel(
    z, v, keep, extent, normaliser, mean, peaks, out, heads, tokens, width, blocks, scale, beta,
    z_stride_b, z_stride_h, z_stride_n, v_stride_b, v_stride_h, v_stride_n,
    UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    EVEN: tl.constexpr, EVEN_WIDTH: tl.constexpr, BOUNDED: tl.constexpr, CAUSAL: tl.constexpr,
    BOOST: tl.constexpr,
):  # fmt: skip
    """``H V`` from ``r`` and from ``L``, or ``exp(-L)`` if ``BOUNDED`` (then not ``CAUSAL``).

    Grid (samples * heads * blocks,). Two loops for unbounded scores, as in ``gradient_kernel``.
    """
    index = tl.program_id(0) // blocks
    first = (tl.program_id(0) % blocks) * ROWS
    sample = index // heads
    width, z_stride_n, v_stride_n = width * UNIT, z_stride_n * UNIT, v_stride_n * UNIT
    z = head_of(z, index, heads, z_stride_b * UNIT, z_stride_h * UNIT)
    v = head_of(v, index, heads, v_stride_b * UNIT, v_stride_h * UNIT)
    normaliser += tl.cast(index, tl.int64) * tokens
    mean += tl.cast(index, tl.int64) * tokens
    count = token_count(extent, sample, tokens)
    z_own = load_tile(z, first, count, width, z_stride_n, ROWS, WIDTH, EVEN, EVEN_WIDTH)
    v_own = load_tile(v, first, count, width, v_stride_n, ROWS, WIDTH, EVEN, EVEN_WIDTH)
    curved = tl.zeros([ROWS, WIDTH], tl.float32)
    if CAUSAL:
        for WHERE in tl.static_range(LEFT, RIGHT + 1):
            begin = 0 if WHERE == 1 else (first if WHERE == 2 else first + ROWS)
            end = count if WHERE == 3 else tl.minimum(first if WHERE == 1 else first + ROWS, count)
            curved = _curve(
                curved, z_own, v_own, z, v, normaliser, mean, first, begin, end, count, tokens,
                width, scale, beta, 0.0, z_stride_n, v_stride_n, ROWS, COLUMNS, WIDTH, EVEN,
                EVEN_WIDTH, WHERE, SEPARATE, BOOST,
            )  # fmt: skip
    elif BOUNDED:
        curved = _curve(
            curved, z_own, v_own, z, v, normaliser, mean, first, 0, count, count, tokens, width,
            scale, beta, 0.0, z_stride_n, v_stride_n, ROWS, COLUMNS, WIDTH, EVEN, EVEN_WIDTH,
            EVERYWHERE, RECIPROCAL, BOOST,
        )  # fmt: skip
    else:
        peak = tl.load(peaks + index)
        near = peak <= WIDEST_PEAK
        shift = shift_of(tl.where(near, peak, 0.0))
        curved = _curve(
            curved, z_own, v_own, z, v, normaliser, mean, first, 0, tl.where(near, count, 0), count,
            tokens, width, scale, beta, shift, z_stride_n, v_stride_n, ROWS, COLUMNS,
            WIDTH, EVEN, EVEN_WIDTH, EVERYWHERE, SHIFTED, BOOST,
        )  # fmt: skip
        curved = _curve(
            curved, z_own, v_own, z, v, normaliser, mean, first, 0, tl.where(near, 0, count), count,
            tokens, width, scale, beta, 0.0, z_stride_n, v_stride_n, ROWS, COLUMNS, WIDTH, EVEN,
            EVEN_WIDTH, EVERYWHERE, SEPARATE, BOOST,
        )  # fmt: skip
    kept = kept_rows(keep, sample, first, count, tokens, ROWS)
    curved = tl.where(kept[:, None], curved * (2.0**-BOOST), 0.0)
    store_tile(out, curved, index, first, tokens, tokens, width, ROWS, WIDTH)
