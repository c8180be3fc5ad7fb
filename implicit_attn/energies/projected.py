"""Energies of projected features, ``E(z) = potential(norm(z W^T))``, with their norm and projection."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from implicit_attn.energies.checks import check_tokens, check_vector
from implicit_attn.energies.energy import Energy
from implicit_attn.energies.tokens import Pair, accumulation_dtype, hide, sum_samples
from solvers.core.checks import require_count, require_instance, require_positive
from solvers.core.modes import without_autocast


@dataclass(frozen=True)
class RMSNorm:
    """RMS norm without gain: ``y_hat = y / r``, ``r = sqrt(mean(y^2) + epsilon)`` over the last dimension.

    Its Jacobian ``(I - y_hat y_hat^T / p) / r`` for width p is symmetric. With an epsilon near zero an
    energy of ``y_hat`` has kinks where a projection vanishes, and its minima lie at the kinks; for
    equilibrium layers choose an epsilon of order 1.

    Args:
        epsilon: finite, > 0.

    Source: Zhang and Sennrich (2019), https://arxiv.org/abs/1910.07467, there with a gain.
    """

    epsilon: float = 1.0

    def __post_init__(self) -> None:
        require_positive("epsilon", self.epsilon)

    def normalise(self, y: Tensor) -> Pair:
        """``y`` (..., p) -> ``y_hat`` (..., p) and ``r`` (..., 1), in the dtype of ``y``."""
        radius = self.mean_square(y).sqrt().to(y.dtype)
        return y / radius, radius

    def mean_square(self, y: Tensor) -> Tensor:
        """``r^2 = mean(y^2) + epsilon``, (..., 1), in float32 or wider."""
        wide = y.to(accumulation_dtype(y.dtype))
        return wide.square().mean(-1, keepdim=True) + self.epsilon

    @staticmethod
    def jacobian_product(unit: Tensor, radius: Tensor, g: Tensor) -> Tensor:
        """Jacobian times ``g``, ``(g - y_hat mean(g y_hat)) / r``; ``unit`` is y_hat, ``radius`` r."""
        along = (g * unit).mean(-1, keepdim=True)
        return torch.addcmul(g, unit, along, value=-1.0) / radius

    @staticmethod
    def hessian_product(
        unit: Tensor, radius: Tensor, g: Tensor, curved: Tensor, v: Tensor
    ) -> Tensor:
        """Hessian of ``E(y / r)`` by y times ``v``.

        With g the gradient of E at ``y_hat``, ``curved = Hessian of E at y_hat * Jacobian * v``,
        ``m = mean(g y_hat)`` and ``c = mean(v y_hat)`` it is
        ``(curved - (m v + c g) / r - y_hat (mean(curved y_hat) + (mean(g v) - 3 m c) / r)) / r``.
        """
        m = (g * unit).mean(-1, keepdim=True) / radius
        c = (v * unit).mean(-1, keepdim=True)
        along = (g * v).mean(-1, keepdim=True) / radius - 3.0 * m * c
        along = along + (curved * unit).mean(-1, keepdim=True)
        total = torch.addcmul(curved, v, m, value=-1.0)
        total = torch.addcmul(total, g, c / radius, value=-1.0)
        return torch.addcmul(total, unit, along, value=-1.0) / radius


SOFT_NORM = RMSNorm(epsilon=1.0)


def check_norm(norm: Any) -> RMSNorm | None:
    return require_instance("norm", norm, RMSNorm, "RMSNorm(epsilon=...)", optional=True)


class SpectralBound(nn.Module):
    """Parametrisation ``W -> W min(1, bound / sigma)``, ``sigma`` the largest singular value.

    Exact and differentiable, the same in training and evaluation. Each read of the weight costs the
    eigenvalues of a Gram matrix; a solve, like ``torch.nn.utils.parametrize.cached()``, takes one.

    Args:
        bound: finite, > 0.
    """

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.bound = require_positive("bound", bound)

    def spectral_norm(self, weight: Tensor) -> Tensor:
        """``sigma``, a scalar in float32 or wider."""
        wide = weight.to(accumulation_dtype(weight.dtype))
        return torch.linalg.matrix_norm(wide, ord=2)

    def forward(self, weight: Tensor) -> Tensor:
        return weight * (self.bound / self.norm_or_bound(weight)).to(weight.dtype)

    def norm_or_bound(self, weight: Tensor) -> Tensor:
        """``max(sigma, bound)``, smooth at a zero weight, too, in float32 or wider."""
        # sigma^2 as an eigenvalue of the smaller Gram matrix takes half the time of singular values. The
        # entries are divided by a bound on them, so that no square over- or underflows.
        wide = weight.to(accumulation_dtype(weight.dtype))
        size = wide.detach().abs().amax().clamp_min(self.bound)
        wide = wide / size
        with without_autocast(weight.device.type):  # whose products are in half precision
            gram = wide @ wide.mT if len(wide) < wide.shape[1] else wide.mT @ wide
            least = (self.bound / size).square()
            return torch.maximum(torch.linalg.eigvalsh(gram)[-1], least).sqrt() * size

    def right_inverse(self, weight: Tensor) -> Tensor:
        """An assigned weight is stored as it is; the bound applies where it is read."""
        return weight

    def extra_repr(self) -> str:
        return f"bound={self.bound}"


class Projection(nn.Module):
    """A weight (rows, dim) that maps states ``z`` (..., dim) to ``z W^T`` and gradients back.

    Entries are drawn from N(0, 1/dim), so a state with entries of order 1 has such projections.

    Args:
        dim: features of the state.
        rows: features of the projection.
        bound: bound on the largest singular value, or None.
    """

    weight: Tensor

    def __init__(self, dim: int, rows: int, bound: float | None = None) -> None:
        super().__init__()
        dim, rows = require_count("dim", dim), require_count("rows", rows)
        self.weight = nn.Parameter(torch.randn(rows, dim) * dim**-0.5)
        if bound is not None:
            parametrize.register_parametrization(self, "weight", SpectralBound(bound))

    def extra_repr(self) -> str:
        rows, dim = self.weight.shape
        return f"dim={dim}, rows={rows}"


def split_heads(y: Tensor, heads: int | None) -> Tensor:
    """(B, N, heads p) -> (B, heads, N, p), contiguous; unchanged for None."""
    if heads is None:
        return y
    batch, tokens, rows = y.shape
    return y.view(batch, tokens, heads, rows // heads).transpose(1, 2).contiguous()


def merge_heads(y: Tensor) -> Tensor:
    """(B, heads, N, p) -> (B, N, heads p)."""
    batch, heads, tokens, width = y.shape
    return y.transpose(1, 2).reshape(batch, tokens, heads * width)


class ProjectedEnergy(Energy):
    """``E(z) = potential(norm(z W^T))``, with gradient and Hessian-vector product in closed form.

    A subclass sets ``projection`` (or overrides ``weight``) and defines the potential of the features:
    its value, its gradient by the features (the force) and its Hessian times a vector. Features and
    gradient are zero at masked tokens; a subclass must leave these out of the value itself.

    Args:
        dim: features d of the state.
        heads: split the features into so many heads, (B, N, d) -> (B, heads, N, rows / heads);
            None: no head dimension, (B, ..., d) -> (B, ..., rows).
        norm: norm over the last dimension of the features, or None.
    """

    projection: Projection

    def __init__(self, dim: int, *, heads: int | None = None, norm: RMSNorm | None = None) -> None:
        super().__init__()
        self.dim, self.heads, self.norm = dim, heads, check_norm(norm)

    @property
    def weight(self) -> Tensor:
        """W (rows, d), read once an evaluation: each read of a bounded weight computes it."""
        return self.projection.weight

    @abstractmethod
    def potential_and_force(self, y: Tensor, mask: Tensor | None) -> Pair:
        """The potential of each sample, (B,), for features ``y``, and its gradient by ``y``."""

    @abstractmethod
    def force_and_curvature(self, y: Tensor, v: Tensor, mask: Tensor | None) -> Pair:
        """The gradient by ``y``, and the Hessian by ``y`` times ``v``."""

    def potential(self, y: Tensor, mask: Tensor | None) -> Tensor:
        return self.potential_and_force(y, mask)[0]

    def force(self, y: Tensor, mask: Tensor | None) -> Tensor:
        return self.potential_and_force(y, mask)[1]

    def value_and_force(self, raw: Tensor, mask: Tensor | None) -> Pair:
        """The potential and its gradient by the features ``raw`` before the norm."""
        if self.norm is None:
            return self.potential_and_force(raw, mask)
        y, radius = self.norm.normalise(raw)
        value, force = self.potential_and_force(y, mask)
        return value, self.norm.jacobian_product(y, radius, force)

    def features(
        self, z: Tensor, *, mask: Tensor | None = None, weight: Tensor | None = None
    ) -> Tensor:
        """``norm(z W^T)``: (B, heads, N, p), or (B, ..., rows) without heads; ``weight`` replaces W."""
        weight = self.weight if weight is None else weight
        return self._features(self._visible(z, mask), weight)[0]

    def straight_gradient(
        self, z: Tensor, *, mask: Tensor | None = None, weight: Tensor | None = None
    ) -> Tensor:
        """The gradient without the norm's derivative: ``dE/dy W`` at ``y = norm(z W^T)``, like ``z``.

        It is zero at masked tokens, and the gradient of no function of z unless the norm is None;
        ``weight`` replaces W.

        Source: Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646, equations 9 and 11.
        """
        z = self._visible(z, mask)
        weight = self.weight if weight is None else weight
        y, _ = self._features(z, weight)
        return self._pull_back(self.force(y, mask), weight, mask).to(z.dtype)

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return self.potential(self.features(z, mask=mask), mask)

    def value_and_grad(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Pair:
        z, weight = self._visible(z, mask), self.weight
        value, force = self.value_and_force(split_heads(F.linear(z, weight), self.heads), mask)
        return value, self._pull_back(force, weight, mask).to(z.dtype)

    def hvp(self, z: Tensor, v: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        z, weight = self._visible(z, mask), self.weight
        check_vector(v, z)
        y, radius = self._features(z, weight)
        raw = split_heads(F.linear(hide(v, mask), weight), self.heads)
        if self.norm is None or radius is None:
            _, curved = self.force_and_curvature(y, raw, mask)
        else:
            tangent = self.norm.jacobian_product(y, radius, raw)
            force, curved = self.force_and_curvature(y, tangent, mask)
            curved = self.norm.hessian_product(y, radius, force, curved, raw)
        return self._pull_back(curved, weight, mask).to(z.dtype)

    def _visible(self, z: Tensor, mask: Tensor | None) -> Tensor:
        tokens = self.heads is not None
        check_tokens(z, mask, type(self).__name__, dim=self.dim, tokens=tokens)
        return hide(z, mask)

    def _features(self, z: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        y = split_heads(F.linear(z, weight), self.heads)
        return (y, None) if self.norm is None else self.norm.normalise(y)

    def _pull_back(self, force: Tensor, weight: Tensor, mask: Tensor | None) -> Tensor:
        force = force if self.heads is None else merge_heads(force)
        return hide(force @ weight, mask)

    def extra_repr(self) -> str:
        return f"norm={self.norm}"


class TokenEnergy(ProjectedEnergy):
    """A function of each token's features, summed over the tokens; no heads."""

    @abstractmethod
    def token_value_and_force(self, y: Tensor) -> Pair:
        """(B, ..., rows) -> the value of each token, (B, ...), and its gradient by ``y``."""

    def potential_and_force(self, y: Tensor, mask: Tensor | None) -> Pair:
        value, force = self.token_value_and_force(y)
        return sum_samples(hide(value, mask)), force
