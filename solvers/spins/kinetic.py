r"""Dynamics of spins: mean-field closures of parallel dynamics, steady states, and Monte Carlo.

A closure depends on the mean of a site at the previous time, but not on its field. A law gives the
covariance as a function of the mean, and the mean averaged over a field with Gaussian noise.

On a sphere of radius R in d dimensions, for large d, with ``q = sqrt(d^2 + 4 R^2 |h|^2)``::

    m = a h,   a = 2 R^2 / (d + q) = (R^2 - |m|^2) / d,   C = a I - (2 / q) m m^T,
    C^-1 u = u / a + 2 m (m.u) / (a^2 d),
    T:A = (8 / q^2 + 8 R^2 / (a q^3)) (m^T A m) m - (2 a / q) (tr(A) m + 2 A m)

T is the third cumulant. Everything is a function of the mean, because ``q = 2 R^2 / a - d``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from solvers.core.checks import require_choice, require_count, require_finite, require_instance
from solvers.core.context import maybe_any
from solvers.core.modes import without_autocast
from solvers.core.problem import Sharing
from solvers.core.solution import Solution, check_on_failure
from solvers.core.tolerance import Tolerance
from solvers.fixed_points import fixed_point
from solvers.spins.inputs import (
    as_wide,
    check_field,
    check_like_field,
    check_mask,
    no_variance,
    zero_masked,
)
from solvers.spins.sites import GaussianSite, IsingSite, PottsSite, Site, SphericalSite

# Trapezoidal rules of the Gaussian average. The rule over the noise has for tanh, with poles at i pi / 2,
# the error exp(-pi^2 / (STEP s)) for standard deviation s and exp(-REACH^2 / 2) from truncation, so it is
# used for s <= WIDE. Wider noise uses the integral by parts over the spin's width, with the error
# exp(-pi^2 / STEP) times exp(pi^2 / (8 s^2)) and rounding from truncation.
STEP, REACH, WIDE = 0.25, 8.0, 1.0


class Law:
    """Law of a general site, which supports only the naive closure."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def mean(self, field: Tensor) -> Tensor:
        """Return the mean (B, N, d) in the field (B, N, d)."""
        return self.site.mean(field, no_variance(field))

    def covariance(self, mean: Tensor) -> Tensor:
        """Return the covariance (B, N, d, d) of a site with this mean (B, N, d)."""
        raise self._unknown("the covariance as a function of the mean", "naive")

    def scatter(self, mean: Tensor) -> Tensor:
        """Return the trace (B, N, 1) of the covariance."""
        return self.covariance(mean).diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)

    def averaged(self, field: Tensor, noise: Tensor) -> Tensor:
        """Return the mean over fields ``h + e``, e Gaussian, covariance of trace ``noise`` (B, N, 1)."""
        raise self._unknown("the average over a noisy field", "tap")

    def _unknown(self, what: str, instead: str) -> ValueError:
        return ValueError(
            f"closure must be {instead!r} for {type(self.site).__name__}: it does not define {what}"
        )


class IsingLaw(Law):
    """``C = 1 - m^2``; the average by quadrature, ``int tanh(h + s u) N(u; 0, 1) du`` for weak noise
    and ``1/2 int sech^2(v) erf((h - v) / (s sqrt 2)) dv`` for strong noise, ``s^2 = noise``."""

    def covariance(self, mean: Tensor) -> Tensor:
        return self.scatter(mean).unsqueeze(-1)

    def scatter(self, mean: Tensor) -> Tensor:
        return (1 - mean.square()).clamp_min(0.0)

    def averaged(self, field: Tensor, noise: Tensor) -> Tensor:
        # The square root has no derivative at 0, so the noise is at least the size of rounding.
        width = (noise + torch.finfo(noise.dtype).eps).sqrt()
        wide = width > WIDE
        # Each rule receives only its own widths, so that the other one has no NaN gradients.
        mean = _over_noise(field, width.clamp_max(WIDE))
        if not maybe_any(wide):
            return mean
        return torch.where(wide, _by_parts(field, width.clamp_min(WIDE)), mean)


def _over_noise(field: Tensor, width: Tensor) -> Tensor:
    nodes = torch.arange(-REACH, REACH + STEP, STEP, dtype=field.dtype, device=field.device)
    weights = torch.exp(-nodes.square() / 2) * (STEP / math.sqrt(2 * math.pi))
    return torch.tanh(field.unsqueeze(-1) + width.unsqueeze(-1) * nodes) @ weights


