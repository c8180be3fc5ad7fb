"""Updates of coupled spins: mean fields with learned or input-dependent couplings, TAP, kinetic, saddle."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.energies.energy import AttentionContext, is_prepared
from implicit_attn.energies.heads import check_state, head_width
from implicit_attn.energies.spins import BareAttention, Couplings
from implicit_attn.energies.tokens import (
    Mask,
    Projection,
    SpectralBound,
    accumulation_dtype,
    check_input,
    check_tokens,
    hide,
    merge_heads,
    split_heads,
    visible_input,
)
from implicit_attn.kernels.arguments import Pairs, token_pairs
from implicit_attn.kernels.reference import attend
from implicit_attn.parametrised import parametrise
from implicit_attn.updates.update import Update
from solvers import (
    Site,
    Solution,
    SphericalSite,
    SpinState,
    kinetic_map,
    spherical_saddle,
    starting_state,
    tap_log_partition,
    tap_step,
)
from solvers.core.checks import (
    require_choice,
    require_count,
    require_flag,
    require_instance,
    require_number,
    require_positive,
)


class NormedMLP(nn.Module):
    """Network ``W2 gelu(W1 norm(z) + b1) + b2`` of each token, which replaces the Onsager term.

    ``norm`` is LayerNorm over the features without gain and bias (W1 and b1 include them). Its epsilon is
    1: with a tiny one the map has a kink where all components are equal, and solvers converge slowly
    across it.

    Args:
        dim: features d.
        hidden: number of hidden units; None for four times the inputs.
        bound: bound on the spectral norms of W1 and W2, or None; it limits the Lipschitz constant of the
            map to ``1.13 bound^2``.

    Shapes: (B, N, d) -> (B, N, d).
    """

    def __init__(self, dim: int, hidden: int | None = None, *, bound: float | None = None) -> None:
        super().__init__()
        hidden = 4 * require_count("dim", dim) if hidden is None else hidden
        self.norm = nn.LayerNorm(dim, eps=1.0, elementwise_affine=False)
        self.first = nn.Linear(dim, require_count("hidden", hidden))
        self.second = nn.Linear(hidden, dim)
        if bound is not None:
            for linear in (self.first, self.second):
                parametrise(linear, "weight", SpectralBound(bound))

    def forward(self, z: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(self.norm(z))))


class CorrectedUpdate(Update):
    """Base class of updates ``f(z, x) = field(z, x) - correction(z)``.

    The correction replaces the Onsager term ``V_i m_i`` of the adaptive TAP equations, which removes
    a token's own influence from its field.

    Args (of the subclasses):
        correction: "network" for ``NormedMLP(dim)``, None for no correction, or a module (B, N, d) ->
            (B, N, d) that acts on each token separately, such as ``NormedMLP(dim, hidden, bound=0.6)``.
    """

    def __init__(self, dim: int, correction: nn.Module | str | None) -> None:
        super().__init__()
        if isinstance(correction, str) and correction == "network":
            correction = NormedMLP(dim)
        self.correction: nn.Module | None = require_instance(
            "correction", correction, nn.Module, '"network", a module', optional=True
        )

    def corrected(self, field: Tensor, z: Tensor, mask: Mask) -> Tensor:
        """Return ``field - correction(z)``, or z at masked tokens; all (B, N, d)."""
        if self.correction is not None:
            field = field - self.correction(hide(z, mask))
        return field if mask is None else torch.where(mask.unsqueeze(-1), field, z)


class MeanFieldAttention(CorrectedUpdate):
    r"""Mean-field spins with learned couplings, ``f(z, x)_i = sum_j J_ij z_j - correction(z_i) + x_i``.

    The couplings J (N, N, d, d) belong to the N positions, so the layer needs exactly N sites. f is a
    contraction if the Lipschitz constants of the two terms sum to less than 1, which bounds on both can
    enforce. Initially ``|J|`` is about ``2 / sqrt d``. A correction with a positive semidefinite Jacobian,
    like the Onsager term, improves convergence.

    Args:
        sites: number of sites N.
        dim: features d.
        correction: see ``CorrectedUpdate``; None gives the naive mean field, which is linear.
        symmetric_sites, scale, bound: options of the ``Couplings``.

    Shapes: ``z`` and ``x`` (B, N, d); ``x`` None for zero. ``mask`` (B, N) bool: masked sites do not act on
    others and keep their state.

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
        super().__init__(dim, correction)
        self.couplings = Couplings(
            sites, dim, symmetric_sites=symmetric_sites, scale=scale, bound=bound
        )
        self.symmetric = symmetric_sites and self.correction is None

    def forward(self, z: Tensor, x: Tensor | None = None, *, mask: Mask = None) -> Tensor:
        self.couplings.check(z, mask, type(self).__name__)
        field = self.couplings(z, mask=mask)
        field = field if x is None else field + check_input(x, z, type(self).__name__)
        return self.corrected(field, z, mask)


