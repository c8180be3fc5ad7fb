"""Factored attention: heads that know positions only, as a Potts model with few parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from implicit_attn.energies.spins.gauge import check_couplings
from implicit_attn.models.potts.conditional import ConditionalModel
from solvers.core.checks import require_choice, require_count

ROWS = ("sink", "softmax", "linear")


class FactoredAttention(ConditionalModel):
    r"""Self-attention whose weights depend on positions alone and whose values on colours alone.

    With weights ``A^h`` (N, N), zero on the diagonal, and values ``V^h`` (d, d) of head h::

        logits_i = x_i + sum_h sum_j A^h_ij V^h S_j,    that is    J_ij = sum_h A^h_ij V^h

    a Potts model of rank H: J rearranged as a matrix (N^2, d^2) has the heads as its terms. From scores
    ``a^h_ij`` the weights are

    * ``rows="softmax"``: ``A^h_ij = softmax_{j != i}(a^h_ij)``. Every row sums to 1, so
      ``sum_j J_ij`` is the same matrix for all sites, with any number of heads: couplings of both signs
      and graphs of unequal degrees are out of reach.
    * ``rows="sink"``: one more key, of score 0 and value 0, so that rows sum to at most 1.
    * ``rows="linear"``: ``A^h_ij = a^h_ij``, without any constraint.

    ``power=2`` squares the mixed values, which makes terms of three sites::

        logits_i = x_i + sum_h W^h (sum_j A^h_ij V^h S_j)^2
                 = x_i + sum_h sum_jk A^h_ij A^h_ik W^h (V^h S_j * V^h S_k)

    The terms with j = k act between pairs. These are conditionals of every site, learned each for
    itself; as in attention J is not tied, ``zero_sum`` of ``implicit_attn.energies.spins.gauge``
    averages both directions.

    Where no colour is special at any site, as with the digits of Sudoku, freeze the fields
    (``model.field.requires_grad_(False)``): from few samples they only learn chance, and the couplings
    suffer from it.

    The last factor (V, or W with ``power=2``) starts at 0: all sites start independent.

    Args:
        sites: N.
        colours: d.
        heads: H.
        rows: "sink", "softmax" or "linear".
        power: 1, or 2 for terms of three sites.

    Attributes:
        scores: a (H, N, N); the diagonal has no effect.
        values: V (H, d, d).
        output: W (H, d, d), or None with ``power=1``.
        field: x (N, d).

    Source: Rende, Gerace, Laio, Goldt, "Mapping of attention mechanisms to a generalized Potts model"
    (2024), https://arxiv.org/abs/2304.07235, for one softmax head; Bhattacharya et al., "Interpreting
    Potts and Transformer Protein Models Through the Lens of Simplified Attention" (2022),
    https://doi.org/10.1142/9789811250477_0004, for several.
    """

    output: nn.Parameter | None

    def __init__(
        self, sites: int, colours: int, heads: int = 1, rows: str = "sink", power: int = 1
    ) -> None:
        super().__init__(sites, colours)
        self.heads = require_count("heads", heads)
        self.rows = require_choice("rows", rows, ROWS)
        self.power = require_count("power", power)
        if power > 2:
            raise ValueError(f"power must be 1 or 2, got {power}")
        self.scores = nn.Parameter(torch.empty(heads, sites, sites))
        self.values = nn.Parameter(torch.empty(heads, colours, colours))
        squares = nn.Parameter(torch.empty(heads, colours, colours)) if power == 2 else None
        self.register_parameter("output", squares)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Scores of one head are 0 and of several N(0, 1), or N(0, 1/N^2) of linear rows.

        Zero scores are even rows: a single head starts from no opinion on which sites matter, and finds
        the graph from fewer samples than from random scores. Several heads must differ.
        """
        # Linear scores are the weights themselves: about as large as those of a softmax.
        many = 0.0 if self.heads == 1 else 1.0
        nn.init.normal_(self.scores, std=1.0 / self.sites if self.rows == "linear" else many)
        nn.init.zeros_(self.field)
        if self.output is None:
            nn.init.zeros_(self.values)
        else:
            nn.init.normal_(self.values, std=self.colours**-0.5)
            nn.init.zeros_(self.output)

    @classmethod
    def from_couplings(cls, couplings: Tensor, heads: int) -> FactoredAttention:
        """The linear heads that are nearest to given couplings in the Frobenius norm.

        The error that is left is the tail ``sqrt(sum_{k > H} sigma_k^2)`` of the singular values of
        the couplings rearranged as (N^2, d^2); no H heads have a smaller one.

        Args:
            couplings: J (N, N, d, d), floating, with ``J_ii = 0``.
            heads: H <= min(N^2, d^2).
        """
        check_couplings(couplings)
        if bool((couplings.diagonal() != 0).any()):
            raise ValueError("couplings must have zero blocks J_ii, got others")
        n, d = couplings.shape[0], couplings.shape[2]
        if require_count("heads", heads) > min(n * n, d * d):
            raise ValueError(f"heads must be <= {min(n * n, d * d)}, got {heads}")
        u, sigma, v = torch.linalg.svd(
            couplings.detach().reshape(n * n, d * d), full_matrices=False
        )
        model = cls(n, d, heads, rows="linear").to(couplings.device, couplings.dtype)
        root = sigma[:heads, None].sqrt()
        with torch.no_grad():
            model.scores.copy_((root * u.T[:heads]).view(heads, n, n))
            model.values.copy_((root * v[:heads]).view(heads, d, d))
        return model

    def attention(self) -> Tensor:
        """The weights A (H, N, N), zero on the diagonal."""
        own = torch.eye(self.sites, dtype=torch.bool, device=self.scores.device)
        if self.rows == "linear":
            return self.scores.masked_fill(own, 0.0)
        scores = self.scores.masked_fill(own, float("-inf"))
        if self.rows == "softmax":
            return torch.softmax(scores, -1)
        sink = scores.new_zeros(self.heads, self.sites, 1)
        return torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]

    def couplings(self) -> Tensor:
        """``J_ij = sum_h A^h_ij V^h``, (N, N, d, d), not tied.

        Raises:
            ValueError: ``power`` is 2; the model is then not one of pairs, see :meth:`triples`.
        """
        if self.power != 1:
            raise ValueError("power must be 1 for pair couplings, got 2; see triples()")
        return torch.einsum("hij,hab->ijab", self.attention(), self.values)

    def triples(self) -> Tensor:
        """``T_ijk^{abc} = sum_h A_ij A_ik sum_r W_ar V_rb V_rc``, (N, N, N, d, d, d).

        ``logits_i^a = x_i^a + sum_jk T_ijk^{a s_j s_k}``, over all j and k, also j = k. It is large: for
        small models.

        Raises:
            ValueError: ``power`` is 1.
        """
        if self.output is None:
            raise ValueError("power must be 2 for couplings of three sites, got 1; see couplings()")
        weights = self.attention()
        colours = torch.einsum("har,hrb,hrc->habc", self.output, self.values, self.values)
        return torch.einsum("hij,hik,habc->ijkabc", weights, weights, colours)

    def interaction(self, states: Tensor) -> Tensor:
        """The sum over the heads, (B, N, d)."""
        n, d = self.sites, self.colours
        if self.output is None and self.heads * (n + d) > n * d:
            # Many heads: one product with J costs N^2 d^2 a sample, the heads H N d (N + d).
            matrix = self.couplings().transpose(1, 2).reshape(n * d, n * d)
            return (states.flatten(1) @ matrix.mT).view(states.shape)
        values = torch.einsum("bjc,hac->bhja", states, self.values)
        mixed = self.attention() @ values
        if self.output is None:
            return mixed.sum(1)
        return torch.einsum("bhir,har->bia", mixed.square(), self.output)

    def penalty(self) -> Tensor:
        """``sum_ij |J_ij|^2 / 2`` of the couplings; with ``power=2`` ``sum |V|^2 + |W|^2``."""
        if self.output is not None:
            return self.values.square().sum() + self.output.square().sum()
        weights, values = self.attention().flatten(1), self.values.flatten(1)
        return 0.5 * ((weights @ weights.mT) * (values @ values.mT)).sum()

    def extra_repr(self) -> str:
        return (
            f"sites={self.sites}, colours={self.colours}, heads={self.heads}, rows={self.rows!r}, "
            f"power={self.power}"
        )
