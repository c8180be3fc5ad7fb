"""Bi-softmax without an N x N matrix, from stock operators, on any device.

Two ways, both by strips of rows in a workspace of fixed size: ``symmetric`` where scores are
bounded (one exponential per element, half of the tiles), ``row_strips`` for everything else. Half
precision is computed in float32. For the formulas see ``reference``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicit_attn.kernels.bi_softmax.reference import PLAIN_EXPONENTIAL, counting
from implicit_attn.kernels.bi_softmax.strips import rows as row_strips
from implicit_attn.kernels.bi_softmax.strips import symmetric, third


def bisoftmax_forward(
    z: Tensor, beta: float, mask: Tensor | None, causal: bool, limit: float | None
) -> tuple[Tensor, Tensor]:
    """Gradient (B, H, N, p) in the dtype of ``z`` and lse (B, H, N) in float32 or wider.

    For the arguments see ``dispatch.bisoftmax``. Not recorded by autograd: see ``ops``.
    """
    if z.numel() == 0:
        wide = torch.promote_types(z.dtype, torch.float32)
        return z.new_zeros(z.shape), z.new_zeros(z.shape[:3], dtype=wide)
    with plain(z):
        rows, counts = wide_rows(z, mask), wide_counts(z, mask)
        if _bounded(rows, beta, causal, limit):
            gradient, lse = symmetric.gradient(rows, beta, counts)
        else:
            gradient, lse = row_strips.gradient(rows, beta, counts, causal)
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
    """Hessian times ``v``, and the pullback of a cotangent a (B, H, N) of the lse.

    ``H V + beta (diag(a) P + P^T diag(a)) Z``, (B, H, N, p) in the dtype of ``z``.
    """
    if z.numel() == 0:
        return z.new_zeros(z.shape)
    with plain(z):
        rows, vectors, counts = wide_rows(z, mask), wide_rows(v, mask), wide_counts(z, mask)
        vectors = vectors.to(rows.dtype)
        flat = [None if t is None else t.flatten(0, 1).to(rows) for t in (lse, lse_cotangent)]
        if _bounded(rows, beta, causal, limit):
            result = symmetric.product(rows, vectors, beta, counts, *flat)
        else:
            result = row_strips.product(rows, vectors, beta, counts, causal, *flat)
        return result.view(z.shape).to(z.dtype)


def bisoftmax_third(
    z: Tensor,
    v: Tensor,
    direction: Tensor,
    beta: float,
    mask: Tensor | None,
    causal: bool,
    lse_cotangent: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Pullback of ``direction`` through ``bisoftmax_hvp``: to z, v (B, H, N, p), a (B, H, N)."""
    if z.numel() == 0:
        wide = torch.promote_types(z.dtype, torch.float32)
        by_a = z.new_zeros(z.shape[:3], dtype=wide)
        return z.new_zeros(z.shape), v.new_zeros(v.shape), by_a
    with plain(z):
        counts = wide_counts(z, mask)
        rows, vectors, along = (wide_rows(t, mask) for t in (z, v, direction))
        vectors, along = vectors.to(rows.dtype), along.to(rows.dtype)
        flat = None if lse_cotangent is None else lse_cotangent.flatten(0, 1).to(rows)
        by_z, by_v, by_a = third.pullback(rows, vectors, along, beta, counts, causal, flat)
        if counts is not None:
            by_z, by_v, by_a = by_z * counts, by_v * counts, by_a * counts.squeeze(-1)
        by_a = by_a.view(z.shape[:3])
        return by_z.view(z.shape).to(z.dtype), by_v.view(v.shape).to(v.dtype), by_a


class plain:
    """Neither autograd nor autocast: the dtypes here are chosen by hand."""

    def __init__(self, z: Tensor) -> None:
        self._contexts = (torch.no_grad(), torch.autocast(z.device.type, enabled=False))

    def __enter__(self) -> None:
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *error: object) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*error)


def wide_rows(z: Tensor, mask: Tensor | None) -> Tensor:
    """(B H, N, p) contiguous, float32 or wider, zero where a token does not count."""
    wide = torch.promote_types(z.dtype, torch.float32)
    return counting(z, mask).to(wide).contiguous().flatten(0, 1)


def wide_counts(z: Tensor, mask: Tensor | None) -> Tensor | None:
    if mask is None:
        return None
    wide = torch.promote_types(z.dtype, torch.float32)
    batch, heads, tokens, _ = z.shape
    return mask.to(wide)[:, None].expand(batch, heads, tokens).reshape(batch * heads, tokens, 1)


def _bounded(rows: Tensor, beta: float, causal: bool, limit: float | None) -> bool:
    """Whether ``exp`` of every score, and sums of them, stay within float32.

    Where nobody vouches for a bound, Cauchy and Schwarz do: ``|S_ij| <= beta max |z_i|^2``. On other
    devices than the CPU asking for it would wait for the device.
    """
    if causal:
        return False
    if limit is None and rows.device.type == "cpu":
        limit = beta * rows.square().sum(-1).max().item()
    return limit is not None and limit <= PLAIN_EXPONENTIAL