def _by_parts(field: Tensor, width: Tensor) -> Tensor:
    count = math.ceil((2 - math.log(torch.finfo(field.dtype).eps) / 2) / STEP)
    nodes = STEP * torch.arange(-count, count + 1, dtype=field.dtype, device=field.device)
    weights = STEP / 2 / torch.cosh(nodes).square()
    return torch.erf((field.unsqueeze(-1) - nodes) / (math.sqrt(2) * width.unsqueeze(-1))) @ weights


class PottsLaw(Law):
    """``C = diag(m) - m m^T``."""

    def covariance(self, mean: Tensor) -> Tensor:
        return torch.diag_embed(mean) - mean.unsqueeze(-1) * mean.unsqueeze(-2)


class GaussianLaw(Law):
    """A constant covariance; noise averages out in a linear response."""

    def covariance(self, mean: Tensor) -> Tensor:
        return self.site.covariance(mean, no_variance(mean)).expand(*mean.shape, mean.shape[-1])

    def averaged(self, field: Tensor, noise: Tensor) -> Tensor:
        return self.mean(field)


LAWS: dict[type[Site], type[Law]] = {
    IsingSite: IsingLaw,
    PottsSite: PottsLaw,
    GaussianSite: GaussianLaw,
}


INVERSION_STEPS = 6  # Newton steps for the field of a mean, starting from the formula for large d
INSIDE = 8  # smallest distance of a mean from the sphere, in units of rounding


