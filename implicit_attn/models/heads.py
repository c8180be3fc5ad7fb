"""What layers with multi-head softmax attention share."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.energies.attention import head_width
from implicit_attn.models.recurrent import RecurrentLayer


class HeadsLayer(RecurrentLayer):
    """Base of the layers: multi-head attention, the norm before it, and that of the second part."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, head_width(dim, heads, None)
        self.attention_norm, self.feedforward_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def split(self, tokens: Tensor) -> Tensor:
        """(B, N, k heads p) -> (B, k heads, N, p)."""
        return tokens.unflatten(-1, (-1, self.width)).transpose(1, 2)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """``softmax(p^-1/2 Q K^T) V`` of each head, from (B, heads, N, p) to (B, N, heads p)."""
        pairs = None
        if mask is not None:
            # A token may attend to itself even where it is masked: no row of the softmax is empty.
            itself = torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
            pairs = mask[:, None, None, :] | itself
        scale = self.width**-0.5
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=pairs, scale=scale)
        return attended.transpose(1, 2).flatten(2)
