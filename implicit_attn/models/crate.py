"""CRATE with shared layers: a transformer derived from sparse rate reduction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.models.recurrent import HeadsLayer, RecurrentBackbone, keep_masked
from solvers.core.checks import require_count, require_positive


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
        layers: their number.
        recurrence: iterations, order and beyond of ``RecurrentBackbone``.

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
        **recurrence: Any,
    ) -> None:
        options = {"step_size": step_size, "sparsity": sparsity}
        made = [CRATELayer(dim, heads, **options) for _ in range(require_count("layers", layers))]
        super().__init__(dim, made, **recurrence)