class AdaptiveTAPAttention(Update):
    r"""Adaptive TAP equations of N coupled sites, with the layer's input x as external field.

    :func:`solvers.adaptive_tap` has the equations; the couplings J are learned.

    The state and the layer's output are a :class:`solvers.SpinState`, the pair (m, V)::

        layer = DEQ(AdaptiveTAPAttention(17, 10), solver=solvers.AdaptiveTAP())
        layer(x).mean  # (B, N, d)

    Unlike in ``MeanFieldAttention``, the couplings and the input determine the Onsager term. A sample
    without a consistent solution ends as ``Status.INDEFINITE``.

    The free energy ``-log Z`` of each sample can be an output or a loss::

        loss = -layer.update.log_partition(layer(x), x).mean()

    Args:
        sites: number of sites N.
        dim: features d.
        site: a ``solvers.Site``; None for ``SphericalSite()``, vectors of length ``sqrt d``.
        scale, bound: options of the ``Couplings``.

    Shapes: ``x`` (B, N, d), None for zero; the state's ``mean`` (B, N, d), ``cavity_variance``
    (B, N, d, d). ``mask`` (B, N) bool: masked sites do not act on others and keep their state.

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
        """Return means 0 and cavity variances for which ``Lambda - J`` is positive definite."""
        self.couplings.check(x, name=type(self).__name__)
        return starting_state(x, self.couplings.weight, self.site)

    def forward(self, z: SpinState, x: Tensor | None = None, *, mask: Mask = None) -> SpinState:
        if not (isinstance(z, tuple) and len(z) == 2):
            raise TypeError(
                "z must be a SpinState (mean, cavity_variance), such as AdaptiveTAPAttention.initial(x) "
                f"returns, got {type(z).__name__}"
            )
        field = self._field(z[0], x, mask)
        return tap_step(SpinState(*z), field, self.couplings.weight, self.site, mask)

    def log_partition(self, z: SpinState, x: Tensor | None = None, *, mask: Mask = None) -> Tensor:
        """Return ``log Z`` (B,) of the spins at the fixed point z, by :func:`solvers.tap_log_partition`."""
        field = self._field(z[0], x, mask)
        return tap_log_partition(SpinState(*z), field, self.couplings.weight, self.site, mask)

    def _field(self, mean: Tensor, x: Tensor | None, mask: Mask) -> Tensor:
        name = type(self).__name__
        self.couplings.check(mean, mask, name)
        return torch.zeros_like(mean) if x is None else check_input(x, mean, name)


class SoftmaxCouplingAttention(CorrectedUpdate):
    r"""``f(z, x)_i = sum_j J_ij z_j - correction(z_i) + x_i``, ``J = strength softmax(Q K^T / sqrt p)``.

    Queries ``Q = x W_q^T`` and keys ``K = x W_k^T`` come from the *input*, so J is constant during a
    solve, and a ``DEQ`` computes it once (:meth:`prepare`). Head h couples the h-th slice of
    ``p = d / heads`` components of the state, without a value projection; the correction mixes the
    components.

    The rows of the softmax sum to 1. With ``strength=1``, as in the source, ``I - J`` is therefore
    singular: it maps equal tokens to zero. The default correction does not change this, because its norm
    removes a shift common to all components, so most inputs have no fixed point. For one head, a
    strength below 1 minus the Lipschitz constant of the correction makes f a contraction in the norm
    of the largest token.

    Args:
        dim: features d.
        heads: number of heads, a divisor of d.
        correction: see ``CorrectedUpdate``.
        strength: strength > 0 of the couplings.

    Shapes: ``z`` and ``x`` (B, N, d), any N. ``mask`` (B, N) bool: masked tokens are not keys and keep
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
    ) -> None:
        super().__init__(dim, correction)
        self.dim, self.heads, self.width = dim, heads, head_width(dim, heads, None)
        self.strength = require_positive("strength", strength)
        self.query, self.key = Projection(dim, dim), Projection(dim, dim)

    def couplings(self, x: Tensor, *, mask: Mask = None) -> Tensor:
        """Return ``J`` (B, heads, N, N) of the input ``x`` (B, N, d), zero for masked tokens."""
        weight = self.query.weight
        x = visible_input(x, weight, mask, type(self).__name__, tokens=True)
        query, key = F.linear(x, weight) * self.width**-0.5, F.linear(x, self.key.weight)
        pairs = token_pairs(mask, False, x.shape[1], x.device)
        return (self.strength * softmax_couplings(query, key, self.heads, pairs)).to(query.dtype)

    def prepare(self, x: Any, *, mask: Mask = None) -> AttentionContext:
        """Return x and J, so that a solve computes the couplings once."""
        if is_prepared(x, mask):
            return x
        return AttentionContext(self.couplings(x, mask=mask), tokens=x, mask=mask)

    def forward(self, z: Tensor, x: Any = None, *, mask: Mask = None) -> Tensor:
        context, name = self.prepare(x, mask=mask), type(self).__name__
        couplings, mask = context.parts, context.mask
        check_tokens(z, mask, name, dim=self.dim, tokens=True)
        x = check_input(context.tokens, z, name)
        visible = hide(z, mask)
        if self.heads == 1:
            field = torch.baddbmm(x, couplings.squeeze(1), visible)
        else:
            field = x + merge_heads(couplings @ split_heads(visible, self.heads))
        return self.corrected(field, z, mask)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, heads={self.heads}, strength={self.strength:.4g}"


