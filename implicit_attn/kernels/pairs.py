"""Which pairs of a query and a key there are, what is added to their scores, and a softmax over them.

Only the dense formulas take such pairs: they hold a number for each pair anyway.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_SHAPES = "(N, M), (B, N, M) or (B, H, N, M), M = N in self-attention"


class Pairs(NamedTuple):
    """Pairs of queries and keys, each part (B or 1, H or 1, N, M).

    Attributes:
        allowed: bool, True where query i may attend to key j; None: everywhere.
        bias: floating, added to the scores ``beta q_i.k_j``; None: nothing is.
    """

    allowed: Tensor | None = None
    bias: Tensor | None = None

    def intersect(self, allowed: Tensor | None) -> Pairs:
        """With only those pairs that are in ``allowed`` (broadcastable, bool), too."""
        if allowed is None:
            return self
        both = allowed if self.allowed is None else self.allowed & allowed
        return Pairs(both, self.bias)


def check_pairs(
    pairs: Tensor | None,
    bias: Tensor | None,
    shape: tuple[int, int, int, int],
    name: str = "bias",
) -> Pairs | None:
    """``pairs`` (bool) and ``bias`` (floating) of two to four dimensions as four each, or None.

    Args:
        shape: (B, H, N, M), to which they must broadcast.
        name: of the bias.

    Raises:
        TypeError, ValueError: for another dtype or shape, naming the argument.
    """
    if pairs is None and bias is None:
        return None
    if pairs is not None and (not isinstance(pairs, Tensor) or pairs.dtype != torch.bool):
        got = pairs.dtype if isinstance(pairs, Tensor) else type(pairs).__name__
        raise TypeError(f"pairs must be a bool tensor {_SHAPES}, got {got}")
    if bias is not None and (not isinstance(bias, Tensor) or not bias.is_floating_point()):
        got = bias.dtype if isinstance(bias, Tensor) else type(bias).__name__
        raise TypeError(f"{name} must be a floating tensor {_SHAPES}, got {got}")
    given = (("pairs", pairs), (name, bias))
    return Pairs(*(None if t is None else _four_dimensional(n, t, shape) for n, t in given))


def _four_dimensional(name: str, tensor: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """A tensor (N, M), (B, N, M) or (B, H, N, M) with four dimensions; sizes of 1 are broadcast.

    Raises:
        ValueError: where it does not broadcast to ``shape`` or its last two sizes differ from it.
    """
    wide = tensor
    if tensor.dim() == 2:
        wide = tensor[None, None]
    elif tensor.dim() == 3:
        wide = tensor[:, None]
    fits = wide.dim() == 4 and wide.shape[2:] == shape[2:]
    if not fits or any(own not in (1, size) for own, size in zip(wide.shape, shape, strict=True)):
        batch, heads, queries, keys = shape
        raise ValueError(
            f"{name} must have the shape ({queries}, {keys}), ({batch}, {queries}, {keys}) or "
            f"({batch}, {heads}, {queries}, {keys}), got {tuple(tensor.shape)}"
        )
    return wide


def softmax_over_pairs(
    scores: Tensor, pairs: Pairs | None, bounded: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Softmax and log-sum-exp of each row of ``scores + bias`` over the allowed pairs.

    What stands at pairs that are not allowed is never used, NaN included. A row without any key has
    weights and log-sum-exp 0.

    Args:
        scores: (B, H, N, M), float32 or wider.
        bounded: ``exp`` of the scores stays finite, which saves the search for each row's maximum; not
            used where there is a bias.

    Returns:
        weights (B, H, N, M), lse (B, H, N), and which rows have a key, (B or 1, H or 1, N) bool, or
        None where all have one.
    """
    allowed, bias = pairs or Pairs()
    scores = scores if bias is None else scores + bias.to(scores.dtype)
    attends = None if allowed is None else allowed.any(-1)
    if allowed is not None and attends is not None:
        # A row without keys is a row of zeros, emptied below: no NaN arises.
        closed = scores.new_zeros(()).masked_fill(attends, -torch.inf).unsqueeze(-1)
        scores = torch.where(allowed, scores, closed)
    if bounded and bias is None:
        exponentials = scores.exp()
        total = exponentials.sum(-1, keepdim=True)
        weights, lse = exponentials / total, total.log().squeeze(-1)
    else:
        weights, lse = scores.softmax(-1), scores.logsumexp(-1)
    if attends is None:
        return weights, lse, None
    weights = weights.masked_fill(~attends.unsqueeze(-1), 0.0)
    return weights, lse.masked_fill(~attends, 0.0), attends


def token_pairs(
    mask: Tensor | None, causal: bool, tokens: int, device: torch.device, own: bool = True
) -> Tensor | None:
    """(B or 1, 1, N, N) bool: pairs of unmasked tokens; None: all.

    With ``j <= i`` where ``causal``, without ``j = i`` but for ``own``.
    """
    pairs = None if mask is None else mask[:, None, :, None] & mask[:, None, None, :]
    if own and not causal:
        return pairs
    every = torch.ones(tokens, tokens, dtype=torch.bool, device=device)
    order = every.tril(0 if own else -1) if causal else ~every.tril().triu()
    return order[None, None] if pairs is None else pairs & order
