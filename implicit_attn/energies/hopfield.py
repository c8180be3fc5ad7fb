"""Associative memories with stored patterns: modern, dense and classical Hopfield energies."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from implicit_attn.energies.energy import Energy
from implicit_attn.energies.projected import TokenEnergy
from implicit_attn.energies.tokens import Pair, accumulation_dtype, hide, sum_samples, sum_squares
from solvers.core.checks import require_positive


class PatternEnergy(TokenEnergy):
    """A function of the overlaps ``y_mu = x_mu.z`` with stored patterns, summed over the tokens.

    Shapes: ``z`` (B, ..., d); ``x`` is ignored; ``mask`` (B, N) for ``z`` (B, N, ..., d).

    Args:
        patterns: (M, d) floating, one pattern ``x_mu`` a row; copied.
        learnable: make what is stored parameters; else buffers.
    """

    patterns: Tensor

    def __init__(self, patterns: Tensor, *, learnable: bool) -> None:
        if not isinstance(patterns, Tensor) or not patterns.is_floating_point():
            kind = patterns.dtype if isinstance(patterns, Tensor) else type(patterns).__name__
            raise TypeError(f"patterns must be a floating tensor (M, d), got {kind}")
        if patterns.dim() != 2 or 0 in patterns.shape:
            raise ValueError(f"patterns must have the shape (M, d), got {tuple(patterns.shape)}")
        super().__init__(patterns.shape[1])
        self._store("patterns", patterns.detach().clone(), learnable)

    def _store(self, name: str, value: Tensor, learnable: bool) -> None:
        if learnable:
            self.register_parameter(name, nn.Parameter(value))
        else:
            self.register_buffer(name, value)

    @property
    def weight(self) -> Tensor:
        return self.patterns

    forward = Energy.forward  # Hopfield and ClassicalHopfield add to the potential

    def extra_repr(self) -> str:
        return f"patterns={tuple(self.patterns.shape)}"


class Hopfield(PatternEnergy):
    """Modern Hopfield network, ``E = 1/2 |z|^2 - beta^-1 log sum_mu exp(beta x_mu.z)`` per token.

    Gradient ``z - X^T softmax(beta X z)``. A unit step is softmax attention with the patterns as keys
    and values, and never raises the energy.

    Shapes and other arguments as for ``PatternEnergy``.

    Args:
        beta: inverse temperature, > 0.

    Source: Ramsauer et al., "Hopfield Networks is All You Need", https://arxiv.org/abs/2008.02217,
    equations 2 and 3, without the constant.
    """

    def __init__(self, patterns: Tensor, *, beta: float = 1.0, learnable: bool = False) -> None:
        super().__init__(patterns, learnable=learnable)
        self.beta = require_positive("beta", beta)

    def value_and_grad(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Pair:
        value, gradient = super().value_and_grad(z, x, mask=mask)
        z = hide(z, mask)
        return value + 0.5 * sum_squares(z), z + gradient

    def hvp(self, z: Tensor, v: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return super().hvp(z, v, x, mask=mask) + hide(v, mask)

    def token_value_and_force(self, y: Tensor) -> Pair:
        wide = y.to(accumulation_dtype(y.dtype))
        return (wide * self.beta).logsumexp(-1) / -self.beta, -(y * self.beta).softmax(-1)

    def force_and_curvature(self, y: Tensor, v: Tensor, mask: Tensor | None) -> Pair:
        share = (y * self.beta).softmax(-1)
        return -share, share * ((share * v).sum(-1, keepdim=True) - v) * self.beta

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, beta={self.beta:.4g}"


class DenseAssociative(PatternEnergy):
    """``E = -sum_mu F(x_mu.z)`` per token, ``F(y) = y^power`` or ``exp(y)``.

    Gradient ``-sum_mu F'(x_mu.z) x_mu``. Unbounded below: add it to an energy that grows faster, or
    apply it to a bounded activation. Concave in z for even powers and the exponential.

    Shapes and other arguments as for ``PatternEnergy``.

    Args:
        power: an integer >= 2, or ``"exp"``.

    Source: Krotov and Hopfield (2016), https://arxiv.org/abs/1606.01164; for the exponential
    Demircigil et al. (2017), https://arxiv.org/abs/1702.01929.
    """

    def __init__(self, patterns: Tensor, *, power: int | str = 3, learnable: bool = False) -> None:
        super().__init__(patterns, learnable=learnable)
        number = isinstance(power, int) and not isinstance(power, bool) and power >= 2
        if not number and power != "exp":
            raise ValueError(f"power must be an integer >= 2 or 'exp', got {power!r}")
        self.power = power
        self.concave = isinstance(power, str) or power % 2 == 0

    def token_value_and_force(self, y: Tensor) -> Pair:
        wide = y.to(accumulation_dtype(y.dtype))
        powers = wide.exp() if isinstance(self.power, str) else wide.pow(self.power)
        return -powers.sum(-1), self._token_force(y)

    def force_and_curvature(self, y: Tensor, v: Tensor, mask: Tensor | None) -> Pair:
        force = self._token_force(y)
        if isinstance(self.power, str):
            return force, force * v
        return force, (-self.power * (self.power - 1)) * y.pow(self.power - 2) * v

    def _token_force(self, y: Tensor) -> Tensor:
        if isinstance(self.power, str):
            return -y.exp()
        return -self.power * y.pow(self.power - 1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, power={self.power!r}"


class ClassicalHopfield(PatternEnergy):
    """``E = -1/2 z^T W z + b.z`` per token, with Hebbian ``W = sum_mu x_mu x_mu^T``.

    Gradient ``b - W z``; the network's update is ``sign(W z - b)``. It stores about 0.14 d patterns.
    Concave, and unbounded below for real states.

    Shapes and other arguments as for ``PatternEnergy``.

    Args:
        bias: b, (d,), or None for 0; copied, and learnable like the patterns.

    Source: Hopfield (1982), https://doi.org/10.1073/pnas.79.8.2554.
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
        self._store("bias", bias.detach().to(patterns.dtype, copy=True), learnable)

    def value_and_grad(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Pair:
        value, gradient = super().value_and_grad(z, x, mask=mask)
        if self.bias is None:
            return value, gradient
        value = value + sum_samples(hide(z, mask) * self.bias)
        return value, hide(gradient + self.bias, mask)

    def token_value_and_force(self, y: Tensor) -> Pair:
        return -0.5 * y.to(accumulation_dtype(y.dtype)).square().sum(-1), -y

    def force_and_curvature(self, y: Tensor, v: Tensor, mask: Tensor | None) -> Pair:
        return -y, -v