def softmax_couplings(query: Tensor, key: Tensor, heads: int, pairs: Tensor | None) -> Tensor:
    """Return ``J`` (B, heads, N, N), float32 or wider, the softmax of ``q_i.k_j`` over allowed pairs."""
    return attend(
        split_heads(query, heads), split_heads(key, heads), 1.0, pairs=Pairs(pairs)
    ).weights


CLOSURES = ("gaussian", "naive", "tap", "plefka")


class KineticAttention(Update):
    r"""Means of spins on spheres under parallel dynamics, each in the field of the others.

    In each head of width p the tokens are normalised to the sphere of radius ``R = sqrt(p / 2)``. They are
    the fields of spins of the same length, which are coupled by attention weights of the input::

        J_ij = softmax_j(scale q_i.k_j),   theta_i = beta (x_i + sum_j J_ij m_j)
        m_i = theta_i / (1 + sqrt(1 + (|theta_i|^2 + Delta_i) / R^2))
        Delta_i = beta^2 sum_j J_ij^2 (R^2 - |m_j|^2)

    ``Delta_i`` is the variance of the field, which the closure "naive" omits. The fixed point m is the steady
    state of the means of a kinetic spin model. As a transformer layer, the field is the residual
    connection, ``J m`` the attention, and the response to the field a normalisation. There is no value
    projection, so heads mix only through J.

    The slope of the response is at most 1/2 and the rows of J sum to 1. With "naive" and ``beta < 2`` the
    map is therefore a contraction with a unique fixed point. It is equivariant to permutations of the
    tokens, unless ``causal``.

    Args:
        dim: features d.
        heads: number of heads, a divisor of d with ``p = d / heads >= 2``.
        beta: inverse temperature > 0.
        closure: "gaussian", "naive", "tap" or "plefka", see ``solvers.kinetic_step``. The last two are
            expansions for weak couplings; "plefka" with beta 2 is worse than "naive", and "tap" costs
            p^3 for each token.
        scale: factor > 0 of the scores, 1 in the source.
        self_coupling: whether a token couples to itself; False excludes ``J_ii`` from the softmax.
        causal: whether a token couples only to itself and previous tokens.

    Shapes: ``z`` and ``x`` (B, N, d), any N. ``mask`` (B, N) bool: masked tokens are not keys and keep
    their state. A token without any key has the field ``beta x_i``.

    Source: Bal, "Spin-model transformers", https://mcbal.github.io/post/spin-model-transformers/, with the
    closure "plefka" and p - 2 instead of p in the radius; Mezard and Sakellariou (2011),
    https://arxiv.org/abs/1103.3433, for the Gaussian closure, here on spheres in many dimensions.
    """

    def __init__(
        self,
        dim: int,
        heads: int = 1,
        beta: float = 1.0,
        closure: str = "gaussian",
        scale: float = 1.0,
        self_coupling: bool = True,
        causal: bool = False,
    ) -> None:
        super().__init__()
        self.dim, self.heads, self.width = dim, heads, head_width(dim, heads, None)
        if self.width < 2:
            raise ValueError(
                f"heads must leave each head at least 2 features, got dim={dim}, heads={heads}"
            )
        self.beta = require_positive("beta", beta)
        self.closure = require_choice("closure", closure, CLOSURES)
        self.scale = require_positive("scale", scale)
        self.self_coupling = require_flag("self_coupling", self_coupling)
        self.causal = require_flag("causal", causal)
        self.radius = math.sqrt(self.width / 2)
        self.site = SphericalSite(self.radius, large_dimension=True)
        self.queries_keys = Projection(dim, 2 * dim)

    def on_spheres(self, x: Tensor) -> Tensor:
        """Return the tokens (B, N, d) with every head scaled to length R, except zeros.

        A head with a length near ``eps p`` (2e-6 for p = 16 in float32) is scaled to
        ``R |x| / sqrt(|x|^2 + (eps p)^2)``.
        """
        parts = x.view(*x.shape[:-1], self.heads, self.width)
        wide = parts.to(accumulation_dtype(x.dtype))
        # Below this length a token shrinks to zero smoothly, because its direction is not differentiable.
        least = torch.finfo(wide.dtype).eps * self.width
        length = (wide.square().sum(-1, keepdim=True) + least**2).sqrt()
        return (wide * (self.radius / length)).to(x.dtype).view(x.shape)

    def couplings(self, x: Tensor, *, mask: Mask = None) -> Tensor:
        """Return ``J`` (B, heads, N, N), without beta, of tokens ``x`` (B, N, d) on their spheres."""
        x = self._visible(x, mask)
        query, key = F.linear(x, self.queries_keys.weight).chunk(2, dim=-1)
        pairs = token_pairs(mask, self.causal, x.shape[1], x.device, own=self.self_coupling)
        return softmax_couplings(self.scale * query, key, self.heads, pairs).to(x.dtype)

    def _visible(self, x: Any, mask: Mask) -> Tensor:
        weight = self.queries_keys.weight
        return visible_input(x, weight, mask, type(self).__name__, tokens=True)

    def prepare(self, x: Any, *, mask: Mask = None) -> AttentionContext:
        """Return the field ``beta x`` (B, heads, N, p) and the couplings ``beta J`` (B, heads, N, N)."""
        if is_prepared(x, mask):
            return x
        x = self.on_spheres(self._visible(x, None))
        couplings = self.beta * self.couplings(x, mask=mask)
        return AttentionContext(couplings, query=split_heads(self.beta * x, self.heads), mask=mask)

    def initial(self, x: Tensor) -> Tensor:
        """Return the means without couplings, ``J = 0``."""
        return self.start(x, self.prepare(x))

    def start(self, x: Any, prepared: AttentionContext) -> Tensor:
        assert prepared.query is not None
        field = prepared.query.detach()
        size = field.square().sum(-1, keepdim=True)
        return merge_heads(field / (1 + (1 + size / self.radius**2).sqrt()))

    def forward(self, z: Tensor, x: Any = None, *, mask: Mask = None) -> Tensor:
        context = self.prepare(x, mask=mask)
        check_state(z, context, type(self).__name__, self.dim, True)
        if not z.numel():  # no samples, or no tokens
            return z
        # Heads are samples of their own.
        given: Any = split_heads(z, self.heads), context.query, context.parts
        mean, field, couplings = (t.flatten(0, 1) for t in given)
        mask = context.mask
        apart = None if mask is None else mask.repeat_interleave(self.heads, dim=0)
        found = kinetic_map(
            mean, field, couplings, site=self.site, closure=self.closure, mask=apart
        )
        return merge_heads(found.unflatten(0, (z.shape[0], self.heads)))

    def extra_repr(self) -> str:
        return f"dim={self.dim}, heads={self.heads}, beta={self.beta:.4g}, closure={self.closure!r}"


