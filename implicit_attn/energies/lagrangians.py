"""Lagrangians of neurons: convex functions whose gradients are activations.

A token has a state z and an activation ``g = dLag/dz``. The energy of an associative memory is
``sum_i [z_i.g_i - Lag(z_i) - x_i.g_i] + E_int(g)``. The dynamics ``z <- z - eta (z - x + dE_int/dg)``
descend it, since ``dg/dz``, the Hessian of the Lagrangian, is positive semidefinite.

Source: Krotov and Hopfield (2021), https://arxiv.org/abs/2008.06996; Hoover et al., "Energy
Transformer" (2023), https://arxiv.org/abs/2302.07253.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.energies.energy import value_and_gradient
from implicit_attn.energies.tokens import (
    Mask,
    RMSNorm,
    accumulation_dtype,
    check_tokens,
    hide,
    sum_samples,
)
from solvers.core.checks import require_positive


class Lagrangian(ABC):
    """Base class of convex functions of each token, over the last dimension, summed over tokens."""

    def __call__(self, z: Tensor, *, mask: Mask = None) -> Tensor:
        """Return the Lagrangian of each sample, (B, ..., d) -> (B,), in float32 or wider.

        ``mask`` (B, N) bool, for ``z`` (B, N, ..., d), is False at masked tokens.
        """
        check_tokens(z, mask, type(self).__name__)
        wide = hide(z, mask).to(accumulation_dtype(z.dtype))
        return sum_samples(hide(self.token_value(wide), mask))

    @abstractmethod
    def token_value(self, z: Tensor) -> Tensor:
        """Return the Lagrangian of each token, (B, ..., d) -> (B, ...)."""

    @abstractmethod
    def activation(self, z: Tensor) -> Tensor:
        """Return ``g = dLag/dz``, like ``z``."""

    def hessian_product(self, z: Tensor, v: Tensor) -> Tensor:
        """Return ``(dg/dz) v``, like ``z``, by default by autograd.

        ``dg/dz`` is symmetric and positive semidefinite.
        """
        return value_and_gradient(lambda z, v: (self.activation(z) * v).sum(-1), z, v)[1]


@dataclass(frozen=True)
class IdentityLagrangian(Lagrangian):
    """``Lag = 1/2 |z|^2``, ``g = z``."""

    def token_value(self, z: Tensor) -> Tensor:
        return 0.5 * z.square().sum(-1)

    def activation(self, z: Tensor) -> Tensor:
        return z

    def hessian_product(self, z: Tensor, v: Tensor) -> Tensor:
        return v


@dataclass(frozen=True)
class ReLULagrangian(Lagrangian):
    """``Lag = 1/2 sum relu(z)^2``, ``g = relu(z)``."""

    def token_value(self, z: Tensor) -> Tensor:
        return 0.5 * F.relu(z).square().sum(-1)

    def activation(self, z: Tensor) -> Tensor:
        return F.relu(z)

    def hessian_product(self, z: Tensor, v: Tensor) -> Tensor:
        return v * (z > 0).to(v.dtype)


@dataclass(frozen=True)
class SoftmaxLagrangian(Lagrangian):
    """``Lag = log sum exp(z)``, ``g = softmax(z)``."""

    def token_value(self, z: Tensor) -> Tensor:
        return z.logsumexp(-1)

    def activation(self, z: Tensor) -> Tensor:
        return z.softmax(-1)

    def hessian_product(self, z: Tensor, v: Tensor) -> Tensor:
        g = z.softmax(-1)
        return g * (v - (g * v).sum(-1, keepdim=True))


@dataclass(frozen=True)
class RMSNormLagrangian(Lagrangian):
    """``Lag = d sqrt(mean(z^2) + epsilon)``, ``g = z / sqrt(mean(z^2) + epsilon)``: RMS norm without gain.

    Choose ``epsilon`` > 0 of order 1 for equilibria, or small for the usual norm.
    """

    epsilon: float = 1.0

    def __post_init__(self) -> None:
        require_positive("epsilon", self.epsilon)

    @staticmethod
    def project(z: Tensor) -> Tensor:
        """Apply a symmetric projection before the norm."""
        return z

    def token_value(self, z: Tensor) -> Tensor:
        return z.shape[-1] * (self.project(z).square().mean(-1) + self.epsilon).sqrt()

    def activation(self, z: Tensor) -> Tensor:
        return RMSNorm(self.epsilon).normalise(self.project(z))[0]

    def hessian_product(self, z: Tensor, v: Tensor) -> Tensor:
        unit, radius = RMSNorm(self.epsilon).normalise(self.project(z))
        return RMSNorm.jacobian_product(unit, radius, self.project(v))


@dataclass(frozen=True)
class LayerNormLagrangian(RMSNormLagrangian):
    """``Lag = d sqrt(var(z) + epsilon)``, ``g = (z - mean(z)) / sqrt(var(z) + epsilon)``: LayerNorm.

    It is the ``RMSNormLagrangian`` of ``z - mean(z)``, without gain and bias.
    """

    @staticmethod
    def project(z: Tensor) -> Tensor:
        return z - z.mean(-1, keepdim=True)


@dataclass(frozen=True)
class IsingLagrangian(Lagrangian):
    """``Lag = sum log(2 cosh z)``, ``g = tanh z``: the log partition function of spins +1 and -1."""

    def token_value(self, z: Tensor) -> Tensor:
        return log_two_cosh(z).sum(-1)

    def activation(self, z: Tensor) -> Tensor:
        return z.tanh()

    def hessian_product(self, z: Tensor, v: Tensor) -> Tensor:
        g = z.tanh()
        return torch.addcmul(v, g * g, v, value=-1.0)


@dataclass(frozen=True)
class SphericalLagrangian(Lagrangian):
    """``Lag = d/2 (s - 1 - log((1 + s) / 2))``, ``g = 2 z / (1 + s)``, ``s = sqrt(1 + 4 |z|^2 / d)``.

    It is the log partition function of a vector on the sphere of radius ``sqrt d`` for large d; g is
    inside the sphere.

    Source: Bal, "Deep Implicit Attention" (2021).
    """

    def token_value(self, z: Tensor) -> Tensor:
        s = self._root(z).squeeze(-1)
        # Computes s - 1 without cancellation for small fields.
        excess = 4.0 * z.square().mean(-1) / (1.0 + s)
        return 0.5 * z.shape[-1] * (excess - torch.log1p(0.5 * excess))

    def activation(self, z: Tensor) -> Tensor:
        return z * (2.0 / (1.0 + self._root(z))).to(z.dtype)

    def hessian_product(self, z: Tensor, v: Tensor) -> Tensor:
        s = self._root(z)
        gain = 2.0 / (1.0 + s)
        along = (z * v).mean(-1, keepdim=True) * (2.0 * gain.square() / s).to(z.dtype)
        return torch.addcmul(v * gain.to(z.dtype), z, along, value=-1.0)

    @staticmethod
    def _root(z: Tensor) -> Tensor:
        wide = z.to(accumulation_dtype(z.dtype))
        return (1.0 + 4.0 * wide.square().mean(-1, keepdim=True)).sqrt()


def log_two_cosh(z: Tensor) -> Tensor:
    """Return ``log(2 cosh z)`` elementwise."""
    # A formula without abs(z), which has no second derivative at 0.
    return F.softplus(z, beta=2, threshold=60.0) + F.softplus(-z, beta=2, threshold=60.0)
