"""Mean-field updates whose couplings come from the attention of the input, or from an MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.energies.attention import head_width
from implicit_attn.energies.checks import check_input, check_mask, check_tokens
from implicit_attn.energies.projected import Projection
from implicit_attn.energies.tokens import accumulation_dtype, hide
from implicit_attn.updates.mean_field import CorrectedUpdate, NormedMLP, make_correction
from solvers.core.checks import require_count, require_flag, require_positive


class SoftmaxCouplingAttention(CorrectedUpdate):
    r"""``f(z, x)_i = sum_j J_ij z_j - correction(z_i) + x_i``, ``J = strength softmax(Q K^T / sqrt p)``.

    Queries ``Q = x W_q^T`` and keys ``K = x W_k^T`` come from the *input*, so J is constant during a
    solve, and a ``DEQ`` computes it once (:meth:`prepare`). Head h couples the h-th slice of
    ``p = d / heads`` components of the state, without a value projection; the correction mixes the
    components.

    The rows of the softmax sum to 1. With ``strength`` 1, as in the source, ``I - J`` is therefore
    singular: it maps equal tokens to zero. The default correction does not help, since its norm
    removes a shift common to all components, so most inputs have no fixed point. For one head, a
    strength below 1 minus the Lipschitz constant of the correction makes f a contraction in the norm
    of the largest token.

    Args:
        dim: d.
        heads: a divisor of d.
        correction, hidden, correction_bound: as for ``CorrectedUpdate``.
        strength: > 0.
        self_coupling: whether a token attends to itself; False excludes ``J_ii`` from the softmax.
        bound: bound on the spectral norms of ``W_q`` and ``W_k``, or None.

    Shapes: ``z`` and ``x`` (B, N, d), any N. ``mask`` (B, N) bool: masked tokens are no keys and keep
    their state. A token without any key has the field ``x_i``.

    Source: Bal, "Deep Implicit Attention" (2021), the section on softmax attention,
    https://mcbal.github.io/post/deep-implicit-attention-a-mean-field-theory-perspective-on-attention-mechanisms/
    """

    def __init__(
        self,
        dim: int,
        heads: int = 1,
        *,
        correction: nn.Module | str | None = "network",
        hidden: int | None = None,
        correction_bound: float | None = None,
        strength: float = 0.5,
        self_coupling: bool = True,
        bound: float | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.heads, self.width = dim, heads, head_width(dim, heads, None)
        self.strength = require_positive("strength", strength)
        self.self_coupling = require_flag("self_coupling", self_coupling)
        self.query, self.key = Projection(dim, dim, bound), Projection(dim, dim, bound)
        self.correction = make_correction(correction, dim, hidden, correction_bound)

    def couplings(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """``J`` (B, heads, N, N) of the input ``x`` (B, N, d), zero for masked tokens."""
        name = type(self).__name__
        if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[-1] != self.dim:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name}: x must be a tensor (B, N, {self.dim}), got {got}")
        check_mask(mask, x, name, features=1)
        x = hide(x, mask)
        shape = (*x.shape[:2], self.heads, self.width)
        query = F.linear(x, self.query.weight).view(shape).transpose(1, 2)
        key = F.linear(x, self.key.weight).view(shape).transpose(1, 2)
        scores = (query * self.width**-0.5) @ key.mT
        pairs = open_pairs(x, mask, self_coupling=self.self_coupling)
        wide = row_softmax(scores.to(accumulation_dtype(scores.dtype)), pairs)
        return (wide * self.strength).to(scores.dtype)

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``(x, J)``, so that a solve computes the couplings once."""
        return x, self.couplings(x, mask=mask)

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        name = type(self).__name__
        check_tokens(z, mask, name, dim=self.dim, tokens=True)
        x, couplings = x if isinstance(x, tuple) and len(x) == 2 else (x, None)
        x = check_input(x, z, name)
        if couplings is None:
            couplings = self.couplings(x, mask=mask)
        visible = hide(z, mask)
        if self.heads == 1:
            field = torch.baddbmm(x, couplings.squeeze(1), visible)
        else:
            slices = visible.view(*z.shape[:2], self.heads, self.width).transpose(1, 2)
            field = x + (couplings @ slices).transpose(1, 2).reshape(z.shape)
        return self.corrected(field, z, mask)

    def extra_repr(self) -> str:
        return (
            f"dim={self.dim}, heads={self.heads}, strength={self.strength:.4g}, "
            f"self_coupling={self.self_coupling}"
        )


