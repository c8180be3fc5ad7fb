"""What Hyper-SET is compared with: shared-parameter transformer, Energy Transformer, CRATE."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.energies import Projection, ReLUFeedForward, SoftmaxAttention
from implicit_attn.energies.attention import head_width
from implicit_attn.energies.checks import check_count, check_positive
from implicit_attn.energies.tokens import hide
from implicit_attn.models.recurrent import RecurrentBackbone, RecurrentLayer


class TransformerLayer(RecurrentLayer):
    """``X + MHSA(LayerNorm(X))``, then ``X + W_2 relu(W_1 LayerNorm(X))``; no biases but the norms'.

    Args:
        dim: features d.
        heads: a divisor of d.
        hidden: width of the feed-forward part.
    """

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.width = heads, head_width(dim, heads, None)
        self.attention_norm, self.feedforward_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.queries_keys_values = nn.Linear(dim, 3 * dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)
        self.widen = nn.Linear(dim, check_count(hidden, "hidden"), bias=False)
        self.narrow = nn.Linear(hidden, dim, bias=False)

    def advance(self, z: Tensor, context: Any, index: int, mask: Tensor | None = None) -> Tensor:
        split = self.queries_keys_values(self.attention_norm(z))
        query, key, value = split_heads(split, 3 * self.heads).chunk(3, dim=1)
        attended = attend(query, key, value, self.width**-0.5, mask)
        moved = z + self.output(merge_heads(attended))
        moved = moved + self.narrow(F.relu(self.widen(self.feedforward_norm(moved))))
        return moved if mask is None else torch.where(mask.unsqueeze(-1), moved, z)


class SharedTransformer(RecurrentBackbone):
    """A pre-norm transformer whose layer is repeated ("universal transformer" without halting).

    Args:
        dim: features d.
        heads: attention heads.
        hidden: width of the feed-forward part; None: 4 d.
        layers, iterations, order: as for ``RecurrentBackbone``.

    Shapes: tokens (B, N, d) -> (B, N, d).

    Source: Vaswani et al. (2017), pre-norm; the baseline of Hu, Zou, Xu (arXiv 2502.11646).
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        hidden: int | None = None,
        *,
        layers: int = 1,
        iterations: int = 12,
        order: str = "blocks",
    ) -> None:
        hidden = 4 * dim if hidden is None else hidden
        made = [TransformerLayer(dim, heads, hidden) for _ in range(check_count(layers, "layers"))]
        super().__init__(dim, made, iterations, order=order)


