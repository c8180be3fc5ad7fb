"""Distributions of one spin in a field and a cavity variance.

:class:`Site` is the interface of the Ising, Potts, Gaussian, spherical and torus sites.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from solvers.core.checks import (
    require_choice,
    require_count,
    require_flag,
    require_instance,
    require_positive,
)
from solvers.core.modes import ordinary, recording, without_autocast
from solvers.spins.inputs import as_wide
from solvers.spins.spheres import (
    CircleMean,
    LogBessel,
    LogPartition,
    Moments,
    circle_covariance,
    eigen,
    saddle_point,
)


class Site(nn.Module):
    r"""A single-site distribution ``rho(S)`` on vectors of d components, tilted by ``h`` and ``V``::

        log Z(h, V) = log int rho(S) exp(h.S + 1/2 S^T V S) dS
        mean = d log Z / dh,   covariance = d^2 log Z / dh^2

    A subclass must define ``log_partition``; mean and covariance are then computed by automatic
    differentiation (d + 1 backward passes), to any order. Parameters of the module receive gradients.
    :func:`solvers.gibbs` also needs ``sample`` and, if the sites differ, ``at``; it rejects states for
    which ``takes`` is False. The free energies of coupled sites need ``log Z`` with all terms that
    depend on V, including those that do not change the moments.

    The class attribute ``values`` describes the values of S in error messages.

    Shapes: ``field`` (B, N, d), symmetric ``variance`` (B, N, d, d) -> ``log_partition`` (B, N),
    ``mean`` (B, N, d), ``covariance`` (B, N, d, d), with independent sites. If a site cannot be
    normalised, ``log_partition`` is NaN or infinite and the solver rejects the step.
    """

    values: ClassVar[str] = "vectors"

    def log_partition(self, field: Tensor, variance: Tensor) -> Tensor:
        """Return ``log Z`` of every site, (B, N)."""
        raise NotImplementedError(
            f"{type(self).__name__} must define log_partition(field, variance)"
        )

    def mean(self, field: Tensor, variance: Tensor) -> Tensor:
        """Return ``d log Z / dh``, (B, N, d)."""
        if type(self).moments is not Site.moments:
            return self.moments(field, variance)[0]
        return self._derivatives(field, variance, 1)[0]

    def covariance(self, field: Tensor, variance: Tensor) -> Tensor:
        """Return ``d^2 log Z / dh^2``, (B, N, d, d)."""
        return self.moments(field, variance)[1]

    def moments(self, field: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and covariance from one evaluation."""
        if type(self).mean is not Site.mean and type(self).covariance is not Site.covariance:
            return self.mean(field, variance), self.covariance(field, variance)
        mean, covariance = self._derivatives(field, variance, 2)
        return mean, covariance

    def sample(self, field: Tensor, generator: Generator | None = None) -> Tensor:
        """Draw every site from ``rho(S) exp(h.S)``, (..., N, d) like the field, without gradients."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot draw samples: it must define sample(field, generator)"
        )

    def at(self, index: int) -> Site:
        """Return the distribution of site ``index``, which is ``self`` unless the sites differ."""
        return self

    def takes(self, states: Tensor) -> Tensor:
        """Return whether ``states`` (..., d) are values of S up to rounding, (...) bool."""
        return states.new_ones(states.shape[:-1], dtype=torch.bool)

    def _derivatives(self, field: Tensor, variance: Tensor, order: int) -> list[Tensor]:
        """Return mean and, for ``order`` 2, covariance by autograd; NaN where log Z is not finite."""
        outer = torch.is_grad_enabled()
        with recording():
            point, variance = ordinary(field), ordinary(variance)
            if not (outer and point.requires_grad):  # else in the caller's graph
                point = point.detach().requires_grad_()
            value = self._value(point, variance)
            keep = outer or order == 2
            found = list(torch.autograd.grad(value.sum(), point, create_graph=keep))
            if order == 2:
                found.append(_curvature(found[0], point, outer))
        exists = value.detach().isfinite()[..., None]
        found[0] = torch.where(exists, found[0], torch.nan)
        found[1:] = [torch.where(exists.unsqueeze(-1), tensor, torch.nan) for tensor in found[1:]]
        return found if outer else [tensor.detach() for tensor in found]

    def _value(self, point: Tensor, variance: Tensor) -> Tensor:
        """Return ``log Z`` after checking the implementation of a subclass."""
        value = self.log_partition(point, variance)
        name = f"log_partition of {type(self).__name__}"
        if not isinstance(value, Tensor) or value.shape != point.shape[:-1]:
            came = tuple(value.shape) if isinstance(value, Tensor) else type(value)
            shape = tuple(point.shape[:-1])
            raise ValueError(f"{name} must return one number per site, shape {shape}, got {came}")
        if not value.requires_grad:
            raise ValueError(f"{name} must be a differentiable function of the field")
        return value


def _curvature(mean: Tensor, point: Tensor, outer: bool) -> Tensor:
    """Return the symmetrised Jacobian ``d mean / d point``, (B, N, d, d), computed row by row."""
    if not mean.requires_grad:
        return mean.new_zeros(*mean.shape, mean.shape[-1])
    options: dict[str, Any] = {
        "retain_graph": True,
        "create_graph": outer,
        "materialize_grads": True,
    }
    rows = [torch.autograd.grad(each.sum(), point, **options)[0] for each in mean.unbind(-1)]
    hessian = torch.stack(rows, dim=-2)
    return (hessian + hessian.mT) / 2


class IsingSite(Site):
    """``S = +1`` or ``-1`` with equal prior weights, d = 1::

        log Z = log cosh h + V / 2,   mean = tanh h,   covariance = 1 - tanh^2 h

    ``V`` drops out of the moments, since ``S^2 = 1``.

    Raises:
        ValueError: if the field has d != 1.
    """

    values: ClassVar[str] = "+1 or -1"

    def log_partition(self, field: Tensor, variance: Tensor) -> Tensor:
        _check_scalar(field)
        # log cosh h without overflow, smooth at 0.
        h = field[..., 0]
        log_cosh = F.softplus(2 * h) - h - math.log(2.0)
        return log_cosh + variance[..., 0, 0] / 2

    def mean(self, field: Tensor, variance: Tensor) -> Tensor:
        _check_scalar(field)
        return torch.tanh(field)

    def covariance(self, field: Tensor, variance: Tensor) -> Tensor:
        _check_scalar(field)
        # 4 sigma(2h) sigma(-2h) keeps its digits where tanh h is 1 to rounding.
        return (4 * torch.sigmoid(2 * field) * torch.sigmoid(-2 * field)).unsqueeze(-1)

    @torch.no_grad()
    def sample(self, field: Tensor, generator: Generator | None = None) -> Tensor:
        _check_scalar(field)
        up = torch.sigmoid(2 * as_wide(field))
        drawn = torch.rand(up.shape, generator=generator, dtype=up.dtype, device=up.device)
        return torch.where(drawn < up, 1.0, -1.0).to(field.dtype)

    def takes(self, states: Tensor) -> Tensor:
        """Return where the states are +1 or -1."""
        return (states.abs() == 1).all(-1)


class PottsSite(Site):
    """One of d states, one-hot, with equal prior weights::

        log Z = lse(h + diag(V)/2) - log d,   mean = softmax(h + diag(V)/2),
        covariance = diag(mean) - mean mean^T

    The covariance is singular along (1, ..., 1), but no solver needs its inverse.
    """

    values: ClassVar[str] = "one-hot"

    def log_partition(self, field: Tensor, variance: Tensor) -> Tensor:
        return torch.logsumexp(_logits(field, variance), dim=-1) - math.log(field.shape[-1])

    def mean(self, field: Tensor, variance: Tensor) -> Tensor:
        return torch.softmax(_logits(field, variance), dim=-1)

    def moments(self, field: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.mean(field, variance)
        products = mean.unsqueeze(-1) * mean.unsqueeze(-2)
        unit = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
        outside = products * (1 - unit)
        # m_a (1 - m_a) as a sum over the other states is exact even if m_a rounds to 1.
        return mean, torch.diag_embed(outside.sum(-1)) - outside

    @torch.no_grad()
    def sample(self, field: Tensor, generator: Generator | None = None) -> Tensor:
        """Draw state a with probability ``softmax(h)_a``, one-hot."""
        with without_autocast(field.device.type):
            states = draw_states(as_wide(field).movedim(-1, 0), generator)
        return torch.zeros_like(field).scatter_(-1, states.unsqueeze(-1), 1.0)

    def takes(self, states: Tensor) -> Tensor:
        """Return where the states are one-hot."""
        return ((states == 0) | (states == 1)).all(-1) & (states.sum(-1) == 1)


def draw_states(logits: Tensor, generator: Generator | None) -> Tensor:
    """Draw states (...) with probabilities ``softmax(logits)`` over dim 0 of (d, ...), by inversion."""
    reached = (logits - logits.amax(0)).exp_().cumsum(0)
    like = {"generator": generator, "dtype": logits.dtype, "device": logits.device}
    drawn = torch.rand(logits.shape[1:], **like)
    # "<=" without comparing the last state never draws a state of zero weight.
    return (reached[:-1] <= drawn * reached[-1]).sum(0)


def _logits(field: Tensor, variance: Tensor) -> Tensor:
    return field + variance.diagonal(dim1=-2, dim2=-1) / 2


def _check_scalar(field: Tensor) -> None:
    if (dim := field.shape[-1]) != 1:
        raise ValueError(f"IsingSite needs spins with one component, d = 1, got d = {dim}")


class GaussianSite(Site):
    r"""``S ~ N(0, Sigma)``::

        covariance = (Sigma^-1 - V)^-1,   mean = covariance h,
        log Z = 1/2 h^T covariance h - 1/2 log det(I - Sigma V)

    The results are NaN where ``Sigma^-1 - V`` is not positive definite.

    Args:
        covariance: ``Sigma``, (d, d) or (N, d, d), symmetric positive definite. A ``nn.Parameter`` is
            registered as a parameter, another tensor as a buffer; both receive gradients.

    Raises:
        TypeError, ValueError: if the shape or dtype is invalid or the matrix is not a covariance.
    """

    sigma: Tensor

    def __init__(self, covariance: Tensor) -> None:
        super().__init__()
        _check_covariance(covariance)
        if isinstance(covariance, nn.Parameter):
            self.sigma = covariance
        else:
            self.register_buffer("sigma", covariance.contiguous())

    def log_partition(self, field: Tensor, variance: Tensor) -> Tensor:
        half, factor = self._factors(field, variance)
        inner = torch.linalg.solve_triangular(factor, half.mT @ field.unsqueeze(-1), upper=False)
        log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return inner.square().sum((-2, -1)) / 2 - log_det

    def covariance(self, field: Tensor, variance: Tensor) -> Tensor:
        half, factor = self._factors(field, variance)
        rows = torch.linalg.solve_triangular(factor, half.mT.expand_as(factor), upper=False)
        return rows.mT @ rows

    def moments(self, field: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        covariance = self.covariance(field, variance)
        return (covariance @ field.unsqueeze(-1)).squeeze(-1), covariance

    @torch.no_grad()
    def sample(self, field: Tensor, generator: Generator | None = None) -> Tensor:
        """Draw ``Sigma h + A e`` with standard normal e."""
        with without_autocast(field.device.type):
            h = as_wide(field)
            drawn = torch.randn(h.shape, generator=generator, dtype=h.dtype, device=h.device)
            half = torch.linalg.cholesky(self._sigma_for(h))
            inner = half.mT @ h.unsqueeze(-1) + drawn.unsqueeze(-1)
            return (half @ inner).squeeze(-1).to(field.dtype)

    def at(self, index: int) -> GaussianSite:
        """Return the Gaussian of site ``index``."""
        return self if self.sigma.dim() == 2 else GaussianSite(self.sigma[index].detach())

    def _sigma_for(self, field: Tensor) -> Tensor:
        sigma, (sites, dim) = self.sigma.to(field.dtype), field.shape[-2:]
        if sigma.shape[-1] != dim or (sigma.dim() == 3 and len(sigma) != sites):
            raise ValueError(
                f"covariance must suit sites (N, d) = {(sites, dim)}, got {tuple(sigma.shape)}"
            )
        return sigma

    def _factors(self, field: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``A`` and the Cholesky factor of ``I - A^T V A``, NaN where it is indefinite."""
        half, _ = torch.linalg.cholesky_ex(self._sigma_for(field))
        unit = torch.eye(field.shape[-1], dtype=half.dtype, device=half.device)
        factor, failed = torch.linalg.cholesky_ex(unit - half.mT @ variance @ half)
        return half, torch.where((failed == 0)[..., None, None], factor, torch.nan)

    def extra_repr(self) -> str:
        return f"covariance={tuple(self.sigma.shape)}"


