"""Bi-softmax gradient by carried normalisers: one sweep, for iterations whose state holds the lse.

With ``S = beta Z Z^T`` and any vector L the weights are ``w_ij = exp(S_ij - L_i)``, and the sweep that
forms ``(W + W^T) Z`` also finds the true ``L'_i = log sum_j exp(S_ij)``. Where ``L = L'`` this is the
gradient of the bi-softmax energy.

By strips that serve both of their sides (see ``blocks_symmetric``), in units of N^2 p multiply-adds
1.5, and 3.5 for the pullback. Where scores are bounded ``w_ij = exp(S_ij) exp(-L_i)``; elsewhere both
``w_ij`` and ``w_ji`` are exponentials of differences, which stay small while L is near ``L'``, so that
no row maximum is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from implicit_attn.kernels.bi_softmax.dispatch import check_backend, explain
from implicit_attn.kernels.bi_softmax.reference import (
    PLAIN_EXPONENTIAL,
    check_vector,
    counting,
    without_autocast,
)
from implicit_attn.kernels.bi_softmax.strips.backend import plain, wide_counts, wide_rows
from implicit_attn.kernels.bi_softmax.strips.symmetric import (
    Room,
    add_products,
    strip_scores,
    strip_tangents,
)
from implicit_attn.kernels.operators import call, mapped, refuse_forward_mode


def carried_bisoftmax(
    z: Tensor,
    lse: Tensor,
    beta: float,
    *,
    mask: Tensor | None = None,
    limit: float | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """``(W + W^T) Z`` with ``W_ij = m_ij exp(S_ij - L_i)`` for a given L, and the true lse of ``S``.

    Args:
        z: (B, H, N, p) projected tokens, floating.
        lse: L (B, H, N), floating.
        beta, mask, limit: as in ``bisoftmax``.
        backend: "reference" (dense, any derivative), "blocks" (O(N) memory, one derivative), or
            "auto": the choice of ``explain``, with "blocks" where that is "triton".

    Returns:
        (B, H, N, p) in the dtype of ``z`` and (B, H, N) in float32 or wider; zero for tokens that do
        not count.

    Raises:
        TypeError, ValueError: as ``bisoftmax``; for an ``lse`` of another shape or "triton".
        NotImplementedError: forward mode, or a second derivative, of "blocks".
    """
    if check_backend(backend) == "triton":
        raise ValueError('backend must be "auto", "reference" or "blocks", got "triton"')
    choice = explain(z, beta, mask=mask, limit=limit, backend=backend).backend
    check_vector(z, z, lse)
    wide = torch.promote_types(z.dtype, torch.float32)
    if choice == "reference":
        return _dense(z, lse.to(wide), beta, mask)
    refuse_forward_mode(lse, "blocks", "carried_bisoftmax")
    return call(carried_op, _carried, [z, lse], z, lse.to(wide), beta, mask, limit)


@without_autocast
def _dense(z: Tensor, lse: Tensor, beta: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    z = counting(z, mask)
    wide = z.to(lse.dtype)
    scores = (wide @ wide.mT) * beta
    if mask is None:
        weights, found = (scores - lse.unsqueeze(-1)).exp(), scores.logsumexp(-1)
    else:
        hidden = ~mask[:, None, :]
        scores = scores.masked_fill(hidden.unsqueeze(-2), -torch.inf)
        weights = (scores - lse.masked_fill(hidden, 0.0).unsqueeze(-1)).exp()
        weights = weights.masked_fill(hidden.unsqueeze(-1), 0.0)
        # Where a token does not count its row is opened, which spares it the NaN, and dropped.
        found = scores.masked_fill(hidden.unsqueeze(-1), 0.0).logsumexp(-1)
        found = found.masked_fill(hidden, 0.0)
    return ((weights + weights.mT) @ wide).to(z.dtype), found


class _Strips:
    """The weights of one strip after the other, ``w_ij`` and ``w_ji`` without their factors a.

    Where bounded both are ``exp(S)`` and a is ``exp(-L)``; elsewhere a is 1. Tensors are (G, N, p),
    (G, N); what is said of a token that does not count is dropped in the end.
    """

    def __init__(
        self, z: Tensor, lse: Tensor, beta: float, mask: Tensor | None, limit: float | None
    ) -> None:
        self.z, self.beta, self.counts = wide_rows(z, mask), beta, wide_counts(z, mask)
        self.lse = self.counting(lse.flatten(0, 1))
        self.bounded = limit is not None and limit <= PLAIN_EXPONENTIAL
        self.a = self.counting(self.lse.neg().exp()) if self.bounded else None
        self.room = Room(self.z, buffers=5)

    def __iter__(self) -> Iterator[slice]:
        """Goes through the strips, each with its heads."""
        for heads in self.room.groups():
            for first, end in self.room.strips():
                self.heads, self.first, self.end = heads, first, end
                self.own = self.z[heads]
                scores = strip_scores(self.own, self.beta, self.first, self.end, self.room)
                self.left = self.right = scores
                if self.bounded:
                    scores.exp_()
                else:
                    rows, columns = self.sides(self.lse)
                    self.right = torch.sub(scores, columns, out=self.buffer(2)).exp_()
                    self.left = scores.sub_(rows).exp_()
                yield heads

    def buffer(self, number: int) -> Tensor:
        return self.room.buffer(number, *self.left.shape)

    def sides(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """``values`` (G, N) of the strip's rows and of its columns, to broadcast over it."""
        values = values[self.heads]
        return values[:, self.first : self.end, None], values[:, None, self.first :]

    def sums(self, total: Tensor, times: Tensor | None = None) -> None:
        """Adds ``sum_j w_ij`` or ``sum_j w_ij times_ij``, over j that count, to ``total``."""
        left, right = self.left, self.right
        if times is not None:
            left = left * times
            right = left if self.bounded else right * times
        first, end = self.first, self.end
        beyond = right[:, :, end - first :]
        if self.counts is None:
            total[self.heads, first:end] += left.sum(-1)
            total[self.heads, end:] += beyond.sum(-2)
            return
        counts = self.counts[self.heads]
        total[self.heads, first:end] += (left @ counts[:, first:]).squeeze(-1)
        total[self.heads, end:] += (beyond.mT @ counts[:, first:end]).squeeze(-1)

    def combined(self, values: Tensor | None, number: int) -> Tensor:
        """``values_i w_ij + values_j w_ji`` in a buffer of its own; None: 1."""
        out = self.buffer(number)
        if self.a is not None:
            rows, columns = self.sides(self.a if values is None else self.a * values)
            return torch.add(rows, columns, out=out).mul_(self.left)
        if values is None:
            return torch.add(self.left, self.right, out=out)
        rows, columns = self.sides(values)
        return torch.mul(self.left, rows, out=out).addcmul_(self.right, columns)

    def scaled(self, total: Tensor) -> Tensor:
        """What ``sums`` added up, with the factors a."""
        return total if self.a is None else total * self.a

    def found(self, total: Tensor) -> Tensor:
        """The true lse from the sums of all weights."""
        if self.counts is not None:
            total = total.masked_fill(self.counts.squeeze(-1) == 0, 1.0)
        return self.counting(total.log() if self.bounded else total.log() + self.lse)

    def counting(self, values: Tensor) -> Tensor:
        if self.counts is None:
            return values
        return values.masked_fill(self.counts.squeeze(-1) == 0, 0.0)


