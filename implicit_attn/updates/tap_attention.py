"""Adaptive-TAP attention: means and cavity variances of coupled vector spins."""

from __future__ import annotations

import torch
from torch import Tensor

from implicit_attn.energies.checks import check_input
from implicit_attn.energies.spins.couplings import Couplings
from implicit_attn.updates.update import Update
from solvers import Site, SphericalSite, SpinState, starting_state, tap_step


class AdaptiveTAPAttention(Update):
    r"""The adaptive TAP equations of N coupled sites, with the layer's input x as external field.

    With learned couplings J, and with the mean and the covariance that the site's distribution has
    under a field h and a cavity variance V::

        h_i = x_i + sum_j J_ij m_j - V_i m_i,   m_i = site mean,  C_i = site covariance at (h_i, V_i)
        Lambda_i = V_i + C_i^-1,   [(Lambda - J)^-1]_ii = C_i

    The state is a :class:`solvers.SpinState`, the pair (m, V), and so is the layer's output::

        layer = DEQ(AdaptiveTAPAttention(17, 10), solver=solvers.AdaptiveTAP())
        layer(x).mean  # (B, N, d)

    Unlike in ``MeanFieldAttention`` the Onsager term ``V_i m_i`` is no learned network; it follows from
    the couplings and the input. The solver keeps ``Lambda - J`` of every sample positive definite; a
    sample without such a solution ends as ``Status.INDEFINITE``.

    Args:
        sites: N.
        dim: d.
        site: a ``solvers.Site``; None: ``SphericalSite()``, unit vectors times ``sqrt d``.
        symmetric_internal, scale, bound: of the ``Couplings``.

    Shapes: ``x`` (B, N, d), None for zero; the state's ``mean`` (B, N, d), ``cavity_variance``
    (B, N, d, d). ``mask`` (B, N) bool: masked sites act on no other site and keep their state.

    Source: Opper and Winther (2001), https://doi.org/10.1103/PhysRevE.64.056131, for the equations;
    Bal, "Deep Implicit Attention" (2021),
    https://mcbal.github.io/post/deep-implicit-attention-a-mean-field-theory-perspective-on-attention-mechanisms/
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
        """Number of parameters, the site's included; entries that a symmetry ties count once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def initial(self, x: Tensor) -> SpinState:
        """Means 0, and cavity variances for which ``Lambda - J`` is positive definite."""
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
