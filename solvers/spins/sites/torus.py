"""A product of circles: angles that are independent until a field or couplings tie them."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from solvers.core.checks import require_count
from solvers.spins.sites.site import Site
from solvers.spins.sites.spherical import SphericalSite

BACKWARD_STEPS = 40  # of the recurrence of Bessel ratios, from an order where a bound is enough
FORWARD_FROM = 30.0  # above this |h|^2 the recurrence of the ratios loses no digits upwards
SERIES_FROM = 400.0  # above this |h|^2 the asymptotic series of the radial variance is exact
TINY = 1e-18  # I_1(r) / r is 1/2 there, where 0 / 0 is not


def _radial_series(terms: int) -> list[float]:
    """``c_n`` of ``1 - A/r - A^2 = sum_n c_n r^{-n-2}``, from ``A' = 1 - A/r - A^2`` order by order."""
    ratio = [1.0]  # a_n of A = sum_n a_n r^-n; that of A' at r^-n is -(n - 1) a_{n-1}
    for n in range(1, terms + 1):
        products = sum(ratio[k] * ratio[n - k] for k in range(1, n))
        ratio.append(((n - 2) * ratio[n - 1] - products) / 2)
    return [-n * each for n, each in enumerate(ratio)][1:]


SERIES = _radial_series(30)


class TorusSite(Site):
    r"""c unit circles, uniform: ``S = (cos a_1, sin a_1, ..., cos a_c, sin a_c)``, d = 2c, ``|S|^2 = c``.

    For V = 0 every circle is a von Mises distribution of its own; with ``h_k`` the two components of
    the field on circle k, and ``r_k = |h_k|``::

        log Z = sum_k log I_0(r_k),   mean_k = I_1(r_k) / I_0(r_k) h_k / r_k

    A V within the circles (2 x 2 blocks on the diagonal) is that of
    ``SphericalSite(1.0)``, circle by circle. One that couples circles has no closed form.

    Args:
        circles: c; None: d / 2.

    Raises:
        ValueError: if the field has not 2c components; for a V that couples two circles.

    ``log_partition`` is 0 at ``h = 0, V = 0``.

    Source: Mardia and Jupp (2000), "Directional Statistics", section 3.5.4,
    https://doi.org/10.1002/9780470316979, for the von Mises distribution.
    """

    values: ClassVar[str] = "of length 1 on every circle"

    def __init__(self, circles: int | None = None) -> None:
        super().__init__()
        self.circles = None if circles is None else require_count("circles", circles)
        self.circle = SphericalSite(1.0)

    def log_partition(self, field: Tensor, variance: Tensor) -> Tensor:
        parts = self._parts(field)
        blocks = _blocks(variance, field)
        if blocks is None:
            return LogBessel.apply(parts).sum(-1)
        return self.circle.log_partition(parts.flatten(1, 2), blocks).view(parts.shape[:-1]).sum(-1)

    def mean(self, field: Tensor, variance: Tensor) -> Tensor:
        parts = self._parts(field)
        blocks = _blocks(variance, field)
        if blocks is None:
            return CircleMean.apply(parts).flatten(-2)
        return self.circle.mean(parts.flatten(1, 2), blocks).view(field.shape)

    def moments(self, field: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        parts = self._parts(field)
        blocks = _blocks(variance, field)
        if blocks is not None:
            mean, covariance = self.circle.moments(parts.flatten(1, 2), blocks)
            return mean.view(field.shape), _on_diagonal(covariance.view(*parts.shape, 2))
        return CircleMean.apply(parts).flatten(-2), _on_diagonal(_covariance(parts))

    def sample(
        self,
        field: Tensor,
        generator: torch.Generator | None = None,
        variance: Tensor | None = None,
    ) -> Tensor:
        """Angles of von Mises distributions, drawn circle by circle.

        Raises:
            NotImplementedError: for a V that is not zero.
        """
        if variance is not None and bool(without_copies(variance).any()):
            raise NotImplementedError(
                "TorusSite draws samples at variance 0 alone, got another one"
            )
        return self.circle.sample(self._parts(field).flatten(-3, -2), generator).view(field.shape)

    def takes(self, states: Tensor) -> Tensor:
        """Of length 1 on every circle."""
        return self.circle.takes(self._parts(states)).all(-1)

    def _parts(self, field: Tensor) -> Tensor:
        """(..., N, c, 2)."""
        dim = field.shape[-1]
        circles = dim // 2 if self.circles is None else self.circles
        if dim != 2 * circles or dim == 0:
            wanted = "an even number of" if self.circles is None else f"{2 * circles}"
            raise ValueError(f"TorusSite takes fields of {wanted} components, got d = {dim}")
        return field.unflatten(-1, (circles, 2))

    def extra_repr(self) -> str:
        return f"circles={self.circles}"


class BesselRatio(torch.autograd.Function):
    r"""``g_v(s) = I_{v+1}(r) / (r I_v(r))``, ``r = sqrt s``: smooth in s >= 0, with all its derivatives.

    ``dg_v/ds = g_v (g_{v+1} - g_v) / 2`` and ``1 / g_v = 2 (v + 1) + s g_{v+1}``. An s that overflows
    counts as the largest number.
    """

    @staticmethod
    def forward(square: Tensor, order: int) -> Tensor:
        square = square.clamp_max(torch.finfo(square.dtype).max)
        root = square.sqrt().clamp_min(TINY)
        large = torch.special.i1e(root) / (torch.special.i0e(root) * root)
        if order == 0:
            return large
        for v in range(order):
            large = (1 / large - 2 * (v + 1)) / square.clamp_min(FORWARD_FROM)
        top = order + BACKWARD_STEPS
        small = 1 / (top + 0.5 + ((top + 1.5) ** 2 + square).sqrt())  # a bound of Amos
        for v in reversed(range(order, top)):
            small = 1 / (2 * (v + 1) + square * small)
        return torch.where(square < FORWARD_FROM, small, large)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        square, ctx.order = inputs
        ctx.save_for_backward(square)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None]:
        (square,) = ctx.saved_tensors
        ratio = BesselRatio.apply(square, ctx.order)
        higher = BesselRatio.apply(square, ctx.order + 1)
        slope = ratio * (higher - ratio)
        if ctx.order == 0:  # the two ratios agree in all digits for large s
            strong = square.clamp_min(FORWARD_FROM)
            slope = torch.where(
                square < FORWARD_FROM, slope, (RadialVariance.apply(strong) - ratio) / strong
            )
        return cotangents[0] * slope / 2, None


