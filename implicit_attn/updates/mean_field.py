"""Mean fields of spins: learned couplings, adaptive TAP, couplings of the input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.energies.energy import Prepared
from implicit_attn.energies.heads import head_width
from implicit_attn.energies.projected import Projection, SpectralBound, merge_heads, split_heads
from implicit_attn.energies.spins import Couplings
from implicit_attn.energies.tokens import (
    accumulation_dtype,
    check_input,
    check_mask,
    check_tokens,
    hide,
)
from implicit_attn.kernels.pairs import Pairs, softmax_over_pairs, token_pairs
from implicit_attn.parametrised import parametrise
from implicit_attn.updates.update import Update
from solvers import Site, SphericalSite, SpinState, starting_state, tap_log_partition, tap_step
from solvers.core.checks import require_count, require_flag, require_instance, require_positive


class NormedMLP(nn.Module):
    """``W2 gelu(W1 norm(z) + b1) + b2`` of each token, in the place of the Onsager term.

    ``norm`` is LayerNorm over the features without gain and offset (W1 and b1 hold them). Its epsilon is
    of order 1: with a tiny one the map has a kink where all components agree, and no solver converges
    fast across it. It maps a zero token to zero, so that masked tokens add nothing to a sum over tokens.

    Args:
        dim: features d.
        hidden: hidden units; None: four times the inputs.
        epsilon: of the norm, finite, > 0.
        bound: bound on the spectral norms of W1 and W2, or None; the Lipschitz constant of the map is
            then at most ``1.13 bound^2 / sqrt(epsilon)``.

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
        hidden = (
            4 * require_count("dim", dim) if hidden is None else require_count("hidden", hidden)
        )
        epsilon = require_positive("epsilon", epsilon)
        self.norm = nn.LayerNorm(dim, eps=epsilon, elementwise_affine=False)
        self.first, self.second = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        if bound is not None:
            for linear in (self.first, self.second):
                parametrise(linear, "weight", SpectralBound(bound))

    def forward(self, z: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(self.norm(z))))


class CorrectedUpdate(Update):
    """An update ``f(z, x) = field(z, x) - correction(z)``.

    The correction stands for the Onsager term ``V_i m_i`` of the adaptive TAP equations, which removes
    a token's own influence from the field that acts on it.

    Args (of the subclasses):
        correction: "network" for ``NormedMLP(dim)``, None for none, or a module (B, N, d) -> (B, N, d) that
            acts on each token separately, such as ``NormedMLP(dim, hidden, bound=0.6)``.
    """

    correction: nn.Module | None

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
    contraction where the Lipschitz constants of the two terms sum to less than 1, which bounds of both can
    enforce. Initially ``|J|`` is about ``2 / sqrt d``. A correction whose
    Jacobian is positive semidefinite, like that of the Onsager term, improves convergence.

    Args:
        sites: N.
        dim: d.
        correction: as for ``CorrectedUpdate``; without one this is the naive mean field, which is linear.
        symmetric_sites, scale, bound: of the ``Couplings``.

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
        symmetric_sites: bool = True,
        scale: float = 1.0,
        bound: float | None = None,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"scale": scale, "bound": bound}
        self.couplings = Couplings(sites, dim, symmetric_sites=symmetric_sites, **options)
        self.correction = _read_correction(correction, dim)
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
        scale, bound: of the ``Couplings``.

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
        scale: float = 1.0,
        bound: float | None = None,
    ) -> None:
        super().__init__()
        require_instance("site", site, Site, "a solvers.Site", optional=True)
        self.couplings = Couplings(sites, dim, scale=scale, bound=bound)
        self.site = SphericalSite() if site is None else site

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
        field = self._field(mean, x, mask)
        if variance.shape != (*mean.shape, mean.shape[-1]):
            raise ValueError(
                f"cavity_variance must have the shape {(*mean.shape, mean.shape[-1])} to go with mean "
                f"{tuple(mean.shape)}, got {tuple(variance.shape)}"
            )
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
        field = self._field(z[0], x, mask)
        return tap_log_partition(SpinState(*z), field, self.couplings.weight, self.site, mask)

    def _field(self, mean: Tensor, x: Tensor | None, mask: Tensor | None) -> Tensor:
        self.couplings.check(mean, mask)
        name = type(self).__name__
        return torch.zeros_like(mean) if x is None else check_input(x, mean, name)