class LargeSphereLaw(Law):
    """A sphere in many dimensions, in closed form."""

    def __init__(self, site: SphericalSite, dim: int) -> None:
        super().__init__(site)
        self.dim, self.squared_radius = dim, site.squared_radius(dim)

    def mean(self, field: Tensor) -> Tensor:
        return self.slope(field.square().sum(-1, keepdim=True)) * field

    def slope(self, squared_field: Tensor) -> Tensor:
        """Return ``a = |m| / |h|`` (B, N, 1) for ``|h|^2``."""
        rho = self.squared_radius
        return 2 * rho / (self.dim + (self.dim**2 + 4 * rho * squared_field).sqrt())

    def response(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``a`` and ``q`` (B, N, 1) at the field with this mean, which is moved inside the sphere."""
        slope = self.scatter(mean) / self.dim
        least = INSIDE * torch.finfo(mean.dtype).eps * self.squared_radius / self.dim
        slope = slope.clamp_min(least)
        return slope, 2 * self.squared_radius / slope - self.dim

    def covariance(self, mean: Tensor) -> Tensor:
        slope, root = self.response(mean)
        unit = torch.eye(self.dim, dtype=mean.dtype, device=mean.device)
        outer = mean.unsqueeze(-1) * mean.unsqueeze(-2)
        return slope.unsqueeze(-1) * unit - (2 / root).unsqueeze(-1) * outer

    def scatter(self, mean: Tensor) -> Tensor:
        """Return ``R^2 - |m|^2``, the exact trace of the covariance, which C only approximates."""
        return (self.squared_radius - mean.square().sum(-1, keepdim=True)).clamp_min(0.0)

    def averaged(self, field: Tensor, noise: Tensor) -> Tensor:
        """Return the mean for ``|h + e|^2 = |h|^2 + noise``, which holds in many dimensions."""
        return self.slope(field.square().sum(-1, keepdim=True) + noise) * field

    def reaction(self, distance: Tensor, mean: Tensor, spread: Tensor, product: Tensor) -> Tensor:
        """Return ``1/2 C^-1 T:(v v^T + B)`` with ``v = distance``, ``spread = tr B`` (B, N, 1) and
        ``product = B m``."""
        slope, root = self.response(mean)
        along = (mean * distance).sum(-1, keepdim=True)
        total = spread + distance.square().sum(-1, keepdim=True)
        vector = product + along * distance  # A m
        inner = (mean * vector).sum(-1, keepdim=True)  # m^T A m
        cubic = 8 / root.square() + 8 * self.squared_radius / (slope * root**3)
        third = cubic * inner * mean - (2 * slope / root) * (total * mean + 2 * vector)
        share = (mean * third).sum(-1, keepdim=True)
        return (third / slope + 2 * share / (slope.square() * self.dim) * mean) / 2


class SphereLaw(LargeSphereLaw):
    """A sphere in any dimension, computed by the quadrature of its site."""

    def mean(self, field: Tensor) -> Tensor:
        return self.site.mean(field, no_variance(field))

    def slope(self, squared_field: Tensor) -> Tensor:
        tiny = torch.finfo(squared_field.dtype).tiny
        size = squared_field.clamp_min(tiny).sqrt()
        probe = torch.cat([size, size.new_zeros(*size.shape[:-1], self.dim - 1)], dim=-1)
        return self.mean(probe)[..., :1] / size

    def covariance(self, mean: Tensor) -> Tensor:
        return self.site.covariance(self.field_of(mean), no_variance(mean))

    def field_of(self, mean: Tensor) -> Tensor:
        """Return the field (B, N, d) of a mean, by Newton's method for ``|h| / |m|``."""
        size, rho = mean.square().sum(-1, keepdim=True), self.squared_radius
        with torch.no_grad():
            # |h| / |m| is exact at m = 0 and near the sphere, where R^2 - |m|^2 is (d - 1) R / |h|.
            ratio = (1 - size.clamp_max(rho) / (rho * self.dim)) / self.response(mean)[0]
            for _ in range(INVERSION_STEPS):
                ratio = self._closer(ratio, size)
        if torch.is_grad_enabled():  # a step at the solution carries its derivative
            ratio = self._closer(ratio, size)
        return ratio * mean

    def _closer(self, ratio: Tensor, size: Tensor) -> Tensor:
        slope, rest = self.slope(ratio.square() * size), self.dim - 1
        reached = slope * ratio  # |m(h)| / |m|
        # The variance along m, which is the slope of |m| in |h|, is what the others leave of R^2 - |m|^2.
        # Rounding may make it negative, so it is at least its limit for strong fields.
        along = self.squared_radius - reached.square() * size - rest * slope
        along = torch.maximum(along, slope.square() * (rest / (2 * self.squared_radius)))
        # A mean within rounding of the sphere hardly determines its field, so steps are limited.
        return torch.clamp(ratio + (1 - reached) / along, ratio / 2, 2 * ratio)


def drive(couplings: Tensor, values: Tensor) -> Tensor:
    """Return ``sum_j J_ij v_j`` for ``values`` (B, N, k); shared couplings need one matrix product."""
    if couplings.dim() == 2:
        columns = values.mT
        return (columns.flatten(0, 1) @ couplings.mT).view(columns.shape).mT
    return couplings @ values


def check_finite(mask: Tensor | None = None, **tensors: Tensor) -> None:
    """Raise ValueError for the first of ``tensors`` (B, N, d) with NaN or infinity at an unmasked site;
    not on a GPU, where this would wait for the device."""
    for name, value in tensors.items():
        require_finite(name, zero_masked(value.detach(), None if name == "couplings" else mask))


def check_network(mean: Any, field: Any, couplings: Any, mask: Any, start: str = "mean") -> None:
    """Check ``mean`` (called ``start`` in errors) and ``field`` (B, N, d), couplings (N, N) or (B, N, N),
    and a mask (B, N) bool or None."""
    batch, sites, _ = shape = check_field(field)
    check_like_field(start, mean, field, shape)
    check_like_field("couplings", couplings, field, (sites, sites), (batch, sites, sites))
    check_mask(mask, field)


CLOSURES = ("naive", "gaussian", "tap", "plefka")
REACTING = ("tap", "plefka")  # closures that are implicit equations for the means

Rule = Callable[[Tensor], Tensor]  # (B, N, d) -> (B, N, d)


def kinetic_map(
    mean: Tensor,
    field: Tensor,
    couplings: Tensor,
    *,
    site: Site,
    closure: str = "gaussian",
    mask: Tensor | None = None,
) -> Tensor:
    """Return the map whose fixed points are the steady states of :func:`kinetic_step`.

    With the closures "naive" and "gaussian" it is the step itself. With "tap" and "plefka" the step is
    an equation ``m(t) = F(m(t), m(t-1))`` for the next means, and this map is ``F(m, m)``, without an inner
    solve. Arguments, result and errors are those of :func:`kinetic_step`.
    """
    check_network(mean, field, couplings, mask)
    check_closure(site, closure)
    return _map(mean, field, couplings, site, closure, mask)


def _map(
    mean: Tensor, field: Tensor, couplings: Tensor, site: Site, closure: str, mask: Tensor | None
) -> Tensor:
    with without_autocast(mean.device.type):
        wide = as_wide(mean)
        rule = closed(wide, as_wide(field), as_wide(couplings), site, closure, mask)
        after = rule(wide).to(mean.dtype)
    return after if mask is None else torch.where(mask.unsqueeze(-1), after, mean)


def closed(
    mean: Tensor, field: Tensor, couplings: Tensor, site: Site, closure: str, mask: Tensor | None
) -> Rule:
    """Return ``m -> F(m, mean)`` for the previous means; with "naive" and "gaussian" it is constant."""
    law = law_of(site, field.shape[-1])
    # Values at masked sites, which may be NaN, influence nothing, including gradients.
    mean, field = zero_masked(mean, mask), zero_masked(field, mask)
    theta, squares = field + drive(couplings, mean), couplings.square()
    if closure == "naive":
        after = law.mean(theta)
        return lambda now: after
    if closure == "gaussian":
        spread = drive(squares, zero_masked(law.scatter(mean), mask))  # tr B_i
        after = law.averaged(theta, spread)
        return lambda now: after
    if closure == "tap" or isinstance(site, IsingSite | PottsSite):
        covariance = zero_masked(law.covariance(mean), mask)
        noise = drive(squares, covariance.flatten(2)).view_as(covariance)  # B_i
        return lambda now: site.mean(theta - (noise @ now.unsqueeze(-1)).squeeze(-1), noise)
    assert isinstance(law, LargeSphereLaw)
    return _plefka(law, theta, mean, squares, mask)


def law_of(site: Site, dim: int) -> Law:
    """Return the law of a site; raise ValueError for a dimension that it does not support."""
    if isinstance(site, IsingSite) and dim != 1:
        raise ValueError(f"IsingSite needs spins with one component, d = 1, got d = {dim}")
    if isinstance(site, SphericalSite):
        return (LargeSphereLaw if site.large_dimension else SphereLaw)(site, dim)
    found = [law for kind, law in LAWS.items() if isinstance(site, kind)]
    return found[0](site) if found else Law(site)


def check_closure(site: object, closure: str) -> None:
    """Check that the closure supports the site."""
    require_instance("site", site, Site, "a solvers.Site")
    require_choice("closure", closure, CLOSURES)
    large = isinstance(site, SphericalSite) and site.large_dimension
    if closure == "plefka" and not (large or isinstance(site, IsingSite | PottsSite)):
        raise ValueError(
            "closure='plefka' needs IsingSite, PottsSite or SphericalSite(large_dimension=True), "
            f"got {site}; use closure='tap'"
        )


def _plefka(
    law: LargeSphereLaw, theta: Tensor, mean: Tensor, squares: Tensor, mask: Tensor | None
) -> Rule:
    """Return ``h <- theta + 1/2 C^-1 T:(v v^T + B)``, ``v = theta - h``, at the field h of the next means."""
    slope, root = law.response(mean)
    isotropic = drive(squares, zero_masked(slope, mask))
    outer = 2 / root * mean.square().sum(-1, keepdim=True)
    spread = law.dim * isotropic - drive(squares, zero_masked(outer, mask))  # tr B
    pulled = zero_masked(2 / root * mean, mask)

    def reacted(now: Tensor) -> Tensor:
        product = isotropic * now - (squares * (now @ mean.mT)) @ pulled  # B m
        distance = theta - now / law.response(now)[0]
        return law.mean(theta + law.reaction(distance, now, spread, product))

    return reacted


INNER = {torch.float64: 1e-10, torch.float32: 1e-6}  # relative tolerance of the means after a step


def kinetic_step(
    mean: Tensor,
    field: Tensor,
    couplings: Tensor,
    *,
    site: Site,
    closure: str = "gaussian",
    mask: Tensor | None = None,
    max_steps: int = 200,
    on_failure: str = "warn",
) -> Tensor:
    r"""Return the means of spins after one step of parallel dynamics, in a mean-field closure.

    All spins are drawn at once, from their site's distribution in the field of the previous spins::

        P(S_i(t)) ~ rho(S_i) exp(h_i.S_i),   h_i = x_i + sum_j J_ij S_j(t-1)

    The couplings need not be symmetric, and a site may couple to itself. Let ``theta_i`` be the field of
    the means ``m_j(t-1)``, C_j the covariance of a site with that mean, ``B_i = sum_j J_ij^2 C_j`` and
    ``mu(h, V)`` the mean of a site (:class:`solvers.Site`). The closures are

    - "naive": ``m_i(t) = mu(theta_i, 0)``;
    - "gaussian": the average of mu over a Gaussian field with mean theta_i and covariance B_i, by
      quadrature for Ising spins, and with ``|h|^2`` replaced by ``|theta_i|^2 + tr B_i`` for spheres. It is
      exact for many weak random couplings and spheres in many dimensions; in few dimensions it is exact
      only to first order in J, like "naive";
    - "tap": ``m_i(t) = mu(theta_i - B_i m_i(t), B_i)``, an equation that is solved for each sample. For
      Ising and Potts spins it is Plefka's expansion to second order;
    - "plefka": that expansion for other sites, with their third cumulant T:
      ``m_i(t) = mu(h_i, 0)``, ``h_i = theta_i + 1/2 C_i^-1 T_i:(v_i v_i^T + B_i)``,
      ``v_i = theta_i - h_i``. It fails for strong couplings, unlike "gaussian".

    Args:
        mean: m(t-1), (B, N, d).
        field: x, (B, N, d).
        couplings: J, numbers (N, N), or (B, N, N) for each sample.
        site: site distribution. "gaussian" supports Ising, Gaussian and spherical sites, "tap" also Potts
            sites, "plefka" ``SphericalSite(large_dimension=True)``, Ising and Potts sites.
        closure: "naive", "gaussian", "tap" or "plefka".
        mask: (B, N) bool, False for masked sites, which do not influence others and keep their mean.
        max_steps, on_failure: options of :func:`fixed_point` for the equation of "tap" and "plefka".

    Returns:
        m(t), (B, N, d). Gradients flow to mean, field and couplings, and to the site's parameters.

    Raises:
        TypeError, ValueError: if an argument is invalid or the site does not support the closure; on the
            CPU also for NaN or infinity at unmasked sites with "tap" and "plefka".
        SolveError: if ``on_failure="raise"`` and the equation of "tap" or "plefka" was not solved.

    Source: Aguilera, Moosavi, Shimazaki, "A unifying framework for mean-field theories of asymmetric
    kinetic Ising systems" (2021), https://doi.org/10.1038/s41467-021-20890-5, for Ising spins; Mezard
    and Sakellariou (2011), https://arxiv.org/abs/1103.3433, for the Gaussian closure;
    Bal, https://mcbal.github.io/post/spin-model-transformers/, for spheres.
    """
    require_count("max_steps", max_steps)
    check_on_failure(on_failure)
    if closure not in REACTING:
        return kinetic_map(mean, field, couplings, site=site, closure=closure, mask=mask)
    check_network(mean, field, couplings, mask)
    check_closure(site, closure)
    check_finite(mask, mean=mean, field=field, couplings=couplings)

    with without_autocast(mean.device.type):
        before, x = (as_wide(zero_masked(tensor, mask)) for tensor in (mean, field))
        j = as_wide(couplings)
        guess = closed(before, x, j, site, "naive", mask)(before)
        # The rule closes over tensors of all samples, so that past quantities are computed once.
        solution = fixed_point(
            closed(before, x, j, site, closure, mask),
            guess.detach(),
            tolerance=Tolerance(rtol=INNER[x.dtype]),
            max_steps=max_steps,
            mask=mask,
            on_failure=on_failure,
            compact=False,
        )
    after = solution.value.to(mean.dtype)
    return after if mask is None else torch.where(mask.unsqueeze(-1), after, mean)


def kinetic_trajectory(
    mean: Tensor, field: Tensor, couplings: Tensor, *, steps: int, site: Site, **options: Any
) -> Tensor:
    """Return the means m(0) to m(steps) from ``mean`` = m(0), (steps + 1, B, N, d).

    Known spins may be used as means; they have no variance. ``options`` (closure, mask, max_steps,
    on_failure), the other arguments and the errors are those of :func:`kinetic_step`.
    """
    means = [mean]
    for _ in range(require_count("steps", steps)):
        means.append(kinetic_step(means[-1], field, couplings, site=site, **options))
    return torch.stack(means)


def steady_state(
    field: Tensor,
    couplings: Tensor,
    *,
    site: Site,
    closure: str = "gaussian",
    start: Tensor | None = None,
    mask: Tensor | None = None,
    **options: Any,
) -> Solution:
    """Solve for steady means ``m = kinetic_step(m, field, couplings)``, differentiably.

    Args:
        field, couplings, site, closure, mask: see :func:`kinetic_step`.
        start: initial means (B, N, d); None for those of uncoupled sites.
        options: options of :func:`fixed_point`: solver, tolerance, max_steps, adjoint, on_failure, ...

    Returns:
        A :class:`Solution` with the means (B, N, d) as ``value``. Gradients reach field, couplings
        and the site's parameters by the implicit function theorem.

    Raises:
        TypeError, ValueError, SolveError: as for :func:`kinetic_step` and :func:`fixed_point`.
    """
    check_network(field if start is None else start, field, couplings, mask, start="start")
    check_closure(site, closure)
    check_finite(mask, field=field, couplings=couplings)
    if start is None:
        with torch.no_grad(), without_autocast(field.device.type):
            law = law_of(site, field.shape[-1])
            known = torch.where(field.isfinite(), field.detach(), 0.0)  # masked sites may be NaN
            start = law.mean(as_wide(known)).to(field.dtype)
    else:
        check_finite(start=start)
    field = zero_masked(field, mask)
    apart = couplings.dim() == 3

    def rule(mean: Tensor, field: Tensor, mask: Tensor | None, couplings: Tensor) -> Tensor:
        return _map(mean, field, couplings, site, closure, mask)

    def rule_of_own(mean: Tensor, field: Tensor, couplings: Tensor, mask: Tensor | None) -> Tensor:
        return _map(mean, field, couplings, site, closure, mask)

    if apart:
        args: tuple[Any, ...] = (field, couplings, mask)
        return fixed_point(rule_of_own, start, args, mask=mask, **options)
    return fixed_point(Sharing(rule, couplings), start, (field, mask), mask=mask, **options)


class GlauberRun(NamedTuple):
    """Averages over chains at every time, (steps + 1, N, d), and the last spins, (chains, N, d)."""

    means: Tensor
    spins: Tensor


def glauber(
    spins: Tensor,
    field: Tensor,
    couplings: Tensor,
    *,
    steps: int,
    site: Site,
    generator: torch.Generator | None = None,
) -> GlauberRun:
    """Simulate parallel dynamics in independent chains, without gradients.

    All spins of a chain are drawn at once, from their site's distribution in the field of the previous
    spins: ``P(S_i(t)) ~ rho(S_i) exp(S_i.(x_i + sum_j J_ij S_j(t-1)))``. The average over C chains has
    a standard error of ``sqrt(variance of S_i / C)``.

    Args:
        spins: initial spins S(0), (chains, N, d).
        field: x, (N, d).
        couplings: J, (N, N), which may be asymmetric and have a diagonal.
        steps: number of steps, >= 1.
        site: site distribution, which must define ``sample``.
        generator: random generator; None for the global one.

    Returns:
        A :class:`GlauberRun`.

    Raises:
        TypeError, ValueError: if an argument is invalid.
        NotImplementedError: if the site does not define ``sample``.

    Source: Glauber (1963), https://doi.org/10.1063/1.1703954, with all spins at once (Little 1974,
    https://doi.org/10.1016/0025-5564(74)90031-5).
    """
    require_instance("site", site, Site, "a solvers.Site")
    shapes = {"field": "(N, d)", "spins": "(chains, N, d)", "couplings": "(N, N)"}
    for (name, shape), value in zip(shapes.items(), (field, spins, couplings), strict=True):
        if not isinstance(value, Tensor) or value.dim() != 1 + shape.count(","):
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{name} must have the shape {shape}, got {got}")
    check_network(spins, field.expand(len(spins), -1, -1), couplings, None, start="spins")
    check_finite(spins=spins, field=field, couplings=couplings)
    with torch.no_grad():
        means = [spins.mean(0)]
        for _ in range(require_count("steps", steps)):
            spins = site.sample(field + drive(couplings, spins), generator)
            means.append(spins.mean(0))
    return GlauberRun(torch.stack(means), spins)