def _check_covariance(covariance: object) -> None:
    if not isinstance(covariance, Tensor) or not covariance.is_floating_point():
        what = covariance.dtype if isinstance(covariance, Tensor) else type(covariance)
        raise TypeError(f"covariance must be a floating-point tensor, got {what}")
    if covariance.dim() not in (2, 3) or covariance.shape[-1] != covariance.shape[-2]:
        got = tuple(covariance.shape)
        raise ValueError(f"covariance must have the shape (d, d) or (N, d, d), got {got}")
    matrix = as_wide(covariance.detach())
    allowed = 32 * torch.finfo(covariance.dtype).eps * matrix.abs().max()
    apart = float((matrix - matrix.mT).abs().max())
    if not math.isfinite(apart):
        raise ValueError("covariance must be finite, got NaN or infinity")
    if apart > allowed:
        raise ValueError(f"covariance must be symmetric, got a difference of {apart}")
    indefinite = torch.linalg.cholesky_ex(matrix)[1].reshape(-1).nonzero().flatten().tolist()
    if indefinite:
        where = f" at sites {indefinite[:10]}" if covariance.dim() == 3 else ""
        raise ValueError(f"covariance must be positive definite, got an indefinite matrix{where}")


def draw_directions(field: Tensor, generator: Generator | None) -> Tensor:
    r"""Draw unit vectors (K, d) with densities ``exp(field.u)``, d >= 2, by Wood's rejection sampling.

    A uniform direction g has the component t along the field and an independent uniform direction
    across it. With ``k = |field|`` and ``b = (d-1) / (2k + sqrt(4k^2 + (d-1)^2))`` the proposal is::

        w = ((1+b) t + 1-b) / ((1-b) t + 1+b)

    along the field; it is accepted with probability ``exp(k w + (d-1) log(1 - x w) - c)``, where
    ``x = (1-b)/(1+b)`` and c is the maximum of the other terms. At least about two thirds of the proposals
    are accepted, for any d and k.
    """
    size = field.norm(dim=-1)
    axis = torch.zeros_like(field)
    axis[:, 0] = 1.0  # an arbitrary direction without a field
    axis = torch.where((size > 0).unsqueeze(-1), field / size.unsqueeze(-1), axis)
    found = torch.full_like(field, torch.nan)
    rows = torch.nonzero(field.isfinite().all(-1)).flatten()  # NaN stays NaN
    while rows.numel():
        drawn, accepted = _propose(axis[rows], size[rows], generator)
        found[rows[accepted]] = drawn[accepted]
        rows = rows[~accepted]
    return found


