"""Steps of queries among tokens that are held: attention as descent of every token's own energy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from implicit_attn.energies.energy import Energy, Prepared
from implicit_attn.energies.heads import AttentionInput, Beta, HeadOptions, check_held, read_memory
from implicit_attn.energies.hopfield import HeadwiseEnergy, QueryEnergy
from implicit_attn.energies.softmax_attention import SoftmaxAttention
from implicit_attn.energies.tokens import check_tokens, hide
from implicit_attn.updates.gradient_step import GradientStep, StepSize, move
from implicit_attn.updates.update import Update
from solvers.core.checks import require_choice, require_count, require_flag, require_instance

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AttentionStep(Update):
    r"""``f(z)_i = z_i - eta dF_i/dz_i``, where F_i is the free energy of token i among held tokens h.

    With ``q = norm(W_q z)``, ``k_j = norm(W_k h_j)`` and ``T = 1 / beta``::

        inner:    F_i = -T sum_h log sum_j exp(q_i.k_j / T)
        elastic:  F_i = -T sum_h log sum_j exp(-|q_i - k_j|^2 / (2T))

    In self-attention h is z itself and all tokens move at once; ``causal`` restricts the sums to
    ``j <= i``. Without norms the inner step is ``z_i + eta sum_h W_q^T sum_j P_ij k_j``, standard
    attention with tied values; the elastic one takes ``eta sum_h W_q^T q_i`` off that. Without norms no
    F_i rises among tokens that stay, inner for every eta, elastic for ``eta <= 2 / L`` with the largest
    eigenvalue L of ``W_q^T W_q``; with a norm it may rise. Once all tokens move, the step is the
    gradient of no energy: that of the sum of the F_i,
    :class:`implicit_attn.energies.SoftmaxAttention`, also has a term of the keys, through which later
    tokens would reach earlier ones. Causal steps have no such leak.

    Shapes: ``z`` (B, N, d), ``mask`` (B, N) bool; masked tokens keep their state. ``x`` is only the
    initial state, with ``cross`` it is h: (B, M, context_dim), a pair of it and a mask (B, M), or an
    ``AttentionInput`` with such a memory; with ``causal``, too, M is N.

    Args:
        dim: features d.
        heads: number of heads.
        energy: ``"inner"`` or ``"elastic"``.
        causal: token i attends to ``j <= i``.
        cross: h is the input x.
        step_size: eta, > 0.
        context_dim: with ``cross``, features of x, default ``dim``.
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
        cross: bool = False,
        step_size: float = 1.0,
        **shared: Unpack[HeadOptions],
    ) -> None:
        super().__init__()
        self.causal, self.cross = require_flag("causal", causal), require_flag("cross", cross)
        if "context_dim" in shared and not cross:
            raise ValueError(f"context_dim needs cross=True, got {shared['context_dim']!r}")
        options: HeadOptions = {"norm": None, **shared}
        self.energy = SoftmaxAttention(dim, heads, energy=energy, cross=True, **options)
        self.step_size = StepSize(step_size)

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Any:
        """With ``cross`` the keys."""
        return self.energy.prepare(self._input(x), mask=mask) if self.cross else x

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        """One step of all tokens at once."""
        given = self._held(z, x if self.cross else (hide(z, mask), mask), mask)
        return move(z, self.energy.grad(z, given, mask=mask), self.step_size())

    def _held(self, z: Tensor, x: Any, mask: Tensor | None) -> Any:
        """What the energy is given for h: x with the pairs of causal attention, or what was prepared."""
        name = type(self).__name__
        check_tokens(z, mask, name, dim=self.energy.dim, tokens=True)
        if not isinstance(x, Prepared):
            x = self._input(x, z)
        held = x.parts.key if isinstance(x, Prepared) else x.memory
        check_held(held, z, name, held.shape[-2] if self.causal else None)
        return x

    def _input(self, x: Any, z: Tensor | None = None) -> AttentionInput:
        """The tokens h with their mask and pairs."""
        memory, seen = read_memory(x, self.energy.key.weight.shape[1], z, type(self).__name__)
        whole = x if isinstance(x, AttentionInput) else AttentionInput()
        whole = whole._replace(memory=memory, memory_mask=seen)
        if not self.causal:
            return whole
        count = memory.shape[1]
        pairs = torch.ones(count, count, dtype=torch.bool, device=memory.device).tril()
        return whole._replace(pairs=pairs if whole.pairs is None else pairs & whole.pairs)

    def extra_repr(self) -> str:
        return f"causal={self.causal}, cross={self.cross}"


