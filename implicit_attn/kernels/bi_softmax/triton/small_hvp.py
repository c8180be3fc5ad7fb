"""The Hessian-vector product of at most 128 tokens in one launch; laid out as ``triton_small``.

The softmax is normalised anew: that is cheaper than a rounded log-sum-exp is good.
"""

# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false, reportOperatorIssue=false
# (Triton compiles the kernels; a checker sees the Python in them: numbers for constexpr, branches.)
from __future__ import annotations

import triton
import triton.language as tl

from implicit_attn.kernels.bi_softmax.triton.small import (
    cross_scores,
    cross_weights,
    inner_lse,
    inner_scores,
    load_counting,
    own_of,
    wider_lse,
)
from implicit_attn.kernels.bi_softmax.triton.tiles import (
    both_weights,
    counting,
    head_of,
    product,
    store_tile,
    tangents,
    tilted_product,
    token_count,
)


@triton.jit
def _part(
    z_head, v_head, keep, sample, first, count, tokens, width, scale, beta,
    z_stride_n, z_stride_p, v_stride_n, v_stride_p,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, HAS_MASK: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """What counts among the rows from ``first`` on, ``z``, ``v``, and scores and tangents inside."""
    counts = counting(keep, sample, first, count, tokens, ROWS, HAS_MASK)
    z = load_counting(z_head, counts, first, width, z_stride_n, z_stride_p, ROWS, WIDTH)
    v = load_counting(v_head, counts, first, width, v_stride_n, v_stride_p, ROWS, WIDTH)
    score = inner_scores(z, counts, scale, ROWS, CAUSAL, PRECISION, UPCAST)
    return counts, z, v, score, tangents(z, v, z, v, PRECISION, UPCAST) * beta


@triton.jit
def _inner_weights(score, own, CAUSAL: tl.constexpr, BOUNDED: tl.constexpr):
    """``P_ij`` and ``P_ji`` of a part with itself."""
    if CAUSAL:
        forward = tl.exp2(score - own[:, None])
        backward = tl.trans(forward)
    else:
        forward, backward = both_weights(score, own, own, 0.0, 0 if BOUNDED else 2)  # pyright: ignore[reportGeneralTypeIssues]
    return forward, backward


@triton.jit
def _tilt(forward, backward, tangent, mean_rows, mean_columns):
    """``W_ij + W_ji``."""
    tilted = forward * (tangent - mean_rows[:, None])
    return tilted + backward * (tangent - mean_columns[None, :])


@triton.jit
def _curved(weight, tilted, z, v, curved, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    curved = product(weight.to(v.dtype), v, curved, PRECISION, UPCAST)
    return tilted_product(tilted, z, curved, PRECISION, UPCAST)


@triton.jit
def _mean(
    total, mass, cotangent, first, tokens, beta,
    ROWS: tl.constexpr, HAS_COTANGENT: tl.constexpr,
):  # fmt: skip
    """``r_i - beta a_i`` from sums over the boosted weights, and of them.

    The weights sum to one up to the rounding of ``L``; of a large tangent that would be seen.
    """
    mean = total / tl.where(mass > 0.0, mass, 1.0)
    if HAS_COTANGENT:
        rows = first + tl.arange(0, ROWS)
        mean -= beta * tl.load(cotangent + rows, mask=rows < tokens, other=0.0)
    return mean


@triton.jit
def small_hvp_kernel(
    z, v, keep, extent, cotangent, out, heads, tokens, width, scale, beta, z_stride_b,
    z_stride_h, z_stride_n, z_stride_p, v_stride_b, v_stride_h, v_stride_n, v_stride_p,
    out_stride_b, out_stride_h, out_stride_n, out_stride_p,
    FIRST: tl.constexpr, SECOND: tl.constexpr, WIDTH: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_EXTENT: tl.constexpr, HAS_COTANGENT: tl.constexpr, CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr, BOOST: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """``H V``; grid (samples * heads,). ``SECOND`` is 0 where one part is enough."""
    index = tl.program_id(0)
    sample = index // heads
    z_head = head_of(z, index, heads, z_stride_b, z_stride_h)
    v_head = head_of(v, index, heads, v_stride_b, v_stride_h)
    out_head = head_of(out, index, heads, out_stride_b, out_stride_h)
    at = tl.cast(index, tl.int64) * tokens
    count = token_count(extent, sample, tokens, HAS_EXTENT)
    counts_a, z_a, v_a, score_a, tangent_a = _part(
        z_head, v_head, keep, sample, 0, count, tokens, width, scale, beta, z_stride_n, z_stride_p,
        v_stride_n, v_stride_p, FIRST, WIDTH, HAS_MASK, CAUSAL, PRECISION, UPCAST,
    )  # fmt: skip
    if SECOND > 0:
        counts_b, z_b, v_b, score_b, tangent_b = _part(
            z_head, v_head, keep, sample, FIRST, count, tokens, width, scale, beta, z_stride_n,
            z_stride_p, v_stride_n, v_stride_p, SECOND, WIDTH, HAS_MASK, CAUSAL, PRECISION, UPCAST,
        )  # fmt: skip
        cross = cross_scores(z_a, z_b, counts_a, counts_b, scale, PRECISION, UPCAST)
        tangent = tangents(z_a, v_a, z_b, v_b, PRECISION, UPCAST) * beta
        own_b = own_of(wider_lse(score_b, cross, counts_b, 0, BOUNDED), BOOST, BOUNDED)
    if SECOND > 0 and not CAUSAL:
        own_a = own_of(wider_lse(score_a, cross, counts_a, 1, BOUNDED), BOOST, BOUNDED)
    else:
        own_a = own_of(inner_lse(score_a, counts_a, BOUNDED), BOOST, BOUNDED)
    forward_a, backward_a = _inner_weights(score_a, own_a, CAUSAL, BOUNDED)
    total = tl.sum(forward_a * tangent_a, 1)
    mass = tl.sum(forward_a, 1)
    if SECOND > 0:
        forward_b, backward_b = _inner_weights(score_b, own_b, CAUSAL, BOUNDED)
        forward, backward = cross_weights(cross, own_a, own_b, CAUSAL, BOUNDED)
        total += tl.sum(forward * tangent, 1)
        mass += tl.sum(forward, 1)
        total_b = tl.sum(forward_b * tangent_b, 1) + tl.sum(backward * tangent, 0)
        mass_b = tl.sum(forward_b, 1) + tl.sum(backward, 0)
        mean_b = _mean(total_b, mass_b, cotangent + at, FIRST, tokens, beta, SECOND, HAS_COTANGENT)
    mean_a = _mean(total, mass, cotangent + at, 0, tokens, beta, FIRST, HAS_COTANGENT)

    tilted = _tilt(forward_a, backward_a, tangent_a, mean_a, mean_a)
    curved = tl.zeros([FIRST, WIDTH], tl.float32)
    curved = _curved(forward_a + backward_a, tilted, z_a, v_a, curved, PRECISION, UPCAST)
    if SECOND > 0:
        tilted = _tilt(forward_b, backward_b, tangent_b, mean_b, mean_b)
        second = tl.zeros([SECOND, WIDTH], tl.float32)
        second = _curved(forward_b + backward_b, tilted, z_b, v_b, second, PRECISION, UPCAST)
        weight, tilted = forward + backward, _tilt(forward, backward, tangent, mean_a, mean_b)
        curved = _curved(weight, tilted, z_b, v_b, curved, PRECISION, UPCAST)
        second = _curved(tl.trans(weight), tl.trans(tilted), z_a, v_a, second, PRECISION, UPCAST)
        second = tl.where(counts_b[:, None], second * (2.0**-BOOST), 0.0)
        store_tile(
            out_head, second, FIRST, tokens, width, out_stride_n, out_stride_p, SECOND, WIDTH
        )
    curved = tl.where(counts_a[:, None], curved * (2.0**-BOOST), 0.0)
    store_tile(out_head, curved, 0, tokens, width, out_stride_n, out_stride_p, FIRST, WIDTH)
