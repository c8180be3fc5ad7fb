"""The gain-free norm inside energies, and projections whose spectral norm can be bounded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from implicit_attn.energies.checks import check_count, check_positive
from implicit_attn.energies.tokens import accumulation_dtype


@dataclass(frozen=True)
class RMSNorm:
    """``y_hat = y / r`` with ``r = sqrt(mean(y^2) + epsilon)`` over the last dimension, no gain.

    Its Jacobian is symmetric, ``(I - y_hat y_hat^T / p) / r`` for width p, so one product serves
    both directions. An epsilon near zero makes an energy kinked where a projection vanishes, and
    minimisers sit at the kinks; for equilibrium layers epsilon is a modelling choice of order 1.

    Args:
        epsilon: finite, > 0.
    """

    epsilon: float = 1.0

    def __post_init__(self) -> None:
        check_positive(self.epsilon, "epsilon")

    def normalise(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """``y`` (..., p) -> ``y_hat`` (..., p) and ``r`` (..., 1), in the dtype of ``y``."""
        radius = self.mean_square(y).sqrt().to(y.dtype)
        return y / radius, radius

    def mean_square(self, y: Tensor) -> Tensor:
        """``r^2 = mean(y^2) + epsilon``, (..., 1), in float32 or wider."""
        wide = y.to(accumulation_dtype(y.dtype))
        return wide.square().mean(-1, keepdim=True) + self.epsilon

    @staticmethod
    def jacobian_product(unit: Tensor, radius: Tensor, g: Tensor) -> Tensor:
        """Jacobian at ``unit = y_hat``, ``radius = r`` times ``g`` (..., p), either way round.

        ``(g - y_hat mean(g y_hat)) / r``.
        """
        along = (g * unit).mean(-1, keepdim=True)
        return torch.addcmul(g, unit, along, value=-1.0) / radius

    @staticmethod
    def hessian_product(
        unit: Tensor, radius: Tensor, g: Tensor, curved: Tensor, v: Tensor
    ) -> Tensor:
        """Hessian of ``E(y / r)`` by y times ``v``, all of shape (..., p) but ``radius``.

        With g the gradient of E at ``y_hat``, ``curved`` its Hessian there times the Jacobian times
        v, ``m = mean(g y_hat)`` and ``c = mean(v y_hat)``, it is
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


def check_norm(norm: RMSNorm | None) -> RMSNorm | None:
    """``norm`` must be an ``RMSNorm`` or None."""
    if norm is not None and not isinstance(norm, RMSNorm):
        raise TypeError(f"norm must be RMSNorm(epsilon=...) or None, got {norm!r}")
    return norm


class SpectralBound(nn.Module):
    """Parametrisation ``W -> W min(1, bound / sigma)``, ``sigma`` the largest singular value.

    A function of the weight alone, the same in training and evaluation, so the energy does not
    change during a solve. Exact and differentiable; it costs a singular value decomposition per
    read, so a layer reads under ``torch.nn.utils.parametrize.cached()`` around a solve.

    Args:
        bound: finite, > 0.
    """

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.bound = check_positive(bound, "bound")

    def forward(self, weight: Tensor) -> Tensor:
        wide = weight.to(accumulation_dtype(weight.dtype))
        sigma = torch.linalg.matrix_norm(wide, ord=2)
        # Dividing by max(sigma, bound) keeps a zero weight free of 0 / 0.
        return weight * (self.bound / sigma.clamp_min(self.bound)).to(weight.dtype)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Assigning a weight stores it as it is; reading bounds it."""
        return weight

    def extra_repr(self) -> str:
        return f"bound={self.bound}"


class Projection(nn.Module):
    """A weight (rows, dim) that maps states ``z`` (..., dim) to ``z W^T`` and gradients back.

    Entries start from N(0, 1/dim), which keeps projections of states of order 1 at order 1.

    Args:
        dim: features of the state.
        rows: features of the projection.
        bound: bound on the largest singular value, or None.
    """

    weight: Tensor

    def __init__(self, dim: int, rows: int, bound: float | None = None) -> None:
        super().__init__()
        dim, rows = check_count(dim, "dim"), check_count(rows, "rows")
        self.weight = nn.Parameter(torch.randn(rows, dim) * dim**-0.5)
        if bound is not None:
            parametrize.register_parametrization(self, "weight", SpectralBound(bound))

    def extra_repr(self) -> str:
        rows, dim = self.weight.shape
        return f"dim={dim}, rows={rows}"
