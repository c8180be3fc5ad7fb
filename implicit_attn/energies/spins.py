"""Coupled vector spins: couplings, interaction, mean-field free energy, and bare attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from implicit_attn.energies.energy import ClosedForm, Energy, Evaluation
from implicit_attn.energies.lagrangians import IsingLagrangian, Lagrangian
from implicit_attn.energies.tokens import (
    Mask,
    SpectralBound,
    accumulation_dtype,
    check_dtype,
    check_input,
    check_tensor,
    check_tokens,
    hide,
    sum_samples,
)
from implicit_attn.parametrised import parametrise
from solvers.core.checks import (
    require_choice,
    require_count,
    require_flag,
    require_instance,
    require_positive,
)
from solvers.core.modes import without_autocast
from solvers.spins.inputs import no_variance
from solvers.spins.sites import Site


class Couplings(nn.Module):
    """Couplings ``J`` (N, N, d, d) between N sites with d components, without self-couplings.

    ``J_ii = 0``; with ``symmetric_sites``, ``J_ij^{ab} = J_ji^{ba}``, so the matrix (Nd, Nd) is symmetric.
    The only parameters are the free entries, drawn from ``N(0, scale^2 / (N d^2))``, which gives the matrix
    a spectral norm of about ``2 scale / sqrt d``. ``weight`` is J itself. It can be read and set
    (``couplings.weight = J``); a solve computes it once.

    Args:
        sites: number of sites N.
        dim: number of components d.
        symmetric_sites: whether to tie ``J_ij`` to the transpose of ``J_ji``.
        scale: scale > 0 of the initial entries.
        bound: bound on the spectral norm of the matrix, to which a larger ``J`` is scaled down, or None.

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
        """The only parameter, the free entries (K, d, d) of K = N(N-1)/2 or N(N-1) pairs."""
        return self.parametrizations["weight"].original  # type: ignore[index,union-attr,return-value]

    @property
    def matrix(self) -> Tensor:
        """``J`` as a matrix (Nd, Nd), rows ``(i, a)``, columns ``(j, b)``."""
        return _flat(self.weight)

    def forward(self, z: Tensor, *, mask: Mask = None) -> Tensor:
        """Return the field ``sum_j J_ij z_j`` at every site, (B, N, d).

        Masked sites do not act on others, and their own field is 0.
        """
        self.check(z, mask)
        return self.field(z, mask)

    def field(self, z: Tensor, mask: Mask) -> Tensor:
        """Return the result of ``forward`` without checking the arguments."""
        field = (hide(z, mask).flatten(1) @ self.matrix.mT).view(z.shape)
        return hide(field, mask)

    def check(self, z: Tensor, mask: Mask = None, name: str = "Couplings") -> None:
        """Raise an error unless ``z`` is (B, N, d) with this N and d, and ``mask`` (B, N) bool.

        The message begins with the ``name`` of the module that a user has made.
        """
        check_tokens(z, mask, name, dim=self.dim, tokens=True)
        if z.shape[1] != self.sites:
            raise ValueError(
                f"{name}: z must have {self.sites} sites (N), got shape {tuple(z.shape)}"
            )

    def site_norms(self) -> Tensor:
        """Return the Frobenius norm of every block ``J_ij``, (N, N), the strength of the coupling."""
        return torch.linalg.matrix_norm(self.weight)

    def extra_repr(self) -> str:
        tied = f"symmetric_sites={self.symmetric_sites}"
        return f"sites={self.sites}, dim={self.dim}, {tied}, bound={self.bound}"


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
        if not weight.is_meta:  # a meta tensor has no values
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
    """Bound on the spectral norm of the matrix (Nd, Nd) of ``J`` (N, N, d, d)."""

    def __init__(self, bound: float, symmetric: bool) -> None:
        super().__init__(bound)
        self.symmetric = symmetric

    def matrix(self, weight: Tensor) -> Tensor:
        return _flat(weight)


def _flat(weight: Tensor) -> Tensor:
    """Return couplings (N, N, d, d) as a matrix (Nd, Nd)."""
    return weight.transpose(1, 2).flatten(0, 1).flatten(1)


