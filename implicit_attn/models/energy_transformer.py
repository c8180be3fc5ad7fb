"""The Energy Transformer: attention and a Hopfield network as one energy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.energies import ReLUFeedForward, SoftmaxAttention
from implicit_attn.energies.tokens import hide
from implicit_attn.models.recurrent import RecurrentBackbone, RecurrentLayer
from solvers.core.checks import require_count, require_positive


class EnergyTransformerLayer(RecurrentLayer):
    r"""A step ``X <- X - eta dE/dg`` at ``g = gain LayerNorm(X) + shift``, a scalar gain, with ::

        E(g) = -beta^-1 sum_h sum_i log sum_j exp(beta q_hi.k_hj) - 1/2 sum_i sum_m relu(xi_m.g_i)^2

    and ``q = W_Q g, k = W_K g``. The Jacobian of the norm, which is the Hessian of a convex
    Lagrangian, is left out; small steps descend E nevertheless. The gradient is in closed form and
    includes the derivatives by queries and by keys. ``attention`` are options of ``SoftmaxAttention``.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        memories: int,
        *,
        step_size: float = 0.1,
        memory_bias: bool = False,
        **attention: Any,
    ) -> None:
        super().__init__()
        self.step_size = require_positive("step_size", step_size)
        self.attention = SoftmaxAttention(dim, heads, norm=None, **attention)
        self.feedforward = ReLUFeedForward(dim, memories, norm=None, bias=memory_bias)
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
        memories: of the Hopfield network, rows of xi; None: 4 d.
        layers: their number.
        iterations, order: as for ``RecurrentBackbone``.
        options: of the layers:
            step_size: of the descent, eta; 0.1 is the paper's for images.
            bias: biases of queries and keys, ``q = W_Q g + b_Q``, ``k = W_K g + b_K``, zero at first.
            memory_bias: a bias of each memory, ``relu(xi_m.g + c_m)``, zero at first.
            beta: inverse temperature, or one for each head; None: ``1 / sqrt(p)`` for heads of width p.
            learned_beta: train one for each head.
            exclude_self: the paper's sum over ``B != C``: no token attends to itself. Its published code
                sums over all tokens.

    Shapes: tokens (B, N, d) -> (B, N, d).

    Source: Hoover et al., "Energy Transformer" (NeurIPS 2023, https://arxiv.org/abs/2302.07253),
    equations 1 to 6.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        memories: int | None = None,
        *,
        layers: int = 1,
        iterations: int = 12,
        order: str = "blocks",
        **options: Any,
    ) -> None:
        memories = 4 * dim if memories is None else memories
        number = require_count("layers", layers)
        made = [EnergyTransformerLayer(dim, heads, memories, **options) for _ in range(number)]
        super().__init__(dim, made, iterations, order=order)
