"""Laws of hidden units, as the cumulant functions that remain of them when they are summed out.

``K(t) = log E[exp(t h)]`` is convex, ``K(0) = 0``; its first two derivatives are the mean and the
variance of h in the field t, its derivatives at 0 the cumulants: ``K(t) = sum_n kappa_n t^n / n!``. Of
all laws only the normal one and constants have finitely many cumulants that are not 0 (Marcinkiewicz
1939, https://doi.org/10.1007/BF01210677): no polynomial of higher degree is the memory of an RBM.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from implicit_attn.energies.lagrangians import Lagrangian
from implicit_attn.energies.tokens import accumulation_dtype


class HiddenPrior(Lagrangian):
    """The law of hidden units; as a Lagrangian its value is K, its activation the mean in a field."""

    @abstractmethod
    def sample(self, field: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """One draw of each unit in its field, like ``field``; no gradients.

        Args:
            field: t, (..., units) of a scalar law, (..., units, components) of a vector one.
            generator: on the device of ``field``; None: PyTorch's own.

        Raises:
            ValueError: for a field outside the domain of K.
        """


class ScalarPrior(HiddenPrior):
    """Independent units of one component; a subclass defines K, mean and variance of one unit.

    Class attributes:
        lower, upper: ends of the open interval on which ``E[exp(t h)]`` is finite. Outside, K is
            infinite and its derivatives are NaN, so that solvers reject such a step.
    """

    lower: ClassVar[float] = -math.inf
    upper: ClassVar[float] = math.inf

    @abstractmethod
    def _cumulant_function(self, t: Tensor) -> Tensor:
        """K of each entry, inside the domain."""

    @abstractmethod
    def _mean(self, t: Tensor) -> Tensor:
        """K' of each entry, inside the domain."""

    @abstractmethod
    def _variance(self, t: Tensor) -> Tensor:
        """K'' of each entry, inside the domain."""

    @abstractmethod
    def _draw(self, t: Tensor, generator: torch.Generator | None) -> Tensor:
        """One draw of each entry, inside the domain, in float32 or wider."""

    @abstractmethod
    def cumulants(self, count: int) -> list[float]:
        """``kappa_1`` to ``kappa_count``."""

    def cumulant_function(self, t: Tensor) -> Tensor:
        """``K(t)`` of each entry, like ``t``."""
        if self._everywhere:
            return self._cumulant_function(t)
        inside = self._inside(t)
        # An infinite slope as well; each branch sees only its own points, or 0 * inf would be NaN.
        outside = math.inf * torch.where(inside, 1.0, t).square()
        return torch.where(inside, self._cumulant_function(torch.where(inside, t, 0.0)), outside)

    def taylor(self, t: Tensor, order: int) -> Tensor:
        """``sum_n kappa_n t^n / n!`` up to n = ``order``, like ``t``."""
        total, term = torch.zeros_like(t), torch.ones_like(t)
        for number, cumulant in enumerate(self.cumulants(order), 1):
            term = term * t / number
            total = total + cumulant * term
        return total

    def token_value(self, z: Tensor) -> Tensor:
        return self.cumulant_function(z).sum(-1)

    def activation(self, z: Tensor) -> Tensor:
        return self._mean(self._or_nan(z))

    def hessian_product(self, z: Tensor, v: Tensor) -> Tensor:
        return self._variance(self._or_nan(z)) * v

    @torch.no_grad()
    def sample(self, field: Tensor, generator: torch.Generator | None = None) -> Tensor:
        wide = field.to(accumulation_dtype(field.dtype))
        if not self._everywhere and not bool(self._inside(wide).all()):
            raise ValueError(
                f"field must lie in ({self.lower}, {self.upper}) for {type(self).__name__}, got "
                f"values in [{wide.min().item():.4g}, {wide.max().item():.4g}]"
            )
        return self._draw(wide, generator).to(field.dtype)

    @property
    def _everywhere(self) -> bool:
        return self.lower == -math.inf and self.upper == math.inf

    def _inside(self, t: Tensor) -> Tensor:
        return (t > self.lower) & (t < self.upper)

    def _or_nan(self, t: Tensor) -> Tensor:
        return t if self._everywhere else torch.where(self._inside(t), t, torch.nan)
