"""Mean-field updates without couplings of their own: from the input's attention, or by an MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from implicit_attn.energies.attention import head_width
from implicit_attn.energies.checks import (
    check_count,
    check_input,
    check_mask,
    check_positive,
    check_state,
)
from implicit_attn.energies.norms import Projection, SpectralBound
from implicit_attn.energies.spins.couplings import check_flag
from implicit_attn.energies.tokens import accumulation_dtype, hide
from implicit_attn.updates.mean_field import corrected, make_correction
from implicit_attn.updates.update import Update


class SoftmaxCouplingAttention(Update):
    r"""``f(z, x)_i = sum_j J_ij z_j - correction(z_i) + x_i``, ``J = strength softmax(Q K^T / sqrt p)``.

    Queries ``Q = x W_q^T`` and keys ``K = x W_k^T`` come from the *input*, so J is fixed during the
    solve, and a ``DEQ`` computes it once a solve (:meth:`prepare`). Head h couples the h-th slice of
    ``p = d / heads`` components: the state is its own value, as spins have it; the correction mixes
    the components.

    The rows of the softmax sum to 1, so with ``strength`` 1, the source's form, ``I - J`` is
    singular: it maps equal tokens to zero. Only the correction can then make a fixed point, and the
    default one cannot, since its norm sees no shift that all components share: most inputs have
    none. For one head, a strength below 1 minus the Lipschitz constant of the correction makes f a
    contraction in the norm of the largest token.

    Args:
        dim: d.
        heads: a divisor of d.
        correction: "network" for an ``OnsagerNetwork``, None, or a module (B, N, d) -> (B, N, d)
            that treats each token on its own.
        hidden: width of the network; None: 4 d.
        correction_bound: bound on the spectral norms of the network's two weights, or None.
        strength: > 0.
        self_coupling: let a token attend to itself; False takes ``J_ii`` out of the softmax.
        bound: bound on the spectral norms of ``W_q`` and ``W_k``, or None.

    Shapes: ``z`` and ``x`` (B, N, d), any N. ``mask`` (B, N) bool: tokens that do not count are
    neither keys nor moved. A token without any key feels only its own input.

    Source: Bal, "Deep Implicit Attention" (2021), the section on softmax attention.
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
        self.strength = check_positive(strength, "strength")
        self.self_coupling = check_flag(self_coupling, "self_coupling")
        self.query, self.key = Projection(dim, dim, bound), Projection(dim, dim, bound)
        self.correction = make_correction(correction, dim, hidden, correction_bound)

    @property
    def parameter_count(self) -> int:
        """Number of parameters; no symmetry ties any of them."""
        return sum(parameter.numel() for parameter in self.parameters())

    def couplings(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """``J`` (B, heads, N, N) of the input ``x`` (B, N, d), zero where a token does not count."""
        self._check_tokens(x)
        check_mask(mask, x, type(self).__name__, features=1)
        x = hide(x, mask)
        shape = (*x.shape[:2], self.heads, self.width)
        query = F.linear(x, self.query.weight).view(shape).transpose(1, 2)
        key = F.linear(x, self.key.weight).view(shape).transpose(1, 2)
        scores = (query * self.width**-0.5) @ key.mT
        open_pairs = self._open_pairs(x, mask)
        wide = scores.to(accumulation_dtype(scores.dtype))
        if open_pairs is None:
            return (wide.softmax(-1) * self.strength).to(scores.dtype)
        # A row without keys is computed over all of them and then emptied, which spares it the NaN.
        empty = ~open_pairs.any(-1, keepdim=True)
        weights = wide.masked_fill(~(open_pairs | empty), -torch.inf).softmax(-1)
        return (weights * self.strength).masked_fill(~open_pairs, 0.0).to(scores.dtype)

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``(x, J)``, so that a solve computes the couplings once."""
        return x, self.couplings(x, mask=mask)

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        name = type(self).__name__
        check_state(z, name, dim=self.dim, tokens=True)
        check_mask(mask, z, name, features=1)
        x, couplings = x if isinstance(x, tuple) and len(x) == 2 else (x, None)
        x = check_input(x, z, name)
        if couplings is None:
            couplings = self.couplings(x, mask=mask)
        visible = hide(z, mask)
        batch, count, _ = z.shape
        if self.heads == 1:
            field = torch.baddbmm(x, couplings.squeeze(1), visible)
        else:
            slices = visible.view(batch, count, self.heads, self.width).transpose(1, 2)
            field = x + (couplings @ slices).transpose(1, 2).reshape(z.shape)
        if self.correction is not None:
            field = field - corrected(self.correction, visible)
        return field if mask is None else torch.where(mask.unsqueeze(-1), field, z)

    def _check_tokens(self, x: Any) -> None:
        if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[-1] != self.dim:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"{type(self).__name__}: x must be a tensor (B, N, {self.dim}), got {got}"
            )

    def _open_pairs(self, x: Tensor, mask: Tensor | None) -> Tensor | None:
        """Which pairs may couple, (B or 1, 1, N, N) bool; None: all."""
        pairs = None if mask is None else mask[:, None, :, None] & mask[:, None, None, :]
        if self.self_coupling:
            return pairs
        others = ~torch.eye(x.shape[1], dtype=torch.bool, device=x.device)[None, None]
        return others if pairs is None else pairs & others

    def extra_repr(self) -> str:
        return (
            f"dim={self.dim}, heads={self.heads}, strength={self.strength:.4g}, "
            f"self_coupling={self.self_coupling}"
        )


class TokenMixer(nn.Module):
    """An MLP over the tokens, the same for every component: ``W2 gelu(W1 norm(z) + b1) + b2``.

    The norm is LayerNorm over the components of each token, without gain and offset and with an
    epsilon of order 1; a token that is zero stays zero in it and so drops out of ``W1``.

    Args:
        tokens: N.
        dim: d, for the norm.
        hidden: width; None: 4 N.
        epsilon: of the norm, finite, > 0.
        bound: bound on the spectral norms of W1 and W2, or None; the Lipschitz constant of the
            mixer is then at most ``1.13 bound^2 / sqrt(epsilon)``.

    Shapes: (B, N, d) -> (B, N, d).
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
        super().__init__()
        tokens, dim = check_count(tokens, "tokens"), check_count(dim, "dim")
        hidden = 4 * tokens if hidden is None else check_count(hidden, "hidden")
        self.norm = nn.LayerNorm(
            dim, eps=check_positive(epsilon, "epsilon"), elementwise_affine=False
        )
        self.first, self.second = nn.Linear(tokens, hidden), nn.Linear(hidden, tokens)
        if bound is not None:
            for linear in (self.first, self.second):
                parametrize.register_parametrization(linear, "weight", SpectralBound(bound))

    def forward(self, z: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(self.norm(z).mT))).mT