def zero_sum(couplings: Tensor) -> Tensor:
    """Return couplings (N, N, d, d) in the zero-sum gauge, averaged over both directions.

    Each block becomes ``J^ = J - mean_a J - mean_b J + mean_ab J``, then ``(J^_ij + J^_ji^T) / 2``. The
    removed part depends on only one of the two colours, which is equivalent to a field. Blocks ``J_ii``
    are set to 0.

    Source: Ekeberg et al. (2013), https://arxiv.org/abs/1211.1281.
    """
    check_tensor("couplings", couplings, "N N d d")
    centred = couplings - couplings.mean(2, keepdim=True)
    centred = centred - centred.mean(3, keepdim=True)
    both = 0.5 * (centred + centred.permute(1, 0, 3, 2))
    own = torch.eye(len(both), dtype=torch.bool, device=both.device)
    return both.masked_fill(own[..., None, None], 0.0)


class SpinInteraction(ClosedForm):
    """``E = -1/2 sum_ij z_i^T J_ij z_j`` with gradient ``-J z`` and Hessian ``-J``.

    In an ``ActivationStep`` it gives the naive mean-field update ``h <- h - eta (h - x - J m(h))``,
    whose monitored energy is :class:`VectorSpin`::

        DEQ(ActivationStep(SpinInteraction(couplings), IsingLagrangian()))

    Shapes: ``z`` (B, N, d); ``x`` is ignored; ``mask`` (B, N).

    Args:
        couplings: couplings with ``symmetric_sites``; not copied.
    """

    def __init__(self, couplings: Couplings) -> None:
        super().__init__()
        self.couplings = check_symmetric(couplings)

    def check(self, z: Any, x: Any, mask: Mask) -> None:
        self.couplings.check(z, mask)

    def evaluate(self, z: Tensor, x: Any, mask: Mask, need_value: bool) -> Evaluation:
        gradient = -self.couplings.field(z, mask)
        return 0.5 * sum_samples(hide(z, mask) * gradient) if need_value else None, gradient


class VectorSpin(ClosedForm):
    """Mean-field free energy of coupled vector spins as a function of the fields ``h``.

    With ``log Z`` the log partition function of a site and ``m = d log Z/dh`` its mean::

        E(h) = sum_i [ h_i.m_i - log Z(h_i) - x_i.m_i ] - 1/2 sum_ij m_i^T J_ij m_j
        dE/dh = (dm/dh) (h - x - J m)

    Its stationary points include the fixed points of the naive mean field ``h = x + J m(h)``.

    ``energy.mean(h)`` is the magnetisation. ``DEQ(energy)`` follows the gradient, which is slow for saturated
    sites, where ``dm/dh`` vanishes. ``DEQ(ActivationStep(energy.interaction, energy.lagrangian))`` iterates
    ``h <- h - eta (h - x - J m)`` and monitors the same energy; saturation does not slow it down.

    Shapes: ``h`` and ``x`` (B, N, d), ``x`` None for zero; ``mask`` (B, N).

    Args:
        couplings: with ``symmetric_sites``; shared, not copied.
        site: a ``Lagrangian``, which is ``log Z`` (``IsingLagrangian()``, ``SphericalLagrangian()``,
            ``SoftmaxLagrangian()`` for Potts, ``IdentityLagrangian()`` for a unit Gaussian), or a
            :class:`solvers.Site`; None: ``IsingLagrangian()``.

    Source: Krotov and Hopfield (2021), https://arxiv.org/abs/2008.06996, for the form; Bal, "Deep
    Implicit Attention" (2021),
    https://mcbal.github.io/post/deep-implicit-attention-a-mean-field-theory-perspective-on-attention-mechanisms/
    """

    def __init__(self, couplings: Couplings, site: Lagrangian | Site | None = None) -> None:
        super().__init__()
        self.couplings = check_symmetric(couplings)
        site = IsingLagrangian() if site is None else site
        self.lagrangian = site if isinstance(site, Lagrangian) else SiteLagrangian(site)

    @property
    def interaction(self) -> SpinInteraction:
        """Interaction energy of the means m, with the same couplings."""
        return SpinInteraction(self.couplings)

    def mean(self, h: Tensor) -> Tensor:
        """Return the magnetisation ``m(h)`` of every site, (B, N, d)."""
        return self.lagrangian.activation(h)

    def check(self, z: Any, x: Any, mask: Mask) -> None:
        self.couplings.check(z, mask)
        if x is not None:
            check_input(x, z, type(self).__name__)

    def evaluate(self, z: Tensor, x: Any, mask: Mask, need_value: bool) -> Evaluation:
        h, value = hide(z, mask), None
        pull = h if x is None else h - hide(x, mask)
        m = self.mean(h)
        field = self.couplings.field(m, mask)
        if need_value:
            interaction = hide((pull - 0.5 * field) * m, mask)
            value = sum_samples(interaction) - self.lagrangian(h, mask=mask)
        return value, hide(self.lagrangian.hessian_product(h, pull - field), mask)


