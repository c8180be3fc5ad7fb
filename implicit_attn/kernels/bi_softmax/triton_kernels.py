"""The Triton kernels of bi-softmax that go over tiles: row sums, gradient, Hessian-vector product.

First what they share (loading tiles, products, the weights of a pair), with ``triton_single_tile``, too.

Exponentials are of base 2, the hardware's own: ``scale = beta log2(e)`` multiplies the products, and
log-sum-exps pass between kernels in base 2: with scores in the hundreds, one rounding on the way to
base e and back would show in the weights. (For the same reason kernels for unbounded scores are
compiled without fused multiply-adds: a score must be the same number wherever it is computed.)
Products accumulate in float32. A float32 product is three TF32 ones with operands split in registers;
over a side of WIDEST_SPLIT that spills, and the ordinary float32 units do it.
"""

# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false, reportOperatorIssue=false
# (Triton compiles the kernels; a checker sees the Python in them: numbers for constexpr, branches.)
from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
LOWEST: tl.constexpr = tl.constexpr(-1.0e30)  # finite: LOWEST - LOWEST is 0
# Three forms of the weight ``P_ij + P_ji`` of a pair of tokens:
# RECIPROCAL: ``exp(S) (a_i + a_j)`` with ``a = exp(-L)`` given, for bounded scores;
# SHIFTED: ``exp(S - c) (a_i + a_j)`` with ``a = exp(c - L)`` from ``L``, with one c a head;
# SEPARATE: ``exp(S - L_i) + exp(S - L_j)``, for any scores.
RECIPROCAL: tl.constexpr = tl.constexpr(0)
SHIFTED: tl.constexpr = tl.constexpr(1)
SEPARATE: tl.constexpr = tl.constexpr(2)
# Up to this peak of L (base 2) a shifted exponential and its counterweight stay normal in float32.
WIDEST_PEAK: tl.constexpr = tl.constexpr(160.0)
WIDEST_SPLIT: tl.constexpr = tl.constexpr(128)


