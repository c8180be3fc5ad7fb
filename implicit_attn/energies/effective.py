"""Restricted Boltzmann machines as energies of their visible units, one law for each kind of hidden unit."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.energies.hopfield import PatternEnergy
from implicit_attn.energies.lagrangians import Lagrangian, SoftmaxLagrangian, log_two_cosh
from implicit_attn.energies.projected import Given
from implicit_attn.energies.spins import SiteDistribution, SiteLagrangian
from implicit_attn.energies.tokens import accumulation_dtype
from solvers.core.checks import require_choice, require_count, require_instance


class HiddenPrior(Lagrangian):
    """The law of hidden units; as a Lagrangian its value is K, its activation the mean in a field."""

    @abstractmethod
    def sample(self, field: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """One draw of each unit in its field, like ``field``; no gradients.

        ``field``: t, (..., units) of a scalar law, (..., units, components) of a vector one; ValueError
        outside the domain of K.
        """


@dataclass(frozen=True, repr=False)
class ScalarPrior(HiddenPrior):
    """Independent units of one component, by the functions of one unit.

    Attributes:
        name: in ``PRIORS``.
        function, mean, variance: K, K' and K'' of each entry of a tensor, inside the domain.
        draw: one draw in each field, in float32 or wider.
        lower, upper: ends of the open interval on which ``E[exp(t h)]`` is finite. Outside, K is
            infinite and its derivatives are NaN, so that solvers reject such a step.
    """

    name: str
    function: Callable[[Tensor], Tensor]
    mean: Callable[[Tensor], Tensor]
    variance: Callable[[Tensor], Tensor]
    draw: Callable[[Tensor, torch.Generator | None], Tensor]
    lower: float = -math.inf
    upper: float = math.inf

    def cumulant_function(self, t: Tensor) -> Tensor:
        """``K(t)`` of each entry, like ``t``."""
        if self._everywhere:
            return self.function(t)
        inside = self._inside(t)
        # An infinite slope as well; each branch sees only its own points, or 0 * inf would be NaN.
        outside = math.inf * torch.where(inside, 1.0, t).square()
        return torch.where(inside, self.function(torch.where(inside, t, 0.0)), outside)

    def token_value(self, z: Tensor) -> Tensor:
        return self.cumulant_function(z).sum(-1)

    def activation(self, z: Tensor) -> Tensor:
        return self.mean(self._or_nan(z))

    def hessian_product(self, z: Tensor, v: Tensor) -> Tensor:
        return self.variance(self._or_nan(z)) * v

    @torch.no_grad()
    def sample(self, field: Tensor, generator: torch.Generator | None = None) -> Tensor:
        wide = field.to(accumulation_dtype(field.dtype))
        if not self._everywhere and not bool(self._inside(wide).all()):
            raise ValueError(
                f"field must lie in ({self.lower}, {self.upper}) for {self.name!r} units, got "
                f"values in [{wide.min().item():.4g}, {wide.max().item():.4g}]"
            )
        return self.draw(wide, generator).to(field.dtype)

    @property
    def _everywhere(self) -> bool:
        return self.lower == -math.inf and self.upper == math.inf

    def _inside(self, t: Tensor) -> Tensor:
        return (t > self.lower) & (t < self.upper)

    def _or_nan(self, t: Tensor) -> Tensor:
        return t if self._everywhere else torch.where(self._inside(t), t, torch.nan)

    def __repr__(self) -> str:
        return f"PRIORS[{self.name!r}]"

    def __reduce__(self) -> Any:  # its functions have no names by which to pickle them
        return _law, (self.name,)


@dataclass(frozen=True)
class OneHotPrior(SoftmaxLagrangian, HiddenPrior):
    """One of M components is 1, each with equal weight, ``K = lse t - log M``: the modern Hopfield."""

    def token_value(self, z: Tensor) -> Tensor:
        return super().token_value(z) - math.log(z.shape[-1])

    @torch.no_grad()
    def sample(self, field: Tensor, generator: torch.Generator | None = None) -> Tensor:
        wide = field.to(accumulation_dtype(field.dtype))
        # The largest of the fields with Gumbel noise, -log of an exponential variable.
        chosen = (wide - (-torch.log1p(-_uniform(wide, generator))).log()).argmax(-1)
        return F.one_hot(chosen, field.shape[-1]).to(field.dtype)


def _uniform(t: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.rand(t.shape, generator=generator, dtype=t.dtype, device=t.device)


def _normal(t: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(t.shape, generator=generator, dtype=t.dtype, device=t.device)


NORMAL_LIMIT = 2.0**24  # mean of Poisson units above which float32 has no room for other integers


def _draw_poisson(t: Tensor, generator: torch.Generator | None) -> Tensor:
    """Beyond ``NORMAL_LIMIT`` by the normal limit; infinite where exp(t) is."""
    rate = t.exp()
    many = rate > NORMAL_LIMIT
    if t.device.type == "cpu" and not bool(many.any()):  # elsewhere the answer is not awaited
        return torch.poisson(rate, generator=generator)
    few = torch.poisson(rate.clamp_max(NORMAL_LIMIT), generator=generator)
    return torch.where(many, (rate * (1 + _normal(t, generator) / rate.sqrt())).round(), few)


def _draw_laplace(t: Tensor, generator: torch.Generator | None) -> Tensor:
    sign = torch.where(2 * _uniform(t, generator) < 1 + t, 1.0, -1.0)
    return -torch.log1p(-_uniform(t, generator)) * sign / (1 - sign * t)


LAWS = (
    ScalarPrior(
        "normal",  # h ~ N(0, 1)
        function=lambda t: 0.5 * t.square(),
        mean=lambda t: t,
        variance=torch.ones_like,
        draw=lambda t, generator: t + _normal(t, generator),
    ),
    ScalarPrior(
        "poisson",  # of mean 1
        function=torch.expm1,
        mean=torch.exp,
        variance=torch.exp,
        draw=_draw_poisson,
    ),
    ScalarPrior(
        "ising",  # +1 or -1 with equal weight
        function=lambda t: log_two_cosh(t) - math.log(2.0),
        mean=torch.tanh,
        variance=lambda t: 4 * torch.sigmoid(2 * t) * torch.sigmoid(-2 * t),
        draw=lambda t, generator: torch.where(
            _uniform(t, generator) < torch.sigmoid(2 * t), 1.0, -1.0
        ),
    ),
    ScalarPrior(
        "binary",  # 0 or 1 with equal weight
        function=lambda t: F.softplus(t, threshold=60.0) - math.log(2.0),
        mean=torch.sigmoid,
        variance=lambda t: torch.sigmoid(t) * torch.sigmoid(-t),
        draw=lambda t, generator: (_uniform(t, generator) < torch.sigmoid(t)).to(t.dtype),
    ),
    ScalarPrior(
        "exponential",  # h >= 0 with density exp(-h)
        function=lambda t: -torch.log1p(-t),
        mean=lambda t: 1 / (1 - t),
        variance=lambda t: (1 - t).square().reciprocal(),
        draw=lambda t, generator: -torch.log1p(-_uniform(t, generator)) / (1 - t),
        upper=1.0,
    ),
    ScalarPrior(
        "laplace",  # density exp(-|h|) / 2
        function=lambda t: -torch.log1p(-t.square()),
        mean=lambda t: 2 * t / ((1 - t) * (1 + t)),
        variance=lambda t: (1 - t).square().reciprocal() + (1 + t).square().reciprocal(),
        draw=_draw_laplace,
        lower=-1.0,
        upper=1.0,
    ),
    ScalarPrior(
        "constant",  # h = 1
        function=lambda t: t,
        mean=torch.ones_like,
        variance=torch.zeros_like,
        draw=lambda t, generator: torch.ones_like(t),
    ),
)
PRIORS: dict[str, HiddenPrior] = {**{law.name: law for law in LAWS}, "one-hot": OneHotPrior()}


def _law(name: str) -> HiddenPrior:
    return PRIORS[name]


VISIBLE = ("normal", "ising", "binary")


class EffectiveRBM(PatternEnergy):
    r"""A restricted Boltzmann machine without its hidden units::

        exp(-E(v)) = a(v) exp(b.v) int q(h) exp(sum_m h_m.(W v)_m) dh
        E(v) = -log a(v) - b.v - sum_m K((W v)_m),     K(t) = log E_q[exp(t.h)]

    up to a constant in ``log a``, per token v. The law q of a hidden unit makes the memory:

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

    Gradient ``v - b - W^T K'(W v)`` for normal visible units, ``-b - W^T K'(W v)`` for others: the mean
    of the hidden units is their activation. For exponential and Laplace units the integral diverges
    where a field leaves the domain: there E is minus infinity and its gradient NaN, which a solver
    rejects.

    Shapes: ``z`` (B, ..., d), the visible units; ``x`` is ignored; ``mask`` (B, N).

    Args:
        weights: W, (units, d) of scalar hidden units or (units, components, d) of vector ones,
            floating; copied.
        hidden: a name of the table, a site such as ``solvers.SphericalSite()``,
            or another ``Lagrangian``, which is K then.
        visible: ``"normal"`` (``-log a = |v|^2 / 2``), ``"ising"`` (entries +1 and -1) or ``"binary"``
            (0 and 1), where log a is constant; None: constant, and no samples.
        bias: b, (d,), or None for 0; copied, learnable like the weights.
        learnable: make weights and bias parameters; else buffers.

    Attributes:
        patterns: the weights as (units components, d).
        prior: of the hidden units, a ``Lagrangian``.

    Source: Hinton (2002), https://doi.org/10.1162/089976602760128018, for the machine; Barra et al.
    (2012), https://doi.org/10.1016/j.neunet.2012.06.003, for Hopfield networks as such; Mehta et al.
    (2019), https://arxiv.org/abs/1803.08823, section 16, for cumulants.
    """

    def __init__(
        self,
        weights: Tensor,
        hidden: str | Lagrangian | SiteDistribution = "normal",
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
        # A site that does not take such units says so now.
        self.prior.token_value(self.patterns.new_zeros(1, 1, self.components))

    def token_value(self, y: Tensor, given: Given) -> Tensor:
        return -self.prior.token_value(self._fields(y)).sum(-1)

    def force(self, y: Tensor, given: Given) -> Tensor:
        return -self.prior.activation(self._fields(y)).flatten(-2).to(y.dtype)

    def sample_hidden(self, v: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The hidden units given the visible ones (..., d): (..., units), or (..., units, components).

        TypeError if their law has no ``sample(field, generator)``.
        """
        source = self.prior.site if isinstance(self.prior, SiteLagrangian) else self.prior
        sample = getattr(source, "sample", None)
        if sample is None:
            name = type(source).__name__
            raise TypeError(f"hidden must have sample(field, generator), {name} has not")
        fields = (v @ self.patterns.mT).unflatten(-1, (-1, self.components)).detach()
        h = sample(fields, generator)
        return h.squeeze(-1) if self.components == 1 else h

    def sample_visible(self, h: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The visible units (..., d), given the hidden ones as :meth:`sample_hidden` makes them.

        ValueError if ``visible`` is None.
        """
        if self.visible is None:
            raise ValueError(f"visible must be one of {VISIBLE} for samples, got None")
        h = h if self.components == 1 else h.flatten(-2)
        field = (h @ self.patterns).detach()
        field = field if self.bias is None else field + self.bias.detach()
        return PRIORS[self.visible].sample(field, generator)

    def gibbs(self, v: Tensor, sweeps: int, generator: torch.Generator | None = None) -> Tensor:
        """Block Gibbs sampling: ``sweeps`` times all hidden units, then all visible ones.

        Args:
            v: (..., d), dtype of the weights: starts of independent chains; entries as ``visible`` has them.
            sweeps: >= 1.
            generator: on the device of ``v``; None: PyTorch's own.

        Returns:
            (..., d), distributed as ``exp(-E)`` after enough sweeps.

        Raises:
            TypeError, ValueError: v has another dtype, shape or entries; as for the samples.
        """
        require_instance("v", v, Tensor, f"a tensor (..., {self.dim})")
        if v.dtype != self.patterns.dtype:
            raise TypeError(f"v must be of the dtype of the weights, got {v.dtype}")
        if v.shape[-1:] != (self.dim,):
            raise ValueError(f"v must have the shape (..., {self.dim}), got {tuple(v.shape)}")
        low = {"ising": -1, "binary": 0}.get(self.visible or "")
        if low is not None and not bool(((v == low) | (v == 1)).all()):
            raise ValueError(f"v must have the entries {low} and 1 only ({self.visible} units)")
        for _ in range(require_count("sweeps", sweeps)):
            v = self.sample_visible(self.sample_hidden(v, generator), generator)
        return v

    def _fields(self, y: Tensor) -> Tensor:
        """(..., rows) -> (..., units, components), in float32 or wider."""
        return y.unflatten(-1, (-1, self.components)).to(accumulation_dtype(y.dtype))

    def extra_repr(self) -> str:
        name = next((name for name, prior in PRIORS.items() if prior == self.prior), self.prior)
        return f"weights={tuple(self.patterns.shape)}, hidden={name!r}, visible={self.visible!r}"


def _prior(hidden: object, components: int, shape: tuple[int, ...]) -> Lagrangian:
    if isinstance(hidden, str):
        if require_choice("hidden", hidden, PRIORS) == "one-hot" and components == 1:
            wanted = "weights (units, components, d) with components >= 2"
            raise ValueError(f"hidden='one-hot' needs {wanted}, got {shape}")
        return PRIORS[hidden]
    if isinstance(hidden, Lagrangian):
        return hidden
    if isinstance(hidden, SiteDistribution) and not isinstance(hidden, type):
        return SiteLagrangian(hidden)
    raise TypeError(
        f"hidden must be one of {tuple(PRIORS)}, a Lagrangian or a site with log_partition, mean and "
        f"covariance, got {hidden!r}"
    )
