"""The interface of a site: the distribution of one spin in a field and a cavity variance."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from solvers.core.modes import ordinary, recording


class Site(nn.Module):
    r"""A single-site distribution ``rho(S)`` on vectors of d components, tilted by ``h`` and ``V``::

        log Z(h, V) = log int rho(S) exp(h.S + 1/2 S^T V S) dS
        mean = d log Z / dh,   covariance = d^2 log Z / dh^2

    A subclass must define ``log_partition`` alone; mean and covariance then come by automatic
    differentiation (d + 1 backward passes), to any order. Parameters of the module get gradients.
    :func:`solvers.gibbs` also asks for ``sample`` and, where the sites differ, for ``at``; it refuses
    states that ``takes`` denies. The free
    energies of coupled sites need ``log Z`` with all that depends on V, also what no moment shows.

    Class attributes:
        field_dependent: the covariance depends on the field; only Gaussian sites say False, and are
            solved once for all fields.
        values: the values of S in words, for messages.

    Shapes: ``field`` (B, N, d), ``variance`` (B, N, d, d) symmetric -> ``log_partition`` (B, N),
    ``mean`` (B, N, d), ``covariance`` (B, N, d, d), each site on its own. Where a site cannot be
    normalised ``log_partition`` is NaN or infinite; the solver rejects such a step.
    """

    field_dependent: ClassVar[bool] = True
    values: ClassVar[str] = "vectors"

    def log_partition(self, field: Tensor, variance: Tensor) -> Tensor:
        """``log Z`` of every site, (B, N)."""
        raise NotImplementedError(
            f"{type(self).__name__} must define log_partition(field, variance)"
        )

    def mean(self, field: Tensor, variance: Tensor) -> Tensor:
        """``d log Z / dh``, (B, N, d)."""
        return self._derivatives(field, variance, 1)[0]

    def covariance(self, field: Tensor, variance: Tensor) -> Tensor:
        """``d^2 log Z / dh^2``, (B, N, d, d)."""
        return self.moments(field, variance)[1]

    def moments(self, field: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and covariance in one evaluation."""
        if type(self).mean is not Site.mean and type(self).covariance is not Site.covariance:
            return self.mean(field, variance), self.covariance(field, variance)
        mean, covariance = self._derivatives(field, variance, 2)
        return mean, covariance

    def sample(
        self,
        field: Tensor,
        generator: torch.Generator | None = None,
        variance: Tensor | None = None,
    ) -> Tensor:
        """One independent draw of every site from ``rho(S) exp(h.S + 1/2 S^T V S)``; no gradients.

        Args:
            field: ``h`` (..., N, d).
            generator: of the draws, on the device of ``field``; None: the global one.
            variance: ``V`` (..., N, d, d); None: 0.

        Returns:
            (..., N, d), dtype of ``field``.

        Raises:
            NotImplementedError: where the site, or the site at this ``variance``, has no sampler.
        """
        raise NotImplementedError(
            f"{type(self).__name__} cannot draw samples: it must define sample(field, generator, "
            "variance=None)"
        )

    def at(self, index: int) -> Site:
        """The distribution of site ``index`` alone; itself, unless the sites differ."""
        return self

    def takes(self, states: Tensor) -> Tensor:
        """(...) bool: ``states`` (..., d) are values of S, up to rounding; True unless a site says more."""
        return states.new_ones(states.shape[:-1], dtype=torch.bool)

    def _derivatives(self, field: Tensor, variance: Tensor, order: int) -> list[Tensor]:
        """Mean, and covariance for ``order`` 2, by autograd; NaN where log Z is not finite."""
        outer = torch.is_grad_enabled()
        with recording():
            point, variance = ordinary(field), ordinary(variance)
            if not (outer and point.requires_grad):  # else in the caller's graph
                point = point.detach().requires_grad_()
            mean, exists = self._slope(point, variance, outer or order == 2)
            found = [torch.where(exists.unsqueeze(-1), mean, torch.nan)]
            if order == 2:
                covariance = _curvature(mean, point, outer)
                found.append(torch.where(exists[..., None, None], covariance, torch.nan))
        return found if outer else [tensor.detach() for tensor in found]

    def _slope(self, point: Tensor, variance: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
        """``d log Z / dh`` (B, N, d), and where log Z is finite (B, N) bool."""
        value = self.log_partition(point, variance)
        if not isinstance(value, Tensor) or value.shape != point.shape[:-1]:
            came = tuple(value.shape) if isinstance(value, Tensor) else type(value)
            raise ValueError(
                f"log_partition of {type(self).__name__} must return one number per site, shape "
                f"{tuple(point.shape[:-1])}, got {came}"
            )
        if not value.requires_grad:
            raise ValueError(
                f"log_partition of {type(self).__name__} does not depend on the field (or is not "
                "differentiable in it)"
            )
        slope = torch.autograd.grad(value.sum(), point, create_graph=keep)[0]
        return slope, torch.isfinite(value.detach())


def _curvature(mean: Tensor, point: Tensor, outer: bool) -> Tensor:
    """The symmetrised Jacobian ``d mean / d point``, (B, N, d, d), row by row."""
    if not mean.requires_grad:
        return mean.new_zeros(*mean.shape, mean.shape[-1])
    rows = []
    for component in range(mean.shape[-1]):
        slope = mean[..., component].sum()
        (row,) = torch.autograd.grad(
            slope, point, retain_graph=True, create_graph=outer, allow_unused=True
        )
        rows.append(torch.zeros_like(point) if row is None else row)
    hessian = torch.stack(rows, dim=-2)
    return (hessian + hessian.mT) / 2
