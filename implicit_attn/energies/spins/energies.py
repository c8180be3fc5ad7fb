"""Coupled vector spins: interaction energy, mean-field free energy, and sites as Lagrangians."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from implicit_attn.energies.checks import check_input, check_vector
from implicit_attn.energies.differentiation import value_and_gradient
from implicit_attn.energies.energy import Energy
from implicit_attn.energies.lagrangians import IsingLagrangian, Lagrangian
from implicit_attn.energies.spins.couplings import Couplings
from implicit_attn.energies.tokens import Pair, hide, sum_samples


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

    def hvp(self, z: Tensor, v: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        self.couplings.check(z, mask)
        check_vector(v, z)
        return -self.couplings(v, mask=mask)


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

    def hvp(self, z: Tensor, v: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        """``D (v - J D v) + (d3 log Z / dh3)(h - x - J m, v)`` with ``D = dm/dh``."""
        _, force = self._value_and_force(z, x, mask)
        check_vector(v, z)
        visible, v = hide(z, mask), hide(v, mask)
        pushed = v - self.couplings(self.lagrangian.hessian_product(visible, v), mask=mask)
        product = self.lagrangian.hessian_product(visible, pushed)

        def cubic(h: Tensor, force: Tensor, v: Tensor) -> Tensor:
            # The third derivative is symmetric, so its product with two vectors is a gradient by h.
            return sum_samples(self.lagrangian.hessian_product(h, force) * v)

        return hide(product + value_and_gradient(cubic, visible, force, v)[1].to(z.dtype), mask)

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


Site = SiteDistribution
"""The public name ``implicit_attn.energies.Site`` of the protocol."""


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
        return self.site.log_partition(z, _no_variance(z))

    def activation(self, z: Tensor) -> Tensor:
        return self.site.mean(z, _no_variance(z))

    def hessian_product(self, z: Tensor, v: Tensor) -> Tensor:
        return (self.site.covariance(z, _no_variance(z)) @ v.unsqueeze(-1)).squeeze(-1)


def _no_variance(h: Tensor) -> Tensor:
    """``V = 0`` for fields (..., d): (..., d, d), expanded from one number."""
    return h.new_zeros(()).expand(*h.shape, h.shape[-1])


def check_symmetric(couplings: object) -> Couplings:
    """``couplings`` must be ``Couplings`` with ``symmetric_sites``; others have no energy."""
    if not isinstance(couplings, Couplings):
        raise TypeError(f"couplings must be Couplings, got {type(couplings)}")
    if not couplings.symmetric_sites:
        raise ValueError("couplings must have symmetric_sites=True to have an energy, got False")
    return couplings
