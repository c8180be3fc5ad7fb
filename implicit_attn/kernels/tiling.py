"""Strips of rows and the buffers they are computed in: what the kernels without an N x N matrix share.

Tensors are (G, N, p), G = B H heads, float32 or float64, with zero rows at masked tokens.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from implicit_attn.kernels.arguments import dense_for_transforms, wide_dtype, zero_masked
from implicit_attn.kernels.operators import ORDINARY

# Elements of a strip for all its heads: 1 MiB of float32, which stays in cache. Whole matrices are
# small, so that more of them at once save operator calls.
STRIP, WHOLE_STRIP = 2**18, 2**20
WHOLE = 256  # tokens up to which a strip is a whole matrix
ROWS = 128  # rows of a strip beyond that, at most


# Elements of the largest buffer that is kept; a larger one is allocated for each call.
KEPT = 2**20

_OF_THIS_THREAD = threading.local()


def recomputed(function: Callable[..., Any], count: int, rows: int, *arguments: Any) -> list[Any]:
    """``function(strip, *arguments)`` for strips of so many rows, one at least.

    Where there are several each is computed again for derivatives, so that only one of them is held at a
    time. The transforms of ``torch.func``, forward mode and compilers hold all of them.
    """
    strips = [slice(first, first + rows) for first in range(0, max(count, 1), max(rows, 1))]
    tensors = [each for each in arguments if isinstance(each, Tensor)]
    plain = all(type(each) in ORDINARY for each in tensors) and not torch.compiler.is_compiling()
    if len(strips) == 1 or not plain or dense_for_transforms(*tensors) is not None:
        return [function(strip, *arguments) for strip in strips]
    options: Any = {"use_reentrant": False, "preserve_rng_state": False}
    return [checkpoint(function, strip, *arguments, **options) for strip in strips]


def wide_rows(z: Tensor, mask: Tensor | None) -> Tensor:
    """(B, H, N, p) as (B H, N, p), contiguous, float32 or wider, zero at masked tokens."""
    return zero_masked(z, mask).to(wide_dtype(z)).contiguous().flatten(0, 1)


def wide_mask(z: Tensor, mask: Tensor | None) -> Tensor | None:
    """A mask (B, N) as (B H, N, 1), float32 or wider: 0 at masked tokens and 1 elsewhere."""
    if mask is None:
        return None
    batch, heads, tokens, _ = z.shape
    numbers = mask.to(wide_dtype(z))[:, None]
    return numbers.expand(batch, heads, tokens).reshape(batch * heads, tokens, 1)


def strip_rows(tokens: int) -> int:
    """Rows of a strip, so that all strips are about equal."""
    return tokens if tokens <= WHOLE else -(-tokens // -(-tokens // ROWS))


def strip_heads(keys: Tensor, rows: int) -> int:
    """Heads that share a strip of so many rows; on the CPU a head for each core, at least."""
    batch, tokens, _ = keys.shape
    heads = (WHOLE_STRIP if rows >= tokens else STRIP) // (rows * tokens)
    if keys.device.type == "cpu":
        heads = max(heads, torch.get_num_threads())
    groups = -(-batch // max(1, heads))
    return -(-batch // groups)


def row_strips(keys: Tensor, queries: int) -> Iterator[tuple[slice, slice]]:
    """Strips of whole rows of matrices (G, queries, M): the heads that share one, and its rows."""
    rows = strip_rows(queries)
    group = strip_heads(keys, rows)
    for head in range(0, keys.shape[0], group):
        for first in range(0, queries, rows):
            yield slice(head, head + group), slice(first, min(first + rows, queries))


def buffer(like: Tensor, number: int, size: int) -> Tensor:
    """Flat, uninitialised memory for ``size`` elements with the dtype and device of ``like``.

    A fresh allocation is paid for page by page when it is first written, which for small problems
    takes longer than the arithmetic. So each thread keeps the CPU buffers up to ``KEPT`` elements, one
    for each ``number`` and dtype: a buffer is good until the same one is asked for again.
    """
    if type(like) is not Tensor or like.device.type != "cpu" or size > KEPT:
        return like.new_empty(size)
    kept, name = vars(_OF_THIS_THREAD), f"{number} {like.dtype}"
    found = kept.get(name)
    if found is None or found.numel() < size:
        with torch.inference_mode(False):  # else it could not be written to outside of that mode
            found = torch.empty(size, dtype=like.dtype, device="cpu")
        if type(found) is Tensor:  # what a mode such as FakeTensorMode made is good only inside it
            kept[name] = found
    return found


def release() -> None:
    """Free the buffers of this thread."""
    vars(_OF_THIS_THREAD).clear()


class SymmetricStrips:
    """Strips of the symmetric matrices ``beta Z Z^T``, with the buffers that they share."""

    def __init__(self, z: Tensor, beta: float, buffers: int) -> None:
        self._z, self._beta = z, beta
        batch, tokens, _ = z.shape
        rows = strip_rows(tokens)
        heads = strip_heads(z, rows)
        self.groups = [slice(first, first + heads) for first in range(0, batch, heads)]
        self._rows = [(first, min(first + rows, tokens)) for first in range(0, tokens, rows)]
        size = heads * rows * tokens
        self._buffers = [buffer(z, number, size) for number in range(buffers)]

    def of(self, heads: slice) -> list[SymmetricStrip]:
        """All strips of the matrices of a group of heads."""
        z = self._z[heads]
        return [SymmetricStrip(z, self._beta, *rows, self._buffers) for rows in self._rows]


class SymmetricStrip:
    """Rows ``first .. end`` of symmetric matrices, and the columns from ``first`` on.

    The tiles right of the diagonal one stand for their transposes too, so the strips of a matrix
    are about half of it. What a strip computes lies in a buffer until that is taken again.
    """

    def __init__(self, z: Tensor, beta: float, first: int, end: int, buffers: list[Tensor]) -> None:
        self.z, self._beta, self._buffers = z, beta, buffers
        self.first, self.end = first, end
        self._rows, self._columns = slice(first, end), slice(first, None)
        self._shape = (z.shape[0], end - first, z.shape[1] - first)

    def buffer(self, number: int) -> Tensor:
        """A buffer in the shape of the strip, (heads, rows, columns)."""
        return self._buffers[number][: math.prod(self._shape)].view(self._shape)

    def scores(self) -> Tensor:
        """``S = beta Z Z^T``, in buffer 0."""
        out, rows, columns = self.buffer(0), self.z[:, self._rows], self.z[:, self._columns]
        return torch.baddbmm(out, rows, columns.mT, beta=0.0, alpha=self._beta, out=out)

    def tangents(self, z: Tensor, v: Tensor, number: int = 1) -> Tensor:
        """``beta (V Z^T + Z V^T)``."""
        out, rows, columns = self.buffer(number), self._rows, self._columns
        torch.baddbmm(out, v[:, rows], z[:, columns].mT, beta=0.0, alpha=self._beta, out=out)
        return out.baddbmm_(z[:, rows], v[:, columns].mT, alpha=self._beta)

    def pair_sums(self, values: Tensor, number: int) -> Tensor:
        """``a_i + a_j`` for values a (heads, N)."""
        rows, columns = values[:, self._rows, None], values[:, None, self._columns]
        return torch.add(rows, columns, out=self.buffer(number))

    def add_sums(self, matrix: Tensor, total: Tensor, unmasked: Tensor | None) -> None:
        """Add the row sums of a symmetric matrix, over unmasked columns, to ``total`` (heads, N)."""
        first, end = self.first, self.end
        beyond = matrix[:, :, end - first :]
        if unmasked is None:
            total[:, first:end] += matrix.sum(-1)
            if beyond.shape[2]:
                total[:, end:] += beyond.sum(-2)
            return
        total[:, first:end] += (matrix @ unmasked[:, first:]).squeeze(-1)
        if beyond.shape[2]:
            total[:, end:] += (beyond.mT @ unmasked[:, first:end]).squeeze(-1)

    def add_products(self, matrix: Tensor, side: Tensor, output: Tensor) -> None:
        """Add the product of a symmetric matrix with ``side`` to ``output``, both (heads, N, p)."""
        first, end = self.first, self.end
        output[:, first:end].baddbmm_(matrix, side[:, first:])
        beyond = matrix[:, :, end - first :]
        if beyond.shape[2]:
            output[:, end:].baddbmm_(beyond.mT, side[:, first:end])
