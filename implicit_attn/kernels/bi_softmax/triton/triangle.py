"""Sums over the rows of a symmetric matrix from half of its tiles, in two deterministic phases.

The matrix is ``exp(S)`` (its sums give ``L``) or ``exp(S) * T`` (its sums give the mean tangents of
the Hessian-vector product), for bounded scores. Program ``s`` of a head's ``slices`` programs owns
some blocks of columns (``owned_block``) and writes the row sums of the tiles above the diagonal
into a slot of its own; the second kernel adds the slots in a fixed order. Memory: ``slices`` floats
a token, whatever the number of tokens.
"""

# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false, reportOperatorIssue=false
# (Triton compiles the kernels; a checker sees the Python in them: numbers for constexpr, branches.)
from __future__ import annotations

import triton
import triton.language as tl

from implicit_attn.kernels.bi_softmax.triton.tiles import (
    LN2,
    LOG2E,
    head_of,
    kept_rows,
    load_tile,
    scores,
    store_row_values,
    tangents,
    token_count,
)


@triton.jit
def owned_blocks(slice_index, slices, blocks):
    """How many blocks of columns a slice owns."""
    rounds = blocks // slices
    turn = rounds % 2
    place = slice_index + turn * (slices - 1 - 2 * slice_index)
    return rounds + (place < blocks % slices)


@triton.jit
def owned_block(slice_index, slices, blocks, step):
    """The ``step``-th block that a slice owns, the largest first.

    Block b has b + 1 tiles. Dealing the blocks out, the largest first, forwards and backwards by turns
    gives every slice about as many tiles.
    """
    turn = step % 2
    place = slice_index + turn * (slices - 1 - 2 * slice_index)
    return blocks - 1 - step * slices - place


@triton.jit
def _tile(z, v, other_z, other_v, score_offset, scale, TANGENT: tl.constexpr):
    score = scores(z, other_z) * scale + score_offset[None, :]
    tile = tl.exp2(score)
    if TANGENT:
        tile *= tangents(z, v, other_z, other_v)
    return tile


@triton.jit
def triangle_kernel(
    z, v, keep, extent, slots, heads, tokens, width, slices, scale, z_stride_b, z_stride_h,
    z_stride_n, v_stride_b, v_stride_h, v_stride_n,
    UNIT: tl.constexpr, TANGENT: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    EVEN: tl.constexpr, EVEN_WIDTH: tl.constexpr,
):  # fmt: skip
    """First phase; grid (samples * heads * slices,)."""
    slice_index = tl.program_id(0) % slices
    index = tl.program_id(0) // slices
    sample = index // heads
    width, z_stride_n, v_stride_n = width * UNIT, z_stride_n * UNIT, v_stride_n * UNIT
    z_head = head_of(z, index, heads, z_stride_b * UNIT, z_stride_h * UNIT)
    v_head = head_of(v, index, heads, v_stride_b * UNIT, v_stride_h * UNIT)
    slot = slots + tl.cast(tl.program_id(0), tl.int64) * tokens
    count = token_count(extent, sample, tokens)
    within = tl.arange(0, BLOCK)
    blocks = tl.cdiv(count, BLOCK)
    for step in range(0, owned_blocks(slice_index, slices, blocks)):
        # The largest block writes every row of the slot that later ones add to.
        first = owned_block(slice_index, slices, blocks, step) * BLOCK
        z_own = load_tile(z_head, first, count, width, z_stride_n, BLOCK, WIDTH, EVEN, EVEN_WIDTH)
        v_own = z_own
        if TANGENT:
            v_own = load_tile(
                v_head, first, count, width, v_stride_n, BLOCK, WIDTH, EVEN, EVEN_WIDTH
            )
        own_kept = kept_rows(keep, sample, first, count, tokens, BLOCK)
        offset = tl.where(own_kept, 0.0, float("-inf"))
        # The diagonal tile, symmetric itself; columns are summed over kept rows.
        columns = _tile(z_own, v_own, z_own, v_own, offset, scale, TANGENT)
        columns = tl.where(own_kept[:, None], columns, 0.0)
        for start in range(0, first, BLOCK):
            z_row = load_tile(
                z_head, start, count, width, z_stride_n, BLOCK, WIDTH, True, EVEN_WIDTH
            )
            v_row = z_row
            if TANGENT:
                v_row = load_tile(
                    v_head, start, count, width, v_stride_n, BLOCK, WIDTH, True, EVEN_WIDTH
                )
            tile = _tile(z_row, v_row, z_own, v_own, offset, scale, TANGENT)
            if keep is not None and not TANGENT:  # a tangent is zero there already
                row_kept = kept_rows(keep, sample, start, count, tokens, BLOCK)
                tile = tl.where(row_kept[:, None], tile, 0.0)
            columns += tile
            here = slot + start + within
            before = tl.load(here, mask=(step > 0) & (start + within < tokens), other=0.0)
            tl.store(here, before + tl.sum(tile, 1))
        here = slot + first + within
        inside = first + within < tokens
        before = tl.load(here, mask=(step > 0) & inside, other=0.0)
        tl.store(here, before + tl.sum(columns, 0), mask=inside)
        tl.debug_barrier()  # the next block reads what other threads of this program wrote