KINDS = ("free", "input")


class SaddleAttention(nn.Module):
    r"""Means of N spins with d components, |S_i| = sqrt d, whose fields are the normalised tokens.

    ``P(S) ~ exp(1/2 sum_ij K_ij S_i.S_j + sum_i h_i.S_i)`` with ``h = beta LayerNorm(x)`` and scalar
    couplings K, either parameters or from the input, with queries and keys of ``n = LayerNorm(x) / sqrt d``::

        free:    K = 2 beta J,  J_ij = J_ji,  drawn from N(0, 1 / (N d))
        input:   K = beta (A + A^T) / sqrt(N d),  A = tanh(sqrt d (W_q n)(W_k n)^T),  without its diagonal

    The output is ``m = (Lambda - K)^-1 h`` (:func:`solvers.spherical_saddle`, exact for large d). The
    multipliers Lambda minimise a strictly convex function of N numbers, so the module needs no ``DEQ``,
    damping or starting point, and supports derivatives of any order::

        layer = SaddleAttention(17, 64, couplings="input")
        layer(x)  # (B, N, d)
        layer.solve(x).value.log_partition  # (B,), the free energy as another output or as a loss

    Args:
        sites: number of sites N of free couplings; ``couplings="input"`` accepts any N.
        dim: features d.
        couplings: "free" or "input".
        beta: inverse temperature > 0.
        on_failure: "warn", "raise" or "ignore" samples that did not converge.

    Shapes: ``x`` (B, N, d) -> (B, N, d). ``mask`` (B, N) bool: masked tokens do not influence others, their
    output is zero, and N in the formula is the number of unmasked tokens, so padding has no effect.

    Attributes:
        last: detached :class:`solvers.Solution` of the latest solve, or None.

    Source: M. Bal, afem, https://github.com/mcbal/afem: K is ``2 beta J`` and h is
    ``beta sqrt d`` times the field of that code, m is ``sqrt d`` times its magnetisation.
    """

    def __init__(
        self,
        sites: int,
        dim: int,
        couplings: str = "free",
        *,
        beta: float = 1.0,
        on_failure: str = "warn",
    ) -> None:
        super().__init__()
        self.sites, self.dim = require_count("sites", sites), require_count("dim", dim)
        self.kind = require_choice("couplings", couplings, KINDS)
        self.beta = require_positive("beta", beta)
        self.on_failure = require_choice("on_failure", on_failure, ("warn", "raise", "ignore"))
        self.last: Solution | None = None
        if self.kind == "free":
            self.free = Couplings(sites, 1, scale=dim**-0.5)
        else:
            self.query = nn.Linear(dim, dim, bias=False)
            self.key = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        """Return the means (B, N, d)."""
        return self.solve(x, mask).value.mean

    def solve(self, x: Tensor, mask: Mask = None) -> Solution:
        """Return the solution, whose ``value`` is a :class:`solvers.SaddlePoint`."""
        check_tokens(x, mask, type(self).__name__, dim=self.dim, tokens=True)
        if self.kind == "free" and x.shape[1] != self.sites:
            raise ValueError(
                f"SaddleAttention: x must have {self.sites} sites (N), got shape {tuple(x.shape)}"
            )
        fields = F.layer_norm(x, (self.dim,))
        k = self.couplings(fields, mask).to(fields.dtype)
        options: dict[str, Any] = {"mask": mask, "on_failure": self.on_failure}
        solution = spherical_saddle(k, self.beta * fields, **options)
        value = type(solution.value)(*(tensor.detach() for tensor in solution.value))
        self.last = replace(solution, value=value)
        return solution

    def couplings(self, fields: Tensor, mask: Mask = None) -> Tensor:
        """Return ``K`` (N, N), or (B, N, N) from the normalised input (B, N, d)."""
        if self.kind == "free":
            return 2 * self.beta * self.free.weight[..., 0, 0]
        sites = fields.shape[1]
        count: Any = sites
        if mask is not None:
            count = mask.sum(1).clamp(min=1).to(fields.dtype)[:, None, None]
        n = fields / math.sqrt(self.dim)
        scores = torch.tanh(math.sqrt(self.dim) * (self.query(n) @ self.key(n).mT))
        outside = 1 - torch.eye(sites, dtype=scores.dtype, device=scores.device)
        return self.beta * (scores + scores.mT) / (count * self.dim) ** 0.5 * outside

    def extra_repr(self) -> str:
        return f"sites={self.sites}, dim={self.dim}, couplings={self.kind!r}, beta={self.beta}"


