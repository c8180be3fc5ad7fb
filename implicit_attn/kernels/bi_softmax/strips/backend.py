"""Bi-softmax without an N x N matrix, from stock operators, on any device.

Two ways, both by strips of rows in a workspace of fixed size: ``symmetric`` where scores are
bounded (one exponential per element, half of the tiles), ``rows`` for everything else. Half
precision is computed in float32. For the formulas see ``dispatch``; for autograd and autocast ``ops``.
"""

from __future__ import annotations

from torch import Tensor

from implicit_attn.kernels.arguments import exact_if_alone, within_exponent
from implicit_attn.kernels.bi_softmax.strips import rows, symmetric
from implicit_attn.kernels.tiling import wide_mask, wide_rows


def bisoftmax_forward(
    z: Tensor, beta: float, mask: Tensor | None, causal: bool, limit: float | None
) -> tuple[Tensor, Tensor]:
    """Gradient (B, H, N, p) in the dtype of ``z`` and lse (B, H, N) in float32 or wider."""
    tokens, unmasked = wide_rows(z, mask), wide_mask(z, mask)
    if _bounded(tokens, beta, causal, limit):
        gradient, lse = symmetric.gradient(tokens, beta, unmasked)
        lse = lse.view(z.shape[:3])
        if mask is not None or z.shape[2] == 1:
            own = beta * tokens.square().sum(-1)
            lse = exact_if_alone(lse, own.view_as(lse), mask)
    else:
        gradient, lse = rows.gradient(tokens, beta, unmasked, causal)
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
    tokens, vectors, unmasked = wide_rows(z, mask), wide_rows(v, mask), wide_mask(z, mask)
    given = (lse, _zero_masked_rows(lse_cotangent, mask))
    flat = [None if t is None else t.flatten(0, 1).to(tokens) for t in given]
    if _bounded(tokens, beta, causal, limit):
        result = symmetric.product(tokens, vectors, beta, unmasked, *flat)
    else:
        result = rows.product(tokens, vectors, beta, unmasked, causal, *flat)
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
    """Pullback of ``direction`` through ``bisoftmax_hvp``: to z, v (B, H, N, p), a (B, H, N)."""
    tokens, vectors, along = (wide_rows(t, mask) for t in (z, v, direction))
    unmasked = wide_mask(z, mask)
    a = _zero_masked_rows(lse_cotangent, mask)
    a = None if a is None else a.flatten(0, 1).to(tokens)
    by_z, by_v, by_a = rows.pullback(tokens, vectors, along, beta, unmasked, causal, a)
    if unmasked is not None:
        by_z, by_v, by_a = by_z * unmasked, by_v * unmasked, by_a * unmasked.squeeze(-1)
    by_a = by_a.view(z.shape[:3])
    return by_z.view(z.shape).to(z.dtype), by_v.view(v.shape).to(v.dtype), by_a


def _zero_masked_rows(a: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """A number for each row (B, H, N), zero at masked tokens, whatever was there."""
    return a if a is None or mask is None else a.masked_fill(~mask[:, None], 0.0)


def _bounded(tokens: Tensor, beta: float, causal: bool, limit: float | None) -> bool:
    """Whether ``exp`` of every score, and sums of them, stay within float32.

    Where the caller gives no bound, Cauchy-Schwarz does: ``|S_ij| <= beta max |z_i|^2``. On other
    devices than the CPU asking for it would wait for the device.
    """
    if causal:
        return False
    if limit is None and tokens.device.type == "cpu":
        limit = beta * tokens.square().sum(-1).max().item()
    return within_exponent(limit)