def _carried(
    z: Tensor, lse: Tensor, beta: float, mask: Tensor | None, limit: float | None
) -> tuple[Tensor, Tensor]:
    if z.numel() == 0:
        return z.new_zeros(z.shape), lse.new_zeros(lse.shape)
    with plain(z):
        strips = _Strips(z, lse, beta, mask, limit)
        output, total = torch.zeros_like(strips.z), torch.zeros_like(strips.lse)
        for heads in strips:
            strips.sums(total)
            both = strips.combined(None, 1)
            add_products(both, strips.own, output[heads], strips.first, strips.end)
        found = strips.found(total)
        return counting(output.view(z.shape), mask).to(z.dtype), found.view(lse.shape)


def _pullback(
    z: Tensor,
    lse: Tensor,
    found: Tensor,
    v: Tensor,
    cotangent: Tensor,
    beta: float,
    mask: Tensor | None,
    limit: float | None,
) -> tuple[Tensor, Tensor]:
    """Pullback of v (of the gradient) and a cotangent c of the found lse: to z and the given lse.

    With ``G = W + W^T`` and ``T = beta (V Z^T + Z V^T)``: by z it is ``(G * T) Z + G V +
    beta (diag(c) P + P^T diag(c)) Z``, ``P`` the true row softmax; by L ``-rowsum(W * T) / beta``.
    """
    if z.numel() == 0:
        return z.new_zeros(z.shape), lse.new_zeros(lse.shape)
    with plain(z):
        strips, vectors = _Strips(z, lse, beta, mask, limit), wide_rows(v, mask)
        # P_ij = w_ij exp(L_i - L'_i)
        ratio = strips.counting((strips.lse - found.flatten(0, 1)).exp())
        pulled = beta * ratio * cotangent.flatten(0, 1)
        output, total = torch.zeros_like(strips.z), torch.zeros_like(strips.lse)
        for heads in strips:
            along, first, end = vectors[heads], strips.first, strips.end
            tangent = strip_tangents(strips.own, along, beta, first, end, strips.room)
            strips.sums(total, tangent)
            both = strips.combined(None, 3)
            tangent.mul_(both).add_(strips.combined(pulled, 4))
            add_products(both, along, output[heads], first, end)
            add_products(tangent, strips.own, output[heads], first, end)
        by_lse = strips.counting(strips.scaled(total)).view(lse.shape) / -beta
        return counting(output.view(z.shape), mask).to(z.dtype), by_lse