def _read_correction(correction: Any, dim: int) -> nn.Module | None:
    if isinstance(correction, str) and correction == "network":
        return NormedMLP(dim)
    return require_instance(
        "correction", correction, nn.Module, '"network", a module', optional=True
    )


class SoftmaxCouplingAttention(CorrectedUpdate):
    r"""``f(z, x)_i = sum_j J_ij z_j - correction(z_i) + x_i``, ``J = strength softmax(Q K^T / sqrt p)``.

    Queries ``Q = x W_q^T`` and keys ``K = x W_k^T`` come from the *input*, so J is constant during a
    solve, and a ``DEQ`` computes it once (:meth:`prepare`). Head h couples the h-th slice of
    ``p = d / heads`` components of the state, without a value projection; the correction mixes the
    components.

    The rows of the softmax sum to 1. With ``strength`` 1, as in the source, ``I - J`` is therefore
    singular: it maps equal tokens to zero. The default correction does not help, since its norm
    removes a shift common to all components, so most inputs have no fixed point. For one head, a
    strength below 1 minus the Lipschitz constant of the correction makes f a contraction in the norm
    of the largest token.

    Args:
        dim: d.
        heads: a divisor of d.
        correction: as for ``CorrectedUpdate``.
        strength: > 0.
        self_coupling: whether a token attends to itself; False excludes ``J_ii`` from the softmax.
        bound: bound on the spectral norms of ``W_q`` and ``W_k``, or None.

    Shapes: ``z`` and ``x`` (B, N, d), any N. ``mask`` (B, N) bool: masked tokens are no keys and keep
    their state. A token without any key has the field ``x_i``.

    Source: Bal, "Deep Implicit Attention" (2021), the section on softmax attention,
    https://mcbal.github.io/post/deep-implicit-attention-a-mean-field-theory-perspective-on-attention-mechanisms/
    """

    def __init__(
        self,
        dim: int,
        heads: int = 1,
        *,
        correction: nn.Module | str | None = "network",
        strength: float = 0.5,
        self_coupling: bool = True,
        bound: float | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.heads, self.width = dim, heads, head_width(dim, heads, None)
        self.strength = require_positive("strength", strength)
        self.self_coupling = require_flag("self_coupling", self_coupling)
        self.query, self.key = Projection(dim, dim, bound), Projection(dim, dim, bound)
        self.correction = _read_correction(correction, dim)

    def couplings(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """``J`` (B, heads, N, N) of the input ``x`` (B, N, d), zero for masked tokens."""
        check_fields(x, mask, type(self).__name__, self.dim)
        x = hide(x, mask)
        query, key = (
            split_heads(F.linear(x, side.weight), self.heads) for side in (self.query, self.key)
        )
        couplings = softmax_couplings(
            query * self.width**-0.5,
            key,
            token_pairs(mask, False, x.shape[1], x.device, self.self_coupling),
        )
        return (couplings * self.strength).to(query.dtype)

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Prepared:
        """x and J, so that a solve computes the couplings once."""
        return x if isinstance(x, Prepared) else Prepared((x, self.couplings(x, mask=mask)))

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        name = type(self).__name__
        check_tokens(z, mask, name, dim=self.dim, tokens=True)
        if not isinstance(x, Prepared):
            x = Prepared((x, self.couplings(check_input(x, z, name), mask=mask)))
        x, couplings = check_input(x.parts[0], z, name), x.parts[1]
        visible = hide(z, mask)
        if self.heads == 1:
            field = torch.baddbmm(x, couplings.squeeze(1), visible)
        else:
            field = x + merge_heads(couplings @ split_heads(visible, self.heads))
        return self.corrected(field, z, mask)

    def extra_repr(self) -> str:
        return (
            f"dim={self.dim}, heads={self.heads}, strength={self.strength:.4g}, "
            f"self_coupling={self.self_coupling}"
        )


def softmax_couplings(query: Tensor, key: Tensor, pairs: Tensor | None) -> Tensor:
    """``J`` (B, heads, N, N), float32 or wider: the softmax of ``q_i.k_j`` over the pairs that couple."""
    scores = query @ key.mT
    wide = scores.to(accumulation_dtype(scores.dtype))
    return softmax_over_pairs(wide, Pairs(pairs))[0]


def check_fields(x: Any, mask: Any, name: str, dim: int) -> None:
    """``x`` (B, N, d) and ``mask`` (B, N) bool or None."""
    if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[-1] != dim:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name}: x must be a tensor (B, N, {dim}), got {got}")
    check_mask(mask, x, name, features=1)
