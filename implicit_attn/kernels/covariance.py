"""The product of a covariance under attention weights with a vector, which no p x p matrix needs."""

from __future__ import annotations

import torch
from torch import Tensor

from implicit_attn.kernels.arguments import wide_dtype
from implicit_attn.kernels.tiling import recomputed
from solvers.core.checks import require_choice, require_count, require_flag
from solvers.core.modes import without_autocast

COVARIANCE_BACKENDS = ("reference", "strips")
STRIP_ROWS = 128


def covariance_product(
    weights: Tensor | tuple[Tensor, Tensor],
    values: Tensor,
    vector: Tensor,
    *,
    mean: Tensor | None = None,
    causal: bool = False,
    backend: str = "reference",
    rows: int = STRIP_ROWS,
) -> Tensor:
    """``C_i w_i = sum_j P_ij (v_j - m_i) ((v_j - m_i).w_i)`` with the mean ``m_i = sum_j P_ij v_j``.

    With the keys for values, ``C w / T`` is the derivative of the attention output
    ``sum_j softmax_j(q.k_j / T) k_j`` by q along w.

    Args:
        weights: P (B, H, N, M), whose rows sum to 1; or the pair (query (B, H, N, p), key
            (B, H, M, p)), for ``P = softmax_j(q_i.k_j)``, the temperature multiplied in already.
        values: v, (B, H, M, r).
        vector: w, (B, H, N, r).
        mean: with P, the means m (B, H, N, r) where they are known; None: they are computed, which
            is more precise where the values have a large common offset.
        causal: with a pair, query i sees the keys ``j <= i``, of which there are as many.
        backend: "reference" (dense) or, with a pair, "strips": strips of rows that are computed
            again for derivatives, so that only one of them is held at a time. The transforms of
            ``torch.func`` and forward-mode derivatives hold all of them.
        rows: of a strip.

    Returns:
        (B, H, N, r) in the dtype of ``vector``, computed in the widest dtype of the arguments,
        float32 or wider; differentiable any number of times.

    Raises:
        TypeError, ValueError: for arguments other than the above, naming them.

    Source: Ren, Ouyang, Tang, Liu, "Transformers as Intrinsic Optimizers",
    https://arxiv.org/abs/2511.00907, where it is the second-order term of a Newton step.
    """
    require_choice("backend", backend, COVARIANCE_BACKENDS)
    require_count("rows", rows)
    require_flag("causal", causal)
    _check(weights, values, vector)
    if mean is not None and mean.shape != vector.shape:
        raise ValueError(
            f"mean must be like vector, {tuple(vector.shape)}, got {tuple(mean.shape)}"
        )
    with without_autocast(values.device.type):
        return _compute(weights, values, vector, mean, causal, backend, rows)


def _compute(
    weights: Tensor | tuple[Tensor, Tensor],
    values: Tensor,
    vector: Tensor,
    mean: Tensor | None,
    causal: bool,
    backend: str,
    rows: int,
) -> Tensor:
    wide = wide_dtype(vector)
    for part in (values, *(weights if isinstance(weights, (tuple, list)) else (weights,))):
        wide = torch.promote_types(wide, part.dtype)
    values, moved = values.to(wide), vector.to(wide)
    # The covariance is that of the values without a common offset, whose squares would cancel.
    origin = values[:, :, :1]
    values = values - origin
    if isinstance(weights, Tensor):
        if causal or backend == "strips":
            raise ValueError(
                'causal=True and backend="strips" need a pair (query, key), got the weights'
            )
        mean = None if mean is None else mean.to(wide) - origin
        return _product(weights.to(wide), values, moved, mean).to(vector.dtype)
    if mean is not None:
        raise ValueError("mean needs the weights, got a pair (query, key)")
    query, key = (part.to(wide) for part in weights)
    if causal and query.shape[2] != key.shape[2]:
        raise ValueError(
            f"causal=True needs as many keys as queries, {query.shape[2]}, got {key.shape[2]}"
        )
    rows = query.shape[2] if backend == "reference" else rows
    parts = recomputed(_strip, query.shape[2], rows, query, key, values, moved, causal)
    return torch.cat(parts, 2).to(vector.dtype)


def _strip(
    rows: slice, query: Tensor, key: Tensor, values: Tensor, vector: Tensor, causal: bool
) -> Tensor:
    scores = query[:, :, rows] @ key.mT
    if causal:
        later = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(later.triu(rows.start + 1), -torch.inf)
    return _product(scores.softmax(-1), values, vector[:, :, rows])


def _product(weights: Tensor, values: Tensor, vector: Tensor, mean: Tensor | None = None) -> Tensor:
    mean = weights @ values if mean is None else mean
    along = vector @ values.mT - (vector * mean).sum(-1, keepdim=True)
    # sum_j P_ij (v_j - m_i).w_i = 0, so the second mean drops out.
    return (weights * along) @ values


def _check(weights: Tensor | tuple[Tensor, Tensor], values: Tensor, vector: Tensor) -> None:
    for name, tensor in (("values", values), ("vector", vector)):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name} must be a tensor of a floating dtype, got {got}")
    parts = list(weights) if isinstance(weights, (tuple, list)) else [weights]
    if not all(isinstance(part, Tensor) for part in parts) or not 1 <= len(parts) <= 2:
        kinds = [type(part).__name__ for part in parts]
        raise TypeError(f"weights must be a tensor or a pair of tensors (query, key), got {kinds}")
    lead, (queries, keys) = parts[0].shape[:2], (parts[0].shape[-2:-1], parts[-1].shape[-2:-1])
    fits = all(part.dim() == 4 and part.shape[:2] == lead for part in parts)
    if len(parts) == 1:
        keys = parts[0].shape[-1:]
    if not fits or parts[0].shape[-1] != parts[-1].shape[-1]:
        raise ValueError(
            "weights must have the shape (B, H, N, M), or be a pair (B, H, N, p) and (B, H, M, p), "
            f"got {[tuple(part.shape) for part in parts]}"
        )
    for name, tensor, tokens in (("values", values, keys), ("vector", vector, queries)):
        if tensor.shape != (*lead, *tokens, *values.shape[-1:]):
            raise ValueError(
                f"{name} must have the shape {(*lead, *tokens, *values.shape[-1:])}, got "
                f"{tuple(tensor.shape)}"
            )