carried_op = torch.library.custom_op(
    "implicit_attn::carried_bisoftmax",
    _carried,
    mutates_args=(),
    schema="(Tensor z, Tensor lse, float beta, Tensor? mask, float? limit) -> (Tensor, Tensor)",
)
carried_pullback_op = torch.library.custom_op(
    "implicit_attn::carried_bisoftmax_pullback",
    _pullback,
    mutates_args=(),
    schema="(Tensor z, Tensor lse, Tensor found, Tensor v, Tensor cotangent, float beta, "
    "Tensor? mask, float? limit) -> (Tensor, Tensor)",
)


@carried_op.register_fake
def _(z: Tensor, lse: Tensor, *others: Any) -> Any:
    return z.new_empty(z.shape), lse.new_empty(lse.shape)


@carried_pullback_op.register_fake
def _(z: Tensor, lse: Tensor, *others: Any) -> Any:
    return z.new_empty(z.shape), lse.new_empty(lse.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    z, lse, ctx.beta, mask, ctx.limit = inputs
    ctx.save_for_backward(z, lse, output[1], mask)


def _backward(ctx: Any, v: Tensor, cotangent: Tensor) -> tuple[Any, ...]:
    z, lse, found, mask = ctx.saved_tensors
    given = (z, lse, found.detach(), v.to(z.dtype), cotangent)
    arguments = (*given, ctx.beta, mask, ctx.limit)
    return *call(carried_pullback_op, _pullback, list(given), *arguments), None, None, None


def _backward_pullback(ctx: Any, *cotangents: Tensor) -> Any:
    raise NotImplementedError(
        "the bi-softmax by carried normalisers can be differentiated once; use "
        'backend="reference" for more'
    )


torch.library.register_autograd(carried_op, _backward, setup_context=_save)
torch.library.register_autograd(carried_pullback_op, _backward_pullback)
torch.library.register_vmap(carried_op, mapped(carried_op, 2))
