"""Coupled vector spins: couplings and their gauge, interaction energy, mean-field free energy."""

from __future__ import annotations

import math
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from implicit_attn.energies.energy import Energy
from implicit_attn.energies.lagrangians import IsingLagrangian, Lagrangian
from implicit_attn.energies.projected import SpectralBound
from implicit_attn.energies.tokens import (
    Pair,
    accumulation_dtype,
    check_input,
    check_tensor,
    check_tokens,
    hide,
    sum_samples,
)
from implicit_attn.parametrised import parametrise
from solvers.core.checks import require_count, require_flag, require_positive


class Couplings(nn.Module):
    """Couplings ``J`` (N, N, d, d) between N sites with d components; no site couples to itself.

    ``J_ii = 0``; with ``symmetric_sites`` ``J_ij^{ab} = J_ji^{ba}``, so that ``J`` as a matrix
    (Nd, Nd) is symmetric. The only parameters are the free entries (``torch.nn.utils.parametrize``), so
    optimisers and weight decay see each once. They are drawn from ``N(0, scale^2 / (N d^2))``, which
    gives the matrix a spectral norm of about ``2 scale / sqrt d``.

    ``weight`` is J itself. It can be read, set (``couplings.weight = J``) and cached
    (``torch.nn.utils.parametrize.cached()``); a solve computes it once.

    Args:
        sites: N.
        dim: d.
        symmetric_sites: tie ``J_ij`` to the transpose of ``J_ji``.
        scale: of the initial entries, > 0.
        bound: bound on the spectral norm of the matrix, or None. A larger ``J`` is scaled down to
            it, at the cost of an eigenvalue decomposition a solve.

    Raises:
        TypeError, ValueError: for arguments out of range; on setting ``weight`` to a tensor of
            another shape or without the symmetries.

    Source: Opper and Winther (2001), https://doi.org/10.1103/PhysRevE.64.056131, for the model; Bal,
    "Deep Implicit Attention" (2021),
    https://mcbal.github.io/post/deep-implicit-attention-a-mean-field-theory-perspective-on-attention-mechanisms/
    """

    weight: Tensor

    def __init__(
        self,
        sites: int,
        dim: int,
        *,
        symmetric_sites: bool = True,
        scale: float = 1.0,
        bound: float | None = None,
    ) -> None:
        super().__init__()
        self.sites, self.dim = require_count("sites", sites), require_count("dim", dim)
        self.symmetric_sites = require_flag("symmetric_sites", symmetric_sites)
        self.scale = require_positive("scale", scale)
        self.bound = None if bound is None else require_positive("bound", bound)
        self.weight = nn.Parameter(torch.zeros(sites, sites, dim, dim))
        parametrise(self, "weight", _FreeEntries(sites, dim, symmetric_sites))
        if self.bound is not None:
            parametrise(self, "weight", _BoundedMatrix(self.bound, symmetric_sites))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the free entries from ``N(0, scale^2 / (N d^2))``."""
        nn.init.normal_(self.free, std=self.scale / (self.sites**0.5 * self.dim))

    @property
    def free(self) -> nn.Parameter:
        """The entries that the symmetries leave free, the only parameter.

        (K, d, d), for K = N(N-1)/2 or N(N-1) pairs.
        """
        return self.parametrizations["weight"].original  # type: ignore[index,union-attr,return-value]

    @property
    def matrix(self) -> Tensor:
        """``J`` as a matrix (Nd, Nd), rows ``(i, a)``, columns ``(j, b)``."""
        size = self.sites * self.dim
        return self.weight.transpose(1, 2).reshape(size, size)

    def forward(self, z: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """The field ``sum_j J_ij z_j`` at every site, (B, N, d), one matrix product.

        Masked sites act on no other site, and their own field is 0.
        """
        self.check(z, mask)
        field = (hide(z, mask).flatten(1) @ self.matrix.mT).view(z.shape)
        return hide(field, mask)

    def check(self, z: Tensor, mask: Tensor | None = None) -> None:
        """``z`` must be (B, N, d) of this N and d, and ``mask`` (B, N) bool, or errors that say so."""
        check_tokens(z, mask, "Couplings", dim=self.dim, tokens=True)
        if z.shape[1] != self.sites:
            raise ValueError(
                f"Couplings: z must have {self.sites} sites (N), got shape {tuple(z.shape)}"
            )

    def site_norms(self) -> Tensor:
        """Frobenius norm of every block ``J_ij``, (N, N): how strongly two sites are coupled."""
        return torch.linalg.matrix_norm(self.weight)

    def extra_repr(self) -> str:
        return (
            f"sites={self.sites}, dim={self.dim}, symmetric_sites={self.symmetric_sites}, "
            f"bound={self.bound}"
        )


class _FreeEntries(nn.Module):
    """Parametrisation: free entries -> ``J`` (N, N, d, d), laid out in memory as (N, d, N, d)."""

    rows: Tensor
    columns: Tensor

    def __init__(self, sites: int, dim: int, tied: bool) -> None:
        super().__init__()
        self.sites, self.dim, self.tied = sites, dim, tied
        rows, columns = torch.triu_indices(sites, sites, 1)
        if not tied:
            rows, columns = torch.cat([rows, columns]), torch.cat([columns, rows])
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("columns", columns, persistent=False)

    def forward(self, free: Tensor) -> Tensor:
        n, d = self.sites, self.dim
        upper = free.new_zeros(n, d, n, d).transpose(1, 2)
        upper = upper.index_put((self.rows, self.columns), free)
        return upper + upper.permute(1, 0, 3, 2) if self.tied else upper

    def right_inverse(self, weight: Tensor) -> Tensor:
        n, d = self.sites, self.dim
        check_tensor("weight", weight, "N N d d", N=n, d=d)
        if not weight.is_meta:  # which has no values
            self._check_symmetries(weight.detach())
        return weight[self.rows, self.columns]

    def _check_symmetries(self, weight: Tensor) -> None:
        allowed = 32 * torch.finfo(weight.dtype).eps * weight.abs().max()
        offences = {"have zero blocks J_ii": weight.diagonal().abs().max()}
        if self.tied:
            offences["have J_ij^ab = J_ji^ba"] = (weight - weight.permute(1, 0, 3, 2)).abs().max()
        for wanted, worst in offences.items():
            if not bool(worst <= allowed):
                raise ValueError(f"weight must {wanted}, got deviations up to {float(worst):.3g}")


class _BoundedMatrix(SpectralBound):
    """The bound for ``J`` (N, N, d, d), on the spectral norm of its matrix (Nd, Nd)."""

    def __init__(self, bound: float, symmetric: bool) -> None:
        super().__init__(bound)
        self.symmetric = symmetric

    def matrix(self, weight: Tensor) -> Tensor:
        size = weight.shape[0] * weight.shape[2]
        return weight.transpose(1, 2).reshape(size, size)

    def norm_or_bound(self, weight: Tensor) -> Tensor:
        """By J itself: in a Gram matrix eigenvalues of both signs are one, without second derivatives."""
        wide = self.matrix(weight.to(accumulation_dtype(weight.dtype)))
        wide = torch.where(wide.isfinite(), wide, 0.0)
        if self.symmetric:
            norm = torch.linalg.eigvalsh(wide).abs().amax()
        else:
            norm = torch.linalg.matrix_norm(wide, ord=2)
        return norm.clamp_min(self.bound)


def zero_sum(couplings: Tensor) -> Tensor:
    """Couplings in the zero-sum gauge, both directions averaged, (N, N, d, d).

    Within each block ``J^ = J - mean_a J - mean_b J + mean_ab J``, then ``(J^_ij + J^_ji^T) / 2``. What
    is dropped depends on one of the two colours alone and only moves fields, so models that differ in
    it are the same. Blocks ``J_ii`` are set to 0.

    Args:
        couplings: J (N, N, d, d), floating.

    Raises:
        TypeError, ValueError: as :func:`check_couplings`.

    Source: Ekeberg et al. (2013), https://arxiv.org/abs/1211.1281.
    """
    check_couplings(couplings)
    centred = couplings - couplings.mean(2, keepdim=True)
    centred = centred - centred.mean(3, keepdim=True)
    both = 0.5 * (centred + centred.permute(1, 0, 3, 2))
    own = torch.eye(len(both), dtype=torch.bool, device=both.device)
    return both.masked_fill(own[..., None, None], 0.0)


def binary_size(couplings: Tensor) -> float:
    """The power of two next to the largest entry, 1 if all are 0: dividing by it rounds nothing.

    Squares of couplings far from 1 leave the range of float32, those of ``J / binary_size(J)`` do not.
    """
    largest = float(couplings.detach().abs().amax())
    return 2.0 ** (math.frexp(largest)[1] - 1) if largest > 0 else 1.0


def check_couplings(couplings: Tensor, name: str = "couplings") -> None:
    """Finite couplings (N, N, d, d).

    Raises:
        TypeError: no tensor, or not floating.
        ValueError: another shape; NaN or infinity in it.
    """
    check_tensor(name, couplings, "N N d d")


class SpinInteraction(Energy):
    """``E = -1/2 sum_ij z_i^T J_ij z_j``. Gradient ``-J z``, Hessian ``-J``.

    In an ``ActivationStep`` it gives the naive mean-field update ``h <- h - eta (h - x - J m(h))``,
    whose monitored energy is :class:`VectorSpin`::

        DEQ(ActivationStep(SpinInteraction(couplings), IsingLagrangian()))

    Shapes: ``z`` (B, N, d); ``x`` is ignored; ``mask`` (B, N).

    Args:
        couplings: with ``symmetric_sites``; shared, not copied.
    """

    def __init__(self, couplings: Couplings) -> None:
        super().__init__()
        self.couplings = check_symmetric(couplings)

    def value_and_grad(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Pair:
        gradient = -self.couplings(z, mask=mask)
        return 0.5 * sum_samples(hide(z, mask) * gradient), gradient


class VectorSpin(Energy):
    """Mean-field free energy of coupled vector spins as a function of the fields ``h``.

    With ``log Z`` the log partition function of a site and ``m = d log Z/dh`` its mean::

        E(h) = sum_i [ h_i.m_i - log Z(h_i) - x_i.m_i ] - 1/2 sum_ij m_i^T J_ij m_j
        dE/dh = (dm/dh) (h - x - J m)

    The fixed points of the naive mean field ``h = x + J m(h)`` are its stationary points.

    There are two layers for it, both with the state h; ``energy.mean(h)`` is the magnetisation.
    ``DEQ(energy)`` follows the gradient. Its Jacobian is symmetric, but it is slow where sites
    saturate, since ``dm/dh`` vanishes there, and h is not unique where m does not depend on it (a
    shift of all components of a Potts site).
    ``DEQ(ActivationStep(energy.interaction, energy.lagrangian))`` iterates
    ``h <- h - eta (h - x - J m)`` and monitors the same energy; saturation does not slow it down.

    Shapes: ``h`` and ``x`` (B, N, d), ``x`` None for zero; ``mask`` (B, N).

    Args:
        couplings: with ``symmetric_sites``; shared, not copied.
        site: a ``Lagrangian``, which is ``log Z`` (``IsingLagrangian()``, ``SphericalLagrangian()``,
            ``SoftmaxLagrangian()`` for Potts, ``IdentityLagrangian()`` for a unit Gaussian), or a
            :class:`SiteDistribution`; None: ``IsingLagrangian()``.

    Source: Krotov and Hopfield (2021), https://arxiv.org/abs/2008.06996, for the form; Bal, "Deep
    Implicit Attention" (2021),
    https://mcbal.github.io/post/deep-implicit-attention-a-mean-field-theory-perspective-on-attention-mechanisms/
    """

    def __init__(
        self, couplings: Couplings, site: Lagrangian | SiteDistribution | None = None
    ) -> None:
        super().__init__()
        self.couplings = check_symmetric(couplings)
        site = IsingLagrangian() if site is None else site
        self.lagrangian = site if isinstance(site, Lagrangian) else SiteLagrangian(site)

    @property
    def interaction(self) -> SpinInteraction:
        """The interaction, an energy of the means m, with the same couplings."""
        return SpinInteraction(self.couplings)

    def mean(self, h: Tensor) -> Tensor:
        """``m(h)``, (B, N, d): the magnetisation of every site."""
        return self.lagrangian.activation(h)

    def forward(self, z: Tensor, x: Tensor | None = None, *, mask: Tensor | None = None) -> Tensor:
        return self._value_and_force(z, x, mask)[0]

    def value_and_grad(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Pair:
        value, force = self._value_and_force(z, x, mask)
        return value, hide(self.lagrangian.hessian_product(hide(z, mask), force), mask)

    def _value_and_force(self, h: Tensor, x: Tensor | None, mask: Tensor | None) -> Pair:
        """The energy and the force ``h - x - J m``, zero at masked sites."""
        self.couplings.check(h, mask)
        visible = hide(h, mask)
        pull = visible
        if x is not None:
            pull = visible - hide(check_input(x, h, type(self).__name__), mask)
        m = self.lagrangian.activation(visible)
        field = self.couplings(m, mask=mask)
        interaction = hide((pull - 0.5 * field) * m, mask)
        return sum_samples(interaction) - self.lagrangian(visible, mask=mask), pull - field


@runtime_checkable
class SiteDistribution(Protocol):
    """The distribution of a vector spin in a field h (B, N, d) with a cavity variance V (B, N, d, d).

    Every ``solvers.Site`` is one.
    """

    def log_partition(self, field: Tensor, variance: Tensor, /) -> Tensor:
        """``log Z(h, V) = log int rho(S) exp(h.S + 1/2 S^T V S)``, (B, N)."""
        ...

    def mean(self, field: Tensor, variance: Tensor, /) -> Tensor:
        """``d log Z / dh``, (B, N, d)."""
        ...

    def covariance(self, field: Tensor, variance: Tensor, /) -> Tensor:
        """``d2 log Z / dh2``, (B, N, d, d)."""
        ...


class SiteLagrangian(Lagrangian, nn.Module):
    """``Lag(h) = log Z(h, 0)``: a :class:`SiteDistribution` as a Lagrangian, for the naive mean field.

    Args:
        site: an object with ``log_partition``, ``mean`` and ``covariance``, such as a
            ``solvers.Site``. One that is an ``nn.Module`` is registered with its parameters.
    """

    def __init__(self, site: SiteDistribution) -> None:
        nn.Module.__init__(self)
        if isinstance(site, type) or not isinstance(site, SiteDistribution):
            raise TypeError(
                f"site must be a Lagrangian or have log_partition, mean and covariance, got {site!r}"
            )
        self.site = site

    def token_value(self, z: Tensor) -> Tensor:
        return self.site.log_partition(z, no_variance(z))

    def activation(self, z: Tensor) -> Tensor:
        return self.site.mean(z, no_variance(z))

    def hessian_product(self, z: Tensor, v: Tensor) -> Tensor:
        return (self.site.covariance(z, no_variance(z)) @ v.unsqueeze(-1)).squeeze(-1)


def no_variance(h: Tensor) -> Tensor:
    """``V = 0`` for fields (..., d): (..., d, d), expanded from one number."""
    return h.new_zeros(()).expand(*h.shape, h.shape[-1])


def check_symmetric(couplings: object) -> Couplings:
    """``couplings`` must be ``Couplings`` with ``symmetric_sites``; others have no energy."""
    if not isinstance(couplings, Couplings):
        raise TypeError(f"couplings must be Couplings, got {type(couplings)}")
    if not couplings.symmetric_sites:
        raise ValueError("couplings must have symmetric_sites=True to have an energy, got False")
    return couplings
