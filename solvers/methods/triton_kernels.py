"""A turn of Anderson's method in three Triton kernels; what they compute is in ``turns``."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

REDUCED = 16  # chunks whose sums the second kernel reads at a time


@triton.jit
def _products(
    z, value, mask, base, residual, trial, steps, changes, partial, status, evaluations, pairs, left,
    settings, bounds, size, chunks, M: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Store the newest difference; inner products of a chunk of a row with it and with the residual."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if (row == 0) & (chunk == 0):
        tl.store(left, 0)
    if tl.load(status + row) == -1:
        first = tl.load(evaluations + row) == 0
        k = tl.load(pairs + row)
        damping = tl.load(settings + 2)
        at = tl.load(bounds + chunk) + tl.arange(0, C)
        there = at < tl.load(bounds + chunks + chunk)
        here = row * size + at
        zi = tl.load(z + here, there, 0.0)
        fi = tl.load(value + here, there, 0.0).to(zi.dtype)
        free, given = tl.load(settings + 10) > 0, tl.load(settings + 11) > 0
        r, own = tl.where(given, fi, fi - zi), zi
        fi = tl.where(given, zi + fi, fi)
        if MASKED:
            keep = tl.load(mask + here, there, 0) != 0
            r, fi, own = tl.where(keep, r, 0.0), tl.where(keep, fi, 0.0), tl.where(keep, zi, 0.0)
        own = tl.where(free, own, fi)  # the scale of the row
        old = there & (first == 0)  # what a buffer holds before the first turn does not count
        before, last = tl.load(residual + here, old, 0.0), tl.load(base + here, old, 0.0)
        change = tl.where(first, 0.0, r - before)
        moved = zi - last
        step = moved + damping.to(zi.dtype) * change
        tl.store(trial + here, r, there)
        slot = k % M
        newest = (row * M + slot) * size + at
        tl.store(steps + newest, step, old)
        tl.store(changes + newest, change, old)
        out = partial + (row * chunks + chunk) * (2 * P + 4)
        for j in tl.static_range(0, M):  # type: ignore[attr-defined]
            known = there & (j < k) & (j != slot)
            other = tl.load(changes + (row * M + j) * size + at, known, 0.0)
            other = tl.where(j == slot, change, other)
            tl.store(out + j, tl.sum(change * other).to(tl.float64))
            tl.store(out + P + j, tl.sum(r * other).to(tl.float64))
        # Squares of float32 numbers neither over- nor underflow in float64.
        sums = out + 2 * P
        for j in tl.static_range(0, 4):  # type: ignore[attr-defined]
            term = r if j == 0 else own if j == 1 else moved if j == 2 else change
            wide = term.to(tl.float64)
            tl.store(sums + j, tl.sum(wide * wide))


@triton.jit
def _judge(
    partial, first_chunks, gram, weights, norms, caps, gains, score, relative, norm_at_best, error, room,
    limit, bound, scale, path, status, evaluations, flags, rejections, pairs, nearby, left, settings,
    most, chunks, parts, M: tl.constexpr, P: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    S2: tl.constexpr,
):  # fmt: skip
    """Status of a row, and the weights of its differences in the next step, by elimination."""
    row = tl.program_id(0).to(tl.int64)
    flag = 0
    if tl.load(status + row) == -1:
        k = tl.load(evaluations + row)
        stored = tl.load(pairs + row)
        rejected = tl.load(rejections + row)
        first = k == 0
        count = k + 1
        rtol, atol = tl.load(settings), tl.load(settings + 1)
        ridge, tiny, largest = (
            tl.load(settings + 3), tl.load(settings + 4), tl.load(settings + 5),
        )  # fmt: skip
        eps, fallen, unit = tl.load(settings + 6), tl.load(settings + 7), tl.load(settings + 8)
        free = tl.load(settings + 10) > 0
        infinite = float("inf")
        j = tl.arange(0, P)
        by_change = tl.zeros((P,), tl.float64)
        by_residual = tl.zeros((P,), tl.float64)
        for start in range(0, chunks, R):
            c = start + tl.arange(0, R)
            both = (c < chunks)[:, None] & (j < M)[None, :]
            rows = partial + (row * chunks + c) * (2 * P + 4)
            by_change += tl.sum(tl.load(rows[:, None] + j[None, :], both, 0.0), 0)
            by_residual += tl.sum(tl.load(rows[:, None] + P + j[None, :], both, 0.0), 0)
        # Norms of the whole row decide whether the trial is accepted.
        squares, scale_squares, moved_squares = 0.0 * rtol, 0.0 * rtol, 0.0 * rtol
        for start in range(0, chunks, R):
            c = start + tl.arange(0, R)
            sums = partial + (row * chunks + c) * (2 * P + 4) + 2 * P
            squares += tl.sum(tl.load(sums, c < chunks, 0.0))
            scale_squares += tl.sum(tl.load(sums + 1, c < chunks, 0.0))
            moved_squares += tl.sum(tl.load(sums + 2, c < chunks, 0.0))
        norm, whole = tl.sqrt(squares), tl.sqrt(scale_squares)
        finite = norm + whole < infinite
        far = tl.where(first, tl.load(settings + 9) * tl.maximum(norm, whole), tl.load(limit + row))
        tl.store(limit + row, far)
        guarded = (count > 2) & (rejected == 0)
        lower = norm <= tl.where(first, infinite, tl.load(bound + row))
        accepted = finite & (first | (norm <= far)) & ((guarded == 0) | lower)
        # Judge the row, part by part.
        remembered = tl.arange(0, S2)
        new_score, new_relative, new_error, length = 0.0 * rtol, 0.0 * rtol, 0.0 * rtol, 0.0 * rtol
        new_room = 0.0 * rtol + infinite
        meets, close, less = accepted, accepted, accepted
        for part in range(0, parts):
            own, scales, moves, changed = 0.0 * rtol, 0.0 * rtol, 0.0 * rtol, 0.0 * rtol
            low, high = tl.load(first_chunks + part), tl.load(first_chunks + part + 1)
            for start in range(low, high, R):
                c = start + tl.arange(0, R)
                inside = c < high
                sums = partial + (row * chunks + c) * (2 * P + 4) + 2 * P
                own += tl.sum(tl.load(sums, inside, 0.0))
                scales += tl.sum(tl.load(sums + 1, inside, 0.0))
                moves += tl.sum(tl.load(sums + 2, inside, 0.0))
                changed += tl.sum(tl.load(sums + 3, inside, 0.0))
            own, scales, moves, changed = (
                tl.sqrt(own), tl.sqrt(scales), tl.sqrt(moves), tl.sqrt(changed),
            )  # fmt: skip
            place = row * parts + part
            extent = scales + own
            cap = tl.maximum(tl.maximum(rtol * extent, atol), 10 * eps * extent)
            cap = tl.where(first, tl.where(free, 0.0, cap), tl.load(caps + place))
            start_size = far / tl.load(settings + 9)
            cap = tl.where(accepted, tl.maximum(cap, fallen * tl.minimum(own, start_size)), cap)
            tl.store(caps + place, cap)
            before = tl.where(first, 0.0, tl.load(norms + place))
            # Of a plain step, which follows a rejection, the rate counts.
            slower = tl.where((rejected > 0) & (before > own), before - own, changed)
            slower = tl.maximum(slower, tl.where(free, eps * before, 0.0))
            known = accepted & (first == 0) & (moves > eps * scales)
            kept = place * S + remembered
            gain = tl.load(gains + kept, (remembered < S) & (first == 0), 0.0)
            newest = tl.where(known, count % S, -1)
            gain = tl.where(remembered == newest, moves / slower, gain)
            tl.store(gains + kept, gain, remembered < S)
            length += tl.where(known, moves, 0.0)
            top = tl.max(gain)
            steps_known = tl.sum(tl.where(gain > 0, 1, 0))
            few = steps_known < tl.where(free, 1, 2)
            wrong = tl.where(own == 0, 0.0, tl.where(few, infinite, own * top))
            threshold = tl.maximum(rtol * scales, atol)
            allowed = tl.minimum(threshold, cap)
            scaled = tl.minimum(scales, far)  # a runaway is no scale
            rounded = (own <= unit * scaled) & (unit * scaled <= cap) & (free == 0)
            allowed_error = tl.maximum(rtol * scaled, atol)
            near = (wrong <= allowed_error) | rounded
            new_room = tl.minimum(new_room, tl.where(rounded, infinite, allowed_error / wrong))
            small = (own <= allowed) & (eps * scales <= cap)
            close, less = close & near, less & (own <= cap) & (steps_known >= 4)
            meets = meets & (near & (small | free))
            units = tl.where(allowed == 0, tiny, allowed)
            size_of = tl.where(scales == 0, tiny, scales)
            new_score = tl.maximum(new_score, tl.minimum(own / units, largest))
            new_relative = tl.maximum(new_relative, tl.minimum(own / size_of, largest))
            relative_error = tl.where(wrong < infinite, tl.minimum(wrong / size_of, largest), wrong)
            new_error = tl.maximum(new_error, relative_error)
            tl.store(norms + place, tl.where(accepted, own, before))
        before = (tl.load(nearby + row) != 0) & (first == 0)
        new_score = tl.where(free, norm, new_score)
        meets = meets & ((free == 0) | before | less | (norm == 0))
        tl.store(nearby + row, tl.where(accepted, tl.where(close, 1, 0), tl.where(before, 1, 0)))
        walked = tl.where(first, 0.0, tl.load(path + row)) + length
        tl.store(path + row, walked)
        tl.store(bound + row, tl.where(accepted, norm, tl.load(bound + row)))
        hopeless = (accepted == 0) & (first | (rejected >= 40))
        gone = (accepted == 0) & (rejected > 0) & (norm > far)
        new = tl.where(hopeless, tl.where(finite, 2, 4), -1)
        new = tl.where(gone, 3, new)
        new = tl.where(meets, 0, new)
        new = tl.where((new == -1) & (count >= most), 1, new)
        least = tl.where(first, infinite, tl.load(score + row))
        better = accepted & ((new_score < least) | meets)
        tl.store(score + row, tl.where(better, new_score, least))
        old = tl.where(first, infinite, tl.load(relative + row))
        tl.store(relative + row, tl.where(better, new_relative, old))
        old = tl.where(first, infinite, tl.load(norm_at_best + row))
        tl.store(norm_at_best + row, tl.where(better, norm, old))
        old = tl.where(first, infinite, tl.load(error + row))
        tl.store(error + row, tl.where(better, new_error, old))
        tl.store(room + row, tl.where(better, new_room, tl.load(room + row)))
        flag = tl.where(better, 1, 0) + tl.where(accepted, 2, 0)
        tl.store(status + row, new)
        tl.store(evaluations + row, count)
        tl.atomic_add(left, tl.where(new == -1, 1, 0))
        shortened = tl.where(first, 1.0, tl.load(scale + row))
        grown = tl.where(rejected > 0, tl.minimum(2 * shortened, 1.0), shortened)
        halved = tl.where(rejected > 0, 0.5 * shortened, shortened)
        tl.store(scale + row, tl.where(accepted, grown, halved))
        tl.store(rejections + row, tl.where(accepted, 0, rejected + 1))
        tl.store(pairs + row, tl.where(accepted, tl.where(first, 0, stored + 1), 0))
        # Empty slots have a row and a column of the identity, and so the weight 0.
        slot = stored % M
        a, b = j[:, None], j[None, :]
        same = a == b
        place = gram + row * P * P + a * P + b
        G = tl.where(stored == 0, same.to(tl.float64), tl.load(place))
        own_square = by_change * (1 + ridge) + ridge * moved_squares + tiny
        fresh = tl.where(j == slot, own_square, by_change)
        down = tl.sum(tl.where(same, fresh[None, :], 0.0), 1)
        G = tl.where((first == 0) & (a == slot), fresh[None, :], G)
        G = tl.where((first == 0) & (b == slot), down[:, None], G)
        tl.store(place, G)
        x = tl.where(first, 0.0, by_residual)
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
    tl.store(flags + row, flag)


@triton.jit
def _combine(
    z, kept, base, residual, trial, steps, weights, scale, status, evaluations, pairs, flags, settings,
    bounds, size, chunks, M: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Keep the best iterate and the accepted point of a row, and make the next point of one that goes on."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    flag, running = tl.load(flags + row), tl.load(status + row) == -1
    at = tl.load(bounds + chunk) + tl.arange(0, C)
    there = at < tl.load(bounds + chunks + chunk)
    here = row * size + at
    zi = tl.load(z + here, there, 0.0)
    if ((flag & 1) != 0) | (tl.load(evaluations + row) == 1):
        tl.store(kept + here, zi, there)
    if (flag & 2) != 0:
        r = tl.load(trial + here, there, 0.0)
        if running:
            k = tl.load(pairs + row)
            damping = tl.load(settings + 2).to(zi.dtype)
            new = zi + damping * r
            for j in tl.static_range(0, M):  # type: ignore[attr-defined]
                weight = tl.load(weights + row * P + j).to(zi.dtype)
                new -= weight * tl.load(steps + (row * M + j) * size + at, there & (j < k), 0.0)
            tl.store(z + here, new, there)
        tl.store(base + here, zi, there)
        tl.store(residual + here, r, there)
    elif running:  # a shortened step from the last accepted point
        last, r = tl.load(base + here, there, 0.0), tl.load(residual + here, there, 0.0)
        tl.store(z + here, last + tl.load(scale + row).to(zi.dtype) * r, there)


def turn(s: Any, value: Any) -> None:
    """:func:`solvers.methods.turns.turn` in three launches."""
    products: Any = _products  # Triton turns Python's numbers into constants
    judge: Any = _judge
    combine: Any = _combine
    batch, size = s.z.shape
    width, chunks = s.gram.shape[1], s.chunks.shape[1]
    remembered = s.gains.shape[2]
    mask = s.z if s.mask is None else s.mask
    products[(batch, chunks)](
        s.z, value, mask, s.base, s.residual, s.trial, s.steps, s.changes, s.partial, s.status,
        s.evaluations, s.pairs, s.left, s.settings, s.chunks, size, chunks, s.memory, width, s.chunk,
        s.mask is not None,
    )  # fmt: skip
    judge[(batch,)](
        s.partial, s.first_chunks, s.gram, s.weights, s.norms, s.caps, s.gains, s.score, s.relative, s.norm,
        s.error, s.room, s.limit, s.bound, s.scale, s.path, s.status, s.evaluations, s.flags, s.rejections,
        s.pairs, s.near, s.left, s.settings, s.max_steps, chunks, len(s.sizes), s.memory, width, REDUCED,
        remembered, triton.next_power_of_2(remembered),
    )  # fmt: skip
    combine[(batch, chunks)](
        s.z, s.kept, s.base, s.residual, s.trial, s.steps, s.weights, s.scale, s.status, s.evaluations,
        s.pairs, s.flags, s.settings, s.chunks, size, chunks, s.memory, width, s.chunk,
    )  # fmt: skip