class BareAttentionStep(Update):
    r"""``f(z)_i = normalise((1 - gamma) sum_j alpha_ij J_ij z_j + gamma z_i)`` for all tokens in parallel.

    ``sum_j alpha_ij J_ij z_j = -de_i/dz_i`` descends the token's *own* term of the energy with the others
    fixed; the sum of the terms may increase, so no energy is monitored. ``gamma = 1/2`` is the residual form
    ``z_i + sum_j alpha_ij J_ij z_j``. Without normalisation the states vanish or diverge.

    As a layer, use ``DEQ(BareAttentionStep(energy), solver=solvers.Forward())``: from states far from a fixed
    point plain iteration reaches an attractor, while Anderson acceleration may stall.

    Args:
        energy: a :class:`BareAttention`.
        gamma: share of the old state, in [0, 1).
        radius: radius of a token's sphere, finite and > 0; None for no normalisation.
        circles: number of equal parts of a token, each normalised to ``radius / sqrt(circles)``: 1 for
            the sphere of the whole token, D / 2 for pixels as points on separate circles.

    Shapes: ``z`` (B, N, D); ``x`` is ignored; ``mask`` (B, N) bool. Masked tokens, tokens without
    neighbours and parts that would become 0 keep their state.

    Source: D'Amico and Negri (2024), https://arxiv.org/abs/2409.16112.
    """

    def __init__(
        self,
        energy: BareAttention,
        *,
        gamma: float = 0.0,
        radius: float | None = 1.0,
        circles: int = 1,
    ) -> None:
        super().__init__()
        self.energy = require_instance("energy", energy, BareAttention, "a BareAttention")
        self.gamma = require_number("gamma", gamma, low=0.0, high=1.0)
        if gamma == 1.0:
            raise ValueError("gamma must be < 1, got 1.0")
        self.radius = None if radius is None else require_positive("radius", radius)
        self.circles = require_count("circles", circles)
        if energy.width % circles:
            raise ValueError(f"circles must divide the {energy.width} components, got {circles}")

    def forward(self, z: Tensor, x: Any = None, *, mask: Mask = None) -> Tensor:
        pull = self.energy.pull(z, mask=mask)
        seen = hide(z, mask)
        moved = (1 - self.gamma) * pull + self.gamma * seen
        if self.radius is not None:
            moved = self._normalised(moved, seen)
        if mask is None:
            return moved if z.shape[1] > 1 else z.clone()
        hears = mask & (mask.sum(-1, keepdim=True) > 1)
        return torch.where(hears.unsqueeze(-1), moved, z)

    def _normalised(self, moved: Tensor, z: Tensor) -> Tensor:
        """Normalise each part of ``moved`` to its radius; a part with norm 0 is replaced by that of ``z``."""
        assert self.radius is not None
        wide = accumulation_dtype(z.dtype)
        parts = moved.to(wide).unflatten(-1, (self.circles, -1))
        kept = z.to(wide).unflatten(-1, (self.circles, -1))
        length = parts.norm(dim=-1, keepdim=True)
        lives = length != 0  # NaN is preserved
        scale = self.radius / self.circles**0.5
        unit = parts * (scale / torch.where(lives, length, 1.0))
        return torch.where(lives, unit, kept).flatten(-2).to(z.dtype)

    def extra_repr(self) -> str:
        return f"gamma={self.gamma}, radius={self.radius}, circles={self.circles}"
