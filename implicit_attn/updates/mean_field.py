"""Mean-field attention: sites that respond to each other through learned couplings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from implicit_attn.energies.checks import check_count, check_input, check_positive
from implicit_attn.energies.norms import SpectralBound
from implicit_attn.energies.spins.couplings import Couplings
from implicit_attn.updates.update import Update


class OnsagerNetwork(nn.Module):
    """The amortised Onsager term, a network of each site: ``W2 gelu(W1 norm(z) + b1) + b2``.

    The norm is LayerNorm without gain and offset (W1 and b1 hold them) and with an epsilon of order
    1: with a tiny one the network has a kink where the components of a site agree, and no solver
    converges fast across it.

    Args:
        dim: d.
        hidden: width; None: 4 d.
        epsilon: of the norm, finite, > 0.
        bound: bound on the spectral norms of W1 and W2, or None; the Lipschitz constant of the
            network is then at most ``1.13 bound^2 / sqrt(epsilon)``.

    Shapes: (B, N, d) -> (B, N, d).
    """

    def __init__(
        self,
        dim: int,
        hidden: int | None = None,
        *,
        epsilon: float = 1.0,
        bound: float | None = None,
    ) -> None:
        super().__init__()
        dim = check_count(dim, "dim")
        hidden = 4 * dim if hidden is None else check_count(hidden, "hidden")
        self.norm = nn.LayerNorm(
            dim, eps=check_positive(epsilon, "epsilon"), elementwise_affine=False
        )
        self.first, self.second = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        if bound is not None:
            for linear in (self.first, self.second):
                parametrize.register_parametrization(linear, "weight", SpectralBound(bound))

    def forward(self, z: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(self.norm(z))))


class MeanFieldAttention(Update):
    r"""``f(z, x)_i = sum_j J_ij z_j - correction(z_i) + x_i``: a site answers the others' pull.

    The couplings J (N, N, d, d) are learned and belong to the N places, so the layer takes exactly
    N sites. The correction stands for the Onsager term ``V_i m_i`` of the adaptive TAP equations,
    which takes a site's own influence back out of the field that it feels.

    A fixed point must exist and be found while J and the correction are trained. The initial J
    keeps ``|J|`` near ``2 / sqrt d``. Where the Lipschitz constants of the two terms sum to less
    than 1, which ``bound`` and ``correction_bound`` can enforce, f is a contraction; a correction
    that pushes back (a positive semidefinite Jacobian, as the Onsager term has) helps.

    Args:
        sites: N.
        dim: d.
        correction: "network" for an ``OnsagerNetwork``, None for no correction (the naive mean
            field, linear), or a module (B, N, d) -> (B, N, d) that treats each site on its own.
        hidden: width of the network; None: 4 d.
        correction_bound: bound on the spectral norms of the network's two weights, or None.
        symmetric_sites, symmetric_internal, scale, bound: of the ``Couplings``.

    Shapes: ``z`` and ``x`` (B, N, d); ``x`` None counts as zero. ``mask`` (B, N) bool: sites that do
    not count pull on nobody and do not move.

    Source: Bal, "Deep Implicit Attention: A Mean-Field Theory Perspective on Attention Mechanisms"
    (2021).
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

    @property
    def parameter_count(self) -> int:
        """Effective number of parameters under the symmetries, the correction's included."""
        others = () if self.correction is None else self.correction.parameters()
        return self.couplings.parameter_count + sum(p.numel() for p in others)

    def forward(self, z: Tensor, x: Tensor | None = None, *, mask: Tensor | None = None) -> Tensor:
        self.couplings.check(z, mask)
        visible = z if mask is None else z.masked_fill(~mask.unsqueeze(-1), 0.0)
        flat, matrix = visible.flatten(1), self.couplings.matrix
        if x is None:
            field = flat @ matrix.mT
        else:
            field = torch.addmm(check_input(x, z, "MeanFieldAttention").flatten(1), flat, matrix.mT)
        field = field.view(z.shape)
        if self.correction is not None:
            field = field - corrected(self.correction, visible)
        return field if mask is None else torch.where(mask.unsqueeze(-1), field, z)


def make_correction(
    correction: Any,
    dim: int,
    hidden: int | None,
    bound: float | None,
    hidden_name: str = "hidden",
) -> nn.Module | None:
    """The correction that a layer's arguments name, or an error that names the argument."""
    if isinstance(correction, str) and correction == "network":
        hidden = None if hidden is None else check_count(hidden, hidden_name)
        bound = None if bound is None else check_positive(bound, "correction_bound")
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


def corrected(correction: nn.Module, z: Tensor) -> Tensor:
    """``correction(z)``, which must be like ``z``."""
    value = correction(z)
    if not isinstance(value, Tensor) or value.shape != z.shape:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"correction must return the shape of z, {tuple(z.shape)}, got {got}")
    return value