def _propose(axis: Tensor, size: Tensor, generator: Generator | None) -> tuple[Tensor, Tensor]:
    """Return proposals (K, d) and whether they are accepted (K,)."""
    like = {"generator": generator, "dtype": axis.dtype, "device": axis.device}
    normal, uniform = torch.randn(axis.shape, **like), torch.rand(size.shape, **like)
    rest = axis.shape[-1] - 1
    along = (normal * axis).sum(-1)
    across = normal - along.unsqueeze(-1) * axis
    across = across - (across * axis).sum(-1, keepdim=True) * axis  # again, against rounding
    t = along / normal.norm(dim=-1)
    b = rest / (2 * size + torch.hypot(2 * size, torch.full_like(size, float(rest))))
    below = b * (1 - t) / ((1 + b) + (1 - b) * t) * 2  # 1 - w, without cancellation
    w = 1 - below
    # Differences of 1 - w and 1 - x, unlike those of w and x, keep their digits in strong fields.
    x, gap = (1 - b) / (1 + b), 2 * b / (1 + b)
    ratio = (below + w * gap) / (gap * (1 + x))
    accepted = size * (gap - below) + rest * ratio.log() >= uniform.log()
    radial = (below * (1 + w)).clamp_min(0).sqrt()
    direction = across / across.norm(dim=-1, keepdim=True)
    return w.unsqueeze(-1) * axis + radial.unsqueeze(-1) * direction, accepted


