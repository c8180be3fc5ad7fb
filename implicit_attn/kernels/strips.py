"""Attention without an N x N matrix, from standard operators on strips of rows in buffers of fixed size.

Half precision is computed in float32. Bi-softmax, on any device, uses one of two algorithms; see ``dispatch``
for its formulas and ``ops`` for autograd and autocast.

*Symmetric*, for bounded scores: with symmetric ``e = exp(S)``, ``l_i = sum_j e_ij`` and ``u = 1 / l``
the gradient's matrix is ``(P + P^T)_ij = e_ij (u_i + u_j)``. A strip contains some rows of ``e`` and the
columns from its first row on; it yields row sums, column sums, and products with either side. In units of
N^2 p multiply-adds the gradient costs 2 (0.5 for the sums, 1.5 for the products) and the Hessian-vector
product 5 (1.5 and 3.5). A strip that is a whole matrix is reused in the second pass. Row maxima are not
needed: the bound keeps ``exp`` in range (``S_ii >= 0``, so row sums are at least 1).

*Rows*, for any scores and masks, in one pass: a strip contains all columns of some rows (up to its last
row if causal), so its row maxima and row sums are final, and its contributions to its rows and columns are
added directly: ``P Z`` in the strip's rows plus ``P^T Z_rows`` everywhere. The gradient costs 3 and the
Hessian-vector product 7, or half as much if causal.

Attention to frozen keys (``flash``, on the CPU): if the keys do not depend on the queries, one call of
torch's attention with the keys as values gives value and gradient. Strips compute their derivatives,
including the Hessian-vector product, because torch's backward pass always differentiates the keys, too.
Only derivatives of derivatives store an N x M matrix.

Internal tensors are (G, N, p), G = B H heads, float32 or float64, with zero rows at masked tokens;
``unmasked`` (G, N, 1) is ``wide_mask``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from implicit_attn.kernels import reference
from implicit_attn.kernels.arguments import (
    ORDINARY,
    dense_for_transforms,
    exact_if_alone,
    wide_dtype,
    within_exponent,
    without_autocast,
    zero_masked,
)

# Elements of a strip for all its heads: 1 MiB of float32, which fits into the cache. Whole matrices are
# small, so processing several at once saves operator calls.
STRIP, WHOLE_STRIP = 2**18, 2**20
WHOLE = 256  # largest number of tokens for which a strip is a whole matrix
ROWS = 128  # largest number of rows of a strip for more tokens
# Elements of the largest buffer that is reused; larger ones are allocated for each call.
KEPT = 2**20

_OF_THIS_THREAD = threading.local()
_stock = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

# --- strips and their buffers ---------------------------------------------------------------------


def recomputed(function: Callable[..., Any], count: int, rows: int, *arguments: Any) -> list[Any]:
    """Return ``function(strip, *arguments)`` for strips of so many rows, at least one.

    Several strips are recomputed for derivatives, so only one of them is in memory at a time. With
    ``torch.func`` transforms, forward mode and compilers all of them are.
    """
    strips = [slice(first, first + rows) for first in range(0, max(count, 1), max(rows, 1))]
    tensors = [each for each in arguments if isinstance(each, Tensor)]
    plain = all(type(each) in ORDINARY for each in tensors) and not torch.compiler.is_compiling()
    if len(strips) == 1 or not plain or dense_for_transforms(*tensors) is not None:
        return [function(strip, *arguments) for strip in strips]
    options: Any = {"use_reentrant": False, "preserve_rng_state": False}
    return [checkpoint(function, strip, *arguments, **options) for strip in strips]


def strip_rows(tokens: int) -> int:
    """Return the number of rows that makes all strips about equal."""
    return tokens if tokens <= WHOLE else -(-tokens // -(-tokens // ROWS))


def strip_heads(keys: Tensor, rows: int) -> int:
    """Return the number of heads that share a strip, on the CPU at least one per core."""
    batch, tokens, _ = keys.shape
    heads = (WHOLE_STRIP if rows >= tokens else STRIP) // (rows * tokens)
    if keys.device.type == "cpu":
        heads = max(heads, torch.get_num_threads())
    groups = -(-batch // max(1, heads))
    return -(-batch // groups)


def row_strips(keys: Tensor, queries: int) -> Iterator[tuple[slice, slice]]:
    """Yield strips of whole rows of matrices (G, queries, M): their heads and rows."""
    rows = strip_rows(queries)
    group = strip_heads(keys, rows)
    for head in range(0, keys.shape[0], group):
        for first in range(0, queries, rows):
            yield slice(head, head + group), slice(first, min(first + rows, queries))


def buffer(like: Tensor, number: int, size: int) -> Tensor:
    """Return flat uninitialised memory for ``size`` elements with the dtype and device of ``like``.

    The page faults of a new allocation take longer than the arithmetic of small problems. Each thread
    therefore keeps CPU buffers of up to ``KEPT`` elements, one per ``number`` and dtype; a buffer is valid
    until the same one is requested again.
    """
    if type(like) is not Tensor or like.device.type != "cpu" or size > KEPT:
        return like.new_empty(size)
    kept, name = vars(_OF_THIS_THREAD), f"{number} {like.dtype}"
    found = kept.get(name)
    if found is None or found.numel() < size:
        with torch.inference_mode(False):  # inference tensors cannot be written outside that mode
            found = torch.empty(size, dtype=like.dtype, device="cpu")
        if type(found) is Tensor:  # do not keep tensors of modes such as FakeTensorMode
            kept[name] = found
    return found


def release() -> None:
    """Free the buffers of this thread."""
    vars(_OF_THIS_THREAD).clear()


def wide_rows(z: Tensor, mask: Tensor | None) -> Tensor:
    """Convert (B, H, N, p) to contiguous (B H, N, p), float32 or wider, zero at masked tokens."""
    return zero_masked(z, mask).to(wide_dtype(z)).contiguous().flatten(0, 1)


def wide_mask(z: Tensor, mask: Tensor | None) -> Tensor | None:
    """Convert a mask (B, N) to (B H, N, 1), float32 or wider, 0 at masked tokens and 1 elsewhere."""
    if mask is None:
        return None
    batch, heads, tokens, _ = z.shape
    numbers = mask.to(wide_dtype(z))[:, None]
    return numbers.expand(batch, heads, tokens).reshape(batch * heads, tokens, 1)


def symmetric_strips(
    z: Tensor, beta: float, buffers: int
) -> Iterator[tuple[slice, list[SymmetricStrip]]]:
    """Yield groups of heads with all strips of their matrices ``beta Z Z^T``, in the same buffers."""
    batch, tokens, _ = z.shape
    rows = strip_rows(tokens)
    heads = strip_heads(z, rows)
    shared = [buffer(z, number, heads * rows * tokens) for number in range(buffers)]
    bounds = [(first, min(first + rows, tokens)) for first in range(0, tokens, rows)]
    for head in range(0, batch, heads):
        group = slice(head, head + heads)
        yield group, [SymmetricStrip(z[group], beta, *each, shared) for each in bounds]


class SymmetricStrip:
    """Rows ``first .. end`` of symmetric matrices, and the columns from ``first`` on.

    The tiles right of the diagonal one also represent their transposes, so the strips of a matrix
    are about half of it. The results of a strip are valid until their buffer is reused.
    """

    def __init__(self, z: Tensor, beta: float, first: int, end: int, buffers: list[Tensor]) -> None:
        self.z, self._beta, self._buffers = z, beta, buffers
        self.first, self.end = first, end
        self._rows, self._columns = slice(first, end), slice(first, None)
        self._shape = (z.shape[0], end - first, z.shape[1] - first)

    def buffer(self, number: int) -> Tensor:
        """Return a buffer with the shape of the strip, (heads, rows, columns)."""
        return self._buffers[number][: math.prod(self._shape)].view(self._shape)

    def scores(self) -> Tensor:
        """Return ``S = beta Z Z^T`` in buffer 0."""
        out, rows, columns = self.buffer(0), self.z[:, self._rows], self.z[:, self._columns]
        return torch.baddbmm(out, rows, columns.mT, beta=0.0, alpha=self._beta, out=out)

    def tangents(self, v: Tensor) -> Tensor:
        """Return ``beta (V Z^T + Z V^T)`` in buffer 1."""
        out, z, rows, columns = self.buffer(1), self.z, self._rows, self._columns
        torch.baddbmm(out, v[:, rows], z[:, columns].mT, beta=0.0, alpha=self._beta, out=out)
        return out.baddbmm_(z[:, rows], v[:, columns].mT, alpha=self._beta)

    def pair_sums(self, values: Tensor, number: int) -> Tensor:
        """Return ``a_i + a_j`` for values a (heads, N)."""
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


# --- bi-softmax -----------------------------------------------------------------------------------


def bisoftmax_forward(
    z: Tensor, beta: float, mask: Tensor | None, causal: bool, limit: float | None
) -> tuple[Tensor, Tensor]:
    """Return gradient (B, H, N, p) in the dtype of ``z`` and lse (B, H, N) in float32 or wider."""
    tokens, unmasked = wide_rows(z, mask), wide_mask(z, mask)
    if _bounded(tokens, beta, causal, limit):
        gradient, lse = _symmetric_gradient(tokens, beta, unmasked)
        lse = lse.view(z.shape[:3])
        if mask is not None or z.shape[2] == 1:
            own = beta * tokens.square().sum(-1)
            lse = exact_if_alone(lse, own.view_as(lse), mask)
    else:
        gradient, lse = _row_gradient(tokens, beta, unmasked, causal)
    return gradient.view(z.shape).to(z.dtype), lse.view(z.shape[:3])


def bisoftmax_hvp(
    z: Tensor,
    v: Tensor,
    beta: float,
    mask: Tensor | None,
    causal: bool,
    limit: float | None,
    lse: Tensor | None = None,
    lse_cotangent: Tensor | None = None,
) -> Tensor:
    """Return the Hessian times ``v`` plus the pullback of a cotangent a (B, H, N) of the lse.

    It is ``H V + beta (diag(a) P + P^T diag(a)) Z``, (B, H, N, p) in the dtype of ``z``.
    """
    tokens, vectors, unmasked = wide_rows(z, mask), wide_rows(v, mask), wide_mask(z, mask)
    flat = [_wide_numbers(each, tokens, mask) for each in (lse, lse_cotangent)]
    if _bounded(tokens, beta, causal, limit):
        result = _symmetric_product(tokens, vectors, beta, unmasked, *flat)
    else:
        result = _row_product(tokens, vectors, beta, unmasked, causal, *flat)
    return result.view(z.shape).to(z.dtype)


def hvp_pullback(
    z: Tensor,
    v: Tensor,
    direction: Tensor,
    beta: float,
    mask: Tensor | None,
    causal: bool,
    lse_cotangent: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pullback of ``direction`` through ``bisoftmax_hvp`` to z, v (B, H, N, p), a (B, H, N)."""
    tokens, vectors, along = (wide_rows(t, mask) for t in (z, v, direction))
    unmasked, a = wide_mask(z, mask), _wide_numbers(lse_cotangent, tokens, mask)
    by_z, by_v, by_a = _row_pullback(tokens, vectors, along, beta, unmasked, causal, a)
    if unmasked is not None:
        by_z, by_v, by_a = by_z * unmasked, by_v * unmasked, by_a * unmasked.squeeze(-1)
    by_a = by_a.view(z.shape[:3])
    return by_z.view(z.shape).to(z.dtype), by_v.view(v.shape).to(v.dtype), by_a


