"""Steps of queries among tokens that are held: attention as descent of every token's own energy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from implicit_attn.energies.heads import AttentionInput, Beta, HeadOptions
from implicit_attn.energies.hopfield import QueryEnergy
from implicit_attn.energies.softmax_attention import SoftmaxAttention
from implicit_attn.energies.tokens import check_tokens, hide
from implicit_attn.updates.gradient_step import GradientStep, move
from implicit_attn.updates.update import Update
from solvers.core.checks import require_count, require_flag, require_positive

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AttentionStep(Update):
    r"""``f(z)_i = z_i - eta dF_i/dz_i``, where F_i is the free energy of token i among held tokens h.

    With ``q = norm(W_q z)``, ``k_j = norm(W_k h_j)`` and ``T = 1 / beta``::

        inner:    F_i = -T sum_h log sum_j exp(q_i.k_j / T)
        elastic:  F_i = -T sum_h log sum_j exp(-|q_i - k_j|^2 / (2T))

    h is z itself and all tokens move at once; ``causal`` restricts the sums to ``j <= i``. Without norms
    the inner step is ``z_i + eta sum_h W_q^T sum_j P_ij k_j``, standard attention with tied values; the
    elastic one takes ``eta sum_h W_q^T q_i`` off that. Without norms no F_i rises among tokens that stay,
    inner for every eta, elastic for ``eta <= 2 / L`` with the largest eigenvalue L of ``W_q^T W_q``. Once
    all tokens move, the step is the gradient of no energy: that of the sum of the F_i,
    :class:`implicit_attn.energies.SoftmaxAttention`, also has a term of the keys, through which later
    tokens would reach earlier ones. Causal steps have no such leak.

    Shapes: ``z`` (B, N, d), ``mask`` (B, N) bool; masked tokens keep their state. ``x`` is only the
    initial state.

    Args:
        dim: features d.
        heads: number of heads.
        energy: ``"inner"`` or ``"elastic"``.
        causal: token i attends to ``j <= i``.
        step_size: eta, > 0.
        shared: as for ``SoftmaxAttention``; no norm by default.

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
        step_size: float = 1.0,
        **shared: Unpack[HeadOptions],
    ) -> None:
        super().__init__()
        self.causal = require_flag("causal", causal)
        options: HeadOptions = {"norm": None, **shared}
        self.energy = SoftmaxAttention(dim, heads, energy=energy, cross=True, **options)
        self.step_size = require_positive("step_size", step_size)

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        """One step of all tokens at once."""
        check_tokens(z, mask, type(self).__name__, dim=self.energy.dim, tokens=True)
        count, pairs = z.shape[1], None
        if self.causal:
            pairs = torch.ones(count, count, dtype=torch.bool, device=z.device).tril()
        held = AttentionInput(memory=hide(z, mask), memory_mask=mask, pairs=pairs)
        return move(z, self.energy.grad(z, held, mask=mask), self.step_size)

    def extra_repr(self) -> str:
        return f"causal={self.causal}"


class QueryDescent(GradientStep):
    r"""``q <- q - eta dE/dq``, every query of every head down its own energy among the keys.

    ``E(q) = 1/2 |q|^2 - beta^-1 log sum_j exp(beta q.k_j)``. A unit step is softmax attention with the
    keys for values, and no step with ``eta <= 1`` raises E.

    Shapes: ``z`` (B, N, d), the queries, each head a slice of ``p = d / heads`` features. ``x``: the keys
    (B, M, d), a pair of them and a mask (B, M), or an ``AttentionInput`` with such a memory, which may also
    hold pairs and their biases. ``mask`` (B, N), of the queries.

    Args:
        dim: features d of queries and keys.
        heads: a divisor of ``dim``.
        step_size: eta, > 0.
        beta: inverse temperature, > 0, or one for each head; None: ``1 / sqrt(p)``.

    Source: Bal, "Attention as Energy Minimization: Visualizing Energy Landscapes" (2021),
    https://mcbal.github.io/post/attention-as-energy-minimization-visualizing-energy-landscapes/; the
    energy: Ramsauer et al. (2020), https://arxiv.org/abs/2008.02217.
    """

    energy: QueryEnergy

    def __init__(
        self, dim: int, heads: int = 1, *, step_size: float = 1.0, beta: Beta = None
    ) -> None:
        super().__init__(QueryEnergy(dim, heads, beta=beta), step_size)

    def trajectory(self, z: Tensor, x: Any, steps: int) -> tuple[Tensor, Tensor]:
        """States (steps + 1, B, N, d) from ``z`` on, and their energies (steps + 1, B, heads, N)."""
        x = self.prepare(x)
        states = [z]
        for _ in range(require_count("steps", steps)):
            states.append(self(states[-1], x))
        return torch.stack(states), torch.stack([self.energy.each(state, x) for state in states])
