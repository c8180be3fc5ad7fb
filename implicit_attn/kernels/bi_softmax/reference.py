"""Bi-softmax attention in dense tensor operations: the definition that other backends must match.

The energy of one head with rows ``z_i`` is ``E(Z) = beta^-1 sum_i L_i`` with ``S = beta Z Z^T`` and
``L_i = log sum_j exp(S_ij)`` (Hu, Zou, Xu, "Hyper-SET", arXiv 2502.11646, equation 3).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from implicit_attn.kernels.operators import has_tangent, transformed

Options = ParamSpec("Options")
Result = TypeVar("Result")

# exp of scores within this bound, and sums of them over any number of tokens, stay in float32.
PLAIN_EXPONENTIAL = 60.0


def without_autocast(
    function: Callable[Concatenate[Tensor, Options], Result],
) -> Callable[Concatenate[Tensor, Options], Result]:
    """``function`` with autocast off on the device of its first argument, recorded as ever.

    Autocast would round the scores of float32 tokens to half precision, and the lse with them.
    """

    @wraps(function)
    def wrapped(first: Tensor, *args: Options.args, **kwargs: Options.kwargs) -> Result:
        kind = first.device.type
        if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
            return function(first, *args, **kwargs)  # spares small calls the context
        with torch.autocast(kind, enabled=False):
            return function(first, *args, **kwargs)

    return wrapped


@without_autocast
def bisoftmax(
    z: Tensor,
    beta: float,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    limit: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradient of the bi-softmax energy, and the log-sum-exp of each row.

    With ``P_ij = m_ij exp(S_ij - L_i)`` the gradient is ``(P + P^T) Z``, for any mask ``m``; the
    energy is ``lse.sum(dim=(1, 2)) / beta``. A token attends and is attended to only where it
    counts (``m_ij = mask_i mask_j``). ``causal`` keeps ``j <= i``: the energy is then causal, its
    gradient is not, because the column term carries later tokens into earlier ones.

    Args:
        z: (B, H, N, p) projected tokens, floating.
        beta: inverse temperature, > 0.
        mask: (B, N) bool, True where a token counts; None: all count.
        causal: restrict row i to columns ``j <= i``.
        limit: a bound on every ``|S_ij|`` that the caller vouches for, as RMS-normalised rows have
            (``beta p``); a moderate one saves the search for each row's maximum.

    Returns:
        gradient (B, H, N, p) in the dtype of ``z``, and lse (B, H, N) in float32 or wider. Tokens
        that do not count have zero in both, and their content is never used.

    Raises:
        TypeError, ValueError: for a dtype, shape or ``beta`` other than the above.
    """
    check_arguments(z, beta, mask)
    blocked = _blocked(z, mask, causal)
    z = counting(z, mask).contiguous()
    if limit is not None and limit <= PLAIN_EXPONENTIAL and not causal:
        both, lse = _symmetric_softmax(z, beta, blocked)
    else:
        weights, lse = _row_softmax(z, beta, blocked)
        both = weights + weights.mT
    return torch.matmul(both, z), lse


@without_autocast
def bisoftmax_hvp(
    z: Tensor,
    v: Tensor,
    beta: float,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    lse: Tensor | None = None,
) -> Tensor:
    """Hessian of the bi-softmax energy times ``v``.

    With ``T = beta (V Z^T + Z V^T)``, ``r_i = sum_j P_ij T_ij`` and ``W = P * (T - r)`` it is
    ``(P + P^T) V + (W + W^T) Z``.

    Args:
        z: (B, H, N, p), as in ``bisoftmax``.
        v: like ``z``.
        beta: as in ``bisoftmax``.
        mask: as in ``bisoftmax``.
        causal: as in ``bisoftmax``.
        lse: what ``bisoftmax`` returned for the same arguments; saves computing it again, which is
            done all the same where a derivative by ``z`` may be asked for.

    Returns:
        (B, H, N, p) like ``z``; zero for tokens that do not count.

    Raises:
        TypeError, ValueError: as ``bisoftmax``, or if ``v`` is not like ``z``.
    """
    check_arguments(z, beta, mask)
    check_vector(z, v, lse)
    blocked = _blocked(z, mask, causal)
    z = counting(z, mask).contiguous()
    v = counting(v, mask).contiguous()
    if lse is None or _differentiated(z):
        weights, _ = _row_softmax(z, beta, blocked)
    else:
        scores = _scores(z, beta, blocked)
        weights = (scores - lse.unsqueeze(-1)).exp().to(z.dtype)
    one_side = torch.matmul(v, z.mT)
    tangent = (one_side + one_side.mT) * beta
    mean = (weights * tangent).sum(-1, keepdim=True)
    tilted = weights * (tangent - mean)
    return torch.matmul(weights + weights.mT, v) + torch.matmul(tilted + tilted.mT, z)


