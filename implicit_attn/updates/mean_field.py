"""Mean-field and adaptive-TAP attention: vector spins with learned couplings between N sites."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from implicit_attn.energies.checks import check_input
from implicit_attn.energies.projected import SpectralBound
from implicit_attn.energies.spins.couplings import Couplings
from implicit_attn.energies.tokens import hide
from implicit_attn.updates.update import Update
from solvers import (
    Site,
    SphericalSite,
    SpinState,
    starting_state,
    tap_log_partition,
    tap_step,
)
from solvers.core.checks import require_count, require_instance, require_positive


class NormedMLP(nn.Module):
    """``W2 gelu(W1 norm(z) + b1) + b2``, with LayerNorm without gain and offset (W1 and b1 hold them).

    The epsilon of the norm is of order 1: with a tiny one the map has a kink where all components
    agree, and no solver converges fast across it.

    Args:
        dim: d, over which the norm is taken.
        width: features of ``W1`` and of the result.
        hidden: hidden units; None: ``4 width``.
        epsilon: of the norm, finite, > 0.
        bound: bound on the spectral norms of W1 and W2, or None; the Lipschitz constant of the map is
            then at most ``1.13 bound^2 / sqrt(epsilon)``.

    Shapes: (B, N, d) -> (B, N, d).
    """

    def __init__(
        self, dim: int, width: int, hidden: int | None, epsilon: float, bound: float | None
    ) -> None:
        super().__init__()
        hidden = 4 * width if hidden is None else require_count("hidden", hidden)
        epsilon = require_positive("epsilon", epsilon)
        self.norm = nn.LayerNorm(dim, eps=epsilon, elementwise_affine=False)
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, width)
        if bound is not None:
            for linear in (self.first, self.second):
                parametrize.register_parametrization(linear, "weight", SpectralBound(bound))


class OnsagerNetwork(NormedMLP):
    """A network of each site that stands for the Onsager term: ``W2 gelu(W1 norm(z) + b1) + b2``.

    Shapes and arguments as for ``NormedMLP``, of width d.
    """

    def __init__(
        self,
        dim: int,
        hidden: int | None = None,
        *,
        epsilon: float = 1.0,
        bound: float | None = None,
    ) -> None:
        super().__init__(require_count("dim", dim), dim, hidden, epsilon, bound)

    def forward(self, z: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(self.norm(z))))


class CorrectedUpdate(Update):
    """An update ``f(z, x) = field(z, x) - correction(z)``.

    The correction stands for the Onsager term ``V_i m_i`` of the adaptive TAP equations, which removes
    a token's own influence from the field that acts on it.

    Args (of the subclasses):
        correction: "network" for an ``OnsagerNetwork``, None for none, or a module
            (B, N, d) -> (B, N, d) that acts on each token separately.
        hidden: hidden units of the network; None: 4 d.
        correction_bound: bound on the spectral norms of the network's two weights, or None.
    """

    correction: nn.Module | None

    @property
    def parameter_count(self) -> int:
        """Number of parameters; entries that a symmetry ties count once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def corrected(self, field: Tensor, z: Tensor, mask: Tensor | None) -> Tensor:
        """``field - correction(z)``, or z at masked tokens; all (B, N, d)."""
        if self.correction is not None:
            visible = hide(z, mask)
            term = self.correction(visible)
            if not isinstance(term, Tensor) or term.shape != z.shape:
                got = tuple(term.shape) if isinstance(term, Tensor) else type(term).__name__
                raise ValueError(
                    f"correction must return the shape of z, {tuple(z.shape)}, got {got}"
                )
            field = field - term
        return field if mask is None else torch.where(mask.unsqueeze(-1), field, z)


