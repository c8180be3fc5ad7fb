"""A turn of Anderson's method in three Triton kernels; what they compute is in ``turns``."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

REDUCED = 16  # chunks whose sums the second kernel reads at a time


@triton.jit
def _products(
    z, value, mask, previous, residual, steps, changes, partial, status, evaluations, left, settings,
    size, chunks, M: tl.constexpr, P: tl.constexpr, C: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Store the newest difference; inner products of a chunk of a row with it and with the residual."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if (row == 0) & (chunk == 0):
        tl.store(left, 0)
    if tl.load(status + row) == -1:
        k = tl.load(evaluations + row)
        damping = tl.load(settings + 2)
        at = chunk * C + tl.arange(0, C)
        there = at < size
        here = row * size + at
        zi = tl.load(z + here, there, 0.0)
        fi = tl.load(value + here, there, 0.0).to(zi.dtype)
        r = fi - zi
        if MASKED:
            keep = tl.load(mask + here, there, 0) != 0
            r, fi = tl.where(keep, r, 0.0), tl.where(keep, fi, 0.0)
        old = there & (k > 0)  # what a buffer holds before the first turn does not count
        before, last = tl.load(residual + here, old, 0.0), tl.load(previous + here, old, 0.0)
        change = tl.where(k > 0, r - before, 0.0)
        step = zi - last + damping.to(zi.dtype) * change
        tl.store(previous + here, zi, there)
        tl.store(residual + here, r, there)
        slot = (k + M - 1) % M
        newest = (row * M + slot) * size + at
        tl.store(steps + newest, step, old)
        tl.store(changes + newest, change, old)
        out = partial + (row * chunks + chunk) * (2 * P + 2)
        for j in tl.static_range(0, M):  # type: ignore[attr-defined]
            known = there & (j < k) & (j != slot)
            other = tl.load(changes + (row * M + j) * size + at, known, 0.0)
            other = tl.where(j == slot, change, other)
            tl.store(out + j, tl.sum(change * other).to(tl.float64))
            tl.store(out + P + j, tl.sum(r * other).to(tl.float64))
        # Squares of float32 numbers neither over- nor underflow in float64.
        wide, wide_value = r.to(tl.float64), fi.to(tl.float64)
        tl.store(out + 2 * P, tl.sum(wide * wide))
        tl.store(out + 2 * P + 1, tl.sum(wide_value * wide_value))


@triton.jit
def _judge(
    partial, gram, weights, status, evaluations, best, better, norm_at_best, limit, left, settings,
    most, chunks, M: tl.constexpr, P: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Status of a row, and the weights of its differences in the next step, by elimination."""
    row = tl.program_id(0).to(tl.int64)
    improved = 0
    if tl.load(status + row) == -1:
        k = tl.load(evaluations + row)
        j = tl.arange(0, P)
        by_change = tl.zeros((P,), tl.float64)
        by_residual = tl.zeros((P,), tl.float64)
        squares = tl.zeros((R,), tl.float64)
        value_squares = tl.zeros((R,), tl.float64)
        for first in range(0, chunks, R):
            c = first + tl.arange(0, R)
            inside = c < chunks
            start = partial + (row * chunks + c) * (2 * P + 2)
            both = inside[:, None] & (j < M)[None, :]
            by_change += tl.sum(tl.load(start[:, None] + j[None, :], both, 0.0), 0)
            by_residual += tl.sum(tl.load(start[:, None] + P + j[None, :], both, 0.0), 0)
            squares += tl.load(start + 2 * P, inside, 0.0)
            value_squares += tl.load(start + 2 * P + 1, inside, 0.0)
        norm, scale = tl.sqrt(tl.sum(squares)), tl.sqrt(tl.sum(value_squares))
        rtol, atol = tl.load(settings), tl.load(settings + 1)
        ridge, tiny, largest = (
            tl.load(settings + 3), tl.load(settings + 4), tl.load(settings + 5),
        )  # fmt: skip
        finite = norm + scale < float("inf")
        bound = tl.where(k == 0, 1e6 * tl.maximum(norm, scale), tl.load(limit + row))
        tl.store(limit + row, bound)
        fits = finite & (norm <= bound)
        converged = fits & (norm <= tl.maximum(rtol * scale, atol))
        new = tl.where(converged, 0, tl.where(k + 1 >= most, 1, -1))
        new = tl.where(fits, new, tl.where(finite, 3, 4))
        relative = tl.minimum(norm / tl.where(scale == 0, tiny, scale), largest)
        least = tl.where(k == 0, float("inf"), tl.load(best + row))
        norm_before = tl.where(k == 0, float("inf"), tl.load(norm_at_best + row))
        better_now = fits & ((relative < least) | converged)
        tl.store(best + row, tl.where(better_now, relative, least))
        tl.store(norm_at_best + row, tl.where(better_now, norm, norm_before))
        improved = better_now.to(tl.int32)
        tl.store(status + row, new)
        tl.store(evaluations + row, k + 1)
        tl.atomic_add(left, tl.where(new == -1, 1, 0))
        # Empty slots have a row and a column of the identity, and so the weight 0.
        slot = (k + M - 1) % M
        a, b = j[:, None], j[None, :]
        same = a == b
        place = gram + row * P * P + a * P + b
        G = tl.where(k == 0, same.to(tl.float64), tl.load(place))
        fresh = tl.where(j == slot, by_change * ridge + tiny, by_change)
        down = tl.sum(tl.where(same, fresh[None, :], 0.0), 1)
        G = tl.where((k > 0) & (a == slot), fresh[None, :], G)
        G = tl.where((k > 0) & (b == slot), down[:, None], G)
        tl.store(place, G)
        x = tl.where(k > 0, by_residual, 0.0)
        for i in tl.static_range(0, M):  # type: ignore[attr-defined]
            pivot_row = tl.sum(tl.where(a == i, G, 0.0), 0)
            pivot = tl.sum(tl.where(j == i, pivot_row, 0.0))
            head = tl.sum(tl.where(j == i, x, 0.0)) / pivot
            factor = tl.where(j == i, 0.0, tl.sum(tl.where(b == i, G, 0.0), 1))
            G = tl.where(
                a == i, pivot_row[None, :] / pivot, G - factor[:, None] * pivot_row[None, :] / pivot
            )
            x = tl.where(j == i, head, x - factor * head)
        # Where products of differences overflow, the next step is a plain one.
        x = tl.where(tl.sum(tl.where(x - x == 0, 0, 1)) == 0, x, 0.0)
        tl.store(weights + row * P + j, x)
    tl.store(better + row, improved)