def check_arguments(z: Tensor, beta: float, mask: Tensor | None) -> None:
    """``z`` (B, H, N, p) floating, ``beta`` > 0, ``mask`` (B, N) bool, or an error that says so."""
    if not z.is_floating_point():
        raise TypeError(f"z must be of a floating dtype, got {z.dtype}")
    if z.dim() != 4:
        raise ValueError(f"z must have the shape (B, H, N, p), got {tuple(z.shape)}")
    if not beta > 0:
        raise ValueError(f"beta must be > 0, got {beta!r}")
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be of dtype bool, got {mask.dtype}")
    expected = (z.shape[0], z.shape[2])
    if tuple(mask.shape) != expected:
        raise ValueError(f"mask must have the shape (B, N) = {expected}, got {tuple(mask.shape)}")


def check_vector(z: Tensor, v: Tensor, lse: Tensor | None) -> None:
    """``v`` like ``z``, and ``lse`` (B, H, N) where given, or an error that says what came."""
    if v.shape != z.shape or v.dtype != z.dtype:
        raise ValueError(
            f"v must be like z, {tuple(z.shape)} {z.dtype}, got {tuple(v.shape)} {v.dtype}"
        )
    if lse is not None and lse.shape != z.shape[:3]:
        raise ValueError(
            f"lse must have the shape (B, H, N) = {tuple(z.shape[:3])}, got {tuple(lse.shape)}"
        )


def _differentiated(z: Tensor) -> bool:
    """Whether a derivative by ``z`` may be taken: a given lse, a constant, has no part in it."""
    return (torch.is_grad_enabled() and z.requires_grad) or transformed() or has_tangent(z)


def counting(z: Tensor, mask: Tensor | None) -> Tensor:
    """``z`` with zeros at the tokens that do not count, whatever they held."""
    return z if mask is None else z.masked_fill(~mask[:, None, :, None], 0.0)


def _blocked(z: Tensor, mask: Tensor | None, causal: bool) -> Tensor | None:
    """(B or 1, 1, N, N) bool, True where ``m_ij = 0``; the diagonal stays open.

    A token that does not count is a zero row that meets only itself: its log-sum-exp is 0 and its
    part of the gradient is 0, so no row is ever empty and nothing needs repair afterwards.
    """
    if mask is None and not causal:
        return None
    tokens = z.shape[2]
    if mask is None:
        return torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=z.device).triu(1)
    open_pairs = mask[:, None, :, None] & mask[:, None, None, :]
    if causal:
        open_pairs = open_pairs.tril()
    return ~(open_pairs | torch.eye(tokens, dtype=torch.bool, device=z.device))


def _scores(z: Tensor, beta: float, blocked: Tensor | None) -> Tensor:
    """``S = beta Z Z^T``, minus infinity where blocked; float32 for half precision."""
    if z.dtype in (torch.float16, torch.bfloat16):
        z = z.float()
    batch, heads, tokens, width = z.shape
    rows = z.view(batch * heads, tokens, width)
    scores = torch.baddbmm(z.new_zeros(()), rows, rows.mT, beta=0.0, alpha=beta)
    scores = scores.view(batch, heads, tokens, tokens)
    return scores if blocked is None else scores.masked_fill(blocked, -torch.inf)


def _row_softmax(z: Tensor, beta: float, blocked: Tensor | None) -> tuple[Tensor, Tensor]:
    """``P`` (B, H, N, N) and ``L`` (B, H, N)."""
    scores = _scores(z, beta, blocked)
    log_weights = scores.log_softmax(-1)
    # L_i = S_ii - log P_ii: the diagonal is never blocked, so both are finite.
    lse = scores.diagonal(dim1=-2, dim2=-1) - log_weights.diagonal(dim1=-2, dim2=-1)
    return log_weights.exp().to(z.dtype), lse


def _symmetric_softmax(z: Tensor, beta: float, blocked: Tensor | None) -> tuple[Tensor, Tensor]:
    """``P + P^T`` and ``L`` for bounded scores and a symmetric mask.

    With ``e = exp(S)``, symmetric, and ``l_i = sum_j e_ij``: ``(P + P^T)_ij`` is
    ``e_ij (1 / l_i + 1 / l_j)``.
    """
    exponentials = _scores(z, beta, blocked).exp()
    totals = exponentials.sum(-2)  # columns and rows sum to the same
    shares = totals.reciprocal()
    both = exponentials * (shares.unsqueeze(-1) + shares.unsqueeze(-2))
    return both.to(z.dtype), totals.log()
