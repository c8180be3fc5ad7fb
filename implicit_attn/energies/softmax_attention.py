"""Softmax attention with separate queries and keys, as a free energy of the queries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.energies.attention import head_width
from implicit_attn.energies.checks import check_mask, check_tokens
from implicit_attn.energies.energy import Energy
from implicit_attn.energies.projected import (
    SOFT_NORM,
    Projection,
    RMSNorm,
    check_norm,
    merge_heads,
    split_heads,
)
from implicit_attn.energies.tokens import Pair, accumulation_dtype, hide, sum_samples, sum_squares
from implicit_attn.kernels import check_frozen_key_backend, frozen_key_attention
from implicit_attn.kernels.arguments import LARGEST_EXPONENT
from solvers.core.checks import require_choice, require_count, require_positive


class SoftmaxAttention(Energy):
    """Helmholtz free energy of every query among the keys, at the temperature ``1 / beta``.

    ``energy="inner"``: ``E = -beta^-1 sum_h sum_i log sum_j exp(beta q_i.k_j)``. Gradient by q:
    ``-sum_j P_ij k_j``, so a descent step moves a token along its attention output.

    ``energy="elastic"``: ``E = -beta^-1 sum_h sum_i log sum_j exp(-beta |q_i - k_j|^2 / 2)``. Gradient
    by q: ``q_i - sum_j P_ij k_j``. Bounded below.

    ``q = norm(W_q z)``. In self-attention ``k = norm(W_k z)``, and the gradient includes the term of
    the keys, so it is exact and its Jacobian symmetric. In cross-attention ``k = norm(W_k x)`` is
    constant; with ``energy="inner"`` and no norm E is then concave in z.

    Shapes: ``z`` (B, N, d), ``mask`` (B, N). Self: ``x`` is ignored. Cross: ``x`` (B, M, context_dim),
    or a pair of it and a mask (B, M) bool, False at masked context tokens. A query without any key
    has energy 0.

    Args:
        dim: features d of the tokens.
        heads: number of heads.
        energy: ``"inner"`` or ``"elastic"``.
        cross: cross-attention: keys from ``x`` in place of ``z``.
        context_dim: features of the context, default ``dim``; for ``cross`` only.
        head_dim, beta: as for :class:`implicit_attn.energies.attention.HeadsEnergy`.
        norm: norm of each head's queries and keys, ``RMSNorm(epsilon)`` or None.
        bound: bound on the spectral norms of ``W_q`` and ``W_k``, or None.
        causal: for self-attention, restrict the energy of token i to ``j <= i``. The key term of the
            gradient still carries information from later to earlier tokens.
        backend: what computes cross-attention: "reference" (dense), "flash" (torch's fused attention
            on the CPU, which forms no N x M matrix) or "auto";
            ``implicit_attn.kernels.explain_frozen_keys`` says which one "auto" takes.
            Self-attention is dense.

    Source: Ren, Ouyang, Tang, Liu, "Transformers as Intrinsic Optimizers",
    https://arxiv.org/abs/2511.00907, equation 3 ("inner") and theorem 1 ("elastic").
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        energy: str = "inner",
        cross: bool = False,
        context_dim: int | None = None,
        head_dim: int | None = None,
        beta: float | None = None,
        norm: RMSNorm | None = SOFT_NORM,
        bound: float | None = None,
        causal: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        require_choice("energy", energy, ("inner", "elastic"))
        if context_dim is not None and not cross:
            raise ValueError(f"context_dim needs cross=True, got context_dim={context_dim!r}")
        if causal and cross:
            raise ValueError("causal needs self-attention, got causal=True with cross=True")
        if check_frozen_key_backend(backend) == "flash" and not cross:
            raise ValueError("backend='flash' needs cross=True, got cross=False")
        self.dim, self.heads, self.width = dim, heads, head_width(dim, heads, head_dim)
        width = heads * self.width
        self.context_dim = dim if context_dim is None else require_count("context_dim", context_dim)
        self.energy, self.cross, self.causal, self.backend = energy, cross, causal, backend
        self.beta = self.width**-0.5 if beta is None else require_positive("beta", beta)
        self.norm = check_norm(norm)
        self.query = Projection(dim, width, bound)
        self.key = Projection(self.context_dim, width, bound)
        self.concave = cross and energy == "inner" and norm is None

    def value_and_grad(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Pair:
        check_tokens(z, mask, type(self).__name__, dim=self.dim, tokens=True)
        z = hide(z, mask)
        query_weight, key_weight = self.query.weight, self.key.weight
        query, query_radius = self._features(z, query_weight)
        if self.cross:
            context, context_mask = self._context(x, z)
            key, _ = self._features(context, key_weight)
            value, force = self._among_frozen_keys(query, key, mask, context_mask)
            gradient = self._pull_back(force, query, query_radius, query_weight)
            return value, hide(gradient, mask).to(z.dtype)
        key, key_radius = self._features(z, key_weight)
        weights, lse, attends = self._attend(query, key, self._excluded_pairs(z, mask))
        force = -(weights @ key)
        if self.energy == "elastic":
            force = force + _where_attends(query, attends)
        gradient = self._pull_back(force, query, query_radius, query_weight)
        force = -(weights.mT @ query)
        if self.energy == "elastic":
            force = force + weights.sum(-2).unsqueeze(-1) * key
        gradient = gradient + self._pull_back(force, key, key_radius, key_weight)
        return self._value(query, lse, attends), hide(gradient, mask).to(z.dtype)

    def _among_frozen_keys(
        self, query: Tensor, key: Tensor, mask: Tensor | None, context_mask: Tensor | None
    ) -> Pair:
        """Value, and its gradient by the queries (B, H, N, p)."""
        attends = None if mask is None else mask[:, None]
        if context_mask is not None:
            some = context_mask.any(1)[:, None, None]
            attends = some if attends is None else attends & some
        queries, keys = query, key
        if self.energy == "elastic":  # q.k - |k|^2 / 2 as a product of features wider by one
            half = key.square().sum(-1, keepdim=True) * -0.5
            queries = torch.cat((query, torch.ones_like(query[..., :1])), -1)
            keys = torch.cat((key, half), -1)
        mean, lse = frozen_key_attention(
            queries, keys, self.beta, mask=context_mask, backend=self.backend
        )
        force = -mean[..., : self.width]
        if attends is not None:
            force, lse = _where_attends(force, attends), lse.masked_fill(~attends, 0.0)
        if self.energy == "elastic":
            force = force + _where_attends(query, attends)
        return self._value(query, lse, attends), force

    def _excluded_pairs(self, z: Tensor, mask: Tensor | None) -> Tensor | None:
        """(B or 1, 1, N, N) bool, or None."""
        pairs = None if mask is None else ~(mask[:, None, :, None] & mask[:, None, None, :])
        if not self.causal:
            return pairs
        later = torch.ones(z.shape[1], z.shape[1], dtype=torch.bool, device=z.device).triu(1)
        return later[None, None] if pairs is None else pairs | later

    def _context(self, x: Any, z: Tensor) -> tuple[Tensor, Tensor | None]:
        name = "SoftmaxAttention (cross)"
        context, mask = x if isinstance(x, (tuple, list)) and len(x) == 2 else (x, None)
        shape = f"({z.shape[0]}, M, {self.context_dim})"
        if not isinstance(context, Tensor):
            raise TypeError(
                f"{name}: x must be a tensor {shape}, or a pair of it and a mask, "
                f"got {type(x).__name__}; where x is a dict, choose its part with .select(key)"
            )
        expected = (z.shape[0], self.context_dim)
        if context.dim() != 3 or (context.shape[0], context.shape[2]) != expected:
            raise ValueError(f"{name}: x must have the shape {shape}, got {tuple(context.shape)}")
        if context.device != z.device:
            raise ValueError(f"{name}: x must be on {z.device} like z, got {context.device}")
        check_mask(mask, context, f"{name}, context", features=1)
        return hide(context, mask), mask

    def _features(self, tokens: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """(B, N, d) -> (B, heads, N, p), and the radius of the norm."""
        y = split_heads(F.linear(tokens, weight), self.heads)
        return (y, None) if self.norm is None else self.norm.normalise(y)

    def _attend(
        self, query: Tensor, key: Tensor, blocked: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Weights P (B, H, N, M), lse (B, H, N), and which queries have a key, (B or 1, 1, N) bool.

        For the elastic energy the lse leaves out ``|q|^2``, which is equal for all keys.
        """
        wide = accumulation_dtype(query.dtype)
        scores = (query.to(wide) @ key.to(wide).mT) * self.beta
        if self.energy == "elastic":
            scores = scores - (0.5 * self.beta) * key.to(wide).square().sum(-1).unsqueeze(-2)
        attends, closed = None, None
        if blocked is not None:
            closed = blocked.all(-1, keepdim=True)
            attends = ~closed.squeeze(-1)
            # A row without keys is computed over all keys and emptied below: no NaN arises.
            scores = scores.masked_fill(blocked & ~closed, -torch.inf)
        limit = 1.5 * self.beta * self.width  # of |scores|: |q|, |k| <= sqrt(p) after the norm
        if self.norm is not None and limit <= LARGEST_EXPONENT:  # no row maximum is needed
            exponentials = scores.exp()
            total = exponentials.sum(-1, keepdim=True)
            weights, lse = exponentials / total, total.log().squeeze(-1)
        else:
            lse = scores.logsumexp(-1)
            weights = (scores - lse.unsqueeze(-1)).exp()
        if closed is not None and attends is not None:
            weights = weights.masked_fill(closed, 0.0)
            lse = lse.masked_fill(~attends, 0.0)
        return weights.to(query.dtype), lse, attends

    def _value(self, query: Tensor, lse: Tensor, attends: Tensor | None) -> Tensor:
        value = sum_samples(lse) / -self.beta
        if self.energy == "elastic":
            value = value + 0.5 * sum_squares(_where_attends(query, attends))
        return value

    def _pull_back(
        self, force: Tensor, unit: Tensor, radius: Tensor | None, weight: Tensor
    ) -> Tensor:
        if self.norm is not None and radius is not None:
            force = self.norm.jacobian_product(unit, radius, force)
        return merge_heads(force) @ weight

    def extra_repr(self) -> str:
        return (
            f"heads={self.heads}, energy={self.energy}, cross={self.cross}, beta={self.beta:.4g}, "
            f"norm={self.norm}, causal={self.causal}"
        )


def _where_attends(query: Tensor, attends: Tensor | None) -> Tensor:
    return query if attends is None else query.masked_fill(~attends.unsqueeze(-1), 0.0)
