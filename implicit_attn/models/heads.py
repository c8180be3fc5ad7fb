"""Multi-head attention as the shared transformer and CRATE compute it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def split_heads(tokens: Tensor, heads: int) -> Tensor:
    """(B, N, heads p) -> (B, heads, N, p)."""
    return tokens.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(tokens: Tensor) -> Tensor:
    """(B, heads, N, p) -> (B, N, heads p)."""
    return tokens.transpose(1, 2).flatten(2)


def attend(query: Tensor, key: Tensor, value: Tensor, beta: float, mask: Tensor | None) -> Tensor:
    """``softmax(beta Q K^T) V`` of each head, (B, heads, N, p); no key where ``mask`` is False."""
    pairs = None
    if mask is not None:
        # A token may attend to itself even where it is masked: no row of the softmax is empty.
        itself = torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
        pairs = mask[:, None, None, :] | itself
    return F.scaled_dot_product_attention(query, key, value, attn_mask=pairs, scale=beta)
