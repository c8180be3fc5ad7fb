"""Bi-softmax by blocks where scores are bounded: half of the tiles serve both of their sides.

With ``e = exp(S)``, symmetric, ``l_i = sum_j e_ij`` and ``u = 1 / l``, the gradient's matrix is
``(P + P^T)_ij = e_ij (u_i + u_j)``. A strip holds some rows of ``e`` and the columns from its first
row on; it gives row sums and column sums, and products with either side. In units of N^2 p
multiply-adds the gradient takes 2 (0.5 for the sums, 1.5 for the products) and the Hessian-vector
product 5 (1.5 and 3.5). A strip that is a whole matrix is kept from the first pass to the second.

Tensors are (G, N, p), G = B H, float32 or float64, rows of tokens that do not count are zero.
``counts`` (G, N, 1) is 1 where a token counts and 0 elsewhere, or None. No row maximum is taken:
the scores' bound must leave ``exp`` within the dtype (``S_ii >= 0``, so no row sum is below 1).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from implicit_attn.kernels import workspace

# Elements of a strip for all its heads: 1 MiB of float32, which stays in cache. Whole matrices are
# small, so that more of them at once save operator calls.
STRIP, WHOLE_STRIP = 2**18, 2**20
WHOLE = 256  # tokens up to which a strip is a whole matrix
ROWS = 128  # rows of a strip beyond that, at most


def gradient(z: Tensor, beta: float, counts: Tensor | None) -> tuple[Tensor, Tensor]:
    """``(P + P^T) Z`` (G, N, p) and ``L`` (G, N)."""
    output = torch.zeros_like(z)
    lse = z.new_empty(z.shape[:2])
    room = Room(z, buffers=2)
    for heads in room.groups():
        part = None if counts is None else counts[heads]
        _gradient(z[heads], beta, part, output[heads], lse[heads], room)
    return output, lse


def product(
    z: Tensor,
    v: Tensor,
    beta: float,
    counts: Tensor | None,
    lse: Tensor | None,
    cotangent: Tensor | None,
) -> Tensor:
    """Hessian times ``v``, plus ``beta (diag(a) P + P^T diag(a)) Z`` for a ``cotangent`` a (G, N)."""
    output = torch.zeros_like(z)
    room = Room(z, buffers=3)
    for heads in room.groups():
        part, row_lse, pull = (None if t is None else t[heads] for t in (counts, lse, cotangent))
        _product(z[heads], v[heads], beta, part, row_lse, pull, output[heads], room)
    return output


def strip_rows(tokens: int) -> int:
    """Rows of a strip, so that all strips are about equal."""
    return tokens if tokens <= WHOLE else -(-tokens // -(-tokens // ROWS))


def strip_heads(z: Tensor, rows: int) -> int:
    """Heads that share a strip of so many rows; on the CPU a head for each core, at least."""
    batch, tokens, _ = z.shape
    heads = (WHOLE_STRIP if rows >= tokens else STRIP) // (rows * tokens)
    if z.device.type == "cpu":
        heads = max(heads, torch.get_num_threads())
    groups = -(-batch // max(1, heads))
    return -(-batch // groups)


class Room:
    """The strips of a batch of matrices and the buffers that they are computed in."""

    def __init__(self, z: Tensor, buffers: int) -> None:
        self.batch, self.tokens, _ = z.shape
        self.rows = strip_rows(self.tokens)
        self.heads = strip_heads(z, self.rows)
        size = self.heads * self.rows * self.tokens
        self._buffers = [workspace.buffer(z, number, size) for number in range(buffers)]

    @property
    def whole(self) -> bool:
        """One strip is the matrix."""
        return self.rows >= self.tokens

    def groups(self) -> Iterator[slice]:
        """Heads that share a strip."""
        for first in range(0, self.batch, self.heads):
            yield slice(first, min(first + self.heads, self.batch))

    def strips(self) -> Iterator[tuple[int, int]]:
        """First row, and the row after the last."""
        for first in range(0, self.tokens, self.rows):
            yield first, min(first + self.rows, self.tokens)

    def buffer(self, number: int, heads: int, rows: int, columns: int) -> Tensor:
        return self._buffers[number][: heads * rows * columns].view(heads, rows, columns)


def strip_scores(z: Tensor, beta: float, first: int, end: int, room: Room) -> Tensor:
    """``S = beta Z Z^T`` of a strip, in buffer 0."""
    strip = room.buffer(0, z.shape[0], end - first, z.shape[1] - first)
    return torch.baddbmm(strip, z[:, first:end], z[:, first:].mT, beta=0.0, alpha=beta, out=strip)


def _exponentials(z: Tensor, beta: float, first: int, end: int, room: Room) -> Tensor:
    return strip_scores(z, beta, first, end, room).exp_()


def _add_sums(strip: Tensor, total: Tensor, counts: Tensor | None, first: int, end: int) -> None:
    """Row sums and, right of the diagonal tile, column sums of a strip into ``total`` (G, N)."""
    beyond = strip[:, :, end - first :]
    if counts is None:
        total[:, first:end] += strip.sum(-1)
        if beyond.shape[2]:
            total[:, end:] += beyond.sum(-2)
        return
    total[:, first:end] += (strip @ counts[:, first:]).squeeze(-1)
    if beyond.shape[2]:
        total[:, end:] += (beyond.mT @ counts[:, first:end]).squeeze(-1)


def _shares(total: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor]:
    """``u = 1 / l`` and ``L = log l``; zero where a token does not count."""
    if counts is None:
        return total.reciprocal(), total.log()
    hidden = counts.squeeze(-1) == 0
    total = total.masked_fill(hidden, 1.0)
    return total.reciprocal().masked_fill_(hidden, 0.0), total.log()


def add_products(strip: Tensor, z: Tensor, output: Tensor, first: int, end: int) -> None:
    """``strip Z`` into the strip's rows, and its transpose right of the diagonal tile."""
    output[:, first:end].baddbmm_(strip, z[:, first:])
    beyond = strip[:, :, end - first :]
    if beyond.shape[2]:
        output[:, end:].baddbmm_(beyond.mT, z[:, first:end])


