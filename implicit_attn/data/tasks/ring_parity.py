"""Prefix parity along a ring: a task whose answer takes as many local steps as the ring is long."""

from __future__ import annotations

import torch
from torch import Tensor

from implicit_attn.data.tasks.instances import Instances
from solvers.core.checks import require_count


def draw_rings(
    number: int, size: int, *, marks: tuple[int, int] = (1, 3), generator: torch.Generator
) -> Instances:
    r"""Rings of random bits, some positions marked; the answer is the parity since the last mark.

    With bits ``b_i`` and positions counted around the ring::

        y_i = b_i                      where i is marked
        y_i = (b_i + y_{i-1}) mod 2    elsewhere

    A map that looks at neighbours alone needs as many applications as the longest run from a mark to
    the last position before the next one: this run is the difficulty. Half of the answers are 1,
    whatever is known of fewer bits than the run has.

    Args:
        number: B of instances.
        size: N of positions.
        marks: least and most marks of a ring, drawn uniformly; more than N are cut to N.
        generator: of bits and marks.

    Returns:
        Instances whose inputs (B, N, 2) hold ``2 b_i - 1`` and, at marks, 1, else -1. All positions
        count; the difficulty is in [1, N].

    Raises:
        TypeError, ValueError: a count that is no integer or out of range.

    Source: prefix sums as a task of extrapolation: Bansal et al., "End-to-end Algorithm Synthesis with
    Recurrent Networks" (2022), https://arxiv.org/abs/2202.05826; ring and marks are ours.
    """
    require_count("number", number)
    require_count("size", size)
    least, most = (require_count(f"marks[{k}]", marks[k]) for k in (0, 1))
    if least > most:
        raise ValueError(f"marks must be (least, most), got {marks!r}")
    bits = torch.randint(2, (number, size), generator=generator)
    wanted = torch.randint(least, most + 1, (number, 1), generator=generator).clamp_max(size)
    ranks = torch.rand(number, size, generator=generator).argsort(1).argsort(1)
    marked = ranks < wanted
    targets, runs = ring_parity(bits, marked)
    inputs = torch.stack([bits, marked.long()], dim=2).float() * 2 - 1
    return Instances(inputs, targets, torch.ones_like(marked), runs)


def ring_parity(bits: Tensor, marked: Tensor) -> tuple[Tensor, Tensor]:
    """The parities since the last mark, (B, N) int64, and the longest run of each ring, (B,) int64.

    Args:
        bits: (B, N) int64, 0 or 1.
        marked: (B, N) bool, at least one of each ring.
    """
    size = bits.shape[1]
    parity, run = torch.zeros_like(bits[:, 0]), torch.zeros_like(bits[:, 0])
    targets, longest = torch.empty_like(bits), torch.zeros_like(run)
    for place in range(
        2 * size
    ):  # the second time around, what came before the first mark is known
        here = place % size
        parity = torch.where(marked[:, here], bits[:, here], bits[:, here] ^ parity)
        run = torch.where(marked[:, here], 1, run + 1)
        targets[:, here] = parity
        # The first time around runs begin at no mark, so they are too short, never too long.
        longest = torch.maximum(longest, run)
    return targets, longest
