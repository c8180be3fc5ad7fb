"""Triton kernels of bi-softmax for at most 128 tokens: a program per (sample, head) keeps all scores on chip.

The rows are divided into two parts, the first a power of two, so 65 tokens cost 64 + 16 rows of arithmetic
instead of 128. The scores between the two parts are computed once. The Hessian-vector product computes the
log-sum-exps again, because that is cheap and a stored one is rounded.
"""

# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false, reportOperatorIssue=false
# (Triton compiles the kernels; a checker sees the Python in them: numbers for constexpr, branches.)
from __future__ import annotations

import triton
import triton.language as tl

from implicit_attn.kernels.bi_softmax.triton_kernels import (
    LN2,
    LOWEST,
    both_weights,
    exp_boosted,
    head_of,
    kept_rows,
    product,
    scores,
    store_tile,
    sum_of_weights,
    tangents,
    tilted_product,
)


@triton.jit
def load_kept(head, kept, first, width, stride_n, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Load the rows in ``kept``; the others are zero and not read."""
    rows = first + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    pointers = head + (rows[:, None] * stride_n + columns[None, :])
    return tl.load(pointers, mask=kept[:, None] & (columns[None, :] < width), other=0.0)


@triton.jit
def inner_scores(z, kept, scale, ROWS: tl.constexpr, CAUSAL: tl.constexpr):
    """Scores (base 2) of a part with itself, minus infinity where row i may not see column j."""
    allowed = kept[:, None] & kept[None, :]
    if CAUSAL:
        rows = tl.arange(0, ROWS)
        allowed = allowed & (rows[None, :] <= rows[:, None])
    return tl.where(allowed, scores(z, z) * scale, float("-inf"))


@triton.jit
def cross_scores(z_a, z_b, kept_a, kept_b, scale):
    """Scores (base 2) of the first part with the second; minus infinity where one is not kept."""
    allowed = kept_a[:, None] & kept_b[None, :]
    return tl.where(allowed, scores(z_a, z_b) * scale, float("-inf"))


@triton.jit
def log_sum_exp(score, cross, kept, AXIS: tl.constexpr, BOUNDED: tl.constexpr):
    """``L`` (base 2) of a part's rows, zero where not kept; ``cross`` (or None) is summed over ``AXIS``."""
    peak = tl.max(score, 1)
    if BOUNDED:
        peak = tl.zeros_like(peak)
        total = tl.sum(tl.exp2(score), 1)
        if cross is not None:
            total += tl.sum(tl.exp2(cross), AXIS)
    else:
        if cross is not None:
            peak = tl.maximum(peak, tl.max(cross, AXIS))
        peak = tl.maximum(peak, LOWEST)
        total = tl.sum(tl.exp2(score - peak[:, None]), 1)
        if cross is not None:
            shifted = cross - (peak[:, None] if AXIS == 1 else peak[None, :])
            total += tl.sum(tl.exp2(shifted), AXIS)
    return tl.where(kept, peak + tl.log2(tl.where(kept, total, 1.0)), 0.0)


@triton.jit
def own_of(lse, BOOST: tl.constexpr, BOUNDED: tl.constexpr):
    """Return the argument of ``both_weights`` for a log-sum-exp in base 2."""
    return tl.exp2(BOOST - lse) if BOUNDED else lse


@triton.jit
def _inner_weight(score, own, CAUSAL: tl.constexpr, BOUNDED: tl.constexpr, BOOST: tl.constexpr):
    """``P + P^T`` of a part with itself."""
    if CAUSAL:
        weight = exp_boosted(score - own[:, None], BOOST)
        weight += tl.trans(weight)
    else:
        weight = sum_of_weights(score, own, own, 0.0, 0 if BOUNDED else 2, BOOST)
    return weight


@triton.jit
def cross_weights(
    score, own_a, own_b, CAUSAL: tl.constexpr, BOUNDED: tl.constexpr, BOOST: tl.constexpr
):
    """``P_ij`` and ``P_ji`` for i in the first part, j in the second."""
    if CAUSAL:  # the first part does not see the second
        backward = exp_boosted(score - own_b[None, :], BOOST)
        forward = tl.zeros_like(backward)
    else:
        forward, backward = both_weights(score, own_a, own_b, 0.0, 0 if BOUNDED else 2, BOOST)  # pyright: ignore[reportGeneralTypeIssues]
    return forward, backward


@triton.jit
def small_gradient_kernel(
    z, keep, lse, out, heads, tokens, width, scale, stride_b, stride_h, stride_n,
    UNIT: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr, BOOST: tl.constexpr,
):  # fmt: skip
    """Gradient and log-sum-exp; grid (samples * heads,). ``SECOND`` is 0 where one part is enough.

    ``BOUNDED`` is for no causal mask only.
    """
    index = tl.program_id(0)
    sample = index // heads
    width, stride_n = width * UNIT, stride_n * UNIT
    head = head_of(z, index, heads, stride_b * UNIT, stride_h * UNIT)
    lse_head = lse + tl.cast(index, tl.int64) * tokens

    kept_a = kept_rows(keep, sample, 0, tokens, tokens, FIRST)
    z_a = load_kept(head, kept_a, 0, width, stride_n, FIRST, WIDTH)
    score_a = inner_scores(z_a, kept_a, scale, FIRST, CAUSAL)
    if SECOND > 0:
        kept_b = kept_rows(keep, sample, FIRST, tokens, tokens, SECOND)
        z_b = load_kept(head, kept_b, FIRST, width, stride_n, SECOND, WIDTH)
        score_b = inner_scores(z_b, kept_b, scale, SECOND, CAUSAL)
        cross = cross_scores(z_a, z_b, kept_a, kept_b, scale)
        lse_b = log_sum_exp(score_b, cross, kept_b, 0, BOUNDED)
    if SECOND > 0 and not CAUSAL:
        lse_a = log_sum_exp(score_a, cross, kept_a, 1, BOUNDED)
    else:
        lse_a = log_sum_exp(score_a, None, kept_a, 1, BOUNDED)

    if BOUNDED:
        # For a single token, log exp S would have the rounding error of 1.
        counted = tl.sum(kept_a.to(tl.int32))
        if SECOND > 0:
            counted += tl.sum(kept_b.to(tl.int32))
        if counted == 1:
            lse_a = tl.where(kept_a, tl.max(score_a, 1), 0.0)
            if SECOND > 0:
                lse_b = tl.where(kept_b, tl.max(score_b, 1), 0.0)

    rows_a = tl.arange(0, FIRST)
    tl.store(lse_head + rows_a, lse_a * LN2, mask=rows_a < tokens)
    own_a = own_of(lse_a, BOOST, BOUNDED)
    weight = _inner_weight(score_a, own_a, CAUSAL, BOUNDED, BOOST).to(z_a.dtype)
    gathered = product(weight, z_a, tl.zeros([FIRST, WIDTH], tl.float32))
    if SECOND > 0:
        rows_b = FIRST + tl.arange(0, SECOND)
        tl.store(lse_head + rows_b, lse_b * LN2, mask=rows_b < tokens)
        own_b = own_of(lse_b, BOOST, BOUNDED)
        forward, backward = cross_weights(cross, own_a, own_b, CAUSAL, BOUNDED, BOOST)
        across = (forward + backward).to(z_a.dtype)
        gathered = product(across, z_b, gathered)
        weight = _inner_weight(score_b, own_b, CAUSAL, BOUNDED, BOOST).to(z_b.dtype)
        second = product(weight, z_b, tl.zeros([SECOND, WIDTH], tl.float32))
        second = product(tl.trans(across), z_a, second) * (2.0**-BOOST)
        store_tile(out, second, index, FIRST, tokens, tokens, width, SECOND, WIDTH)
    gathered *= 2.0**-BOOST
    store_tile(out, gathered, index, 0, tokens, tokens, width, FIRST, WIDTH)


@triton.jit
def _part(
    z_head, v_head, keep, sample, first, tokens, width, scale, beta, z_stride_n, v_stride_n,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Return which rows from ``first`` on are kept, their ``z``, ``v``, scores and tangents."""
    kept = kept_rows(keep, sample, first, tokens, tokens, ROWS)
    z = load_kept(z_head, kept, first, width, z_stride_n, ROWS, WIDTH)
    v = load_kept(v_head, kept, first, width, v_stride_n, ROWS, WIDTH)
    score = inner_scores(z, kept, scale, ROWS, CAUSAL)
    return kept, z, v, score, tangents(z, v, z, v) * beta


@triton.jit
def _inner_weights(score, own, CAUSAL: tl.constexpr, BOUNDED: tl.constexpr, BOOST: tl.constexpr):
    """``P_ij`` and ``P_ji`` of a part with itself."""
    if CAUSAL:
        forward = exp_boosted(score - own[:, None], BOOST)
        backward = tl.trans(forward)
    else:
        forward, backward = both_weights(score, own, own, 0.0, 0 if BOUNDED else 2, BOOST)  # pyright: ignore[reportGeneralTypeIssues]
    return forward, backward


@triton.jit
def _tilt(forward, backward, tangent, mean_rows, mean_columns):
    """``W_ij + W_ji``."""
    tilted = forward * (tangent - mean_rows[:, None])
    return tilted + backward * (tangent - mean_columns[None, :])


@triton.jit
def _curved(weight, tilted, z, v, curved):
    curved = product(weight.to(v.dtype), v, curved)
    return tilted_product(tilted, z, curved)


@triton.jit
def _mean(total, mass, cotangent, kept, index, first, tokens, beta, ROWS: tl.constexpr):
    """Return ``r_i - beta a_i`` from the sums of the boosted weights with and without the tangents.

    The weights sum to one only up to the rounding of ``L``, which would matter for large tangents. The
    cotangent of a masked token is not read.
    """
    mean = total / tl.where(mass > 0.0, mass, 1.0)
    if cotangent is not None:
        rows = first + tl.arange(0, ROWS)
        at = tl.cast(index, tl.int64) * tokens + rows
        mean -= beta * tl.load(cotangent + at, mask=kept, other=0.0)
    return mean


@triton.jit
def small_hvp_kernel(
    z, v, keep, cotangent, out, heads, tokens, width, scale, beta, z_stride_b, z_stride_h,
    z_stride_n, v_stride_b, v_stride_h, v_stride_n,
    UNIT: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr, BOOST: tl.constexpr,
):  # fmt: skip
    """``H V``; grid (samples * heads,). ``SECOND`` is 0 where one part is enough."""
    index = tl.program_id(0)
    sample = index // heads
    width, z_stride_n, v_stride_n = width * UNIT, z_stride_n * UNIT, v_stride_n * UNIT
    z_head = head_of(z, index, heads, z_stride_b * UNIT, z_stride_h * UNIT)
    v_head = head_of(v, index, heads, v_stride_b * UNIT, v_stride_h * UNIT)
    kept_a, z_a, v_a, score_a, tangent_a = _part(
        z_head, v_head, keep, sample, 0, tokens, width, scale, beta, z_stride_n, v_stride_n,
        FIRST, WIDTH, CAUSAL,
    )  # fmt: skip
    if SECOND > 0:
        kept_b, z_b, v_b, score_b, tangent_b = _part(
            z_head, v_head, keep, sample, FIRST, tokens, width, scale, beta, z_stride_n,
            v_stride_n, SECOND, WIDTH, CAUSAL,
        )  # fmt: skip
        cross = cross_scores(z_a, z_b, kept_a, kept_b, scale)
        tangent = tangents(z_a, v_a, z_b, v_b) * beta
        own_b = own_of(log_sum_exp(score_b, cross, kept_b, 0, BOUNDED), BOOST, BOUNDED)
    if SECOND > 0 and not CAUSAL:
        own_a = own_of(log_sum_exp(score_a, cross, kept_a, 1, BOUNDED), BOOST, BOUNDED)
    else:
        own_a = own_of(log_sum_exp(score_a, None, kept_a, 1, BOUNDED), BOOST, BOUNDED)
    forward_a, backward_a = _inner_weights(score_a, own_a, CAUSAL, BOUNDED, BOOST)
    total = tl.sum(forward_a * tangent_a, 1)
    mass = tl.sum(forward_a, 1)
    if SECOND > 0:
        forward_b, backward_b = _inner_weights(score_b, own_b, CAUSAL, BOUNDED, BOOST)
        forward, backward = cross_weights(cross, own_a, own_b, CAUSAL, BOUNDED, BOOST)
        total += tl.sum(forward * tangent, 1)
        mass += tl.sum(forward, 1)
        total_b = tl.sum(forward_b * tangent_b, 1) + tl.sum(backward * tangent, 0)
        mass_b = tl.sum(forward_b, 1) + tl.sum(backward, 0)
        mean_b = _mean(total_b, mass_b, cotangent, kept_b, index, FIRST, tokens, beta, SECOND)
    mean_a = _mean(total, mass, cotangent, kept_a, index, 0, tokens, beta, FIRST)

    tilted = _tilt(forward_a, backward_a, tangent_a, mean_a, mean_a)
    curved = tl.zeros([FIRST, WIDTH], tl.float32)
    curved = _curved(forward_a + backward_a, tilted, z_a, v_a, curved)
    if SECOND > 0:
        tilted = _tilt(forward_b, backward_b, tangent_b, mean_b, mean_b)
        second = tl.zeros([SECOND, WIDTH], tl.float32)
        second = _curved(forward_b + backward_b, tilted, z_b, v_b, second)
        weight, tilted = forward + backward, _tilt(forward, backward, tangent, mean_a, mean_b)
        curved = _curved(weight, tilted, z_b, v_b, curved)
        second = _curved(tl.trans(weight), tl.trans(tilted), z_a, v_a, second)
        second = tl.where(kept_b[:, None], second * (2.0**-BOOST), 0.0)
        store_tile(out, second, index, FIRST, tokens, tokens, width, SECOND, WIDTH)
    curved = tl.where(kept_a[:, None], curved * (2.0**-BOOST), 0.0)
    store_tile(out, curved, index, 0, tokens, tokens, width, FIRST, WIDTH)