def _wide_numbers(a: Tensor | None, like: Tensor, mask: Tensor | None) -> Tensor | None:
    """Convert numbers per row (B, H, N) to (B H, N), zero at masked tokens."""
    if a is None:
        return None
    a = a if mask is None else a.masked_fill(~mask[:, None], 0.0)
    return a.flatten(0, 1).to(like)


def _bounded(tokens: Tensor, beta: float, causal: bool, limit: float | None) -> bool:
    """Return whether ``exp`` of every score and their sums are finite in float32.

    Without a bound from the caller the Cauchy-Schwarz inequality gives one, ``|S_ij| <= beta max |z_i|^2``,
    on the CPU only, because reading it would wait for another device.
    """
    if causal:
        return False
    if limit is None and tokens.device.type == "cpu":
        limit = beta * tokens.square().sum(-1).max().item()
    return within_exponent(limit)


def _symmetric_gradient(z: Tensor, beta: float, unmasked: Tensor | None) -> tuple[Tensor, Tensor]:
    """``(P + P^T) Z`` (G, N, p) and ``L`` (G, N)."""
    output, lse = torch.zeros_like(z), z.new_empty(z.shape[:2])
    for heads, strips in symmetric_strips(z, beta, buffers=2):
        part = None if unmasked is None else unmasked[heads]
        exponentials, total = z, torch.zeros_like(lse[heads])
        for strip in strips:
            exponentials = strip.scores().exp_()
            strip.add_sums(exponentials, total, part)
        reciprocal, lse[heads] = _reciprocals(total, part)
        for strip in strips:
            if len(strips) > 1:
                exponentials = strip.scores().exp_()
            both = exponentials.mul_(strip.pair_sums(reciprocal, 1))
            strip.add_products(both, z[heads], output[heads])
    return output if unmasked is None else output.mul_(unmasked), lse


