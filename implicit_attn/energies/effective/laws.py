"""The laws of hidden units: normal, Poisson, two values, exponential, Laplace, constant, one-hot."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.energies.effective.prior import HiddenPrior, ScalarPrior
from implicit_attn.energies.tokens import accumulation_dtype
from solvers.core.checks import require_count

NORMAL_LIMIT = 2.0**24  # mean of Poisson units above which float32 has no room for other integers


@dataclass(frozen=True)
class NormalPrior(ScalarPrior):
    """``h ~ N(0, 1)``, ``K = t^2 / 2``: the classical Hopfield energy."""

    def _cumulant_function(self, t: Tensor) -> Tensor:
        return 0.5 * t.square()

    def _mean(self, t: Tensor) -> Tensor:
        return t

    def _variance(self, t: Tensor) -> Tensor:
        return torch.ones_like(t)

    def _draw(self, t: Tensor, generator: torch.Generator | None) -> Tensor:
        return t + torch.randn(t.shape, generator=generator, dtype=t.dtype, device=t.device)

    def cumulants(self, count: int) -> list[float]:
        return [float(n == 2) for n in range(1, require_count("count", count) + 1)]


@dataclass(frozen=True)
class PoissonPrior(ScalarPrior):
    """``h ~ Poisson(1)``, ``K = exp(t) - 1``: the exponential memory. All cumulants are 1.

    Samples with a mean above 2^24 are drawn by the normal limit; they are infinite where exp(t) is.
    """

    def _cumulant_function(self, t: Tensor) -> Tensor:
        return torch.expm1(t)

    def _mean(self, t: Tensor) -> Tensor:
        return t.exp()

    def _variance(self, t: Tensor) -> Tensor:
        return t.exp()

    def _draw(self, t: Tensor, generator: torch.Generator | None) -> Tensor:
        rate = t.exp()
        many = rate > NORMAL_LIMIT
        if t.device.type == "cpu" and not bool(many.any()):  # elsewhere the answer is not awaited
            return torch.poisson(rate, generator=generator)
        few = torch.poisson(rate.clamp_max(NORMAL_LIMIT), generator=generator)
        noise = torch.randn(t.shape, generator=generator, dtype=t.dtype, device=t.device)
        return torch.where(many, (rate * (1 + noise / rate.sqrt())).round(), few)

    def cumulants(self, count: int) -> list[float]:
        return [1.0] * require_count("count", count)


@dataclass(frozen=True)
class IsingPrior(ScalarPrior):
    """``h = +1`` or ``-1`` with equal weight, ``K = log cosh t``; cumulants 0, 1, 0, -2, 0, 16, ..."""

    def _cumulant_function(self, t: Tensor) -> Tensor:
        # log(2 cosh t) as a sum without a kink: abs(t) would have no second derivative at 0.
        both = F.softplus(t, beta=2, threshold=60.0) + F.softplus(-t, beta=2, threshold=60.0)
        return both - math.log(2.0)

    def _mean(self, t: Tensor) -> Tensor:
        return t.tanh()

    def _variance(self, t: Tensor) -> Tensor:
        return 4 * torch.sigmoid(2 * t) * torch.sigmoid(-2 * t)

    def _draw(self, t: Tensor, generator: torch.Generator | None) -> Tensor:
        return torch.where(_uniform(t, generator) < torch.sigmoid(2 * t), 1.0, -1.0)

    def cumulants(self, count: int) -> list[float]:
        return _of_slope(count, (1, 0, -1), Fraction(0))  # (tanh t)' = 1 - tanh^2 t


@dataclass(frozen=True)
class BinaryPrior(ScalarPrior):
    """``h = 0`` or ``1`` with equal weight, ``K = log((1 + exp t) / 2)``: softplus units."""

    def _cumulant_function(self, t: Tensor) -> Tensor:
        return F.softplus(t, threshold=60.0) - math.log(2.0)

    def _mean(self, t: Tensor) -> Tensor:
        return torch.sigmoid(t)

    def _variance(self, t: Tensor) -> Tensor:
        return torch.sigmoid(t) * torch.sigmoid(-t)

    def _draw(self, t: Tensor, generator: torch.Generator | None) -> Tensor:
        return (_uniform(t, generator) < torch.sigmoid(t)).to(t.dtype)

    def cumulants(self, count: int) -> list[float]:
        return _of_slope(count, (0, 1, -1), Fraction(1, 2))  # sigma' = sigma - sigma^2


@dataclass(frozen=True)
class ExponentialPrior(ScalarPrior):
    """``h >= 0`` with density ``exp(-h)``, ``K = -log(1 - t)`` for ``t < 1``; kappa_n = (n - 1)!."""

    upper: ClassVar[float] = 1.0

    def _cumulant_function(self, t: Tensor) -> Tensor:
        return -torch.log1p(-t)

    def _mean(self, t: Tensor) -> Tensor:
        return 1 / (1 - t)

    def _variance(self, t: Tensor) -> Tensor:
        return (1 - t).square().reciprocal()

    def _draw(self, t: Tensor, generator: torch.Generator | None) -> Tensor:
        return -torch.log1p(-_uniform(t, generator)) / (1 - t)

    def cumulants(self, count: int) -> list[float]:
        return [float(math.factorial(n)) for n in range(require_count("count", count))]


@dataclass(frozen=True)
class LaplacePrior(ScalarPrior):
    """Density ``exp(-|h|) / 2``, ``K = -log(1 - t^2)`` for ``|t| < 1``; kappa_n = 2 (n - 1)!, n even."""

    lower: ClassVar[float] = -1.0
    upper: ClassVar[float] = 1.0

    def _cumulant_function(self, t: Tensor) -> Tensor:
        return -torch.log1p(-t.square())

    def _mean(self, t: Tensor) -> Tensor:
        return 2 * t / ((1 - t) * (1 + t))

    def _variance(self, t: Tensor) -> Tensor:
        return (1 - t).square().reciprocal() + (1 + t).square().reciprocal()

    def _draw(self, t: Tensor, generator: torch.Generator | None) -> Tensor:
        sign = torch.where(2 * _uniform(t, generator) < 1 + t, 1.0, -1.0)
        return -torch.log1p(-_uniform(t, generator)) * sign / (1 - sign * t)

    def cumulants(self, count: int) -> list[float]:
        exponential = ExponentialPrior().cumulants(count)
        return [2 * kappa if n % 2 == 0 else 0.0 for n, kappa in enumerate(exponential, 1)]


@dataclass(frozen=True)
class ConstantPrior(ScalarPrior):
    """``h = 1``, ``K = t``: a field along the pattern, no interaction."""

    def _cumulant_function(self, t: Tensor) -> Tensor:
        return t

    def _mean(self, t: Tensor) -> Tensor:
        return torch.ones_like(t)

    def _variance(self, t: Tensor) -> Tensor:
        return torch.zeros_like(t)

    def _draw(self, t: Tensor, generator: torch.Generator | None) -> Tensor:
        return torch.ones_like(t)

    def cumulants(self, count: int) -> list[float]:
        return [float(n == 1) for n in range(1, require_count("count", count) + 1)]


@dataclass(frozen=True)
class OneHotPrior(HiddenPrior):
    """One of M components is 1, each with equal weight, ``K = lse t - log M``: the modern Hopfield."""

    def token_value(self, z: Tensor) -> Tensor:
        return z.logsumexp(-1) - math.log(z.shape[-1])

    def activation(self, z: Tensor) -> Tensor:
        return z.softmax(-1)

    def hessian_product(self, z: Tensor, v: Tensor) -> Tensor:
        share = z.softmax(-1)
        return share * (v - (share * v).sum(-1, keepdim=True))

    @torch.no_grad()
    def sample(self, field: Tensor, generator: torch.Generator | None = None) -> Tensor:
        wide = field.to(accumulation_dtype(field.dtype))
        # The largest of the fields with Gumbel noise, -log of an exponential variable.
        chosen = (wide - (-torch.log1p(-_uniform(wide, generator))).log()).argmax(-1)
        return F.one_hot(chosen, field.shape[-1]).to(field.dtype)


def _uniform(t: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.rand(t.shape, generator=generator, dtype=t.dtype, device=t.device)


def _of_slope(count: int, slope: tuple[int, int, int], at_zero: Fraction) -> list[float]:
    """Cumulants where the mean m(t) solves ``m' = a + b m + c m^2``, ``m(0) = at_zero``: each further
    derivative is a polynomial of m, exact in fractions."""
    found, polynomial = [], [Fraction(0), Fraction(1)]  # coefficients of 1, m, m^2, ...
    for _ in range(require_count("count", count)):
        found.append(float(sum(c * at_zero**power for power, c in enumerate(polynomial))))
        derived = [power * c for power, c in enumerate(polynomial)][1:] or [Fraction(0)]
        polynomial = [Fraction(0)] * (len(derived) + 2)
        for power, c in enumerate(derived):
            for shift, factor in enumerate(slope):
                polynomial[power + shift] += c * factor
    return found


PRIORS: dict[str, HiddenPrior] = {
    "normal": NormalPrior(),
    "poisson": PoissonPrior(),
    "ising": IsingPrior(),
    "binary": BinaryPrior(),
    "exponential": ExponentialPrior(),
    "laplace": LaplacePrior(),
    "one-hot": OneHotPrior(),
    "constant": ConstantPrior(),
}
