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
        blocks = _blocks(variance)
        if blocks is None:
            return LogBessel.apply(parts.square().sum(-1)).sum(-1)
        return self.circle.log_partition(parts.flatten(1, 2), blocks).view(parts.shape[:-1]).sum(-1)

    def mean(self, field: Tensor, variance: Tensor) -> Tensor:
        parts = self._parts(field)
        blocks = _blocks(variance)
        if blocks is None:
            return (BesselRatio.apply(parts.square().sum(-1, keepdim=True), 0) * parts).flatten(-2)
        return self.circle.mean(parts.flatten(1, 2), blocks).view(field.shape)

    def moments(self, field: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        parts = self._parts(field)
        blocks = _blocks(variance)
        if blocks is not None:
            mean, covariance = self.circle.moments(parts.flatten(1, 2), blocks)
            return mean.view(field.shape), _on_diagonal(covariance.view(*parts.shape, 2))
        square = parts.square().sum(-1, keepdim=True)
        ratio, higher = BesselRatio.apply(square, 0), BesselRatio.apply(square, 1)
        unit = torch.eye(2, dtype=field.dtype, device=field.device)
        slope = (ratio * (higher - ratio)).unsqueeze(-1)
        products = parts.unsqueeze(-1) * parts.unsqueeze(-2)
        covariance = ratio.unsqueeze(-1) * unit + slope * products
        return (ratio * parts).flatten(-2), _on_diagonal(covariance)

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

    ``dg_v/ds = g_v (g_{v+1} - g_v) / 2`` and ``1 / g_v = 2 (v + 1) + s g_{v+1}``.
    """

    @staticmethod
    def forward(square: Tensor, order: int) -> Tensor:
        root = square.sqrt().clamp_min(1e-18)  # I_1(r) / r is 1/2 there, where 0 / 0 is not
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
        return cotangents[0] * ratio * (higher - ratio) / 2, None


class LogBessel(torch.autograd.Function):
    """``log I_0(sqrt s)``, whose derivative by s is ``g_0(s) / 2``."""

    @staticmethod
    def forward(square: Tensor) -> Tensor:
        root = square.sqrt()
        return torch.special.i0e(root).log() + root

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        (square,) = ctx.saved_tensors
        return cotangents[0] * BesselRatio.apply(square, 0) / 2


def _blocks(variance: Tensor) -> Tensor | None:
    """The 2 x 2 blocks of V on the diagonal, (B, N c, 2, 2); None where V is zero.

    ValueError where V couples circles.
    """
    if not variance.requires_grad and not bool(without_copies(variance).any()):
        return None
    batch, sites, dim = variance.shape[:3]
    split = variance.reshape(batch, sites, dim // 2, 2, dim // 2, 2)
    inside = split.diagonal(dim1=2, dim2=4).permute(0, 1, 4, 2, 3)
    apart = torch.eye(dim // 2, dtype=torch.bool, device=variance.device).logical_not()
    if bool((split * apart[:, None, :, None]).detach().any()):
        raise ValueError(
            "variance must not couple different circles of a TorusSite, got one that does"
        )
    return inside.reshape(batch, -1, 2, 2)


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