def _symmetric_product(
    z: Tensor,
    v: Tensor,
    beta: float,
    unmasked: Tensor | None,
    lse: Tensor | None,
    cotangent: Tensor | None,
) -> Tensor:
    """Hessian times ``v``, plus ``beta (diag(a) P + P^T diag(a)) Z`` for a ``cotangent`` a (G, N).

    ``G V + M Z`` with ``G = e (u_i + u_j)``, ``M = G T - e (w_i + w_j)``, ``w = u (r - beta a)``.
    """
    output = torch.zeros_like(z)
    for heads, strips in symmetric_strips(z, beta, buffers=3):
        part, given, a = (None if t is None else t[heads] for t in (unmasked, lse, cotangent))
        total, mean = torch.zeros_like(z[heads, :, 0]), torch.zeros_like(z[heads, :, 0])
        exponentials = weighted = z
        for strip in strips:
            exponentials = strip.scores().exp_()
            if given is None:
                strip.add_sums(exponentials, total, part)
            weighted = strip.tangents(v[heads]).mul_(exponentials)
            strip.add_sums(weighted, mean, None)  # zero at masked tokens
        if given is None:
            reciprocal, _ = _reciprocals(total, part)
        else:
            reciprocal = given.neg().exp_()
            reciprocal = reciprocal if part is None else reciprocal.mul_(part.squeeze(-1))
        weight = mean.mul_(reciprocal)  # r
        if a is not None:
            weight = weight.sub_(a, alpha=beta)
        weight.mul_(reciprocal)
        for strip in strips:
            if len(strips) > 1:
                exponentials = strip.scores().exp_()
                weighted = strip.tangents(v[heads]).mul_(exponentials)
            both = strip.pair_sums(reciprocal, 2)
            weighted.mul_(both)
            both.mul_(exponentials)
            weighted.addcmul_(exponentials, weight[:, strip.first : strip.end, None], value=-1.0)
            weighted.addcmul_(exponentials, weight[:, None, strip.first :], value=-1.0)
            strip.add_products(both, v[heads], output[heads])
            strip.add_products(weighted, z[heads], output[heads])
    return output if unmasked is None else output.mul_(unmasked)


