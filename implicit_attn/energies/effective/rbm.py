"""The energy that is left of a restricted Boltzmann machine when its hidden units are summed out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from implicit_attn.energies.effective.laws import PRIORS
from implicit_attn.energies.hopfield import PatternEnergy
from implicit_attn.energies.lagrangians import Lagrangian
from implicit_attn.energies.spins.energies import SiteDistribution, SiteLagrangian
from implicit_attn.energies.tokens import Pair, accumulation_dtype, hide, sum_samples, sum_squares
from solvers.core.checks import require_choice, require_count, require_instance

VISIBLE = ("normal", "ising", "binary")


class EffectiveRBM(PatternEnergy):
    r"""A restricted Boltzmann machine without its hidden units::

        exp(-E(v)) = a(v) exp(b.v) int q(h) exp(sum_m h_m.(W v)_m) dh
        E(v) = -log a(v) - b.v - sum_m K((W v)_m),     K(t) = log E_q[exp(t.h)]

    up to a constant in ``log a``, per token v. The law q of a hidden unit makes the memory:

    ============================  =====================  ======================================
    ``hidden``                    K(t)                   memory
    ============================  =====================  ======================================
    ``"normal"``                  t^2 / 2                ``ClassicalHopfield``
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

    Raises:
        TypeError, ValueError: for another dtype, shape or name, or a law that does not take units of
            so many components.

    Source: Hinton (2002), https://doi.org/10.1162/089976602760128018, for the machine; Barra et al.
    (2012), https://doi.org/10.1016/j.neunet.2012.06.003, for Hopfield networks as such; Mehta et al.
    (2019), https://arxiv.org/abs/1803.08823, section 16, for cumulants.
    """

    bias: Tensor | None

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
        super().__init__(flat, learnable=learnable)
        self.components = weights.shape[1] if weights.dim() == 3 else 1
        self.prior = _prior(hidden, self.components, tuple(weights.shape))
        self.visible = None if visible is None else require_choice("visible", visible, VISIBLE)
        self.concave = self.visible != "normal"  # K is convex
        self._store_bias(bias, learnable)
        # A site that does not take such units says so now.
        self.prior.token_value(self.patterns.new_zeros(1, 1, self.components))

    def value_and_grad(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Pair:
        value, gradient = super().value_and_grad(z, x, mask=mask)
        z = hide(z, mask)
        if self.visible == "normal":
            value, gradient = value + 0.5 * sum_squares(z), z + gradient
        if self.bias is not None:
            value = value - sum_samples(z * self.bias)
            gradient = hide(gradient - self.bias, mask)
        return value, gradient

    def hvp(self, z: Tensor, v: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        curved = super().hvp(z, v, x, mask=mask)
        return curved + hide(v, mask) if self.visible == "normal" else curved

    def token_value_and_force(self, y: Tensor) -> Pair:
        fields = self._fields(y)
        return -self.prior.token_value(fields).sum(-1), self._force(fields, y)

    def force_and_curvature(self, y: Tensor, v: Tensor, mask: Tensor | None) -> Pair:
        fields = self._fields(y)
        curved = self.prior.hessian_product(fields, self._fields(v))
        return self._force(fields, y), -curved.flatten(-2).to(y.dtype)

    def sample_hidden(self, v: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The hidden units given the visible ones (..., d): (..., units), or (..., units, components).

        Raises:
            TypeError, ValueError: v has another dtype than the weights, another shape, or entries that
                ``visible`` has not; the law of the hidden units has no ``sample(field, generator)``.
        """
        self._check_visible(v, generator)
        return self._sample_hidden(v, generator)

    def _sample_hidden(self, v: Tensor, generator: torch.Generator | None) -> Tensor:
        fields = (v @ self.patterns.mT).unflatten(-1, (-1, self.components)).detach()
        h = _sampler(self.prior)(fields, generator)
        return h.squeeze(-1) if self.components == 1 else h

    def sample_visible(self, h: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The visible units (..., d), given the hidden ones as :meth:`sample_hidden` makes them.

        Raises:
            TypeError, ValueError: h has another dtype than the weights, another shape, or entries that
                are not finite; ``visible`` is None.
        """
        units = len(self.patterns) // self.components
        shape = (units,) if self.components == 1 else (units, self.components)
        _check_units("h", h, shape, self.patterns)
        _check_generator(generator)
        if not bool(h.isfinite().all()):
            raise ValueError("h must be finite, got NaN or infinity")
        return self._sample_visible(h, generator)

    def _sample_visible(self, h: Tensor, generator: torch.Generator | None) -> Tensor:
        if self.visible is None:
            raise ValueError(f"visible must be one of {VISIBLE} for samples, got None")
        h = h if self.components == 1 else h.flatten(-2)
        field = (h @ self.patterns).detach()
        field = field if self.bias is None else field + self.bias.detach()
        return PRIORS[self.visible].sample(field, generator)

    def gibbs(self, v: Tensor, sweeps: int, generator: torch.Generator | None = None) -> Tensor:
        """Block Gibbs sampling: ``sweeps`` times all hidden units, then all visible ones.

        Args:
            v: (..., d), starts of independent chains; entries as ``visible`` has them.
            sweeps: >= 1.
            generator: on the device of ``v``; None: PyTorch's own.

        Returns:
            (..., d), distributed as ``exp(-E)`` after enough sweeps.

        Raises:
            TypeError, ValueError: as for :meth:`sample_hidden`; ``visible`` is None.
        """
        self._check_visible(v, generator)
        for _ in range(require_count("sweeps", sweeps)):
            v = self._sample_visible(self._sample_hidden(v, generator), generator)
        return v

    def _check_visible(self, v: Tensor, generator: object) -> None:
        """``v`` must be what the visible units can be; once a call, not once a sweep."""
        _check_units("v", v, (self.dim,), self.patterns)
        _check_generator(generator)
        low = {"ising": -1, "binary": 0}.get(self.visible or "")
        if low is not None and not bool(((v == low) | (v == 1)).all()):
            raise ValueError(
                f"v must have the entries {low} and 1 only, as visible={self.visible!r}"
            )
        if not bool(v.isfinite().all()):
            raise ValueError("v must be finite, got NaN or infinity")

    def _fields(self, y: Tensor) -> Tensor:
        """(..., rows) -> (..., units, components), in float32 or wider."""
        return y.unflatten(-1, (-1, self.components)).to(accumulation_dtype(y.dtype))

    def _force(self, fields: Tensor, y: Tensor) -> Tensor:
        return -self.prior.activation(fields).flatten(-2).to(y.dtype)

    def _store_bias(self, bias: Tensor | None, learnable: bool) -> None:
        if bias is None:
            self.register_buffer("bias", None)
            return
        if not isinstance(bias, Tensor) or tuple(bias.shape) != (self.dim,):
            got = tuple(bias.shape) if isinstance(bias, Tensor) else type(bias).__name__
            raise ValueError(f"bias must have the shape (d,) = ({self.dim},), got {got}")
        self._store("bias", bias.detach().to(self.patterns.dtype, copy=True), learnable)

    def extra_repr(self) -> str:
        name = next((name for name, prior in PRIORS.items() if prior is self.prior), self.prior)
        return f"weights={tuple(self.patterns.shape)}, hidden={name!r}, visible={self.visible!r}"


def _prior(hidden: object, components: int, shape: tuple[int, ...]) -> Lagrangian:
    if isinstance(hidden, str):
        if require_choice("hidden", hidden, PRIORS) == "one-hot" and components == 1:
            raise ValueError(
                "hidden='one-hot' needs weights (units, components, d) with components >= 2, got "
                f"{shape}"
            )
        return PRIORS[hidden]
    if isinstance(hidden, Lagrangian):
        return hidden
    if isinstance(hidden, SiteDistribution) and not isinstance(hidden, type):
        return SiteLagrangian(hidden)
    raise TypeError(
        f"hidden must be one of {tuple(PRIORS)}, a Lagrangian or a site with log_partition, mean and "
        f"covariance, got {hidden!r}"
    )


def _check_units(name: str, units: object, shape: tuple[int, ...], weights: Tensor) -> None:
    """``units`` must be a tensor of the dtype of the weights whose last dimensions are ``shape``."""
    wanted = ", ".join(str(size) for size in ("...", *shape))
    if not isinstance(units, Tensor):
        raise TypeError(f"{name} must be a tensor ({wanted}), got {type(units).__name__}")
    if units.dtype != weights.dtype:
        raise TypeError(
            f"{name} must be of the dtype of the weights, {weights.dtype}, got {units.dtype}"
        )
    if tuple(units.shape[-len(shape) :]) != shape:
        raise ValueError(f"{name} must have the shape ({wanted}), got {tuple(units.shape)}")


def _check_generator(generator: object) -> None:
    require_instance("generator", generator, torch.Generator, "a torch.Generator", optional=True)


def _sampler(prior: Lagrangian) -> Any:
    source = prior.site if isinstance(prior, SiteLagrangian) else prior
    sample = getattr(source, "sample", None)
    if sample is None:
        raise TypeError(
            f"hidden must have sample(field, generator), {type(source).__name__} has not"
        )
    return sample
