"""What the Triton kernels of bi-softmax share: loading tiles, products, the weights of a pair.

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