class RadialVariance(torch.autograd.Function):
    r"""``1 - A/r - A^2`` with ``A = I_1(r) / I_0(r)``, ``r = sqrt s``: the variance along the field.

    For ``s >= FORWARD_FROM``. It falls as ``1 / (2 s)``, which the formula loses; an asymptotic series
    in ``1 / r`` keeps it. ``dv/ds = g_0 (g_0 - g_1) / 2 - g_0 v``.
    """

    @staticmethod
    def forward(square: Tensor) -> Tensor:
        s = square.clamp_max(torch.finfo(square.dtype).max).double()
        ratio = BesselRatio.apply(s, 0)
        inverse = s.clamp_min(SERIES_FROM).rsqrt()
        series = torch.zeros_like(s)
        for coefficient in reversed(SERIES):
            series = series * inverse + coefficient
        direct = 1 - ratio - s * ratio.square()
        return torch.where(s < SERIES_FROM, direct, series * inverse.square()).to(square.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        (square,) = ctx.saved_tensors
        ratio, variance = BesselRatio.apply(square, 0), RadialVariance.apply(square)
        return cotangents[0] * ((ratio - variance) / (2 * square) - ratio * variance)


class CircleMean(torch.autograd.Function):
    """``I_1(r) / I_0(r) h / r`` of fields h (..., 2), whose derivative is :func:`_covariance`."""

    @staticmethod
    def forward(parts: Tensor) -> Tensor:
        root = _radius(parts).clamp_min(TINY)
        return (torch.special.i1e(root) / torch.special.i0e(root)).unsqueeze(-1) * (
            parts / root.unsqueeze(-1)
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        (parts,) = ctx.saved_tensors
        return (_covariance(parts) @ cotangents[0].unsqueeze(-1)).squeeze(-1)


class LogBessel(torch.autograd.Function):
    """``log I_0(|h|)`` of fields h (..., 2), whose derivative is :class:`CircleMean`."""

    @staticmethod
    def forward(parts: Tensor) -> Tensor:
        root = _radius(parts)
        return torch.special.i0e(root).log() + root

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        (parts,) = ctx.saved_tensors
        return cotangents[0].unsqueeze(-1) * CircleMean.apply(parts)


def _radius(parts: Tensor) -> Tensor:
    """``|h|`` of (..., 2), also where its square would overflow."""
    return torch.hypot(*parts.unbind(-1))


def _covariance(parts: Tensor) -> Tensor:
    """Of circles in fields h (..., 2): (..., 2, 2), differentiable.

    ``g_0`` across the field and :class:`RadialVariance` along it. Near 0, where there is no direction,
    ``g_0 1 + g_0 (g_1 - g_0) h h^T``.
    """
    square = parts.square().sum(-1, keepdim=True)
    weak = square < FORWARD_FROM
    near = torch.where(weak, parts, 0.0)
    near_square = torch.where(weak, square, 0.0)
    ratio, higher = BesselRatio.apply(near_square, 0), BesselRatio.apply(near_square, 1)
    unit = torch.eye(2, dtype=parts.dtype, device=parts.device)
    slope = (ratio * (higher - ratio)).unsqueeze(-1)
    around = ratio.unsqueeze(-1) * unit + slope * near.unsqueeze(-1) * near.unsqueeze(-2)
    far = torch.where(weak, 1.0, square)
    along = torch.where(weak, 0.0, parts) * far.rsqrt()
    across = torch.stack([-along[..., 1], along[..., 0]], -1)  # orthogonal in every digit
    beyond = BesselRatio.apply(far, 0).unsqueeze(-1) * across.unsqueeze(-1) * across.unsqueeze(-2)
    radial = RadialVariance.apply(far.clamp_min(FORWARD_FROM)).unsqueeze(-1)
    beyond = beyond + radial * along.unsqueeze(-1) * along.unsqueeze(-2)
    return torch.where(weak.unsqueeze(-1), around, beyond)


def _blocks(variance: Tensor, field: Tensor) -> Tensor | None:
    """The 2 x 2 blocks of V on the diagonal, (B, N c, 2, 2); None where V is zero.

    Sites with entries that are not finite between circles get blocks of NaN.

    ValueError where V has another shape than the field asks for, or couples circles.
    """
    if variance.shape != (*field.shape, field.shape[-1]):
        raise ValueError(
            f"variance must have the shape {(*field.shape, field.shape[-1])} to go with the field, "
            f"got {tuple(variance.shape)}"
        )
    if not variance.requires_grad and not bool(without_copies(variance).any()):
        return None
    batch, sites, dim = variance.shape[:3]
    split = variance.reshape(batch, sites, dim // 2, 2, dim // 2, 2)
    inside = split.diagonal(dim1=2, dim2=4).permute(0, 1, 4, 2, 3)
    apart = torch.eye(dim // 2, dtype=torch.bool, device=variance.device).logical_not()
    between = split.detach().masked_fill(~apart[:, None, :, None], 0.0)
    if bool((between.isfinite() & (between != 0)).any()):
        raise ValueError(
            "variance must not couple different circles of a TorusSite, got one that does"
        )
    broken = between.isfinite().logical_not().flatten(2).any(-1)
    return inside.masked_fill(broken[..., None, None, None], torch.nan).reshape(batch, -1, 2, 2)


def without_copies(tensor: Tensor) -> Tensor:
    """The same entries, each once where the tensor was expanded."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _on_diagonal(blocks: Tensor) -> Tensor:
    """(B, N, c, 2, 2) -> (B, N, 2c, 2c), zeros between circles."""
    *lead, circles, _, _ = blocks.shape
    unit = torch.eye(circles, dtype=blocks.dtype, device=blocks.device)
    return torch.einsum("...kab,kl->...kalb", blocks, unit).reshape(*lead, 2 * circles, 2 * circles)
