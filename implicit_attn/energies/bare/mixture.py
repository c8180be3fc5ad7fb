"""The conditional law of a token given all others: a mixture of tilted single-site laws."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from implicit_attn.energies.checks import check_state


class ConditionalMixture(NamedTuple):
    r"""``p(z_i | rest) = rho(z_i) sum_j exp(z_i.h_ij) / sum_j Z(h_ij)``, all sites at once.

    Neighbour j proposes the law ``rho(z) exp(z.h_ij) / Z(h_ij)`` and is believed with the weight
    ``w_ij = softmax_j log Z(h_ij)``. Neither depends on ``z_i``. Densities are with respect to rho.

    Attributes:
        site: rho, with ``log_partition``, ``mean`` and, for :meth:`sample`, ``sample``.
        fields: ``h_ij`` (B, N, N, D).
        log_weights: ``log w_ij`` (B, N, N), minus infinity for pairs that do not speak.
        log_total: ``lse_j log Z(h_ij)`` (B, N).
    """

    site: Any
    fields: Tensor
    log_weights: Tensor
    log_total: Tensor

    @classmethod
    def of(cls, site: Any, fields: Tensor, speaks: Tensor) -> ConditionalMixture:
        """From the fields and which pairs (B or 1, N, N) bool speak; every site hears at least one."""
        flat = fields.flatten(1, 2)
        values = site.log_partition(flat, no_variance(flat)).view(fields.shape[:-1])
        values = values.masked_fill(~speaks, -torch.inf)
        total = values.logsumexp(-1)
        return cls(site, fields, values - total.unsqueeze(-1), total)

    @property
    def weights(self) -> Tensor:
        """``w_ij`` (B, N, N), rows that sum to 1."""
        return self.log_weights.exp()

    def means(self) -> Tensor:
        """``mu(h_ij)``, the mean of each neighbour's law, (B, N, N, D)."""
        flat = self.fields.flatten(1, 2)
        return self.site.mean(flat, no_variance(flat)).view(self.fields.shape)

    def mean(self) -> Tensor:
        """``sum_j w_ij mu(h_ij)``, (B, N, D): the best guess of every token from the others."""
        return (self.weights.unsqueeze(-2) @ self.means()).squeeze(-2)

    def log_prob(self, z: Tensor) -> Tensor:
        """``log p(z_i | rest)`` (B, N) at ``z`` (B, N, D), given the others that made this mixture.

        The mixture knows no mask. A token that was masked has the law rho here, and NaN where ``z`` is
        NaN; ``BareAttention.log_prob`` gives 0 there.
        """
        batch, sites, _, dim = self.fields.shape
        check_state(z, "ConditionalMixture", dim=dim, tokens=True)
        if z.shape[:2] != (batch, sites):
            raise ValueError(
                f"z must have the shape {(batch, sites, dim)} of the mixture, got {tuple(z.shape)}"
            )
        scores = (self.fields @ z.unsqueeze(-1)).squeeze(-1)
        closed = torch.isneginf(self.log_weights.detach())
        return scores.masked_fill(closed, -torch.inf).logsumexp(-1) - self.log_total

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """A draw of every token given the others, independently, (B, N, D): first j, then its law.

        Raises:
            NotImplementedError: the site cannot draw.
        """
        if not hasattr(self.site, "sample"):
            raise NotImplementedError(f"{type(self.site).__name__} has no method sample")
        with torch.no_grad():
            weights = self.weights.flatten(0, 1)
            chosen = torch.multinomial(weights, 1, generator=generator)
            index = chosen.view(*self.fields.shape[:2], 1, 1).expand(
                -1, -1, 1, self.fields.shape[-1]
            )
            return self.site.sample(self.fields.gather(2, index).squeeze(2), generator)


def no_variance(field: Tensor) -> Tensor:
    """``V = 0`` for fields (..., d): (..., d, d), expanded from one number."""
    return field.new_zeros(()).expand(*field.shape, field.shape[-1])