@triton.jit
def _combine(
    z, kept, residual, steps, weights, status, evaluations, better, settings,
    size, M: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Keep the best iterate of a row, and make the next point of a row that goes on."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * C + tl.arange(0, C)
    there = at < size
    here = row * size + at
    zi = tl.load(z + here, there, 0.0)
    if (tl.load(better + row) != 0) | (tl.load(evaluations + row) == 1):
        tl.store(kept + here, zi, there)
    if tl.load(status + row) == -1:
        k = tl.load(evaluations + row) - 1
        damping = tl.load(settings + 2).to(zi.dtype)
        new = zi + damping * tl.load(residual + here, there, 0.0)
        for j in tl.static_range(0, M):  # type: ignore[attr-defined]
            weight = tl.load(weights + row * P + j).to(zi.dtype)
            new -= weight * tl.load(steps + (row * M + j) * size + at, there & (j < k), 0.0)
        tl.store(z + here, new, there)


def turn(s: Any, value: Any) -> None:
    """:func:`solvers.methods.turns.turn` in three launches."""
    products: Any = _products  # Triton turns Python's numbers into constants
    judge: Any = _judge
    combine: Any = _combine
    batch, size = s.z.shape
    width = s.gram.shape[1]
    chunk = s.chunk
    chunks = triton.cdiv(size, chunk)
    mask = s.z if s.mask is None else s.mask
    products[(batch, chunks)](
        s.z, value, mask, s.previous, s.residual, s.steps, s.changes, s.partial, s.status,
        s.evaluations, s.left, s.settings, size, chunks, s.memory, width, chunk,
        s.mask is not None,
    )  # fmt: skip
    judge[(batch,)](
        s.partial, s.gram, s.weights, s.status, s.evaluations, s.best, s.better, s.norm, s.limit,
        s.left, s.settings, s.max_steps, chunks, s.memory, width, REDUCED,
    )  # fmt: skip
    combine[(batch, chunks)](
        s.z, s.kept, s.residual, s.steps, s.weights, s.status, s.evaluations, s.better,
        s.settings, size, s.memory, width, chunk,
    )  # fmt: skip
