"""Predictors of a patch from all others: bare attention, and what a sceptic would compare it with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from implicit_attn.energies import Couplings
from solvers import TorusSite

STRENGTHS = (1e-4, 1e-3, 1e-2, 0.1, 1.0)  # of ridge regression, among which it chooses


class PairSum(nn.Module):
    r"""``p(z_i | rest) ~ rho(z_i) exp(z_i.h_i)``, ``h_i = F^T sum_{j != i} J_ij F z_j``, circles as rho.

    The neighbours' evidence is added, where bare attention lets one of them speak. Its
    ``local_gradient`` is that of ``-sum_i log p(z_i | rest)``, the pseudo-likelihood.

    Args:
        sites, dim: N and d of the couplings.
        features: fixed ``F`` (d, D), or None for tokens of d components.
    """

    features: Tensor | None

    def __init__(self, sites: int, dim: int, *, features: Tensor | None = None) -> None:
        super().__init__()
        self.couplings = Couplings(sites, dim, symmetric_sites=False)
        self.site = TorusSite()
        self.register_buffer("features", features)

    def fields(self, z: Tensor) -> Tensor:
        """``h_i`` (B, N, D)."""
        F = self.features
        field = self.couplings(z if F is None else z @ F.mT)
        return field if F is None else field @ F

    def mean(self, z: Tensor) -> Tensor:
        """The means of the conditional laws, (B, N, D)."""
        field = self.fields(z)
        return self.site.mean(field, _nothing(field))

    def log_prob(self, z: Tensor) -> Tensor:
        """``log p(z_i | rest)``, (B, N)."""
        field = self.fields(z)
        return (field * z).sum(-1) - self.site.log_partition(field, _nothing(field))

    @torch.no_grad()
    def local_gradient(self, z: Tensor, rule: str = "exact") -> Tensor:
        """``-(z_i - mean_i) z_j^T`` averaged over the samples, (N, N, d, d), zero blocks for i = j."""
        if rule != "exact":
            raise ValueError(f'rule must be "exact", got {rule!r}')
        error, F = z - self.mean(z), self.features
        if F is not None:
            error, z = error @ F.mT, z @ F.mT
        gradient = torch.einsum("nia,njb->ijab", error, z) / -len(z)
        own = torch.eye(z.shape[1], dtype=torch.bool)
        return gradient.masked_fill(own[..., None, None], 0.0)

    def assign_gradient(self, gradient: Tensor) -> None:
        """Set ``grad`` of the free couplings."""
        expansion: Any = self.couplings.parametrizations["weight"][0]  # type: ignore[index]
        self.couplings.free.grad = expansion.right_inverse(gradient)

    def cap_norms(self, maximum: float) -> None:
        """Refused: the likelihood needs no bound."""
        raise ValueError(f"maximum must not be given for a pair sum, got {maximum}")


def _nothing(field: Tensor) -> Tensor:
    return field.new_zeros(()).expand(*field.shape, field.shape[-1])


def ridge(train: Tensor, test: Tensor, strength: float) -> Tensor:
    """Linear regression of the values of every patch (M, N, p) on those of all others, with intercept.

    Minimises ``|Y - X W|^2 / M + strength |W|^2`` about the means, by its dual problem in M unknowns;
    returns (M', N, p) of ``test``, within [0, 1].
    """
    train, test = train.double(), test.double()
    middle = train.mean(0)
    x, new = train - middle, test - middle
    gram, crossed = x.flatten(1) @ x.flatten(1).mT, new.flatten(1) @ x.flatten(1).mT
    unit = len(x) * strength * torch.eye(len(x), dtype=x.dtype)
    predicted = []
    for i in range(x.shape[1]):  # the products without those of the patch itself
        factor = torch.linalg.cholesky(gram - x[:, i] @ x[:, i].mT + unit)
        dual = torch.cholesky_solve(x[:, i], factor)
        predicted.append((crossed - new[:, i] @ x[:, i].mT) @ dual)
    return (torch.stack(predicted, 1) + middle).clamp(0.0, 1.0).float()


def best_strength(values: Tensor, choices: Sequence[float] = STRENGTHS, most: int = 600) -> float:
    """The strength of :func:`ridge` that is best on a third of the first ``most`` samples."""
    values = values[:most]
    cut = max(1, 2 * len(values) // 3)
    errors = [
        (ridge(values[:cut], values[cut:], strength) - values[cut:]).square().mean().item()
        for strength in choices
    ]
    return choices[errors.index(min(errors))]