class SiteLagrangian(Lagrangian, nn.Module):
    """Lagrangian ``log Z(h, 0)`` of a :class:`solvers.Site`, for the naive mean field."""

    def __init__(self, site: Site) -> None:
        nn.Module.__init__(self)
        self.site = require_instance("site", site, Site, "a Lagrangian or a solvers.Site")

    def token_value(self, z: Tensor) -> Tensor:
        return self.site.log_partition(z, no_variance(z))

    def activation(self, z: Tensor) -> Tensor:
        return self.site.mean(z, no_variance(z))

    def hessian_product(self, z: Tensor, v: Tensor) -> Tensor:
        return (self.site.covariance(z, no_variance(z)) @ v.unsqueeze(-1)).squeeze(-1)


def check_symmetric(couplings: Any) -> Couplings:
    """Check that ``couplings`` are ``Couplings`` with ``symmetric_sites``; others have no energy."""
    couplings = require_instance("couplings", couplings, Couplings, "Couplings")
    if not couplings.symmetric_sites:
        raise ValueError("couplings must have symmetric_sites=True to have an energy, got False")
    return couplings


class ConditionalMixture(NamedTuple):
    r"""Conditional distributions ``p(z_i | rest) = rho(z_i) sum_j exp(z_i.h_ij) / sum_j Z(h_ij)``.

    They are mixtures over neighbours j, with components ``rho(z) exp(z.h_ij) / Z(h_ij)`` and weights
    ``w_ij = softmax_j log Z(h_ij)`` that do not depend on ``z_i``.

    Attributes:
        site: rho.
        fields: ``h_ij`` (B, N, N, D).
        weights: ``w_ij`` (B, N, N), 0 for excluded pairs.
        log_total: ``lse_j log Z(h_ij)`` (B, N).
    """

    site: Site
    fields: Tensor
    weights: Tensor
    log_total: Tensor

    def means(self) -> Tensor:
        """Return the mean ``mu(h_ij)`` of each component, (B, N, N, D)."""
        flat = self.fields.flatten(1, 2)
        return self.site.mean(flat, no_variance(flat)).view(self.fields.shape)

    def mean(self) -> Tensor:
        """Return the conditional mean ``sum_j w_ij mu(h_ij)`` of every token, (B, N, D)."""
        return _mix(self.weights, self.means())

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw every token independently given the others, (B, N, D): first j, then its component.

        NotImplementedError if the site does not define ``sample``.
        """
        with torch.no_grad():
            chosen = torch.multinomial(self.weights.flatten(0, 1), 1, generator=generator)
            fields = self.fields.flatten(0, 1).take_along_dim(chosen.unsqueeze(-1), 1)
            return self.site.sample(fields.view(*self.fields.shape[:2], -1), generator)


def _mix(weights: Tensor, values: Tensor) -> Tensor:
    """Return ``sum_j w_ij y_ij``, (B, N, d)."""
    return (weights.unsqueeze(-2) @ values).squeeze(-2)


RULES = ("exact", "source", "hebb")


class BareAttention(Energy):
    r"""Attention energy whose only parameters are couplings ``J`` between positions::

        e_i(z) = -1/lam lse_{j != i}(lam z_i^T J_ij z_j),   E(z) = sum_i e_i
        -de_i/dz_i = sum_j alpha_ij J_ij z_j,   alpha_ij = softmax_{j != i}(lam z_i^T J_ij z_j)

    ``-de_i/dz_i`` is attention with ``J_ij z_j`` as keys and values; ``BareAttentionStep`` iterates it. It
    is not the gradient of E, which has the additional term ``-sum_k alpha_ki J_ki^T z_k`` of the same size.
    With a single-site distribution rho, ``e_i`` defines a normalised conditional distribution, a mixture::

        p(z_i | rest) = rho(z_i) sum_j exp(lam z_i^T J_ij z_j) / sum_j Z_rho(lam J_ij z_j)
        -log p(z_i | rest) = lam e_i + lse_{j != i} log Z_rho(lam J_ij z_j)

    (:meth:`conditionals`, :meth:`log_prob`). These conditionals do not belong to one joint distribution.
    ``E`` alone, without the second term, has no minimum in J. To learn from products of pairs of tokens and
    to predict tokens::

        energy = BareAttention(16, 8, site=solvers.TorusSite())
        energy.assign_gradient(energy.local_gradient(tokens))  # for any optimiser of its parameters
        energy.conditionals(tokens).mean()  # each token from all others

    Args:
        sites: number of sites N.
        dim: size d of the blocks ``J_ij``.
        lam: inverse temperature, finite and > 0.
        features: fixed ``F`` (d, D), with which tokens have D components and the couplings are
            ``F^T J_ij F``; None for tokens with d components.
        site: rho, such as ``solvers.SphericalSite()`` or ``solvers.TorusSite()`` on D components; only
            the conditional distributions and the rule "exact" need it.
        symmetric_sites: whether to tie ``J_ij`` to the transpose of ``J_ji``.
        scale: scale of the initial entries; see ``Couplings``.

    Shapes: ``z`` (B, N, D); ``x`` is ignored; ``mask`` (B, N) bool: masked tokens are not neighbours and
    have no energy. A token without neighbours has energy 0 and the distribution rho.

    Source: D'Amico and Negri (2024), "Self-attention as an attractor network: transient memories
    without backpropagation", https://arxiv.org/abs/2409.16112, for e_i, the step and E as a loss. The
    normaliser is that of the mixture.
    """

    features: Tensor | None

    def __init__(
        self,
        sites: int,
        dim: int,
        *,
        lam: float = 1.0,
        features: Tensor | None = None,
        site: Site | None = None,
        symmetric_sites: bool = False,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.couplings = Couplings(
            require_count("sites", sites), dim, symmetric_sites=symmetric_sites, scale=scale
        )
        self.lam = require_positive("lam", lam)
        if features is not None:
            features = (
                check_tensor("features", features, "d D", d=dim).detach().contiguous().clone()
            )
        self.register_buffer("features", features)
        self.site = require_instance("site", site, Site, "a solvers.Site", optional=True)
        self.width = dim if features is None else features.shape[1]

    def forward(self, z: Tensor, x: Any = None, *, mask: Mask = None) -> Tensor:
        return sum_samples(self.token_energies(z, mask=mask))

    def token_energies(self, z: Tensor, *, mask: Mask = None) -> Tensor:
        """Return ``e_i`` (B, N), 0 at masked tokens, in float32 or wider."""
        _, _, scores = self._pairs(z, mask)
        return hide(scores.logsumexp(-1) / -self.lam, mask)

    def pull(self, z: Tensor, *, mask: Mask = None) -> Tensor:
        """Return ``-de_i/dz_i = sum_j alpha_ij J_ij z_j`` (B, N, D); 0 without neighbours."""
        _, keys, scores = self._pairs(z, mask)
        return hide(self._lift(_mix(scores.softmax(-1), keys)).to(z.dtype), mask)

    def conditionals(self, z: Tensor, *, mask: Mask = None) -> ConditionalMixture:
        """Return the distributions ``p(z_i | rest)`` of all tokens. ValueError without a ``site``."""
        _, keys, scores = self._pairs(z, mask)
        return self._mixture(keys, scores)

    def log_prob(self, z: Tensor, *, mask: Mask = None) -> Tensor:
        """Return ``log p(z_i | rest)`` (B, N) with respect to rho, 0 at masked tokens; needs a ``site``."""
        _, keys, scores = self._pairs(z, mask)
        return hide(scores.logsumexp(-1) - self._mixture(keys, scores).log_total, mask)

    @torch.no_grad()
    def local_gradient(self, z: Tensor, rule: str = "exact", *, mask: Mask = None) -> Tensor:
        r"""Return the gradient of a loss with respect to J from local products, without autograd.

        Averaged over the samples, and with ``F z`` instead of z if there are features::

            "exact"   -lam (alpha_ij z_i - w_ij mu(lam J_ij z_j)) z_j^T     of -sum_i log p(z_i | rest)
            "source"  -alpha_ij z_i z_j^T                                   of E
            "hebb"    -z_i z_j^T / (N - 1)                                  of E for lam -> 0

        The losses of "source" and "hebb" are unbounded below, so the couplings must be bounded. "exact"
        needs a ``site``. ``z`` is (B, N, D) with at least one sample. The result is (N, N, d, d) with zero
        blocks for i = j, ignoring symmetries of J; see :meth:`assign_gradient`.
        """
        require_choice("rule", rule, RULES)
        check_tokens(z, mask, type(self).__name__, dim=self.width, tokens=True)
        if len(z) == 0:
            raise ValueError("z must contain at least one sample to average over, got none")
        query, keys, scores = self._pairs(z, mask)
        alpha = scores.softmax(-1)
        own = torch.eye(z.shape[1], dtype=torch.bool, device=z.device)
        if rule == "hebb":
            speaks = (~torch.isneginf(scores) & ~own).to(query.dtype)
            alpha = speaks / speaks.sum(-1, keepdim=True).clamp_min(1.0)
        signal = alpha.unsqueeze(-1) * query.unsqueeze(2)
        if rule == "exact":
            mixture = self._mixture(keys, scores)
            signal = signal - self._embed(mixture.weights.unsqueeze(-1) * mixture.means())
            signal = self.lam * signal
        gradient = torch.einsum("nija,njb->ijab", signal, query) / -len(z)
        return gradient.masked_fill(own[..., None, None], 0.0).to(z.dtype)

    def assign_gradient(self, gradient: Tensor) -> None:
        """Set ``grad`` of the free entries of J from a gradient (N, N, d, d) of :meth:`local_gradient`.

        With ``symmetric_sites`` each free entry receives the sum of its two gradients.
        """
        free, n, d = self.couplings.free, self.couplings.sites, self.couplings.dim
        check_tensor("gradient", gradient, "N N d d", dtype=free.dtype, N=n, d=d)
        if self.couplings.symmetric_sites:
            gradient = gradient + gradient.permute(1, 0, 3, 2)
        with torch.no_grad():
            expansion: Any = self.couplings.parametrizations["weight"][0]  # type: ignore[index]
            free.grad = expansion.right_inverse(gradient)

    def _pairs(self, z: Tensor, mask: Mask) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens ``F z`` (B, N, d), ``J_ij F z_j`` (B, N, N, d) and scores, float32 or wider.

        Scores of excluded pairs are minus infinity. A token without neighbours attends to itself, with
        ``J_ii = 0``.
        """
        name = type(self).__name__
        check_tokens(z, mask, name, dim=self.width, tokens=True)
        weight = self.couplings.weight
        check_dtype(z, weight, name)
        if z.shape[1] != len(weight):
            raise ValueError(
                f"{name}: z must have {len(weight)} sites (N), got shape {tuple(z.shape)}"
            )
        wide = accumulation_dtype(z.dtype)
        with without_autocast(z.device.type):
            query = self._embed(hide(z, mask).to(wide))
            keys = torch.einsum("ijab,njb->nija", weight.to(wide), query)
            scores = self.lam * (keys @ query.unsqueeze(-1)).squeeze(-1)
        own = torch.eye(z.shape[1], dtype=torch.bool, device=z.device).unsqueeze(0)
        speaks = ~own if mask is None else ~own & mask.unsqueeze(1) & mask.unsqueeze(2)
        speaks = speaks | (own & ~speaks.any(-1, keepdim=True))
        return query, keys, scores.masked_fill(~speaks, -torch.inf)

    def _mixture(self, keys: Tensor, scores: Tensor) -> ConditionalMixture:
        if self.site is None:
            raise ValueError("site must be a solvers.Site for conditional distributions, got None")
        fields = self.lam * self._lift(keys)
        flat = fields.flatten(1, 2)
        values = self.site.log_partition(flat, no_variance(flat)).view(scores.shape)
        values = values.masked_fill(torch.isneginf(scores), -torch.inf)
        return ConditionalMixture(self.site, fields, values.softmax(-1), values.logsumexp(-1))

    def _embed(self, z: Tensor) -> Tensor:
        """Return ``F z``, (..., D) -> (..., d)."""
        return z if self.features is None else z @ self.features.to(z.dtype).mT

    def _lift(self, y: Tensor) -> Tensor:
        """Return ``F^T y``, (..., d) -> (..., D)."""
        return y if self.features is None else y @ self.features.to(y.dtype)

    def extra_repr(self) -> str:
        return f"width={self.width}, lam={self.lam}"