ROUNDED = 0.01  # relative deviation of a given spin's length from the radius that is accepted


class SphericalSite(Site):
    r"""Uniform distribution on the sphere ``|S| = radius`` in d dimensions.

    For V = 0, with ``t = radius |h|``::

        mean = radius I_{d/2}(t) / I_{d/2-1}(t) h / |h|

    An isotropic V drops out. Other V give a Fisher-Bingham distribution, computed by a quadrature that
    is stable for all fields and dimensions (:mod:`solvers.spins.spheres`), at the cost of one
    eigendecomposition of V per site.

    ``large_dimension=True`` replaces the integral by its saddle point: ``mean = X h``,
    ``X = (lambda - V)^-1``, ``lambda`` from ``tr X + |X h|^2 = radius^2``. For V = 0 and radius
    ``sqrt d`` this is ``mean = 2 h / (1 + sqrt(1 + 4 |h|^2 / d))``; the relative error is O(1/d).

    Args:
        radius: radius > 0; None for ``sqrt d``.
        large_dimension: whether to use the saddle point.

    ``log_partition`` is 0 at ``h = 0, V = 0``.

    Source: Mardia and Jupp (2000), "Directional Statistics", section 9.3,
    https://doi.org/10.1002/9780470316979; Bal (2021), "Deep Implicit Attention", for large d.
    """

    values: ClassVar[str] = "of length radius (None: sqrt d)"

    def __init__(self, radius: float | None = None, *, large_dimension: bool = False) -> None:
        super().__init__()
        if radius is not None:
            require_positive("radius", radius)
        self.radius = radius
        self.large_dimension = require_flag("large_dimension", large_dimension)

    def log_partition(self, field: Tensor, variance: Tensor) -> Tensor:
        rho, origin = self.squared_radius(field.shape[-1]), torch.zeros_like(field)
        if self.large_dimension:
            at_zero = _saddle(origin, torch.zeros_like(variance), rho)[0]
            return _saddle(field, variance, rho)[0] - at_zero
        value = LogPartition.apply(field, _unless_zero(variance), rho)
        return value - LogPartition.apply(origin, None, rho)

    def moments(self, field: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        if self.large_dimension:
            return _saddle(field, variance, self.squared_radius(field.shape[-1]))[1:]
        return Moments.apply(field, _unless_zero(variance), self.squared_radius(field.shape[-1]))

    @torch.no_grad()
    def sample(self, field: Tensor, generator: Generator | None = None) -> Tensor:
        """Draw from the sphere (also with ``large_dimension``) by Wood's rejection sampling.

        Source: Wood (1994), "Simulation of the von Mises Fisher distribution",
        https://doi.org/10.1080/03610919408813161.
        """
        radius = math.sqrt(self.squared_radius(field.shape[-1]))
        with without_autocast(field.device.type):
            flat = as_wide(field).reshape(-1, field.shape[-1])
            drawn = radius * draw_directions(radius * flat, generator)
        return drawn.view_as(field).to(field.dtype)

    def takes(self, states: Tensor) -> Tensor:
        """Return where the states have the length ``radius`` up to 1 %, the rounding of half precision."""
        radius = math.sqrt(self.squared_radius(states.shape[-1]))
        return (states.norm(dim=-1) - radius).abs() <= ROUNDED * radius

    def squared_radius(self, dim: int) -> float:
        """Return ``radius^2`` in d >= 2 dimensions."""
        if dim < 2:
            raise ValueError(f"SphericalSite needs d >= 2, got d = {dim}; use IsingSite")
        return float(dim) if self.radius is None else float(self.radius) ** 2

    def extra_repr(self) -> str:
        return f"radius={self.radius}, large_dimension={self.large_dimension}"


def _unless_zero(variance: Tensor) -> Tensor | None:
    """Return None for a zero V that needs no gradient, which avoids an eigendecomposition."""
    return None if variance.device.type == "cpu" and _is_zero(variance) else variance


def _is_zero(variance: Tensor) -> bool:
    """Return whether V is zero and needs no gradient; an expanded entry is read once."""
    for dim, stride in enumerate(variance.stride()):
        if stride == 0 and variance.shape[dim] > 1:
            variance = variance.narrow(dim, 0, 1)
    return not (variance.requires_grad or bool(variance.any()))


def _saddle(field: Tensor, variance: Tensor, rho: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return log Z up to a constant, mean and covariance at the saddle point ``lambda``.

    ``covariance = X - 2 (X^2 h)(X^2 h)^T / (tr X^2 + 2 h^T X^3 h)``, because lambda depends on h.
    """
    with torch.no_grad():
        eigenvalues, basis = eigen(variance)
        squared = (basis.mT @ field.unsqueeze(-1)).squeeze(-1).square() / 4
        levels = eigenvalues / 2
        gap = saddle_point(levels.expand_as(squared), squared, rho)
        multiplier = 2 * (levels.amax(-1) + gap.amin(-1))
    if torch.is_grad_enabled():
        for _ in range(2):  # each Newton step at the solution adds one order of derivatives
            _, spread, mean, _, slope = _at(multiplier, field, variance)
            size = spread.diagonal(dim1=-2, dim2=-1).sum(-1) + mean.square().sum(-1)
            multiplier = multiplier + (size - rho) / slope
    factor, spread, mean, twice, slope = _at(multiplier, field, variance)
    log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    value = rho * multiplier / 2 - log_det + (field * mean).sum(-1) / 2
    ratio = (2 / slope)[..., None, None]
    return value, mean, spread - ratio * twice.unsqueeze(-1) * twice.unsqueeze(-2)


def _at(multiplier: Tensor, field: Tensor, variance: Tensor) -> tuple[Tensor, ...]:
    """Return the Cholesky factor of ``lambda - V``, ``X``, ``X h``, ``X^2 h``, ``tr X^2 + 2 h^T X^3 h``."""
    unit = torch.eye(field.shape[-1], dtype=field.dtype, device=field.device)
    factor, _ = torch.linalg.cholesky_ex(multiplier[..., None, None] * unit - variance)
    spread = torch.cholesky_inverse(factor)
    mean = (spread @ field.unsqueeze(-1)).squeeze(-1)
    twice = (spread @ mean.unsqueeze(-1)).squeeze(-1)
    return factor, spread, mean, twice, spread.square().sum((-2, -1)) + 2 * (mean * twice).sum(-1)


class TorusSite(Site):
    r"""Uniform on c circles: ``S = (cos a_1, sin a_1, ..., cos a_c, sin a_c)``, d = 2c, ``|S|^2 = c``.

    Each circle has an independent von Mises distribution. With ``h_k`` the two components of the field on
    circle k and ``r_k = |h_k|``::

        log Z = sum_k log I_0(r_k),   mean_k = I_1(r_k) / I_0(r_k) h_k / r_k

    These hold at V = 0, as in the naive mean field. There is no closed form for a V that couples circles;
    for a single circle ``SphericalSite(1.0)`` supports any V.

    Args:
        circles: number of circles c; None for d / 2.

    Raises:
        ValueError: if the field does not have 2c components or V is not zero.

    ``log_partition`` is 0 at ``h = 0``.

    Source: Mardia and Jupp (2000), "Directional Statistics", section 3.5.4,
    https://doi.org/10.1002/9780470316979, for the von Mises distribution.
    """

    values: ClassVar[str] = "of length 1 on every circle"

    def __init__(self, circles: int | None = None) -> None:
        super().__init__()
        self.circles = None if circles is None else require_count("circles", circles)
        self.circle = SphericalSite(1.0)

    def log_partition(self, field: Tensor, variance: Tensor) -> Tensor:
        return LogBessel.apply(self._parts(field, variance)).sum(-1)

    def mean(self, field: Tensor, variance: Tensor) -> Tensor:
        return CircleMean.apply(self._parts(field, variance)).flatten(-2)

    def covariance(self, field: Tensor, variance: Tensor) -> Tensor:
        blocks = circle_covariance(self._parts(field, variance))  # (..., c, 2, 2)
        unit = torch.eye(blocks.shape[-3], dtype=blocks.dtype, device=blocks.device)
        return torch.einsum("...kab,kl->...kalb", blocks, unit).flatten(-4, -3).flatten(-2)

    def sample(self, field: Tensor, generator: Generator | None = None) -> Tensor:
        """Draw angles of von Mises distributions for each circle."""
        return self.circle.sample(self._parts(field).flatten(-3, -2), generator).view(field.shape)

    def takes(self, states: Tensor) -> Tensor:
        """Return where the states have length 1 on every circle."""
        return self.circle.takes(self._parts(states)).all(-1)

    def _parts(self, field: Tensor, variance: Tensor | None = None) -> Tensor:
        """Return the components (..., N, c, 2) of the field on each circle."""
        dim = field.shape[-1]
        circles = dim // 2 if self.circles is None else self.circles
        if dim != 2 * circles or dim == 0:
            wanted = "an even number of" if self.circles is None else f"{2 * circles}"
            raise ValueError(f"TorusSite needs fields with {wanted} components, got d = {dim}")
        if variance is not None and not _is_zero(variance):
            raise ValueError("variance must be zero for a TorusSite, got nonzero values")
        return field.unflatten(-1, (circles, 2))

    def extra_repr(self) -> str:
        return f"circles={self.circles}"


NAMES: dict[str, type[Site]] = {
    "ising": IsingSite,
    "potts": PottsSite,
    "spherical": SphericalSite,
    "torus": TorusSite,
}


def read_site(value: Any) -> Site:
    """Return a site from an instance, a class or a name ("ising")."""
    if isinstance(value, str):
        value = NAMES[require_choice("site", value.lower(), NAMES)]
    if value in NAMES.values():
        value = value()
    return require_instance("site", value, Site, "a solvers.Site such as IsingSite(), or its name")
