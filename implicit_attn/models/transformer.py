"""Transformers with shared layers: a pre-norm one, the baseline of the energies, and CRATE."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.energies.attention import head_width
from implicit_attn.models.recurrent import RecurrentBackbone, RecurrentLayer, keep_masked
from solvers.core.checks import require_count, require_positive


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


class TransformerLayer(HeadsLayer):
    """``X + MHSA(LN(X))``, then ``X + W_2 relu(W_1 LN(X))``; only the LayerNorms have biases."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__(dim, heads)
        self.queries_keys_values = nn.Linear(dim, 3 * dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)
        self.widen = nn.Linear(dim, require_count("hidden", hidden), bias=False)
        self.narrow = nn.Linear(hidden, dim, bias=False)

    def advance(self, z: Tensor, context: Any, index: int, mask: Tensor | None = None) -> Tensor:
        split = self.split(self.queries_keys_values(self.attention_norm(z)))
        query, key, value = split.chunk(3, dim=1)
        moved = z + self.output(self.attend(query, key, value, mask))
        moved = moved + self.narrow(F.relu(self.widen(self.feedforward_norm(moved))))
        return keep_masked(moved, z, mask)


class SharedTransformer(RecurrentBackbone):
    """A pre-norm transformer whose layer is repeated: a Universal Transformer without halting.

    Args:
        dim: features d.
        heads: attention heads, a divisor of d.
        hidden: hidden units of the feed-forward part; None: 4 d.
        layers: their number.
        repetition: ``iterations`` and ``order`` of ``RecurrentBackbone``.

    Shapes: tokens (B, N, d) -> (B, N, d).

    Source: Dehghani et al., "Universal Transformers" (https://arxiv.org/abs/1807.03819); the baseline
    of Hu, Zou, Xu, "Hyper-SET" (https://arxiv.org/abs/2502.11646).
    """

    def __init__(
        self, dim: int, heads: int, hidden: int | None = None, *, layers: int = 1, **repetition: Any
    ) -> None:
        hidden = 4 * dim if hidden is None else hidden
        number = require_count("layers", layers)
        made = [TransformerLayer(dim, heads, hidden) for _ in range(number)]
        super().__init__(dim, made, **repetition)


class CRATELayer(HeadsLayer):
    r"""Multi-head subspace self-attention and a proximal step towards a sparse code ::

    Y = X + sum_h O_h softmax(beta V_h V_h^T) V_h,      V_h = U_h^T LayerNorm(X)
    X = relu(Z + eta D^T (Z - D Z) - eta lambda),       Z = LayerNorm(Y)
    """

    def __init__(self, dim: int, heads: int, *, step_size: float, sparsity: float) -> None:
        super().__init__(dim, heads)
        self.step_size = require_positive("step_size", step_size)
        self.sparsity = require_positive("sparsity", sparsity)
        self.subspaces = nn.Linear(dim, dim, bias=False)
        self.output = nn.Linear(dim, dim)
        self.dictionary = nn.Parameter(torch.empty(dim, dim))
        nn.init.kaiming_uniform_(self.dictionary)

    def advance(self, z: Tensor, context: Any, index: int, mask: Tensor | None = None) -> Tensor:
        projected = self.split(self.subspaces(self.attention_norm(z)))
        attended = self.attend(projected, projected, projected, mask)
        code = self.feedforward_norm(z + self.output(attended))
        error = code - F.linear(code, self.dictionary)
        step = torch.add(code, error @ self.dictionary, alpha=self.step_size)
        moved = F.relu(step - self.step_size * self.sparsity)
        return keep_masked(moved, z, mask)


class CRATE(RecurrentBackbone):
    """CRATE with shared layers: subspace attention compresses, an ISTA step sparsifies.

    Args:
        dim: features d.
        heads: attention heads, a divisor of d.
        step_size: of the ISTA step, eta.
        sparsity: weight of its l1 penalty, lambda.
        layers, repetition: as for ``SharedTransformer``.

    Shapes: tokens (B, N, d) -> (B, N, d).

    Source: Yu et al., "White-Box Transformers via Sparse Rate Reduction" (NeurIPS 2023,
    https://arxiv.org/abs/2306.01129), with the learned output matrix of its implementation.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        step_size: float = 0.1,
        sparsity: float = 0.1,
        layers: int = 1,
        **repetition: Any,
    ) -> None:
        options = {"step_size": step_size, "sparsity": sparsity}
        made = [CRATELayer(dim, heads, **options) for _ in range(require_count("layers", layers))]
        super().__init__(dim, made, **repetition)