class QueryDescent(GradientStep):
    r"""``q <- q - eta dE/dq``, every query of every head down its own energy among the keys.

    By default ``E(q) = 1/2 |q|^2 - beta^-1 log sum_j exp(beta q.k_j)``. Then a unit step is softmax
    attention with the keys for values, and no step with ``eta <= 1`` raises E.

    ``context="frozen"``: the keys are given and stay. ``context="live"``, for self-attention: the keys
    are the queries as they stand at each step, ``q <- q - eta dE/dq`` at ``k_j = q_j``; what moves the
    keys is left out, so that this descends no energy. With the default energy and ``eta = 1`` all
    tokens then shrink to one point. Every point is one where they may meet: there is no single fixed
    point, and no implicit gradient.

    Shapes: ``z`` (B, N, d), the queries, each head a slice of ``p = d / heads`` features. ``x`` frozen:
    the keys (B, M, d), a pair of them and a mask (B, M), or an ``AttentionInput`` with such a memory,
    which may also hold pairs and their biases. Live: None, or an ``AttentionInput`` without memory whose
    ``memory_mask`` (B, N) is False at masked tokens. ``mask`` (B, N), of the queries.

    Args:
        dim: features d of queries and keys.
        heads: a divisor of ``dim``.
        energy: an :class:`Energy` of the queries (B', N, p) of one head, B' = B heads, whose input is an
            ``AttentionInput``: ``memory`` (B', M, p) holds the keys, ``memory_mask`` and ``pairs`` say
            which there are, ``tokens`` (B', N, p) are what the caller put there. None: the above.
        step_size: eta, > 0.
        beta: inverse temperature, > 0, of the default energy, or one for each head; None: ``1 / sqrt(p)``.
        context: "frozen" or "live".

    Source: Bal, "Attention as Energy Minimization: Visualizing Energy Landscapes" (2021),
    https://mcbal.github.io/post/attention-as-energy-minimization-visualizing-energy-landscapes/; the
    energy: Ramsauer et al. (2020), https://arxiv.org/abs/2008.02217.
    """

    energy: QueryEnergy | HeadwiseEnergy

    def __init__(
        self,
        dim: int,
        heads: int = 1,
        *,
        energy: Energy | None = None,
        step_size: float = 1.0,
        beta: Beta = None,
        context: str = "frozen",
    ) -> None:
        require_instance("energy", energy, Energy, "an Energy", optional=True)
        if energy is not None and beta is not None:
            raise ValueError(f"beta belongs to the default energy, got beta={beta!r} and an energy")
        keyed = QueryEnergy(dim, heads, beta=beta)  # checks dim, heads and beta
        super().__init__(keyed if energy is None else HeadwiseEnergy(energy, heads), step_size)
        self.dim, self.heads = require_count("dim", dim), heads
        self.context = require_choice("context", context, ("frozen", "live"))
        # Live keys: the gradient by the queries alone is the gradient of nothing.
        self.symmetric = self.monitored = context == "frozen"

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Any:
        """The keys of every head, once a solve; ``x`` where they are live or the energy is given."""
        # What a given energy prepares has heads times as many samples, which a solver cannot follow.
        plain = self.context == "frozen" and isinstance(self.energy, QueryEnergy)
        return self.energy.prepare(x, mask=mask) if plain else x

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return super().forward(z, self._among(z, x), mask=mask)

    def joint(
        self, z: Tensor, x: Any = None, *, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return super().joint(z, self._among(z, x), mask=mask)

    def energies(self, z: Tensor, x: Any = None) -> Tensor:
        """The energy of each query, (B, heads, N), float32 or wider; for arguments as ``forward``'s."""
        return self.energy.each(z, self._among(z, x))

    def trajectory(self, z: Tensor, x: Any, steps: int) -> tuple[Tensor, Tensor]:
        """States (steps + 1, B, N, d) from ``z`` on, and their energies (steps + 1, B, heads, N)."""
        x = self.prepare(x)
        states = [z]
        for _ in range(require_count("steps", steps)):
            states.append(self(states[-1], x))
        return torch.stack(states), torch.stack([self.energies(state, x) for state in states])

    def _among(self, z: Tensor, x: Any) -> Any:
        if self.context == "frozen" or isinstance(x, Prepared):
            return x
        given = AttentionInput() if x is None else x
        if not isinstance(given, AttentionInput) or given.memory is not None:
            got = "one with memory" if isinstance(given, AttentionInput) else type(x).__name__
            raise ValueError(
                f"QueryDescent (live): x must be None or an AttentionInput without memory, got {got}"
            )
        return given._replace(memory=z)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, heads={self.heads}, context={self.context}"