def _reciprocals(total: Tensor, unmasked: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return ``u = 1 / l`` and ``L = log l``, zero at masked tokens."""
    if unmasked is None:
        return total.reciprocal(), total.log()
    masked = unmasked.squeeze(-1) == 0
    total = total.masked_fill(masked, 1.0)
    return total.reciprocal().masked_fill_(masked, 0.0), total.log()


def _row_gradient(
    z: Tensor, beta: float, unmasked: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """``(P + P^T) Z`` (G, N, p) and ``L`` (G, N)."""
    output = torch.zeros_like(z)
    lse = z.new_empty(z.shape[:2])
    for heads, rows, columns, weights, strip_lse in _softmax_strips(z, beta, unmasked, causal):
        lse[heads, rows] = strip_lse
        _add_both_sides(output[heads], weights, z[heads], rows, columns)
    if unmasked is None:
        return output, lse
    return output.mul_(unmasked), lse.mul_(unmasked.squeeze(-1))


def _row_product(
    z: Tensor,
    v: Tensor,
    beta: float,
    unmasked: Tensor | None,
    causal: bool,
    lse: Tensor | None,
    cotangent: Tensor | None,
) -> Tensor:
    """Hessian times ``v``, plus ``beta (diag(a) P + P^T diag(a)) Z`` for a ``cotangent`` a (G, N)."""
    output = torch.zeros_like(z)
    left, right = torch.cat((v, z), -1), torch.cat((z, v), -1)
    for heads, rows, columns, weights, _ in _softmax_strips(z, beta, unmasked, causal, lse):
        tangent = torch.bmm(left[heads, rows], right[heads, columns].mT).mul_(beta)
        mean = torch.einsum("gij,gij->gi", weights, tangent)
        if cotangent is not None:
            mean = mean.sub_(cotangent[heads, rows], alpha=beta)
        tilted = tangent.sub_(mean.unsqueeze(-1)).mul_(weights)
        for matrix, side in ((weights, v[heads]), (tilted, z[heads])):
            _add_both_sides(output[heads], matrix, side, rows, columns)
    return output if unmasked is None else output.mul_(unmasked)


def _row_pullback(
    z: Tensor,
    v: Tensor,
    c: Tensor,
    beta: float,
    unmasked: Tensor | None,
    causal: bool,
    cotangent: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pullback of a Hessian-vector product to z, v (G, N, p) and a (G, N).

    For a direction c the pullback of ``H V + J_L^T a`` (``J_L`` the Jacobian of the lse, a its cotangent)
    is the gradient of the scalar ``c.(H V) + a.(J_L c)`` in (z, v, a). With ``T^v = beta (V Z^T + Z V^T)``,
    ``r^v = rowsum(P * T^v)``, and the same for c, that scalar is the sum over i of

        ``sum_j P_ij Q_ij - r^v_i r^c_i / beta + a_i r^c_i``
        with ``Q_ij = T^v_ij T^c_ij / beta + v_i.c_j + c_i.v_j``

    and its derivatives, from which those in z, v and a follow by the product rule, are

        in S: ``P * (F - rowsum(P * F))``,   ``F = Q + (a - r^v / beta) T^c - (r^c / beta) T^v``
        in ``T^v``: ``P * (T^c - r^c) / beta``,   in ``T^c``: ``P * ((T^v - r^v) / beta + a)``.
    """
    by_z, by_v, by_a = torch.zeros_like(z), torch.zeros_like(v), torch.empty_like(z[:, :, 0])
    for heads, rows, columns, weights, _ in _softmax_strips(z, beta, unmasked, causal):
        own, vectors, along = z[heads], v[heads], c[heads]
        a = 0.0 if cotangent is None else cotangent[heads, rows, None]
        crossed = _both_sides(vectors, along, rows, columns)
        tangent_v = _both_sides(vectors, own, rows, columns).mul_(beta)
        tangent_c = _both_sides(along, own, rows, columns).mul_(beta)
        mean_v = (weights * tangent_v).sum(-1, keepdim=True)
        mean_c = (weights * tangent_c).sum(-1, keepdim=True)
        by_a[heads, rows] = mean_c.squeeze(-1)
        inner = crossed.addcmul_(tangent_v, tangent_c, value=1.0 / beta)
        inner.add_((a - mean_v / beta) * tangent_c).addcmul_(mean_c, tangent_v, value=-1.0 / beta)
        by_scores = weights * inner.sub_((weights * inner).sum(-1, keepdim=True))
        by_tangent_c = weights * (tangent_v.sub_(mean_v) / beta + a)
        by_tangent_v = weights * tangent_c.sub_(mean_c) / beta
        out_z, out_v = by_z[heads], by_v[heads]
        for matrix, side in ((by_scores, own), (by_tangent_v, vectors), (by_tangent_c, along)):
            _add_both_sides(out_z, matrix, side, rows, columns, beta)
        _add_both_sides(out_v, by_tangent_v, own, rows, columns, beta)
        _add_both_sides(out_v, weights, along, rows, columns)
    return by_z, by_v, by_a


def _softmax_strips(
    z: Tensor, beta: float, unmasked: Tensor | None, causal: bool, lse: Tensor | None = None
) -> Iterator[tuple[slice, slice, slice, Tensor, Tensor]]:
    """Yield heads, rows, columns, ``P`` and ``L`` of each strip, with ``L`` from ``lse`` if given."""
    for heads, rows in row_strips(z, z.shape[1]):
        columns = slice(0, rows.stop if causal else z.shape[1])
        left, right = z[heads, rows], z[heads, columns]
        scores = torch.baddbmm(z.new_zeros(()), left, right.mT, beta=0.0, alpha=beta)
        part = None if unmasked is None else unmasked[heads].squeeze(-1).bool()
        blocked = _blocked(z, part, causal, rows, columns)
        if blocked is not None:
            scores.masked_fill_(blocked, -torch.inf)
        if lse is not None:
            given = lse[heads, rows]
            yield heads, rows, columns, scores.sub_(given.unsqueeze(-1)).exp_(), given
            continue
        largest = scores.amax(-1, keepdim=True)
        weights = scores.sub_(largest).exp_()
        total = weights.sum(-1, keepdim=True)
        yield heads, rows, columns, weights.div_(total), largest.add_(total.log()).squeeze(-1)


def _add_both_sides(
    output: Tensor, matrix: Tensor, side: Tensor, rows: slice, columns: slice, scale: float = 1.0
) -> None:
    """Add ``scale (M side)`` to the strip's rows and ``scale (M^T side)`` to its columns."""
    output[:, rows].baddbmm_(matrix, side[:, columns], alpha=scale)
    output[:, columns].baddbmm_(matrix.mT, side[:, rows], alpha=scale)


def _blocked(
    z: Tensor, unmasked: Tensor | None, causal: bool, rows: slice, columns: slice
) -> Tensor | None:
    """Return (G or 1, rows, columns) bool, True where ``m_ij = 0``, except on the diagonal."""
    if unmasked is None and not causal:
        return None
    row = torch.arange(rows.start, rows.stop, device=z.device).unsqueeze(-1)
    column = torch.arange(columns.stop, device=z.device)
    blocked = (column > row if causal else torch.zeros_like(column > row)).unsqueeze(0)
    if unmasked is not None:
        open_pairs = unmasked[:, rows, None] & unmasked[:, None, columns]
        blocked = (blocked | ~open_pairs) & (column != row)
    return blocked


def _both_sides(left: Tensor, right: Tensor, rows: slice, columns: slice) -> Tensor:
    """Return ``left_i.right_j + right_i.left_j`` of a strip."""
    product = torch.bmm(left[:, rows], right[:, columns].mT)
    return product.baddbmm_(right[:, rows], left[:, columns].mT)


# --- attention to frozen keys ---------------------------------------------------------------------


def flash(query: Tensor, key: Tensor, beta: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute frozen-key attention by torch's attention on the CPU, for at least one query and key."""
    mean, lse = _Queries.apply(query, (key,), beta, mask)  # type: ignore[misc]
    if not (torch.is_grad_enabled() and key.requires_grad):
        return mean, lse
    held = (query, mean.detach(), lse.detach())
    of_mean, of_lse = _Keys.apply(key, held, beta, mask)  # type: ignore[misc]
    return mean + of_mean, lse + of_lse


def _unit_stride(tensor: Tensor) -> Tensor:
    """Return the tensor with stride 1 along the width, which torch's operator requires unchecked."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class _Queries(torch.autograd.Function):
    """Torch's attention with the keys as values, and its log-sum-exp; differentiable in the queries.

    A separate node, ``_Keys``, computes the derivative of the keys, so a Hessian-vector product, which
    needs only that of the queries, skips it.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: tuple[Tensor], beta: float, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        bias = None
        if mask is not None:
            bias = query.new_zeros(mask.shape).masked_fill_(~mask, -torch.inf)
            bias = bias[:, None, None]
        (key,) = keys
        rows, columns = _unit_stride(query), _unit_stride(key)
        mean, lse = _stock(rows, columns, columns, 0.0, False, attn_mask=bias, scale=beta)
        ctx.beta = beta
        ctx.save_for_backward(query, key, mask, mean, lse)
        ctx.set_materialize_grads(False)
        return mean, lse

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        query, key, mask, mean, lse = ctx.saved_tensors
        pulled = _pull_back(query, key, mean, lse, cotangents, ctx.beta, mask, False)
        return pulled, None, None, None


class _Keys(torch.autograd.Function):
    """Zeros whose gradient is that of the result of ``_Queries`` with respect to the keys."""

    @staticmethod
    def forward(
        ctx: Any, key: Tensor, held: tuple[Tensor, ...], beta: float, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.beta = beta
        ctx.save_for_backward(key, mask, *held)
        ctx.set_materialize_grads(False)
        _, mean, lse = held
        return mean.new_zeros(()).expand(mean.shape), lse.new_zeros(()).expand(lse.shape)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        key, mask, query, mean, lse = ctx.saved_tensors
        pulled = _pull_back(query, key, mean, lse, cotangents, ctx.beta, mask, True)
        return pulled, None, None, None


@without_autocast
def _pull_back(
    query: Tensor,
    key: Tensor,
    mean: Tensor,
    lse: Tensor,
    cotangents: tuple[Tensor | None, ...],
    beta: float,
    mask: Tensor | None,
    by_key: bool,
) -> Tensor:
    """Return the pullback of cotangents g of the mean and a of the lse to the queries or the keys.

    With ``dS = P * (G K^T - g_i.mean_i + a_i)`` it is ``beta dS K`` or ``beta dS^T Q + P^T G``. It uses the
    graph of the dense formula if it is differentiated again, and strips otherwise.
    """
    if torch.is_grad_enabled():
        pairs = zip(reference.dense(query, key, beta, mask), cotangents, strict=True)
        outputs, weights = zip(*((t, g) for t, g in pairs if g is not None), strict=True)
        by = key if by_key else query
        return torch.autograd.grad(outputs, by, weights, create_graph=True)[0]
    wide = wide_dtype(query)
    given = zip((mean, lse), cotangents, strict=True)
    by_mean, by_lse = (torch.zeros_like(t) if g is None else g for t, g in given)
    rows, columns, pulled = (t.to(wide).flatten(0, 1) for t in (query, key, by_mean))
    shift = by_lse.to(wide) - (by_mean.to(wide) * mean.to(wide)).sum(-1)
    shift, lse = shift.flatten(0, 1).unsqueeze(-1), lse.flatten(0, 1).unsqueeze(-1)
    closed = None if mask is None else ~mask.repeat_interleave(query.shape[1], 0).unsqueeze(1)
    result = torch.zeros_like(columns if by_key else rows)
    for heads, strip in row_strips(columns, rows.shape[1]):
        part = heads, strip
        scores = torch.baddbmm(-lse[part], rows[part], columns[heads].mT, alpha=beta)
        if closed is not None:
            scores.masked_fill_(closed[heads], -torch.inf)
        weights = scores.exp_()
        by_scores = torch.baddbmm(shift[part], pulled[part], columns[heads].mT)
        by_scores.mul_(weights)
        if by_key:
            result[heads].baddbmm_(by_scores.mT, rows[part], alpha=beta)
            result[heads].baddbmm_(weights.mT, pulled[part])
        else:
            result[part] = torch.bmm(by_scores, columns[heads]).mul_(beta)
    like = key if by_key else query
    return result.view(like.shape).to(like.dtype)
