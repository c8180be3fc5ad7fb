"""Attention as one gradient step of every token's own energy, the tokens that it attends to held."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from implicit_attn.energies.checks import check_tokens
from implicit_attn.energies.heads.inputs import AttentionInput
from implicit_attn.energies.heads.temperatures import Beta
from implicit_attn.energies.projected import RMSNorm
from implicit_attn.energies.softmax_attention import SoftmaxAttention
from implicit_attn.energies.tokens import hide
from implicit_attn.updates.gradient_step import StepSize, move
from implicit_attn.updates.update import Update
from solvers.core.checks import require_flag


class AttentionStep(Update):
    r"""``f(z)_i = z_i - eta dF_i/dz_i``, where F_i is the free energy of token i among held tokens h.

    With ``q = norm(W_q z)``, ``k_j = norm(W_k h_j)`` and ``T = 1 / beta``::

        inner:    F_i = -T sum_h log sum_j exp(q_i.k_j / T)
        elastic:  F_i = -T sum_h log sum_j exp(-|q_i - k_j|^2 / (2T))

    In self-attention h is z itself, all tokens move at once, and ``causal`` restricts the sums to
    ``j <= i``. Without norms the inner step is ``z_i + eta sum_h W_q^T sum_j P_ij k_j``, standard
    attention with tied values; the elastic one takes ``eta sum_h W_q^T q_i`` off that. Among tokens that
    stay no F_i rises, inner for every eta, elastic for ``eta <= 2 / L`` with the largest eigenvalue L of
    ``W_q^T W_q``. Once all tokens move, the step is the gradient of no energy: that of the sum of the
    F_i, :class:`implicit_attn.energies.SoftmaxAttention`, also has a term of the keys, through which
    later tokens would reach earlier ones. Causal steps have no such leak.

    Shapes: ``z`` (B, N, d), ``mask`` (B, N) bool; masked tokens keep their state. ``x`` is only the
    initial state, with ``cross`` it is h: (B, M, context_dim), or a pair of it and a mask (B, M).

    Args:
        dim: features d.
        heads: number of heads.
        energy: ``"inner"`` or ``"elastic"``.
        causal: in self-attention, token i attends to ``j <= i``.
        cross: h is the input x.
        step_size: eta, > 0.
        learned_step: train it.
        tied_keys: ``W_k = W_q``.
        context_dim: with ``cross``, features of x, default ``dim``.
        head_dim, beta, learned_beta, norm, bound: as for ``SoftmaxAttention``; no norm by default.

    Source: Ren, Ouyang, Tang, Liu, "Transformers as Intrinsic Optimizers",
    https://arxiv.org/abs/2511.00907, theorems 1 and 3 and the loop transformer of the appendix.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        energy: str = "inner",
        causal: bool = False,
        cross: bool = False,
        step_size: float = 1.0,
        learned_step: bool = False,
        tied_keys: bool = False,
        context_dim: int | None = None,
        head_dim: int | None = None,
        beta: Beta = None,
        learned_beta: bool = False,
        norm: RMSNorm | None = None,
        bound: float | None = None,
    ) -> None:
        super().__init__()
        self.causal, self.cross = require_flag("causal", causal), require_flag("cross", cross)
        if causal and cross:
            raise ValueError("causal needs self-attention, got causal=True with cross=True")
        if context_dim is not None and not cross:
            raise ValueError(f"context_dim needs cross=True, got {context_dim!r}")
        self.energy = SoftmaxAttention(
            dim, heads, energy=energy, cross=True, context_dim=context_dim, head_dim=head_dim,
            beta=beta, learned_beta=learned_beta, norm=norm, bound=bound,
        )  # fmt: skip
        if require_flag("tied_keys", tied_keys):
            if self.energy.context_dim != dim:
                raise ValueError(f"tied_keys needs context_dim={dim}, got {context_dim!r}")
            self.energy.key = self.energy.query
        self.step_size = StepSize(step_size, learned=learned_step)

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Any:
        """With ``cross`` the keys."""
        return self.energy.prepare(x, mask=mask) if self.cross else x

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        """One step of all tokens at once."""
        if not self.cross:
            check_tokens(z, mask, type(self).__name__, dim=self.energy.dim, tokens=True)
            x = AttentionInput(
                memory=hide(z, mask), memory_mask=mask, pairs=self._earlier(z.shape[1], z.device)
            )
        return move(z, self.energy.grad(z, x, mask=mask), self.step_size())

    def own_energies(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        """``F_i`` of every token among the held tokens, (B, N), zero at masked tokens.

        ``x`` is h, (B, M, context_dim) or a pair of it and a mask; None: z itself. For studies: it
        holds the tokens h once for each token of z.
        """
        check_tokens(z, mask, type(self).__name__, dim=self.energy.dim, tokens=True)
        held, seen = x if isinstance(x, (tuple, list)) else (z if x is None else x, None)
        seen = mask if x is None else seen
        held = hide(held, seen)
        batch, count, keys = z.shape[0], z.shape[1], held.shape[1]
        allowed = torch.ones(batch, count, keys, dtype=torch.bool, device=z.device)
        if self.causal:
            allowed = allowed.tril()
        if seen is not None:
            allowed = allowed & seen[:, None]
        memory = held.repeat_interleave(count, 0)
        given = AttentionInput(memory=memory, pairs=allowed.flatten(0, 1).unsqueeze(1))
        each = self.energy(hide(z, mask).flatten(0, 1).unsqueeze(1), given)
        return hide(each.view(batch, count), mask)

    def _earlier(self, count: int, device: torch.device) -> Tensor | None:
        if not self.causal:
            return None
        return torch.ones(count, count, dtype=torch.bool, device=device).tril()

    def extra_repr(self) -> str:
        return f"causal={self.causal}, cross={self.cross}"
