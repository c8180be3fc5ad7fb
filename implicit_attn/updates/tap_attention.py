"""Adaptive-TAP attention: vector spins that respond to each other, their variances included."""

from __future__ import annotations

import torch
from torch import Tensor

from implicit_attn.energies.checks import check_input
from implicit_attn.energies.spins.couplings import Couplings
from implicit_attn.updates.update import Update
from solvers import Site, SphericalSite, SpinState, starting_state, tap_step


class AdaptiveTAPAttention(Update):
    r"""Means and cavity variances of N coupled sites that feel the layer's input as their field.

    With learned couplings J, the input x as external field, and the mean and covariance that the
    site's distribution has under a field h and a cavity variance V::

        h_i = x_i + sum_j J_ij m_j - V_i m_i,   m_i = site mean,  C_i = site covariance at (h_i, V_i)
        Lambda_i = V_i + C_i^-1,   [(Lambda - J)^-1]_ii = C_i

    The state is a :class:`solvers.SpinState`, the pair (m, V), and so is the layer's output::

        layer = DEQ(AdaptiveTAPAttention(17, 10), solver=solvers.AdaptiveTAP())
        layer(x).mean  # (B, N, d)

    Unlike ``MeanFieldAttention`` the Onsager term ``V_i m_i`` is not a learned network but follows
    from the couplings and the input. The solver keeps every sample where ``Lambda - J`` is positive
    definite; a sample without such a solution ends as ``Status.INDEFINITE``.

    Args:
        sites: N.
        dim: d.
        site: a ``solvers.Site``; None: ``SphericalSite()``, unit vectors times ``sqrt d``.
        symmetric_internal, scale, bound: of the ``Couplings``.

    Shapes: ``x`` (B, N, d), None counts as zero; the state's ``mean`` (B, N, d), ``cavity_variance``
    (B, N, d, d). ``mask`` (B, N) bool: sites that do not count influence nobody and do not move.

    Source: Bal, "Deep Implicit Attention: A Mean-Field Theory Perspective on Attention Mechanisms"
    (2021); Opper and Winther (2001) for the equations.
    """

    def __init__(
        self,
        sites: int,
        dim: int,
        *,
        site: Site | None = None,
        symmetric_internal: bool = False,
        scale: float = 1.0,
        bound: float | None = None,
    ) -> None:
        super().__init__()
        if site is not None and not isinstance(site, Site):
            raise TypeError(f"site must be a solvers.Site or None, got {site!r}")
        self.couplings = Couplings(
            sites, dim, symmetric_internal=symmetric_internal, scale=scale, bound=bound
        )
        self.site = SphericalSite() if site is None else site

    @property
    def parameter_count(self) -> int:
        """Effective number of parameters under the symmetries, the site's included."""
        return self.couplings.parameter_count + sum(p.numel() for p in self.site.parameters())

    def initial(self, x: Tensor) -> SpinState:
        """Where a solve starts: means 0, and cavity variances with a positive definite response."""
        self.couplings.check(x)
        return starting_state(x, self.couplings.weight, self.site)

    def forward(
        self, z: SpinState, x: Tensor | None = None, *, mask: Tensor | None = None
    ) -> SpinState:
        if not (isinstance(z, tuple) and len(z) == 2):
            raise TypeError(
                "the state of AdaptiveTAPAttention is a SpinState (mean, cavity_variance), as its "
                f"initial(x) returns; got {type(z).__name__}"
            )
        mean, variance = z
        self.couplings.check(mean, mask)
        if variance.shape != (*mean.shape, mean.shape[-1]):
            raise ValueError(
                f"cavity_variance must have the shape {(*mean.shape, mean.shape[-1])} to go with mean "
                f"{tuple(mean.shape)}, got {tuple(variance.shape)}"
            )
        name = "AdaptiveTAPAttention"
        field = torch.zeros_like(mean) if x is None else check_input(x, mean, name)
        state = SpinState(mean, variance)
        return tap_step(state, field, self.couplings.weight, self.site, mask)