def _hide(output: Tensor, counts: Tensor | None) -> None:
    if counts is not None:
        output.mul_(counts)


def _gradient(
    z: Tensor, beta: float, counts: Tensor | None, output: Tensor, lse: Tensor, room: Room
) -> None:
    heads, tokens, _ = z.shape
    if room.whole:
        return _whole_gradient(z, beta, counts, output, lse, room)
    total = z.new_zeros(heads, tokens)
    for first, end in room.strips():
        strip = _exponentials(z, beta, first, end, room)
        _add_sums(strip, total, counts, first, end)
    share, logarithm = _shares(total, counts)
    lse.copy_(logarithm)
    for first, end in room.strips():
        strip = _exponentials(z, beta, first, end, room)
        shares = room.buffer(1, *strip.shape)
        torch.add(share[:, first:end, None], share[:, None, first:], out=shares)
        add_products(strip.mul_(shares), z, output, first, end)
    _hide(output, counts)


def _whole_gradient(
    z: Tensor, beta: float, counts: Tensor | None, output: Tensor, lse: Tensor, room: Room
) -> None:
    """One strip is the matrix: it is computed once, and has no other side."""
    strip = _exponentials(z, beta, 0, z.shape[1], room)
    total = strip.sum(-1) if counts is None else (strip @ counts).squeeze(-1)
    share, logarithm = _shares(total, counts)
    lse.copy_(logarithm)
    shares = room.buffer(1, *strip.shape)
    torch.add(share[:, :, None], share[:, None, :], out=shares)
    torch.bmm(shares.mul_(strip), z, out=output)
    _hide(output, counts)


def _product(
    z: Tensor,
    v: Tensor,
    beta: float,
    counts: Tensor | None,
    lse: Tensor | None,
    cotangent: Tensor | None,
    output: Tensor,
    room: Room,
) -> None:
    """``G V + M Z`` with ``G = e (u_i + u_j)``, ``M = G T - e (w_i + w_j)``, ``w = u (r - beta a)``."""
    total, mean = torch.zeros_like(z[:, :, 0]), torch.zeros_like(z[:, :, 0])
    strip = weighted = z
    for first, end in room.strips():
        strip = _exponentials(z, beta, first, end, room)
        if lse is None:
            _add_sums(strip, total, counts, first, end)
        weighted = strip_tangents(z, v, beta, first, end, room).mul_(strip)
        _add_sums(weighted, mean, None, first, end)  # zero wherever a token does not count
    share = _shares(total, counts)[0] if lse is None else _given_shares(lse, counts)
    weight = mean.mul_(share)  # r
    if cotangent is not None:
        weight = weight.sub_(cotangent, alpha=beta)
    weight.mul_(share)
    for first, end in room.strips():
        if not room.whole:
            strip = _exponentials(z, beta, first, end, room)
            weighted = strip_tangents(z, v, beta, first, end, room).mul_(strip)
        shares = room.buffer(2, *strip.shape)
        torch.add(share[:, first:end, None], share[:, None, first:], out=shares)
        weighted.mul_(shares)
        both = shares.mul_(strip)
        weighted.addcmul_(strip, weight[:, first:end, None], value=-1.0)
        weighted.addcmul_(strip, weight[:, None, first:], value=-1.0)
        add_products(both, v, output, first, end)
        add_products(weighted, z, output, first, end)
    _hide(output, counts)


def strip_tangents(
    z: Tensor, v: Tensor, beta: float, first: int, end: int, room: Room, buffer: int = 1
) -> Tensor:
    """``T = beta (V Z^T + Z V^T)`` of a strip."""
    strip = room.buffer(buffer, z.shape[0], end - first, z.shape[1] - first)
    torch.baddbmm(strip, v[:, first:end], z[:, first:].mT, beta=0.0, alpha=beta, out=strip)
    return strip.baddbmm_(z[:, first:end], v[:, first:].mT, alpha=beta)


def _given_shares(lse: Tensor, counts: Tensor | None) -> Tensor:
    share = lse.neg().exp_()
    return share if counts is None else share.mul_(counts.squeeze(-1))