@triton.jit
def head_of(pointer, index, heads, stride_b, stride_h):
    """Where head ``index % heads`` of sample ``index // heads`` begins; 64-bit offsets."""
    sample = tl.cast(index // heads, tl.int64)
    head = tl.cast(index % heads, tl.int64)
    return pointer + sample * stride_b + head * stride_h


INTERPRETED: tl.constexpr = tl.constexpr(not isinstance(head_of, triton.JITFunction))


@triton.jit
def load_tile(
    head, first, stop, width, stride_n,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr, EVEN_WIDTH: tl.constexpr,
):  # fmt: skip
    """Rows ``first .. first + ROWS`` of a head, zero from row ``stop`` and column ``width`` on.

    The start is a 64-bit scalar, the offsets within the tile are of 32 bits.
    """
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    start = head + tl.cast(first, tl.int64) * stride_n
    pointers = start + (rows[:, None] * stride_n + columns[None, :])
    if EVEN and EVEN_WIDTH:
        tile = tl.load(pointers)
    elif EVEN:
        tile = tl.load(pointers, mask=columns[None, :] < width, other=0.0)
    elif EVEN_WIDTH:
        tile = tl.load(pointers, mask=(first + rows < stop)[:, None], other=0.0)
    else:
        inside = (first + rows < stop)[:, None] & (columns[None, :] < width)
        tile = tl.load(pointers, mask=inside, other=0.0)
    return tile


@triton.jit
def store_tile(
    out, value, index, first, stop, tokens, width, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """Write ``value`` (ROWS, WIDTH) to rows ``first .. stop`` of head ``index`` of contiguous ``out``."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    start = out + (tl.cast(index, tl.int64) * tokens + first) * width
    pointers = start + (rows[:, None] * width + columns[None, :])
    inside = (first + rows < stop)[:, None] & (columns[None, :] < width)
    tl.store(pointers, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _factor(x):
    """``x``, in float32 where the interpreter has no product of it."""
    return x.to(tl.float32) if INTERPRETED and x.dtype == tl.bfloat16 else x


@triton.jit
def product(a, b, total):
    """``total + a b`` in float32; ``total`` may be None."""
    # Written out, as before Triton 3.6 a kernel has no max of constants.
    SQUARE: tl.constexpr = a.shape[0] <= WIDEST_SPLIT and a.shape[1] <= WIDEST_SPLIT
    NARROW: tl.constexpr = SQUARE and b.shape[1] <= WIDEST_SPLIT
    a, b = _factor(a), _factor(b)
    # Before Triton 3.4 a product takes no None.
    if total is None:
        result = tl.dot(a, b, input_precision="tf32x3" if NARROW else "ieee")
    else:
        result = tl.dot(a, b, total, input_precision="tf32x3" if NARROW else "ieee")
    return result


@triton.jit
def scores(a, b):
    """``a b^T`` (rows of a, rows of b) in float32."""
    return product(_factor(a), tl.trans(_factor(b)), None)


@triton.jit
def tangents(z, v, other_z, other_v):
    """``v other_z^T + z other_v^T``."""
    one_side = scores(v, other_z)
    return product(z, tl.trans(other_v), one_side)


@triton.jit
def tilted_product(a, b, total):
    """``total + a b`` for weights ``a`` (float32) that need a wider range than float16 has."""
    if b.dtype == tl.float16:
        total = tl.dot(a, b.to(tl.float32), total, input_precision="tf32")
    else:
        total = product(a.to(b.dtype), b, total)
    return total


@triton.jit
def weighing(value, shift, BOOST: tl.constexpr, FORM: tl.constexpr):
    """A row's part in the weights of its pairs, from its ``L`` (base 2) or ``exp(-L)``; see the forms.

    ``BOOST`` multiplies all weights by ``2^BOOST``, so that small ones survive float16; those that are
    ``SEPARATE`` by ``exp_boosted``.
    """
    if FORM == 1:
        value = tl.exp2(shift + BOOST - value)
    return value


@triton.jit
def exp_boosted(exponent, BOOST: tl.constexpr):
    """``2^(exponent + BOOST)``; the exponent is a small difference, a large ``L`` would absorb the boost."""
    if BOOST > 0:
        exponent += BOOST
    return tl.exp2(exponent)


@triton.jit
def store_row_values(pointer, value, index, first, tokens, ROWS: tl.constexpr):
    """Write one number per row of head ``index`` of a contiguous (B, H, N) tensor."""
    rows = first + tl.arange(0, ROWS)
    tl.store(pointer + tl.cast(index, tl.int64) * tokens + rows, value, mask=rows < tokens)


@triton.jit
def both_weights(score, here, there, shift, FORM: tl.constexpr, BOOST: tl.constexpr):
    """``P_ij`` and ``P_ji`` of a tile of scores (base 2), given ``weighing`` of its rows and columns."""
    if FORM == 2:
        forward = exp_boosted(score - here[:, None], BOOST)
        backward = exp_boosted(score - there[None, :], BOOST)
    else:
        exponential = tl.exp2(score) if FORM == 0 else tl.exp2(score - shift)
        forward = exponential * here[:, None]
        backward = exponential * there[None, :]
    return forward, backward


@triton.jit
def sum_of_weights(score, here, there, shift, FORM: tl.constexpr, BOOST: tl.constexpr):
    """``P_ij + P_ji``; arguments as for ``both_weights``."""
    if FORM == 2:
        forward = exp_boosted(score - here[:, None], BOOST)
        weight = forward + exp_boosted(score - there[None, :], BOOST)
    else:
        exponential = tl.exp2(score) if FORM == 0 else tl.exp2(score - shift)
        weight = exponential * (here[:, None] + there[None, :])
    return weight


@triton.jit
def shift_of(peak):
    """The ``c`` (base 2) that keeps ``exp(S - c)`` and ``exp(c - L)`` normal, given ``max L``."""
    return tl.maximum(0.5 * peak - 15.0, 0.0)


@triton.jit
def diagonal_weights(score, here, there, rows, columns, BOOST: tl.constexpr):
    """``P_ij`` where ``j <= i`` and ``P_ji`` where ``j >= i``, on the diagonal of a causal mask."""
    left = columns[None, :] <= rows[:, None]
    right = columns[None, :] >= rows[:, None]
    forward = tl.where(left, score - here[:, None], float("-inf"))
    backward = tl.where(right, score - there[None, :], float("-inf"))
    return exp_boosted(forward, BOOST), exp_boosted(backward, BOOST)


@triton.jit
def token_count(extent, sample, tokens):
    """Tokens of this sample before its padding."""
    count = tokens
    if extent is not None:
        count = tl.load(extent + sample)
    return count


@triton.jit
def kept_rows(keep, sample, first, stop, tokens, ROWS: tl.constexpr):
    """(ROWS,) bool: which tokens from ``first`` on are neither masked nor padding."""
    rows = first + tl.arange(0, ROWS)
    inside = rows < stop
    if keep is not None:
        row = keep + tl.cast(sample, tl.int64) * tokens
        inside = inside & (tl.load(row + rows, mask=inside, other=0) != 0)
    return inside


# --- row sums -------------------------------------------------------------------------------------

# Sums over rows of ``S = beta Z Z^T``, one program per block of rows, for any scores and masks.
#
# The log-sum-exps, and the mean tangents ``r_i = sum_j P_ij T_ij`` of the Hessian-vector product. Bounded
# scores need no running maximum. The causal kernel also returns ``o = P Z`` of the row softmax (the
# forward pass of Dao, "FlashAttention-2", https://arxiv.org/abs/2307.08691).


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


# --- gradient ---------------------------------------------------------------------------------------

# The gradient ``(P + P^T) Z`` from the log-sum-exps: one program per block of rows.
#
# With ``k_ij = exp(S_ij - c)`` and ``a_i = exp(c - L_i)`` the weight of a pair is
# ``P_ij + P_ji = k_ij (a_i + a_j)``, one exponential. As ``|S_ij| <= max L =: M`` (``L_i >= S_ii``), one
# ``c`` per head serves up to ``M`` about 110; beyond, the kernel takes two exponentials.


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


# --- Hessian-vector product ---------------------------------------------------------------------------

# From the mean tangents above: with ``T = beta (V Z^T + Z V^T)``, symmetric, ``r_i = sum_j P_ij T_ij`` and
# ``W = P * (T - r)`` it is ``H V = (P + P^T) V + (W + W^T) Z``. A cotangent ``a`` of the log-sum-exps adds
# ``beta (diag(a) P + P^T diag(a)) Z``: the same with ``r - beta a`` for ``r``.


# Which tiles of a causal mask: all of an unmasked matrix, left of the diagonal, on it, right of it.
EVERYWHERE: tl.constexpr = tl.constexpr(0)
LEFT: tl.constexpr = tl.constexpr(1)
MIDDLE: tl.constexpr = tl.constexpr(2)
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