class EnergyTransformerLayer(RecurrentLayer):
    r"""``X - eta dE/dg`` at ``g = gain LayerNorm(X) + shift``, a scalar gain, with ::

        E(g) = -beta^-1 sum_h sum_i log sum_j exp(beta q_hi.k_hj) - 1/2 sum_i sum_m relu(xi_m.g_i)^2

    and ``q = W_Q g, k = W_K g``. The derivative of the norm, the Hessian of a convex Lagrangian, is
    left out of the step, which nevertheless descends E for small steps. A token is among its own
    keys. The gradient is in closed form, of both places where a token enters.

    Args:
        dim: features d.
        heads: attention heads.
        memories: rows of xi.
        step_size: eta.
        deviation: of the initial weights; None: ``d^-1/2``.
    """

    def __init__(
        self, dim: int, heads: int, memories: int, *, step_size: float, deviation: float | None
    ) -> None:
        super().__init__()
        self.step_size = check_positive(step_size, "step_size")
        self.attention = SoftmaxAttention(dim, heads, norm=None)
        self.feedforward = ReLUFeedForward(dim, memories, norm=None)
        if deviation is not None:
            for module in self.modules():
                if isinstance(module, Projection):
                    nn.init.normal_(module.weight, std=check_positive(deviation, "deviation"))
        self.gain, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(dim))

    def activation(self, z: Tensor) -> Tensor:
        """``g(z)``, (B, N, d)."""
        return torch.addcmul(self.shift, self.gain, F.layer_norm(z, z.shape[-1:]))

    def energy(self, z: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """``E(g(z))`` of each sample, (B,)."""
        g = self.activation(hide(z, mask))
        return self.attention(g, mask=mask) + self.feedforward(g, mask=mask)

    def advance(self, z: Tensor, context: Any, index: int, mask: Tensor | None = None) -> Tensor:
        g = self.activation(z)
        gradient = self.attention.grad(g, mask=mask)
        gradient = gradient + self.feedforward.straight_gradient(g, mask=mask)
        return torch.sub(z, gradient, alpha=self.step_size)


class EnergyTransformer(RecurrentBackbone):
    """The Energy Transformer: attention and a Hopfield network as one energy, descended.

    Args:
        dim: features d.
        heads: attention heads.
        memories: of the Hopfield network; None: 4 d.
        step_size: of the descent; 0.1 is the paper's for images.
        deviation: of the initial weights; None: ``d^-1/2``.
        layers, iterations, order: as for ``RecurrentBackbone``.

    Shapes: tokens (B, N, d) -> (B, N, d).

    Source: Hoover et al., "Energy Transformer" (NeurIPS 2023), equations 1 to 6.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        memories: int | None = None,
        *,
        step_size: float = 0.1,
        deviation: float | None = None,
        layers: int = 1,
        iterations: int = 12,
        order: str = "blocks",
    ) -> None:
        memories = 4 * dim if memories is None else memories
        number = check_count(layers, "layers")
        made = [
            EnergyTransformerLayer(dim, heads, memories, step_size=step_size, deviation=deviation)
            for _ in range(number)
        ]
        super().__init__(dim, made, iterations, order=order)


class CRATELayer(RecurrentLayer):
    r"""Multi-head subspace self-attention and a proximal step towards a sparse code ::

        Y = X + sum_h O_h softmax(beta V_h V_h^T) V_h,      V_h = U_h^T LayerNorm(X)
        X = relu(Z + eta D^T (Z - D Z) - eta lambda),       Z = LayerNorm(Y)

    Args:
        dim: features d.
        heads: a divisor of d.
        step_size: eta.
        sparsity: lambda.
    """

    def __init__(self, dim: int, heads: int, *, step_size: float, sparsity: float) -> None:
        super().__init__()
        self.heads, self.width = heads, head_width(dim, heads, None)
        self.step_size = check_positive(step_size, "step_size")
        self.sparsity = check_positive(sparsity, "sparsity")
        self.attention_norm, self.feedforward_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.subspaces = nn.Linear(dim, dim, bias=False)
        self.output = nn.Linear(dim, dim)
        self.dictionary = nn.Parameter(torch.empty(dim, dim))
        nn.init.kaiming_uniform_(self.dictionary)

    def advance(self, z: Tensor, context: Any, index: int, mask: Tensor | None = None) -> Tensor:
        projected = split_heads(self.subspaces(self.attention_norm(z)), self.heads)
        attended = attend(projected, projected, projected, self.width**-0.5, mask)
        code = self.feedforward_norm(z + self.output(merge_heads(attended)))
        error = code - F.linear(code, self.dictionary)
        step = torch.add(code, error @ self.dictionary, alpha=self.step_size)
        moved = F.relu(step - self.step_size * self.sparsity)
        return moved if mask is None else torch.where(mask.unsqueeze(-1), moved, z)


class CRATE(RecurrentBackbone):
    """A white-box transformer: compress by subspace attention, sparsify by ISTA; shared over depth.

    Args:
        dim: features d.
        heads: attention heads.
        step_size: of the sparsifying step.
        sparsity: weight of its penalty.
        layers, iterations, order: as for ``RecurrentBackbone``.

    Shapes: tokens (B, N, d) -> (B, N, d).

    Source: Yu et al., "White-Box Transformers via Sparse Rate Reduction" (NeurIPS 2023), with the
    learned output matrix of its implementation.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        step_size: float = 0.1,
        sparsity: float = 0.1,
        layers: int = 1,
        iterations: int = 12,
        order: str = "blocks",
    ) -> None:
        options = {"step_size": step_size, "sparsity": sparsity}
        made = [CRATELayer(dim, heads, **options) for _ in range(check_count(layers, "layers"))]
        super().__init__(dim, made, iterations, order=order)


def split_heads(tokens: Tensor, heads: int) -> Tensor:
    """(B, N, heads p) -> (B, heads, N, p)."""
    return tokens.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(tokens: Tensor) -> Tensor:
    """(B, heads, N, p) -> (B, N, heads p)."""
    return tokens.transpose(1, 2).flatten(2)


def attend(query: Tensor, key: Tensor, value: Tensor, beta: float, mask: Tensor | None) -> Tensor:
    """Softmax attention (B, heads, N, p) over the tokens that count, in ``mask`` (B, N)."""
    pairs = None
    if mask is not None:
        # Every token may attend to itself, so that no row is empty; theirs is dropped later.
        itself = torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
        pairs = mask[:, None, None, :] | itself
    return F.scaled_dot_product_attention(query, key, value, attn_mask=pairs, scale=beta)
