"""Feed-forward energies: each token falls into memories of its own accord."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.energies.norms import SOFT_NORM, RMSNorm
from implicit_attn.energies.projected import ProjectedEnergy
from implicit_attn.energies.tokens import accumulation_dtype, hide, sum_samples


class MemoryEnergy(ProjectedEnergy):
    """A sum over tokens of a function of ``y = norm(D^T z)``, ``D`` the memories.

    ``projection.weight`` holds ``D^T``, one memory a row.

    Args:
        dim: features d of the tokens.
        memories: number M of memories.
        norm: norm over the M responses of a token, ``RMSNorm(epsilon)`` or None.
        bound: bound on the spectral norm of ``D``, or None.
    """

    def __init__(
        self,
        dim: int,
        memories: int,
        *,
        norm: RMSNorm | None = SOFT_NORM,
        bound: float | None = None,
    ) -> None:
        super().__init__(dim, memories, heads=None, norm=norm, bound=bound)

    @abstractmethod
    def token_potential(self, y: Tensor) -> Tensor:
        """(B, ..., M) -> (B, ...), the value of each token."""

    @abstractmethod
    def token_potential_and_force(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """The value of each token and its gradient by ``y``."""

    def potential(self, y: Tensor, mask: Tensor | None) -> Tensor:
        return sum_samples(hide(self.token_potential(y), mask))

    def potential_and_force(self, y: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        value, force = self.token_potential_and_force(y)
        return sum_samples(hide(value, mask)), force


class ReLUFeedForward(MemoryEnergy):
    """``E = -1/2 sum_i sum_m relu(y_im)^2``, ``y = norm(D^T z)``.

    Negative gradient by z, without norm: ``D relu(D^T z)``, a feed-forward block with tied weights
    (Hyper-SET, arXiv 2502.11646, equation 11, with the full derivative of the norm). Concave in z
    without norm.

    Shapes: ``z`` (B, ..., d); ``x`` is ignored; ``mask`` (B, N) for ``z`` (B, N, ..., d). For the
    arguments see ``MemoryEnergy``.
    """

    def __init__(
        self,
        dim: int,
        memories: int,
        *,
        norm: RMSNorm | None = SOFT_NORM,
        bound: float | None = None,
    ) -> None:
        super().__init__(dim, memories, norm=norm, bound=bound)
        self.concave = norm is None

    def token_potential(self, y: Tensor) -> Tensor:
        return _half_square(F.relu(y))

    def token_potential_and_force(self, y: Tensor) -> tuple[Tensor, Tensor]:
        active = F.relu(y)
        return _half_square(active), -active

    def force(self, y: Tensor, mask: Tensor | None) -> Tensor:
        return -F.relu(y)

    def value_and_force(self, raw: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.norm is None:
            return super().value_and_force(raw, mask)
        # relu(y / r) = relu(y) / r: with a = relu(y), the value is -|a|^2 / 2 r^2 and its gradient
        # (y |a|^2 / (M r^2) - a) / r^2, two passes fewer than through y / r. Tokens that do not
        # count are rows of zeros, and add none.
        active = F.relu(raw)
        square = self.norm.mean_square(raw)
        wide = active.to(square.dtype)
        share = wide.square().sum(-1, keepdim=True) / square
        along = (share / raw.shape[-1]).to(raw.dtype)
        force = torch.addcmul(active, raw, along, value=-1.0) / -square.to(raw.dtype)
        return -0.5 * sum_samples(share), force

    def force_and_curvature(
        self, y: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return -F.relu(y), -v * (y > 0).to(v.dtype)


class GELUFeedForward(MemoryEnergy):
    """``E = -1/2 sum_i sum_m ( (y^2 - 1) Phi(y) + y phi(y) )``, ``y = norm(D^T z)_im``.

    Phi and phi are the normal distribution and its density; the sum is the integral of GELU (exact),
    so the negative gradient by z, without norm, is ``D gelu(D^T z)``. The smooth relative of
    ``ReLUFeedForward``. Not concave: GELU falls below -0.75.

    Shapes: ``z`` (B, ..., d); ``x`` is ignored; ``mask`` (B, N) for ``z`` (B, N, ..., d). For the
    arguments see ``MemoryEnergy``.
    """

    def token_potential(self, y: Tensor) -> Tensor:
        wide = y.to(accumulation_dtype(y.dtype))
        below = torch.special.ndtr(wide)
        return -0.5 * ((wide.square() - 1.0) * below + wide * _normal_density(wide)).sum(-1)

    def token_potential_and_force(self, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.token_potential(y), -F.gelu(y)

    def force(self, y: Tensor, mask: Tensor | None) -> Tensor:
        return -F.gelu(y)

    def force_and_curvature(
        self, y: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return -F.gelu(y), -v * (torch.special.ndtr(y) + y * _normal_density(y))


class SoftmaxFeedForward(MemoryEnergy):
    """``E = -sum_i log sum_m exp(y_im)``, ``y = norm(D^T z)``.

    Negative gradient by z, without norm: ``D softmax(D^T z)``, retrieval from memories (Hyper-SET,
    arXiv 2502.11646, table 18). Concave in z without norm.

    Shapes: ``z`` (B, ..., d); ``x`` is ignored; ``mask`` (B, N) for ``z`` (B, N, ..., d). For the
    arguments see ``MemoryEnergy``.
    """

    def __init__(
        self,
        dim: int,
        memories: int,
        *,
        norm: RMSNorm | None = SOFT_NORM,
        bound: float | None = None,
    ) -> None:
        super().__init__(dim, memories, norm=norm, bound=bound)
        self.concave = norm is None

    def token_potential(self, y: Tensor) -> Tensor:
        return -y.to(accumulation_dtype(y.dtype)).logsumexp(-1)

    def token_potential_and_force(self, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.token_potential(y), -y.softmax(-1)

    def force(self, y: Tensor, mask: Tensor | None) -> Tensor:
        return -y.softmax(-1)

    def force_and_curvature(
        self, y: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        share = y.softmax(-1)
        mean = (share * v).sum(-1, keepdim=True)
        return -share, share * (mean - v)


class GatedFeedForward(MemoryEnergy):
    """``E = -1/2 sum_i ( sum_m phi(y_im) )^2``, ``y = norm(D^T z)``.

    Negative gradient by z, without norm: ``D (s phi'(y))``, ``s = sum_m phi(y_m)``: every memory is
    gated by the sum of all (Hyper-SET, arXiv 2502.11646, table 18). The sum runs over M memories,
    so weights of order 1/M keep the curvature of order 1. Concave in z with ReLU and without norm.

    Shapes: ``z`` (B, ..., d); ``x`` is ignored; ``mask`` (B, N) for ``z`` (B, N, ..., d). For the
    other arguments see ``MemoryEnergy``.

    Args:
        activation: phi, ``"gelu"`` (exact) or ``"relu"``.
    """

    def __init__(
        self,
        dim: int,
        memories: int,
        *,
        activation: str = "gelu",
        norm: RMSNorm | None = SOFT_NORM,
        bound: float | None = None,
    ) -> None:
        super().__init__(dim, memories, norm=norm, bound=bound)
        if activation not in ("gelu", "relu"):
            raise ValueError(f"activation must be 'gelu' or 'relu', got {activation!r}")
        self.activation = activation
        self.concave = norm is None and activation == "relu"

    def token_potential(self, y: Tensor) -> Tensor:
        return -0.5 * self._total(y).squeeze(-1).square()

    def token_potential_and_force(self, y: Tensor) -> tuple[Tensor, Tensor]:
        total = self._total(y)
        force = -total.to(y.dtype) * self._slope(y)
        return -0.5 * total.squeeze(-1).square(), force

    def force_and_curvature(
        self, y: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        total = self._total(y).to(y.dtype)
        slope = self._slope(y)
        curved = -slope * (slope * v).sum(-1, keepdim=True)
        if self.activation == "gelu":
            curved = curved - total * _normal_density(y) * (2.0 - y.square()) * v
        return -total * slope, curved

    def _total(self, y: Tensor) -> Tensor:
        phi = F.gelu(y) if self.activation == "gelu" else F.relu(y)
        return phi.sum(-1, keepdim=True, dtype=accumulation_dtype(y.dtype))

    def _slope(self, y: Tensor) -> Tensor:
        if self.activation == "relu":
            return (y > 0).to(y.dtype)
        return torch.special.ndtr(y) + y * _normal_density(y)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"


def _half_square(active: Tensor) -> Tensor:
    return -0.5 * active.to(accumulation_dtype(active.dtype)).square().sum(-1)


def _normal_density(y: Tensor) -> Tensor:
    return torch.exp(-0.5 * y.square()) / math.sqrt(2.0 * math.pi)
