"""At most 128 tokens: one launch, one program per (sample, head), no score leaves the chip.

The rows are cut in two parts, the first a power of two, so that 65 tokens cost 64 + 16 rows of
arithmetic and not 128; the scores of the two parts with each other are computed once.
"""

# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false, reportOperatorIssue=false
# (Triton compiles the kernels; a checker sees the Python in them: numbers for constexpr, branches.)
from __future__ import annotations

import triton
import triton.language as tl

from implicit_attn.kernels.bi_softmax.triton.tiles import (
    LN2,
    both_weights,
    counting,
    head_of,
    product,
    scores,
    store_tile,
    sum_of_weights,
    token_count,
)

LOWEST: tl.constexpr = tl.constexpr(-1.0e30)


@triton.jit
def load_counting(
    head, counts, first, width, stride_n, stride_p, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """The rows that count; zero for the others, which are not read."""
    rows = first + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    pointers = head + (rows[:, None] * stride_n + columns[None, :] * stride_p)
    return tl.load(pointers, mask=counts[:, None] & (columns[None, :] < width), other=0.0)


@triton.jit
def inner_scores(
    z, counts, scale, ROWS: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Scores (base 2) of a part with itself, minus infinity where row i may not see column j."""
    allowed = counts[:, None] & counts[None, :]
    if CAUSAL:
        rows = tl.arange(0, ROWS)
        allowed = allowed & (rows[None, :] <= rows[:, None])
    return tl.where(allowed, scores(z, z, PRECISION, UPCAST) * scale, float("-inf"))


@triton.jit
def cross_scores(
    z_a, z_b, counts_a, counts_b, scale, PRECISION: tl.constexpr, UPCAST: tl.constexpr
):
    """Scores (base 2) of the first part with the second; minus infinity where one does not count."""
    allowed = counts_a[:, None] & counts_b[None, :]
    return tl.where(allowed, scores(z_a, z_b, PRECISION, UPCAST) * scale, float("-inf"))


@triton.jit
def _log_sum(peak, total, counts):
    """Zero for a row that does not count."""
    return tl.where(counts, peak + tl.log2(tl.where(counts, total, 1.0)), 0.0)


@triton.jit
def inner_lse(score, counts, BOUNDED: tl.constexpr):
    """Log-sum-exp (base 2) over the rows of one part alone."""
    if BOUNDED:
        peak = tl.zeros_like(tl.max(score, 1))
        total = tl.sum(tl.exp2(score), 1)
    else:
        peak = tl.maximum(tl.max(score, 1), LOWEST)
        total = tl.sum(tl.exp2(score - peak[:, None]), 1)
    return _log_sum(peak, total, counts)


@triton.jit
def wider_lse(score, cross, counts, AXIS: tl.constexpr, BOUNDED: tl.constexpr):
    """The same with the other part's scores, ``cross``, summed over ``AXIS``."""
    if BOUNDED:
        peak = tl.zeros_like(tl.max(score, 1))
        total = tl.sum(tl.exp2(score), 1) + tl.sum(tl.exp2(cross), AXIS)
    else:
        peak = tl.maximum(tl.maximum(tl.max(score, 1), tl.max(cross, AXIS)), LOWEST)
        shifted = cross - (peak[:, None] if AXIS == 1 else peak[None, :])
        total = tl.sum(tl.exp2(score - peak[:, None]), 1) + tl.sum(tl.exp2(shifted), AXIS)
    return _log_sum(peak, total, counts)


@triton.jit
def own_of(lse, BOOST: tl.constexpr, BOUNDED: tl.constexpr):
    """What ``both_weights`` wants, from a log-sum-exp of base 2."""
    return tl.exp2(BOOST - lse) if BOUNDED else lse - BOOST


@triton.jit
def _inner_weight(score, own, CAUSAL: tl.constexpr, BOUNDED: tl.constexpr):
    """``P + P^T`` of a part with itself."""
    if CAUSAL:
        weight = tl.exp2(score - own[:, None])
        weight += tl.trans(weight)
    else:
        weight = sum_of_weights(score, own, own, 0.0, 0 if BOUNDED else 2)
    return weight


@triton.jit
def cross_weights(score, own_a, own_b, CAUSAL: tl.constexpr, BOUNDED: tl.constexpr):
    """``P_ij`` and ``P_ji`` for i in the first part, j in the second."""
    if CAUSAL:  # the first part does not see the second
        backward = tl.exp2(score - own_b[None, :])
        forward = tl.zeros_like(backward)
    else:
        forward, backward = both_weights(score, own_a, own_b, 0.0, 0 if BOUNDED else 2)  # pyright: ignore[reportGeneralTypeIssues]
    return forward, backward


@triton.jit
def small_gradient_kernel(
    z, keep, extent, lse, out, heads, tokens, width, scale, stride_b, stride_h, stride_n, stride_p,
    out_stride_b, out_stride_h, out_stride_n, out_stride_p,
    FIRST: tl.constexpr, SECOND: tl.constexpr, WIDTH: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_EXTENT: tl.constexpr, CAUSAL: tl.constexpr, BOUNDED: tl.constexpr, BOOST: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Gradient and log-sum-exp; grid (samples * heads,). ``SECOND`` is 0 where one part is enough.

    ``BOUNDED`` is for no causal mask only.
    """
    index = tl.program_id(0)
    sample = index // heads
    head = head_of(z, index, heads, stride_b, stride_h)
    out_head = head_of(out, index, heads, out_stride_b, out_stride_h)
    lse_head = lse + tl.cast(index, tl.int64) * tokens
    count = token_count(extent, sample, tokens, HAS_EXTENT)

    counts_a = counting(keep, sample, 0, count, tokens, FIRST, HAS_MASK)
    z_a = load_counting(head, counts_a, 0, width, stride_n, stride_p, FIRST, WIDTH)
    score_a = inner_scores(z_a, counts_a, scale, FIRST, CAUSAL, PRECISION, UPCAST)
    if SECOND > 0:
        counts_b = counting(keep, sample, FIRST, count, tokens, SECOND, HAS_MASK)
        z_b = load_counting(head, counts_b, FIRST, width, stride_n, stride_p, SECOND, WIDTH)
        score_b = inner_scores(z_b, counts_b, scale, SECOND, CAUSAL, PRECISION, UPCAST)
        cross = cross_scores(z_a, z_b, counts_a, counts_b, scale, PRECISION, UPCAST)
        lse_b = wider_lse(score_b, cross, counts_b, 0, BOUNDED)
    if SECOND > 0 and not CAUSAL:
        lse_a = wider_lse(score_a, cross, counts_a, 1, BOUNDED)
    else:
        lse_a = inner_lse(score_a, counts_a, BOUNDED)

    rows_a = tl.arange(0, FIRST)
    tl.store(lse_head + rows_a, lse_a * LN2, mask=rows_a < tokens)
    own_a = own_of(lse_a, BOOST, BOUNDED)
    weight = _inner_weight(score_a, own_a, CAUSAL, BOUNDED).to(z_a.dtype)
    gathered = product(weight, z_a, tl.zeros([FIRST, WIDTH], tl.float32), PRECISION, UPCAST)
    if SECOND > 0:
        rows_b = FIRST + tl.arange(0, SECOND)
        tl.store(lse_head + rows_b, lse_b * LN2, mask=rows_b < tokens)
        own_b = own_of(lse_b, BOOST, BOUNDED)
        forward, backward = cross_weights(cross, own_a, own_b, CAUSAL, BOUNDED)
        across = (forward + backward).to(z_a.dtype)
        gathered = product(across, z_b, gathered, PRECISION, UPCAST)
        weight = _inner_weight(score_b, own_b, CAUSAL, BOUNDED).to(z_b.dtype)
        second = product(weight, z_b, tl.zeros([SECOND, WIDTH], tl.float32), PRECISION, UPCAST)
        second = product(tl.trans(across), z_a, second, PRECISION, UPCAST) * (2.0**-BOOST)
        store_tile(
            out_head, second, FIRST, tokens, width, out_stride_n, out_stride_p, SECOND, WIDTH
        )
    gathered *= 2.0**-BOOST
    store_tile(out_head, gathered, 0, tokens, width, out_stride_n, out_stride_p, FIRST, WIDTH)