@triton.jit
def _slots_sum(slots, index, block, slices, count, tokens, BLOCK: tl.constexpr):
    """Sum over the slots that hold rows of this block, in order."""
    rows = block * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    blocks = tl.cdiv(count, BLOCK)
    for slice_index in range(0, slices):
        largest = owned_block(slice_index, slices, blocks, 0)  # negative where there is none
        slot = slots + (tl.cast(index, tl.int64) * slices + slice_index) * tokens
        end = tl.where(largest >= block, count, 0)
        total += tl.load(slot + rows, mask=rows < end, other=0.0)
    return total


@triton.jit
def triangle_lse_kernel(
    slots, keep, extent, lse, reciprocals, heads, tokens, blocks, slices,
    BLOCK: tl.constexpr, BOOST: tl.constexpr,
):  # fmt: skip
    """Second phase: ``L_i = log sum_j exp(S_ij)`` and ``exp(-L_i)``; grid (samples * heads * blocks,)."""
    index = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    count = token_count(extent, index // heads, tokens)
    total = _slots_sum(slots, index, block, slices, count, tokens, BLOCK)
    kept = kept_rows(keep, index // heads, block * BLOCK, count, tokens, BLOCK)
    total = tl.where(kept, total, 1.0)
    store_row_values(lse, tl.log2(total) * LN2, index, block * BLOCK, tokens, BLOCK)
    store_row_values(reciprocals, (2.0**BOOST) / total, index, block * BLOCK, tokens, BLOCK)


@triton.jit
def triangle_mean_kernel(
    slots, keep, extent, lse, cotangent, mean, reciprocals, heads, tokens, blocks, slices, beta,
    BLOCK: tl.constexpr, BOOST: tl.constexpr,
):  # fmt: skip
    """Second phase: ``r_i = sum_j P_ij T_ij``, less ``beta a_i``, and ``exp(-L_i)``."""
    index = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    count = token_count(extent, index // heads, tokens)
    total = _slots_sum(slots, index, block, slices, count, tokens, BLOCK)
    rows = block * BLOCK + tl.arange(0, BLOCK)
    inside = rows < tokens
    at = tl.cast(index, tl.int64) * tokens + rows
    reciprocal = tl.exp2(-tl.load(lse + at, mask=inside, other=0.0) * LOG2E)
    value = beta * (total * reciprocal)
    if cotangent is not None:
        kept = kept_rows(keep, index // heads, block * BLOCK, count, tokens, BLOCK)
        value -= beta * tl.load(cotangent + at, mask=kept, other=0.0)
    tl.store(mean + at, value, mask=inside)
    tl.store(reciprocals + at, reciprocal * (2.0**BOOST), mask=inside)
