"""Associative memories: stored patterns, queries among keys, and effective Boltzmann machines."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.energies.energy import (
    AttentionContext,
    ClosedForm,
    Evaluation,
    value_and_gradient,
)
from implicit_attn.energies.heads import Beta, HasHeads, TokenEnergy, fit_keys, read_input
from implicit_attn.energies.lagrangians import Lagrangian, log_two_cosh
from implicit_attn.energies.spins import SiteLagrangian
from implicit_attn.energies.tokens import (
    Mask,
    Pair,
    accumulation_dtype,
    check_tensor,
    got,
    hide,
    merge_heads,
    split_heads,
    sum_samples,
    sum_squares,
)
from implicit_attn.kernels import check_backend, frozen_key_attention
from solvers.core.checks import (
    require_choice,
    require_count,
    require_instance,
    require_number,
    require_positive,
)
from solvers.spins.sites import PottsSite, Site

LARGEST_MIXTURE = 20_000_000  # largest number of Gaussians times patterns at a lower temperature


class PatternEnergy(TokenEnergy):
    """Base class of functions of overlaps ``y_mu = x_mu.z`` with stored patterns, summed over tokens.

    Shapes: ``z`` (B, ..., d); ``x`` is ignored; ``mask`` (B, N) for ``z`` (B, N, ..., d).

    Args:
        patterns: (M, d) floating-point, one pattern ``x_mu`` per row; copied.
        learnable: whether patterns and bias are parameters instead of buffers.
        bias: b, (d,), of a term ``- b.z``, or None; copied.
        confined: whether to add ``1/2 |z|^2``.
    """

    patterns: Tensor
    bias: Tensor | None

    def __init__(
        self,
        patterns: Tensor,
        *,
        learnable: bool,
        bias: Tensor | None = None,
        confined: bool = False,
    ) -> None:
        dim = check_tensor("patterns", patterns, "M d", finite=False).shape[1]
        super().__init__(dim)
        self.confined = confined
        self._store("patterns", patterns.detach().clone(), learnable)
        if bias is not None:
            check_tensor("bias", bias, "d", finite=False, d=dim)
            bias = bias.detach().to(patterns.dtype, copy=True)
        self._store("bias", bias, learnable)

    def _store(self, name: str, value: Tensor | None, learnable: bool) -> None:
        value = None if value is None else value.contiguous()  # safetensors files need it
        if learnable and value is not None:
            setattr(self, name, nn.Parameter(value))
        else:
            self.register_buffer(name, value)

    @property
    def weight(self) -> Tensor:
        return self.patterns

    def evaluate(self, z: Tensor, x: AttentionContext, mask: Mask, need_value: bool) -> Evaluation:
        value, gradient = super().evaluate(z, x, mask, need_value)
        visible = hide(z, mask)
        if self.confined:
            gradient = visible + gradient
            value = None if value is None else value + 0.5 * sum_squares(visible)
        if self.bias is not None:
            gradient = hide(gradient - self.bias, mask)
            value = None if value is None else value - sum_samples(visible * self.bias)
        return value, gradient

    def extra_repr(self) -> str:
        return f"patterns={tuple(self.patterns.shape)}"


class Hopfield(PatternEnergy):
    """Modern Hopfield network, ``E = 1/2 |z|^2 - beta^-1 log sum_mu exp(beta x_mu.z)`` per token.

    The gradient is ``z - X^T softmax(beta X z)``. A unit step is softmax attention with the patterns as
    keys and values and never increases the energy.

    At temperature 1 / beta the energy of one token defines a density, a mixture of Gaussians around the
    patterns, in which longer patterns have larger weights::

        p(z) = exp(-beta E(z)) / Z = sum_mu w_mu N(z; x_mu, I / beta),   w = softmax_mu(beta |x_mu|^2 / 2)
        log Z = d/2 log(2 pi / beta) + log sum_mu exp(beta |x_mu|^2 / 2)

    The unit step is the posterior mean of the pattern given z, the optimal denoiser of
    ``x_mu + N(0, I / beta)`` (Tweedie's formula, ``z + beta^-1 d log p / dz``). At the temperature
    ``1 / (k beta)`` with an integer k (``cooling``), the density is a mixture over the means of all
    multisets of k patterns.

    Shapes and other arguments are those of ``PatternEnergy``.

    Args:
        beta: inverse temperature, > 0.

    Source: Ramsauer et al., "Hopfield Networks is All You Need", https://arxiv.org/abs/2008.02217,
    equations 2 and 3, without the constant; Bal, "An Energy-Based Perspective on Attention Mechanisms
    in Transformers" (2020), https://mcbal.github.io/post/an-energy-based-perspective-on-attention-mechanisms-in-transformers/,
    for the mixture.
    """

    def __init__(self, patterns: Tensor, *, beta: float = 1.0, learnable: bool = False) -> None:
        super().__init__(patterns, learnable=learnable, confined=True)
        self.beta = require_positive("beta", beta)

    def activate(self, y: Tensor, gates: Tensor | None, need_value: bool) -> Evaluation:
        scores = y.to(accumulation_dtype(y.dtype)) * self.beta
        value = scores.logsumexp(-1) / self.beta if need_value else None
        return value, scores.softmax(-1).to(y.dtype)

    def log_partition(self, cooling: int = 1) -> Tensor:
        """Return the differentiable scalar ``log Z`` of one token at temperature ``1 / (cooling beta)``.

        ``Z`` is a sum over all multisets of ``cooling`` >= 1 patterns; ValueError if their number times
        that of the patterns exceeds 20 million.
        """
        return self._log_partition(cooling).to(accumulation_dtype(self.patterns.dtype))

    def _log_partition(self, cooling: int) -> Tensor:
        logits, _ = self._mixture(cooling)
        volume = 0.5 * self.dim * math.log(2 * math.pi / (cooling * self.beta))
        return logits.logsumexp(0) + volume

    def log_prob(self, z: Tensor, cooling: int = 1) -> Tensor:
        """Return ``log p(z)`` at temperature ``1 / (cooling beta)``, differentiable in z and the patterns.

        ``z`` (..., d) -> (...), for each token, in the widest dtype of z, the patterns and float32; it is
        computed in float64, because large norms cancel.
        """
        if not isinstance(z, Tensor) or not z.is_floating_point() or z.shape[-1:] != (self.dim,):
            raise ValueError(f"z must be a floating-point tensor (..., {self.dim}), {got(z)}")
        wide = z.double()
        attention = (self.beta * wide @ self.patterns.double().mT).logsumexp(-1)
        level = attention - 0.5 * self.beta * wide.square().sum(-1)
        found = cooling * level - self._log_partition(cooling)
        return found.to(accumulation_dtype(torch.promote_types(z.dtype, self.patterns.dtype)))

    @torch.no_grad()
    def sample(
        self, count: int, generator: torch.Generator | None = None, cooling: int = 1
    ) -> Tensor:
        """Draw independent samples (count, d) from ``p`` at temperature ``1 / (cooling beta)``.

        ``generator`` must be on the device of the patterns; None for PyTorch's default.
        """
        require_count("count", count)
        logits, centers = self._mixture(cooling)
        # torch.multinomial supports at most 2^24 categories and rounds in float32.
        shares = logits.softmax(0).cumsum(0)
        draws = torch.rand(count, generator=generator, device=logits.device, dtype=torch.float64)
        chosen = torch.searchsorted(shares, draws * shares[-1]).clamp_max(len(shares) - 1)
        centers = centers[chosen]
        noise = centers.new_empty(centers.shape).normal_(generator=generator)
        return (centers + noise / math.sqrt(cooling * self.beta)).to(self.patterns.dtype)

    def _mixture(self, cooling: int) -> Pair:
        """Return unnormalised log weights (T,) and centres (T, d) of the Gaussians, in float64."""
        patterns = self.patterns.double()
        if require_count("cooling", cooling) == 1:
            return 0.5 * self.beta * patterns.square().sum(-1), patterns
        count = len(patterns)
        size = math.comb(count + cooling - 1, cooling)
        if size * count > LARGEST_MIXTURE:
            raise ValueError(
                f"cooling={cooling} with {count} patterns needs {size} Gaussians; their number times that "
                f"of the patterns must be <= {LARGEST_MIXTURE}"
            )
        indices = torch.arange(count, device=patterns.device)
        multisets = torch.combinations(indices, cooling, with_replacement=True)
        copies = torch.stack([(multisets == i).sum(1) for i in indices], 1).to(patterns.dtype)
        centers = copies @ patterns / cooling
        # A multiset has cooling! / prod_mu n_mu! orders.
        orders = math.lgamma(cooling + 1) - torch.lgamma(copies + 1).sum(1)
        return orders + 0.5 * cooling * self.beta * centers.square().sum(-1), centers

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, beta={self.beta:.4g}"


class DenseAssociative(PatternEnergy):
    """``E = -sum_mu F(x_mu.z)`` per token with ``F(y) = y^power`` or ``exp(y - shift)``.

    The gradient is ``-sum_mu F'(x_mu.z) x_mu``. E is unbounded below: add it to an energy that grows
    faster, or apply it to a bounded activation. It is concave in z for even powers and the exponential.

    Shapes and other arguments are those of ``PatternEnergy``.

    Args:
        power: an integer >= 2, or ``"exp"``.
        shift: shift of the exponential, such as the squared norm of a pattern, at which F is 1.

    Source: Krotov and Hopfield (2016), https://arxiv.org/abs/1606.01164; for the exponential
    Demircigil et al. (2017), https://arxiv.org/abs/1702.01929.
    """

    def __init__(
        self, patterns: Tensor, *, power: int | str = 3, shift: float = 0.0, learnable: bool = False
    ) -> None:
        super().__init__(patterns, learnable=learnable)
        number = isinstance(power, int) and not isinstance(power, bool) and power >= 2
        if not number and power != "exp":
            raise ValueError(f"power must be an integer >= 2 or 'exp', got {power!r}")
        self.power, self.shift = power, require_number("shift", shift)
        if shift and number:
            raise ValueError(f"shift needs power='exp', got shift={shift} and power={power!r}")
        self.concave = isinstance(power, str) or power % 2 == 0

    def activate(self, y: Tensor, gates: Tensor | None, need_value: bool) -> Evaluation:
        wide = y.to(accumulation_dtype(y.dtype))
        if isinstance(self.power, str):
            value = (wide - self.shift).exp().sum(-1) if need_value else None
            return value, (y - self.shift).exp()
        value = wide.pow(self.power).sum(-1) if need_value else None
        return value, self.power * y.pow(self.power - 1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, power={self.power!r}"


class QueryEnergy(HasHeads, ClosedForm):
    """The modern Hopfield energy of queries with the keys as stored patterns, without weights.

    ``E = sum_h sum_i [ 1/2 |q_hi|^2 - beta^-1 log sum_j exp(beta q_hi.k_hj) ]``. The gradient with respect
    to the queries is ``q_i - sum_j softmax_j(beta q_i.k_j) k_j``. A unit step is softmax attention with the
    keys as values and never increases the energy. A query without any key has the energy ``1/2 |q|^2``.

    Shapes: ``z`` (B, N, d) contains the queries, each head a slice of ``p = d / heads`` features. ``x``
    contains the keys (B, M, d), or a pair of them and a mask (B, M) bool, False at masked keys; or an
    ``AttentionInput`` with such a ``memory`` and optional pairs and biases. ``mask`` (B, N) is that of the
    queries.

    Args:
        dim: features d of queries and keys.
        heads: number of heads, a divisor of ``dim``.
        beta: inverse temperature > 0, or one per head; None for ``1 / sqrt(p)``.
        learned_beta: whether to train one inverse temperature per head.
        backend: backend of ``SoftmaxAttention`` with ``cross``.

    Source: Ramsauer et al., "Hopfield Networks is All You Need", https://arxiv.org/abs/2008.02217,
    equations 2 and 3; with keys for patterns Bal, "Attention as Energy Minimization: Visualizing
    Energy Landscapes" (2021), https://mcbal.github.io/post/attention-as-energy-minimization-visualizing-energy-landscapes/
    """

    def __init__(
        self,
        dim: int,
        heads: int = 1,
        *,
        beta: Beta = None,
        learned_beta: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.set_heads(dim, heads, None, beta, learned_beta)
        self.backend = check_backend(backend, "frozen keys")

    def read(self, x: Any, mask: Mask) -> AttentionContext:
        _, pairs, memory, seen = read_input(x, mask, "QueryEnergy", self.dim)
        key = split_heads(memory, self.heads)
        return AttentionContext(key=key, key_mask=seen, pairs=pairs, mask=mask)

    def check(self, z: Any, x: AttentionContext, mask: Mask) -> None:
        super().check(z, x, mask)
        assert x.key is not None  # set by ``read``
        if (x.key.dtype, x.key.device) != (z.dtype, z.device):
            wanted, got = f"{z.dtype} on {z.device}", f"{x.key.dtype} on {x.key.device}"
            raise TypeError(f"QueryEnergy: x must be {wanted} like z, got {got}")

    def evaluate(self, z: Tensor, x: AttentionContext, mask: Mask, need_value: bool) -> Evaluation:
        query = split_heads(hide(z, mask), self.heads)
        mean, lse = self._attend(query, x)
        value = sum_samples(hide(self._each(query, lse).mT, mask)) if need_value else None
        return value, hide(hide(z, mask) - merge_heads(mean), mask)

    def each(self, z: Tensor, x: Any = None) -> Tensor:
        """Return the energy of each query, (B, H, N), float32 or wider."""
        context = self.prepare(x)
        self.check(z, context, None)
        query = split_heads(z, self.heads)
        return self._each(query, self._attend(query, context)[1])

    def _each(self, query: Tensor, lse: Tensor) -> Tensor:
        wide = query.to(accumulation_dtype(query.dtype))
        return 0.5 * wide.square().sum(-1) - lse / self.beta_like(lse)

    def _attend(self, query: Tensor, context: AttentionContext) -> Pair:
        """Return the mean key of each query (B, H, N, p), and the log-sum-exps (B, H, N)."""
        assert context.key is not None
        key, seen, pairs = fit_keys(context.pairs, query, context.key, context.key_mask)
        options: dict[str, Any] = {"mask": seen, "pairs": pairs.allowed, "bias": pairs.bias}
        return frozen_key_attention(
            query, key, self.beta_like(query), backend=self.backend, **options
        )

    def extra_repr(self) -> str:
        return f"dim={self.dim}, heads={self.heads}, {self.described()}"


@dataclass(frozen=True, repr=False)
class ScalarPrior(Lagrangian):
    """Distribution of independent hidden units with one component; as a Lagrangian its value is K.

    Attributes:
        name: name in ``PRIORS``.
        function: K elementwise inside the domain; autograd computes the mean K' and the variance K''.
        draw: draws one value in each field, in float32 or wider.
        lower, upper: ends of the open interval on which ``E[exp(t h)]`` is finite. Outside, K is
            infinite and its derivatives are NaN, so solvers reject such a step.
    """

    name: str
    function: Callable[[Tensor], Tensor]
    draw: Callable[[Tensor, torch.Generator | None], Tensor]
    lower: float = -math.inf
    upper: float = math.inf

    def cumulant_function(self, t: Tensor) -> Tensor:
        """Return ``K(t)`` elementwise, like ``t``."""
        inside = self._inside(t)
        # Each branch receives only its own points, because 0 * inf would be NaN.
        outside = math.inf * torch.where(inside, 1.0, t).square()
        return torch.where(inside, self.function(torch.where(inside, t, 0.0)), outside)

    def token_value(self, z: Tensor) -> Tensor:
        return self.cumulant_function(z).sum(-1)

    def activation(self, z: Tensor) -> Tensor:
        z = z * torch.where(
            self._inside(z), 1.0, torch.nan
        )  # a product, so that derivatives are NaN, too
        return value_and_gradient(lambda t: self.function(t).sum(-1), z)[1]

    @torch.no_grad()
    def sample(self, field: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw each unit in its field, like ``field``; ValueError outside the domain of K."""
        wide = field.to(accumulation_dtype(field.dtype))
        bounded = math.isfinite(self.lower) or math.isfinite(self.upper)
        if bounded and not bool(self._inside(wide).all()):
            raise ValueError(
                f"field must lie in ({self.lower}, {self.upper}) for {self.name!r} units, got "
                f"values in [{wide.min().item():.4g}, {wide.max().item():.4g}]"
            )
        return self.draw(wide, generator).to(field.dtype)

    def _inside(self, t: Tensor) -> Tensor:
        """Return where the entries lie in the domain."""
        return (t > self.lower) & (t < self.upper)

    def __repr__(self) -> str:
        return f"PRIORS[{self.name!r}]"

    def __reduce__(self) -> Any:  # lambdas cannot be pickled
        return _law, (self.name,)


def _uniform(t: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.rand(t.shape, generator=generator, dtype=t.dtype, device=t.device)


def _normal(t: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(t.shape, generator=generator, dtype=t.dtype, device=t.device)


NORMAL_LIMIT = 2.0**24  # mean of Poisson units above which float32 has no room for other integers


def _draw_poisson(t: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw Poisson variables, beyond ``NORMAL_LIMIT`` from the normal limit; infinite where exp(t) is."""
    rate = t.exp()
    many = rate > NORMAL_LIMIT
    if t.device.type == "cpu" and not bool(many.any()):  # avoid waiting for a GPU
        return torch.poisson(rate, generator=generator)
    few = torch.poisson(rate.clamp_max(NORMAL_LIMIT), generator=generator)
    return torch.where(many, (rate * (1 + _normal(t, generator) / rate.sqrt())).round(), few)


def _draw_laplace(t: Tensor, generator: torch.Generator | None) -> Tensor:
    sign = torch.where(2 * _uniform(t, generator) < 1 + t, 1.0, -1.0)
    return -torch.log1p(-_uniform(t, generator)) * sign / (1 - sign * t)


# Name, K and draw of the laws; then the ends of a bounded domain.
LAWS = (
    # h ~ N(0, 1)
    ScalarPrior("normal", lambda t: 0.5 * t.square(), lambda t, g: t + _normal(t, g)),
    # Poisson with mean 1
    ScalarPrior("poisson", torch.expm1, _draw_poisson),
    # +1 or -1 with equal weight
    ScalarPrior(
        "ising",
        lambda t: log_two_cosh(t) - math.log(2.0),
        lambda t, g: torch.where(_uniform(t, g) < torch.sigmoid(2 * t), 1.0, -1.0),
    ),
    # 0 or 1 with equal weight
    ScalarPrior(
        "binary",
        lambda t: F.softplus(t, threshold=60.0) - math.log(2.0),
        lambda t, g: (_uniform(t, g) < torch.sigmoid(t)).to(t.dtype),
    ),
    # h >= 0 with density exp(-h)
    ScalarPrior(
        "exponential",
        lambda t: -torch.log1p(-t),
        lambda t, g: -torch.log1p(-_uniform(t, g)) / (1 - t),
        upper=1.0,
    ),
    # density exp(-|h|) / 2
    ScalarPrior("laplace", lambda t: -torch.log1p(-t.square()), _draw_laplace, -1.0, 1.0),
    # h = 1
    ScalarPrior("constant", lambda t: t, lambda t, g: torch.ones_like(t)),
)
PRIORS: dict[str, ScalarPrior | SiteLagrangian] = {law.name: law for law in LAWS}
PRIORS["one-hot"] = SiteLagrangian(PottsSite())  # K = lse t - log M


def _law(name: str) -> Lagrangian:
    return PRIORS[name]


VISIBLE = ("normal", "ising", "binary")


class EffectiveRBM(PatternEnergy):
    r"""A restricted Boltzmann machine with the hidden units summed out::

        exp(-E(v)) = a(v) exp(b.v) int q(h) exp(sum_m h_m.(W v)_m) dh
        E(v) = -log a(v) - b.v - sum_m K((W v)_m),     K(t) = log E_q[exp(t.h)]

    up to a constant in ``log a``, per token v. The distribution q of a hidden unit determines the memory:

    ============================  =====================  ======================================
    ``hidden``                    K(t)                   memory
    ============================  =====================  ======================================
    ``"normal"``                  t^2 / 2                Hebb: ``-1/2 v^T W^T W v - b.v``
    ``"poisson"``, mean 1         exp(t) - 1             ``DenseAssociative(power="exp")``
    ``"ising"``, +1 or -1         log cosh t             ``IsingLagrangian``
    ``"binary"``, 0 or 1          log((1 + exp t) / 2)   softplus units
    ``"exponential"``, mean 1     -log(1 - t), t < 1     logarithmic
    ``"laplace"``                 -log(1 - t^2)          logarithmic, abs(t) < 1
    ``"one-hot"``                 lse t - log M          ``Hopfield``, one unit of M components
    ``"constant"``, 1             t                      a field
    ``SphericalSite()``           its ``log_partition``  vector units on a sphere
    ============================  =====================  ======================================

    The gradient is ``v - b - W^T K'(W v)`` for normal visible units and ``-b - W^T K'(W v)`` for others, so
    the mean of the hidden units is their activation. For exponential and Laplace units the integral diverges
    if a field is outside the domain: there E is minus infinity and its gradient NaN, which a solver
    rejects.

    Shapes: ``z`` (B, ..., d), the visible units; ``x`` is ignored; ``mask`` (B, N).

    Args:
        weights: W, (units, d) for scalar hidden units or (units, components, d) for vector units,
            floating-point; copied.
        hidden: a name of the table, a site such as ``solvers.SphericalSite()``, or a ``Lagrangian``,
            used as K.
        visible: ``"normal"`` (``-log a = |v|^2 / 2``), ``"ising"`` (entries +1 and -1) or ``"binary"``
            (0 and 1), for which log a is constant; None for constant log a without sampling.
        bias: b, (d,), or None for 0; copied, learnable like the weights.
        learnable: whether weights and bias are parameters instead of buffers.

    Attributes:
        patterns: weights as (units components, d).
        prior: ``Lagrangian`` of the hidden units.

    Source: Hinton (2002), https://doi.org/10.1162/089976602760128018, for the machine; Barra et al.
    (2012), https://doi.org/10.1016/j.neunet.2012.06.003, for the equivalence to Hopfield networks; Mehta
    et al. (2019), https://arxiv.org/abs/1803.08823, section 16, for cumulants.
    """

    def __init__(
        self,
        weights: Tensor,
        hidden: str | Lagrangian | Site = "normal",
        *,
        visible: str | None = None,
        bias: Tensor | None = None,
        learnable: bool = False,
    ) -> None:
        if isinstance(weights, Tensor) and weights.dim() not in (2, 3):
            raise ValueError(
                "weights must have the shape (units, d) or (units, components, d), got "
                f"{tuple(weights.shape)}"
            )
        flat = weights.flatten(0, -2) if isinstance(weights, Tensor) else weights
        super().__init__(flat, learnable=learnable, bias=bias, confined=visible == "normal")
        self.components = weights.shape[1] if weights.dim() == 3 else 1
        self.prior = _prior(hidden, self.components, tuple(weights.shape))
        self.visible = None if visible is None else require_choice("visible", visible, VISIBLE)
        self.concave = self.visible != "normal"  # K is convex
        # A site that does not support these units raises an error now.
        self.prior.token_value(self.patterns.new_zeros(1, 1, self.components))

    def activate(self, y: Tensor, gates: Tensor | None, need_value: bool) -> Evaluation:
        fields = self._fields(y)
        value = self.prior.token_value(fields).sum(-1) if need_value else None
        return value, self.prior.activation(fields).flatten(-2).to(y.dtype)

    def sample_hidden(self, v: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw hidden units (..., units) or (..., units, components), given visible ones (..., d).

        TypeError if their prior does not define ``sample(field, generator)``.
        """
        source: Any = self.prior.site if isinstance(self.prior, SiteLagrangian) else self.prior
        if not hasattr(source, "sample"):
            name = type(source).__name__
            raise TypeError(f"hidden must define sample(field, generator), {name} does not")
        fields = (v @ self.patterns.mT).unflatten(-1, (-1, self.components)).detach()
        h = source.sample(fields, generator)
        return h.squeeze(-1) if self.components == 1 else h

    def sample_visible(self, h: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw visible units (..., d), given hidden ones in the shape of :meth:`sample_hidden`.

        ValueError if ``visible`` is None.
        """
        if self.visible is None:
            raise ValueError(f"visible must be one of {VISIBLE} to draw samples, got None")
        h = h if self.components == 1 else h.flatten(-2)
        field = (h @ self.patterns).detach()
        field = field if self.bias is None else field + self.bias.detach()
        units: Any = PRIORS[self.visible]
        return units.sample(field, generator)

    def gibbs(self, v: Tensor, sweeps: int, generator: torch.Generator | None = None) -> Tensor:
        """Run block Gibbs sampling, which alternates all hidden and all visible units.

        Args:
            v: (..., d) with the dtype of the weights, initial states of independent chains.
            sweeps: number of sweeps, >= 1.
            generator: random generator on the device of ``v``; None for PyTorch's default.

        Returns:
            (..., d), distributed as ``exp(-E)`` after enough sweeps.

        Raises:
            TypeError, ValueError: if v has another dtype, shape or entries, or units cannot be drawn.
        """
        dtype = self.patterns.dtype
        if not isinstance(v, Tensor) or v.dtype != dtype or v.shape[-1:] != (self.dim,):
            raise ValueError(f"v must be a tensor (..., {self.dim}) of {dtype}, {got(v)}")
        low = {"ising": -1, "binary": 0}.get(self.visible or "")
        if low is not None and not bool(((v == low) | (v == 1)).all()):
            raise ValueError(f"v must contain only {low} and 1 for {self.visible} units")
        for _ in range(require_count("sweeps", sweeps)):
            v = self.sample_visible(self.sample_hidden(v, generator), generator)
        return v

    def _fields(self, y: Tensor) -> Tensor:
        """Reshape (..., rows) to (..., units, components), in float32 or wider."""
        return y.unflatten(-1, (-1, self.components)).to(accumulation_dtype(y.dtype))

    def extra_repr(self) -> str:
        name = next((name for name, prior in PRIORS.items() if prior == self.prior), self.prior)
        return f"weights={tuple(self.patterns.shape)}, hidden={name!r}, visible={self.visible!r}"


def _prior(hidden: Any, components: int, shape: tuple[int, ...]) -> Lagrangian:
    if isinstance(hidden, str):
        if require_choice("hidden", hidden, PRIORS) == "one-hot" and components == 1:
            wanted = "weights (units, components, d) with components >= 2"
            raise ValueError(f"hidden='one-hot' needs {wanted}, got {shape}")
        return PRIORS[hidden]
    if isinstance(hidden, Lagrangian):
        return hidden
    known = f"one of {tuple(PRIORS)}, a Lagrangian or a solvers.Site"
    return SiteLagrangian(require_instance("hidden", hidden, Site, known))
