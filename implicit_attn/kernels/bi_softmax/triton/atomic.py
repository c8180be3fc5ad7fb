"""The gradient from half of the tiles: each adds to its rows and, by atomics, to its columns.

Two thirds of the arithmetic of ``triton_gradient``; the order of the additions, hence the rounding,
changes from run to run. For bounded scores without a causal mask.
"""

# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false, reportOperatorIssue=false
# (Triton compiles the kernels; a checker sees the Python in them: numbers for constexpr, branches.)
from __future__ import annotations

import triton
import triton.language as tl

from implicit_attn.kernels.bi_softmax.triton.tiles import (
    head_of,
    load_tile,
    product,
    scores,
    token_count,
)


@triton.jit
def _add_tile(head, value, first, stop, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    rows = first + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    pointers = head + (tl.cast(rows, tl.int64)[:, None] * width + columns[None, :])
    inside = (rows < stop)[:, None] & (columns[None, :] < width)
    tl.atomic_add(pointers, value, mask=inside, sem="relaxed")


@triton.jit
def atomic_gradient_kernel(
    z, extent, share, out, heads, tokens, width, blocks, scale, stride_b, stride_h, stride_n,
    stride_p,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr, EVEN_WIDTH: tl.constexpr,
    HAS_EXTENT: tl.constexpr, BOOST: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """``out`` (float32, contiguous, zero before); the longest rows first."""
    index = tl.program_id(0) // blocks
    first = (tl.program_id(0) % blocks) * BLOCK
    head = head_of(z, index, heads, stride_b, stride_h)
    at = tl.cast(index, tl.int64) * tokens
    out_head = out + at * width
    count = token_count(extent, index // heads, tokens, HAS_EXTENT)
    within = tl.arange(0, BLOCK)
    z_own = load_tile(head, first, count, width, stride_n, stride_p, BLOCK, WIDTH, EVEN, EVEN_WIDTH)
    rows = first + within
    here = tl.load(share + at + rows, mask=rows < tokens, other=0.0)
    exponential = tl.exp2(scores(z_own, z_own, PRECISION, UPCAST) * scale)
    weight = (exponential * (here[:, None] + here[None, :])).to(z_own.dtype)
    gathered = tl.zeros([BLOCK, WIDTH], tl.float32)
    gathered = product(weight, z_own, gathered, PRECISION, UPCAST)
    for start in range(first + BLOCK, count, BLOCK):
        z_other = load_tile(
            head, start, count, width, stride_n, stride_p, BLOCK, WIDTH, EVEN, EVEN_WIDTH
        )
        columns = start + within
        there = tl.load(share + at + columns, mask=columns < tokens, other=0.0)
        exponential = tl.exp2(scores(z_own, z_other, PRECISION, UPCAST) * scale)
        weight = (exponential * (here[:, None] + there[None, :])).to(z_own.dtype)
        gathered = product(weight, z_other, gathered, PRECISION, UPCAST)
        across = tl.zeros([BLOCK, WIDTH], tl.float32)
        across = product(tl.trans(weight), z_own, across, PRECISION, UPCAST)
        _add_tile(out_head, across * (2.0**-BOOST), start, count, width, BLOCK, WIDTH)
    _add_tile(out_head, gathered * (2.0**-BOOST), first, count, width, BLOCK, WIDTH)
