"""Sums over all earlier tokens, which a decay may weigh down, without an N x N matrix.

With decays ``a_l`` in [0, 1] and ``gamma_ij = a_(j+1) ... a_i`` for ``j <= i``, the sums
``sum_(j<=i) gamma_ij v_j`` obey ``s_i = a_i s_(i-1) + v_i``. They are taken in chunks of tokens: within
a chunk by a triangular matrix, between chunks by the recursion.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.kernels.arguments import wide_dtype, without_autocast
from solvers.core.checks import require_count

CHUNK = 64  # tokens; more make larger triangles, fewer more steps of the recursion


@without_autocast
def running_states(
    features: Tensor, log_decay: Tensor | None = None, *, chunk: int = CHUNK
) -> Tensor:
    """What :func:`running_products` needs of the features: ``sum_j gamma f_j f_j^T`` before each chunk.

    Args:
        features, log_decay, chunk: as for :func:`running_products`.

    Returns:
        (B, H, chunks, p, p), float32 or wider.
    """
    _check(features, log_decay, chunk)
    wide, left, whole = _chunks(features, chunk), _chunks(features, chunk), None
    if log_decay is not None:
        logs = _log_chunks(features, log_decay, chunk)
        # What decays a token until the end of its chunk: the logs of those after it.
        after = F.pad(logs[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)
        left, whole = wide * after.exp().unsqueeze(-1), logs.sum(-1, keepdim=True)
    added = left.mT @ wide
    if not added.shape[2]:
        return added
    before, state = [], torch.zeros_like(added[:, :, 0])
    for index in range(added.shape[2]):
        before.append(state)
        if whole is not None:
            state = state * whole[:, :, index, :, None].exp()
        state = state + added[:, :, index]
    return torch.stack(before, 2)


@without_autocast
def running_products(
    query: Tensor,
    features: Tensor,
    log_decay: Tensor | None = None,
    *,
    states: Tensor | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """``sum_(j<=i) gamma_ij (q_i.f_j) f_j``: causal linear attention, its keys for values.

    Args:
        query: q, (B, H, N, p), floating.
        features: f, of the same shape and dtype.
        log_decay: ``log a``, (B, H, N), all <= 0, minus infinity where a is 0; None: every a is 1.
        states: of :func:`running_states` for these features, decays and chunk; None: computed here.
        chunk: tokens of a chunk, >= 1; it changes no result but by rounding.

    Returns:
        (B, H, N, p), differentiable any number of times; O(N (chunk + p) p) operations.

    Raises:
        TypeError, ValueError: for other shapes or dtypes.

    Source: Katharopoulos et al. (2020), https://arxiv.org/abs/2006.16236, in the chunks of Sun et al.,
    "Retentive Network", https://arxiv.org/abs/2307.08621.
    """
    _check(features, log_decay, chunk)
    if query.shape != features.shape or query.dtype != features.dtype:
        raise ValueError(
            f"query must be like features, {tuple(features.shape)} {features.dtype}, got "
            f"{tuple(query.shape)} {query.dtype}"
        )
    if states is None:
        states = running_states(features, log_decay, chunk=chunk)
    rows, wide = _chunks(query, chunk), _chunks(features, chunk)
    scores, from_before = rows @ wide.mT, rows @ states.to(rows.dtype)
    if log_decay is None:
        sums = scores.tril() @ wide + from_before
    else:
        logs = _log_chunks(features, log_decay, chunk)
        from_before = logs.cumsum(-1).exp().unsqueeze(-1) * from_before
        sums = (scores * _triangle(logs)) @ wide + from_before
    return sums.flatten(2, 3)[:, :, : query.shape[2]].to(query.dtype)


def _chunks(values: Tensor, chunk: int) -> Tensor:
    """(B, H, N, r) -> (B, H, chunks, chunk, r), filled up with zeros, float32 or wider."""
    missing = -values.shape[2] % chunk
    wide = F.pad(values.to(wide_dtype(values)), (0, 0, 0, missing))
    return wide.unflatten(2, (wide.shape[2] // chunk, chunk))


def _log_chunks(values: Tensor, log_decay: Tensor, chunk: int) -> Tensor:
    """``log a`` of each chunk, (B, H, chunks, chunk)."""
    wide = log_decay.to(wide_dtype(values)).unsqueeze(-1)
    return _chunks(wide, chunk).squeeze(-1)


def _triangle(logs: Tensor) -> Tensor:
    """``gamma_ij`` within each chunk, (..., chunk, chunk), 0 for j > i.

    Each is the exponential of a sum of its own over ``j < l <= i``: differences of the sums from the
    beginning of a chunk would lose every digit after a decay near 0, and be NaN after one of 0.
    """
    each = logs.unsqueeze(-1).expand(*logs.shape, logs.shape[-1])
    return each.tril(-1).cumsum(-2).exp().tril()


def _check(values: Tensor, log_decay: Tensor | None, chunk: int) -> None:
    require_count("chunk", chunk)
    if not values.is_floating_point():
        raise TypeError(f"values must be of a floating dtype, got {values.dtype}")
    if values.dim() != 4:
        raise ValueError(f"values must have the shape (B, H, N, r), got {tuple(values.shape)}")
    if log_decay is not None and log_decay.shape != values.shape[:3]:
        raise ValueError(
            f"log_decay must have the shape (B, H, N) = {tuple(values.shape[:3])}, got "
            f"{tuple(log_decay.shape)}"
        )
