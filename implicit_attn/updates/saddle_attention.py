"""Attention as the magnetisation of O(d) spins: a layer that is solved in closed form, by Newton steps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.energies.tokens import check_tokens
from solvers import SaddleSolution, spherical_saddle
from solvers.core.checks import require_choice, require_count, require_flag, require_positive

KINDS = ("free", "input")


class SaddleAttention(nn.Module):
    r"""Means of N spins of d components, |S_i| = sqrt d, whose fields are the normalised tokens.

    ``P(S) ~ exp(1/2 sum_ij K_ij S_i.S_j + sum_i h_i.S_i)`` with ``h = beta LayerNorm(x)`` and scalar
    couplings K, either parameters or from the input, with queries and keys of ``n = LayerNorm(x) / sqrt d``::

        free:    K = 2 beta J,  J_ij = J_ji,  drawn from N(0, 1 / (N d))
        input:   K = beta (A + A^T) / sqrt(N d),  A = tanh(sqrt d (W_q n)(W_k n)^T),  without its diagonal

    The output is ``m = (Lambda - K)^-1 h`` (:func:`solvers.spherical_saddle`, exact for large d). The
    multipliers Lambda minimise a strictly convex function of N numbers, so this is a module of its own:
    it needs no ``DEQ``, no damping and no starting point, and takes derivatives of any order::

        layer = SaddleAttention(17, 64, couplings="input")
        layer(x)  # (B, N, d)
        layer.solve(x).log_partition  # (B,), the free energy as another output, or as a loss

    Args:
        sites: N, of the free couplings; inputs of any N go with ``couplings="input"``.
        dim: d.
        couplings: "free" or "input".
        beta: inverse temperature, > 0.
        per_site: False: one multiplier for all spins (the spherical model).
        normalise: False: ``h = beta x``, for fields that are given as they are, and ``n = x / sqrt d``.
        on_failure: "warn", "raise" or "ignore" about samples that did not converge.

    Shapes: ``x`` (B, N, d) -> (B, N, d). ``mask`` (B, N) bool: masked tokens influence no other, their
    output is zero, and N in the formula counts the others, so that padding changes nothing.

    Attributes:
        last: the :class:`solvers.SaddleSolution` of the latest solve, detached, or None.

    Source: M. Bal, afem, https://github.com/mcbal/afem: K is ``2 beta J`` and h is
    ``beta sqrt d`` times the field of that code, m is ``sqrt d`` times its magnetisation.
    """

    pairs: Tensor

    def __init__(
        self,
        sites: int,
        dim: int,
        couplings: str = "free",
        *,
        beta: float = 1.0,
        per_site: bool = True,
        normalise: bool = True,
        on_failure: str = "warn",
    ) -> None:
        super().__init__()
        self.sites, self.dim = require_count("sites", sites), require_count("dim", dim)
        self.kind = require_choice("couplings", couplings, KINDS)
        self.beta = require_positive("beta", beta)
        self.per_site = require_flag("per_site", per_site)
        self.normalise = require_flag("normalise", normalise)
        self.on_failure = require_choice("on_failure", on_failure, ("warn", "raise", "ignore"))
        self.last: SaddleSolution | None = None
        if self.kind == "free":
            pairs = sites * (sites - 1) // 2
            self.free = nn.Parameter(torch.randn(pairs) / math.sqrt(sites * dim))
            self.register_buffer("pairs", torch.triu_indices(sites, sites, 1), persistent=False)
        else:
            self.query = nn.Linear(dim, dim, bias=False)
            self.key = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The means (B, N, d)."""
        return self.solve(x, mask).mean

    def solve(self, x: Tensor, mask: Tensor | None = None) -> SaddleSolution:
        """The whole solution: means, response, log partition function, status of each sample."""
        check_tokens(x, mask, type(self).__name__, dim=self.dim, tokens=True)
        if self.kind == "free" and x.shape[1] != self.sites:
            raise ValueError(
                f"SaddleAttention: x must have {self.sites} sites (N), got shape {tuple(x.shape)}"
            )
        fields = F.layer_norm(x, (self.dim,)) if self.normalise else x
        k = self.couplings(fields, mask)
        solution = spherical_saddle(
            k.to(fields.dtype),
            self.beta * fields,
            per_site=self.per_site,
            mask=mask,
            on_failure=self.on_failure,
        )
        tensors: dict[str, Any] = {name: t.detach() for name, t in vars(solution).items()}
        self.last = replace(solution, **tensors)
        return solution

    def couplings(self, fields: Tensor, mask: Tensor | None = None) -> Tensor:
        """``K`` (N, N), or (B, N, N) from the normalised input (B, N, d), N unmasked tokens of a sample."""
        if self.kind == "free":
            rows, columns = self.pairs.unbind(0)
            upper = self.free.new_zeros(self.sites, self.sites).index_put(
                (rows, columns), self.free
            )
            return 2 * self.beta * (upper + upper.mT)
        sites = fields.shape[1]
        count = torch.full_like(fields[:, :1, :1], sites)
        if mask is not None:
            count = mask.sum(1).clamp(min=1).to(fields.dtype)[:, None, None]
        n = fields / math.sqrt(self.dim)
        scores = torch.tanh(math.sqrt(self.dim) * (self.query(n) @ self.key(n).mT))
        outside = 1 - torch.eye(sites, dtype=scores.dtype, device=scores.device)
        return self.beta * (scores + scores.mT) / (count * self.dim).sqrt() * outside

    def extra_repr(self) -> str:
        return (
            f"sites={self.sites}, dim={self.dim}, couplings={self.kind!r}, beta={self.beta}, "
            f"per_site={self.per_site}"
        )
