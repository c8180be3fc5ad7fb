"""Multi-head attention of tokens to earlier ones, and what its variants share with it."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.energies.attention import head_width
from implicit_attn.energies.checks import check_mask, check_state
from implicit_attn.energies.tokens import hide
from implicit_attn.kernels.arguments import dense_for_transforms
from solvers.core.checks import require_flag, require_positive


class AttentionForm(nn.Module):
    """The residual branch u of an attention layer ``z + u(z)``: heads side by side, then ``W_O``.

    A subclass defines ``attend`` on the heads' features. No projection has a bias.

    Args:
        dim: features d of a token.
        heads: H, a divisor of d; each has the width p = d / H.
        causal: token i attends to ``j <= i``, else to all.
        values: there is a ``W_V``.

    Shapes: tokens ``z`` (B, N, d) -> (B, N, d); ``memory`` (B, N, d), what keys and values are made
    of, None: z; ``mask`` (B, N) bool, False at masked tokens, whose output is 0 and to which no other
    token attends.
    """

    def __init__(self, dim: int, heads: int, *, causal: bool = True, values: bool = True) -> None:
        super().__init__()
        self.width = head_width(dim, heads, None)
        self.dim, self.heads, self.causal = dim, heads, require_flag("causal", causal)
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False) if require_flag("values", values) else None
        self.output = nn.Linear(dim, dim, bias=False)

    def forward(
        self, z: Tensor, memory: Tensor | None = None, *, mask: Tensor | None = None
    ) -> Tensor:
        name = type(self).__name__
        check_state(z, name, dim=self.dim, tokens=True)
        check_mask(mask, z, name, features=1)
        if memory is not None and memory.shape != z.shape:
            raise ValueError(
                f"{name}: memory must have the shape of z, {tuple(z.shape)}, got "
                f"{tuple(memory.shape)}"
            )
        z = hide(z, mask)
        memory = z if memory is None else hide(memory, mask)
        query, key = self.split(self.query(z)), self.split(self.key(memory))
        attended = self.attend(query, key, memory, mask).to(query.dtype)
        return hide(self.output(attended.transpose(1, 2).flatten(2)), mask)

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        """What enters ``W_O``, (B, H, N, p), for queries and keys (B, H, N, p) and the memory."""

    def values(self, memory: Tensor) -> Tensor:
        """``W_V h``, (B, H, N, p)."""
        assert self.value is not None
        return self.split(self.value(memory))

    def split(self, tokens: Tensor) -> Tensor:
        """(B, N, H p) -> (B, H, N, p)."""
        return tokens.unflatten(-1, (self.heads, self.width)).transpose(1, 2)

    def allowed(self, count: int, mask: Tensor | None, device: torch.device) -> Tensor | None:
        """Pairs that attend, bool, (N, N) or (B, 1, N, N); each token at least to itself. None: all."""
        pairs = None
        if self.causal:
            pairs = torch.ones(count, count, dtype=torch.bool, device=device).tril()
        if mask is None:
            return pairs
        itself = torch.eye(count, dtype=torch.bool, device=device)
        seen = mask[:, None, None, :] | itself
        return seen if pairs is None else seen & pairs

    def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        """Softmax of scores (B, H, N, N) over the pairs that attend."""
        pairs = self.allowed(scores.shape[-1], mask, scores.device)
        return (scores if pairs is None else scores.masked_fill(~pairs, -torch.inf)).softmax(-1)

    def by_head(self, layer: nn.Linear) -> Tensor:
        """The rows of a projection's weight for each head, (H, p, d)."""
        return layer.weight.unflatten(0, (self.heads, self.width))

    def extra_repr(self) -> str:
        return f"heads={self.heads}, causal={self.causal}"


class CausalAttention(AttentionForm):
    """Softmax attention, ``W_O sum_j P_ij v_j`` with ``P = softmax(q.k / sqrt(p))``.

    With ``W_V = W_K`` and ``W_O,h = W_Q,h^T / H`` it is minus the gradient of each token's free energy
    ``-(T/H) sum_h log sum_j exp(q_h.k_hj / T)`` at ``T = sqrt(p)``, the keys held.

    Args:
        dim, heads, causal: as for ``AttentionForm``.
        fused: use torch's fused attention, which has no second derivatives in reverse mode: those need
            ``fused=False``, the dense formula, which is what the other forms begin with. Forward-mode
            derivatives and the transforms of ``torch.func`` take the dense formula by themselves.

    Source: Vaswani et al. (2017), https://arxiv.org/abs/1706.03762; as a gradient step Ren, Ouyang,
    Tang, Liu, "Transformers as Intrinsic Optimizers", https://arxiv.org/abs/2511.00907, theorem 3.
    """

    def __init__(self, dim: int, heads: int, *, causal: bool = True, fused: bool = True) -> None:
        super().__init__(dim, heads, causal=causal)
        self.fused = require_flag("fused", fused)

    def attend(self, query: Tensor, key: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        value = self.values(memory)
        if not self.fused or dense_for_transforms(query, key, value) is not None:
            return self.weights((query @ key.mT) * self.width**-0.5, mask) @ value
        pairs = None if mask is None else self.allowed(query.shape[2], mask, query.device)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=pairs, is_causal=self.causal and mask is None
        )


class PositiveScalars(nn.Module):
    """Learned numbers > 0, one for each head: ``log(1 + exp(raw))`` of a parameter ``raw`` (H,).

    Args:
        heads: H.
        initial: > 0.
    """

    def __init__(self, heads: int, initial: float) -> None:
        super().__init__()
        initial = require_positive("initial", initial)
        raw = initial + math.log(-math.expm1(-initial))
        self.raw = nn.Parameter(torch.full((heads,), raw))

    def forward(self) -> Tensor:
        """(H, 1, 1), for tensors (B, H, N, p)."""
        return F.softplus(self.raw).view(-1, 1, 1)