def open_pairs(
    x: Tensor, mask: Tensor | None, *, self_coupling: bool = True, causal: bool = False
) -> Tensor | None:
    """Which tokens of ``x`` (B, N, d) may couple, (B or 1, 1, N, N) bool; None: all."""
    pairs = None if mask is None else mask[:, None, :, None] & mask[:, None, None, :]
    if self_coupling and not causal:
        return pairs
    every = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
    every = every.tril(0 if self_coupling else -1) if causal else ~every.tril().triu()
    return every[None, None] if pairs is None else pairs & every


def row_softmax(scores: Tensor, pairs: Tensor | None) -> Tensor:
    """The softmax of each row over its open pairs; a row without any is zero."""
    if pairs is None:
        return scores.softmax(-1)
    # A row without keys is computed over all keys and then emptied: no NaN arises.
    empty = ~pairs.any(-1, keepdim=True)
    weights = scores.masked_fill(~(pairs | empty), -torch.inf).softmax(-1)
    return weights.masked_fill(~pairs, 0.0)


class TokenMixer(NormedMLP):
    """An MLP over the tokens, the same for every component: ``W2 gelu(W1 norm(z) + b1) + b2``.

    The norm is a LayerNorm over the components of each token. It maps a zero token to zero, so masked
    tokens contribute nothing to ``W1``.

    Shapes and arguments as for ``NormedMLP``, of width N, the number of tokens.
    """

    def __init__(
        self,
        tokens: int,
        dim: int,
        hidden: int | None = None,
        *,
        epsilon: float = 1.0,
        bound: float | None = None,
    ) -> None:
        tokens, dim = require_count("tokens", tokens), require_count("dim", dim)
        super().__init__(dim, tokens, hidden, epsilon, bound)

    def forward(self, z: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(self.norm(z).mT))).mT


class MixerAttention(CorrectedUpdate):
    r"""``f(z, x)_i = g({z_j})_i - correction(z_i) + x_i`` with a token-mixing MLP ``g``.

    A :class:`TokenMixer` replaces the explicit couplings of :class:`MeanFieldAttention`. Its parameters
    belong to the N positions, so the layer takes exactly N tokens. f is a contraction where the
    Lipschitz constants of g and of the correction sum to less than 1, which ``bound`` and
    ``correction_bound`` can enforce.

    Args:
        tokens: N.
        dim: d.
        hidden: hidden units of the mixer; None: 4 N.
        correction, correction_hidden, correction_bound: as for ``CorrectedUpdate``.
        bound: bound on the spectral norms of the mixer's two weights, or None.

    Shapes: ``z`` and ``x`` (B, N, d); ``x`` None for zero. ``mask`` (B, N) bool: masked tokens enter the
    mixer as zeros and keep their state.

    Source: Tolstikhin et al., "MLP-Mixer" (2021), https://arxiv.org/abs/2105.01601; Bal, "Deep Implicit
    Attention" (2021), the section on MLP-Mixer,
    https://mcbal.github.io/post/deep-implicit-attention-a-mean-field-theory-perspective-on-attention-mechanisms/
    """

    def __init__(
        self,
        tokens: int,
        dim: int,
        hidden: int | None = None,
        *,
        correction: nn.Module | str | None = "network",
        correction_hidden: int | None = None,
        correction_bound: float | None = None,
        bound: float | None = None,
    ) -> None:
        super().__init__()
        self.tokens, self.dim = tokens, dim
        self.mixer = TokenMixer(tokens, dim, hidden, bound=bound)
        self.correction = make_correction(
            correction, dim, correction_hidden, correction_bound, hidden_name="correction_hidden"
        )

    def forward(self, z: Tensor, x: Tensor | None = None, *, mask: Tensor | None = None) -> Tensor:
        name = type(self).__name__
        check_tokens(z, mask, name, dim=self.dim, tokens=True)
        if z.shape[1] != self.tokens:
            raise ValueError(f"{name}: z must have {self.tokens} tokens, got {tuple(z.shape)}")
        field = self.mixer(hide(z, mask))
        if x is not None:
            field = field + check_input(x, z, name)
        return self.corrected(field, z, mask)

    def extra_repr(self) -> str:
        return f"tokens={self.tokens}, dim={self.dim}"
