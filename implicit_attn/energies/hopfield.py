"""Associative memories with stored patterns: modern, dense and classical Hopfield energies."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.energies.checks import check_mask, check_positive, check_state, check_vector
from implicit_attn.energies.energy import Energy
from implicit_attn.energies.tokens import accumulation_dtype, hide, sum_samples, sum_squares


class PatternEnergy(Energy):
    """A function of the overlaps ``y_mu = x_mu.z`` with stored patterns, summed over tokens.

    Args:
        patterns: (M, d) floating, one pattern ``x_mu`` a row; copied.
        learnable: keep them as a parameter; else as a buffer.
    """

    patterns: Tensor

    def __init__(self, patterns: Tensor, *, learnable: bool) -> None:
        super().__init__()
        if not isinstance(patterns, Tensor) or not patterns.is_floating_point():
            kind = patterns.dtype if isinstance(patterns, Tensor) else type(patterns).__name__
            raise TypeError(f"patterns must be a floating tensor (M, d), got {kind}")
        if patterns.dim() != 2 or 0 in patterns.shape:
            raise ValueError(f"patterns must have the shape (M, d), got {tuple(patterns.shape)}")
        patterns = patterns.detach().clone()
        if learnable:
            self.patterns = nn.Parameter(patterns)
        else:
            self.register_buffer("patterns", patterns)

    @abstractmethod
    def overlap_value(self, y: Tensor) -> Tensor:
        """(B, ..., M) -> (B, ...): value of each token."""

    @abstractmethod
    def overlap_force(self, y: Tensor) -> Tensor:
        """Gradient of the value by the overlaps, like ``y``."""

    @abstractmethod
    def overlap_curvature(self, y: Tensor, v: Tensor) -> Tensor:
        """Hessian of the value by the overlaps times ``v``, like ``y``."""

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        y = F.linear(self._visible(z, mask), self.patterns)
        return sum_samples(hide(self.overlap_value(y), mask))

    def value_and_grad(
        self, z: Tensor, x: Any = None, *, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        y = F.linear(self._visible(z, mask), self.patterns)
        value = sum_samples(hide(self.overlap_value(y), mask))
        return value, hide(self.overlap_force(y) @ self.patterns, mask).to(z.dtype)

    def hvp(self, z: Tensor, v: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        z = self._visible(z, mask)
        check_vector(v, z)
        y, tangent = F.linear(z, self.patterns), F.linear(hide(v, mask), self.patterns)
        return hide(self.overlap_curvature(y, tangent) @ self.patterns, mask).to(z.dtype)

    def _visible(self, z: Tensor, mask: Tensor | None) -> Tensor:
        name = type(self).__name__
        check_state(z, name, dim=self.patterns.shape[1])
        check_mask(mask, z, name, features=1)
        return hide(z, mask)

    def extra_repr(self) -> str:
        return f"patterns={tuple(self.patterns.shape)}"


class Hopfield(PatternEnergy):
    """Modern Hopfield network, ``E = 1/2 |z|^2 - beta^-1 log sum_mu exp(beta x_mu.z)`` per token.

    Gradient ``z - X^T softmax(beta X z)``: one unit step is softmax attention with the patterns for
    keys and values, and never raises the energy (Ramsauer et al., "Hopfield Networks is All You
    Need", arXiv 2008.02217, equations 2 and 3, without the constant).

    Shapes: ``z`` (B, ..., d); ``x`` is ignored; ``mask`` (B, N) for ``z`` (B, N, ..., d).

    Args:
        patterns: (M, d), one pattern a row; copied.
        beta: inverse temperature, > 0.
        learnable: keep the patterns as a parameter; else as a buffer.
    """

    def __init__(self, patterns: Tensor, *, beta: float = 1.0, learnable: bool = False) -> None:
        super().__init__(patterns, learnable=learnable)
        self.beta = check_positive(beta, "beta")

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return super().forward(z, x, mask=mask) + 0.5 * sum_squares(hide(z, mask))

    def value_and_grad(
        self, z: Tensor, x: Any = None, *, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        value, gradient = super().value_and_grad(z, x, mask=mask)
        z = hide(z, mask)
        return value + 0.5 * sum_squares(z), z + gradient

    def hvp(self, z: Tensor, v: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return super().hvp(z, v, x, mask=mask) + hide(v, mask)

    def overlap_value(self, y: Tensor) -> Tensor:
        wide = y.to(accumulation_dtype(y.dtype))
        return (wide * self.beta).logsumexp(-1) / -self.beta

    def overlap_force(self, y: Tensor) -> Tensor:
        return -(y * self.beta).softmax(-1)

    def overlap_curvature(self, y: Tensor, v: Tensor) -> Tensor:
        share = (y * self.beta).softmax(-1)
        return share * ((share * v).sum(-1, keepdim=True) - v) * self.beta

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, beta={self.beta:.4g}"


class DenseAssociative(PatternEnergy):
    """``E = -sum_mu F(x_mu.z)`` per token, ``F(y) = y^power`` or ``exp(y)``.

    Gradient ``-sum_mu F'(x_mu.z) x_mu`` (Krotov & Hopfield, arXiv 1606.01164; exponential:
    Demircigil et al., arXiv 1702.01929). Unbounded below: add it to an energy that grows faster, or
    give it a bounded activation. Concave in z for even powers and the exponential.

    Shapes: ``z`` (B, ..., d); ``x`` is ignored; ``mask`` (B, N) for ``z`` (B, N, ..., d).

    Args:
        patterns: (M, d), one pattern a row; copied.
        power: an integer >= 2, or ``"exp"``.
        learnable: keep the patterns as a parameter; else as a buffer.
    """

    def __init__(self, patterns: Tensor, *, power: int | str = 3, learnable: bool = False) -> None:
        super().__init__(patterns, learnable=learnable)
        number = isinstance(power, int) and not isinstance(power, bool) and power >= 2
        if not number and power != "exp":
            raise ValueError(f"power must be an integer >= 2 or 'exp', got {power!r}")
        self.power = power
        self.concave = isinstance(power, str) or power % 2 == 0

    def overlap_value(self, y: Tensor) -> Tensor:
        wide = y.to(accumulation_dtype(y.dtype))
        return -(wide.exp() if isinstance(self.power, str) else wide.pow(self.power)).sum(-1)

    def overlap_force(self, y: Tensor) -> Tensor:
        if isinstance(self.power, str):
            return -y.exp()
        return -self.power * y.pow(self.power - 1)

    def overlap_curvature(self, y: Tensor, v: Tensor) -> Tensor:
        if isinstance(self.power, str):
            return -y.exp() * v
        return (-self.power * (self.power - 1)) * y.pow(self.power - 2) * v

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, power={self.power!r}"


class ClassicalHopfield(PatternEnergy):
    """``E = -1/2 z^T W z + b.z`` per token, with Hebbian ``W = sum_mu x_mu x_mu^T``.

    Gradient ``b - W z``; the network's update is ``sign(W z - b)`` (Hopfield 1982; about 0.14 d
    patterns can be stored). Unbounded below for real states; concave.

    Shapes: ``z`` (B, ..., d); ``x`` is ignored; ``mask`` (B, N) for ``z`` (B, N, ..., d).

    Args:
        patterns: (M, d), one pattern a row; copied.
        bias: b, (d,), or None for 0; copied.
        learnable: keep patterns and bias as parameters; else as buffers.
    """

    concave = True
    bias: Tensor | None

    def __init__(
        self, patterns: Tensor, *, bias: Tensor | None = None, learnable: bool = False
    ) -> None:
        super().__init__(patterns, learnable=learnable)
        if bias is None:
            self.register_buffer("bias", None)
            return
        if not isinstance(bias, Tensor) or tuple(bias.shape) != (patterns.shape[1],):
            got = tuple(bias.shape) if isinstance(bias, Tensor) else type(bias).__name__
            raise ValueError(f"bias must have the shape (d,) = ({patterns.shape[1]},), got {got}")
        bias = bias.detach().to(patterns.dtype, copy=True)
        if learnable:
            self.bias = nn.Parameter(bias)
        else:
            self.register_buffer("bias", bias)

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        value = super().forward(z, x, mask=mask)
        return value if self.bias is None else value + sum_samples(hide(z, mask) * self.bias)

    def value_and_grad(
        self, z: Tensor, x: Any = None, *, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        value, gradient = super().value_and_grad(z, x, mask=mask)
        if self.bias is None:
            return value, gradient
        value = value + sum_samples(hide(z, mask) * self.bias)
        return value, hide(gradient + self.bias, mask)

    def overlap_value(self, y: Tensor) -> Tensor:
        return -0.5 * y.to(accumulation_dtype(y.dtype)).square().sum(-1)

    def overlap_force(self, y: Tensor) -> Tensor:
        return -y

    def overlap_curvature(self, y: Tensor, v: Tensor) -> Tensor:
        return -v