class MixerAttention(Update):
    r"""``f(z, x)_i = g({z_j})_i - correction(z_i) + x_i`` with a token-mixing MLP ``g``.

    The explicit couplings of :class:`MeanFieldAttention` give way to a :class:`TokenMixer`; its
    parameters belong to the N places, so the layer takes exactly N tokens.

    Where the Lipschitz constants of g and of the correction sum to less than 1, which ``bound`` and
    ``correction_bound`` can enforce, f is a contraction.

    Args:
        tokens: N.
        dim: d.
        hidden: width of the mixer; None: 4 N.
        correction: "network" for an ``OnsagerNetwork``, None, or a module (B, N, d) -> (B, N, d)
            that treats each token on its own.
        correction_hidden: width of the network; None: 4 d.
        correction_bound: bound on the spectral norms of the network's two weights, or None.
        bound: bound on the spectral norms of the mixer's two weights, or None.

    Shapes: ``z`` and ``x`` (B, N, d); ``x`` None counts as zero. ``mask`` (B, N) bool: tokens that do
    not count enter the mixer as zeros and do not move.

    Source: Bal, "Deep Implicit Attention" (2021), the section on MLP-Mixer (Tolstikhin et al. 2021).
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

    @property
    def parameter_count(self) -> int:
        """Number of parameters; no symmetry ties any of them."""
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(self, z: Tensor, x: Tensor | None = None, *, mask: Tensor | None = None) -> Tensor:
        name = type(self).__name__
        check_state(z, name, dim=self.dim, tokens=True)
        check_mask(mask, z, name, features=1)
        if z.shape[1] != self.tokens:
            raise ValueError(f"{name}: z must have {self.tokens} tokens, got {tuple(z.shape)}")
        visible = hide(z, mask)
        field = self.mixer(visible)
        if x is not None:
            field = field + check_input(x, z, name)
        if self.correction is not None:
            field = field - corrected(self.correction, visible)
        return field if mask is None else torch.where(mask.unsqueeze(-1), field, z)

    def extra_repr(self) -> str:
        return f"tokens={self.tokens}, dim={self.dim}"