class MeanFieldAttention(CorrectedUpdate):
    r"""``f(z, x)_i = sum_j J_ij z_j - correction(z_i) + x_i``: mean-field spins with learned couplings.

    The couplings J (N, N, d, d) belong to the N positions, so the layer takes exactly N sites. f is a
    contraction where the Lipschitz constants of the two terms sum to less than 1, which ``bound`` and
    ``correction_bound`` can enforce. Initially ``|J|`` is about ``2 / sqrt d``. A correction whose
    Jacobian is positive semidefinite, like that of the Onsager term, improves convergence.

    Args:
        sites: N.
        dim: d.
        correction, hidden, correction_bound: as for ``CorrectedUpdate``; without a correction this is
            the naive mean field, which is linear.
        symmetric_sites, symmetric_internal, scale, bound: of the ``Couplings``.

    Shapes: ``z`` and ``x`` (B, N, d); ``x`` None for zero. ``mask`` (B, N) bool: masked sites act on no
    other site and keep their state.

    Source: Bal, "Deep Implicit Attention" (2021),
    https://mcbal.github.io/post/deep-implicit-attention-a-mean-field-theory-perspective-on-attention-mechanisms/
    """

    def __init__(
        self,
        sites: int,
        dim: int,
        *,
        correction: nn.Module | str | None = "network",
        hidden: int | None = None,
        correction_bound: float | None = None,
        symmetric_sites: bool = True,
        symmetric_internal: bool = False,
        scale: float = 1.0,
        bound: float | None = None,
    ) -> None:
        super().__init__()
        self.couplings = Couplings(
            sites,
            dim,
            symmetric_sites=symmetric_sites,
            symmetric_internal=symmetric_internal,
            scale=scale,
            bound=bound,
        )
        self.correction = make_correction(correction, dim, hidden, correction_bound)
        self.symmetric = symmetric_sites and self.correction is None

    def forward(self, z: Tensor, x: Tensor | None = None, *, mask: Tensor | None = None) -> Tensor:
        self.couplings.check(z, mask)
        flat, matrix = hide(z, mask).flatten(1), self.couplings.matrix
        if x is None:
            field = flat @ matrix.mT
        else:
            field = torch.addmm(check_input(x, z, "MeanFieldAttention").flatten(1), flat, matrix.mT)
        return self.corrected(field.view(z.shape), z, mask)


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

    The free energy is an output and a loss, ``-log Z`` of every sample::

        loss = -layer.update.log_partition(layer(x), x).mean()

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
        require_instance("site", site, Site, "a solvers.Site", optional=True)
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
        name = type(self).__name__
        field = torch.zeros_like(mean) if x is None else check_input(x, mean, name)
        return tap_step(SpinState(*z), field, self.couplings.weight, self.site, mask)

    def log_partition(
        self, z: SpinState, x: Tensor | None = None, *, mask: Tensor | None = None
    ) -> Tensor:
        """``log Z`` (B,) of the spins at the fixed point z, by :func:`solvers.tap_log_partition`.

        Its gradients by input, couplings and the site's parameters need no adjoint solve, and are right
        also where z was computed without gradients; ``d log Z / dx`` is ``z.mean``. It is NaN, and adds
        nothing to gradients, in samples whose z has no positive definite ``chi``, as no fixed point has:
        the mean over the batch then is NaN, and ``Training`` refuses the step.
        """
        mean = z[0]
        self.couplings.check(mean, mask)
        name = type(self).__name__
        field = torch.zeros_like(mean) if x is None else check_input(x, mean, name)
        return tap_log_partition(SpinState(*z), field, self.couplings.weight, self.site, mask)


def make_correction(
    correction: Any, dim: int, hidden: int | None, bound: float | None, hidden_name: str = "hidden"
) -> nn.Module | None:
    if isinstance(correction, str) and correction == "network":
        hidden = None if hidden is None else require_count(hidden_name, hidden)
        bound = None if bound is None else require_positive("correction_bound", bound)
        return OnsagerNetwork(dim, hidden, bound=bound)
    if correction is not None and not isinstance(correction, nn.Module):
        raise TypeError(f'correction must be "network", a module or None, got {correction!r}')
    for name, value in ((hidden_name, hidden), ("correction_bound", bound)):
        if value is not None:
            raise ValueError(
                f'{name} belongs to correction="network", got {name}={value!r} with '
                f"correction={correction!r}"
            )
    return correction
