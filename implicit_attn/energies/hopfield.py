"""Associative memories with stored patterns: modern, dense and classical Hopfield energies."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from implicit_attn.energies.energy import Energy
from implicit_attn.energies.projected import TokenEnergy
from implicit_attn.energies.tokens import Pair, accumulation_dtype, hide, sum_samples, sum_squares
from solvers.core.checks import require_count, require_number, require_positive

LARGEST_MIXTURE = 2_000_000  # members of all multisets of a density at a lower temperature


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

    At temperature 1 / beta the energy of one token is a density, a mixture of Gaussians around the
    patterns, in which long patterns weigh more::

        p(z) = exp(-beta E(z)) / Z = sum_mu w_mu N(z; x_mu, I / beta),   w = softmax_mu(beta |x_mu|^2 / 2)
        log Z = d/2 log(2 pi / beta) + log sum_mu exp(beta |x_mu|^2 / 2)

    The unit step is the mean of the pattern that z came from, given z: the best denoiser of
    ``x_mu + N(0, I / beta)`` (Tweedie's formula, ``z + beta^-1 d log p / dz``). At ``1 / (k beta)``, k an
    integer (``cooling``), the density is a mixture over the means of k patterns, each of k from all;
    other temperatures have no closed form.

    Shapes and other arguments as for ``PatternEnergy``.

    Args:
        beta: inverse temperature, > 0.

    Source: Ramsauer et al., "Hopfield Networks is All You Need", https://arxiv.org/abs/2008.02217,
    equations 2 and 3, without the constant; Bal, "An Energy-Based Perspective on Attention Mechanisms
    in Transformers" (2020), https://mcbal.github.io/post/an-energy-based-perspective-on-attention-mechanisms-in-transformers/,
    for the mixture.
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

    def log_partition(self, cooling: int = 1) -> Tensor:
        """``log Z`` of one token at temperature ``1 / (cooling beta)``, a scalar, differentiable.

        Args:
            cooling: an integer k >= 1; ``Z`` is then a sum over all multisets of k patterns.

        Raises:
            ValueError: these have more than two million members together.
        """
        return self._log_partition(cooling).to(accumulation_dtype(self.patterns.dtype))

    def _log_partition(self, cooling: int) -> Tensor:
        logits, _ = self._mixture(cooling)
        volume = 0.5 * self.dim * math.log(2 * math.pi / (cooling * self.beta))
        return logits.logsumexp(0) + volume

    def log_prob(self, z: Tensor, cooling: int = 1) -> Tensor:
        """``log p(z)`` at temperature ``1 / (cooling beta)``, differentiable by z and the patterns.

        Args:
            z: (..., d), each token on its own.
            cooling: as for :meth:`log_partition`.

        Returns:
            (...), in the widest dtype of z, the patterns and float32; computed in float64, as large
            norms cancel.
        """
        if not isinstance(z, Tensor) or not z.is_floating_point() or z.shape[-1:] != (self.dim,):
            got = (z.dtype, tuple(z.shape)) if isinstance(z, Tensor) else type(z).__name__
            raise ValueError(f"z must be a floating tensor (..., {self.dim}), got {got}")
        wide = z.double()
        attention = (self.beta * wide @ self.patterns.double().mT).logsumexp(-1)
        level = attention - 0.5 * self.beta * wide.square().sum(-1)
        found = cooling * level - self._log_partition(cooling)
        return found.to(accumulation_dtype(torch.promote_types(z.dtype, self.patterns.dtype)))

    @torch.no_grad()
    def sample(
        self, count: int, generator: torch.Generator | None = None, cooling: int = 1
    ) -> Tensor:
        """Independent draws from ``p`` at temperature ``1 / (cooling beta)``; no gradients.

        Args:
            count: number of draws n.
            generator: on the device of the patterns; None: PyTorch's own.
            cooling: as for :meth:`log_partition`.

        Returns:
            (n, d), dtype of the patterns.
        """
        require_count("count", count)
        logits, centers = self._mixture(cooling)
        # Not multinomial, which takes no more than 2^24 categories and rounds in float32.
        shares = logits.softmax(0).cumsum(0)
        draws = torch.rand(count, generator=generator, device=logits.device, dtype=torch.float64)
        chosen = torch.searchsorted(shares, draws * shares[-1]).clamp_max(len(shares) - 1)
        centers = centers[chosen]
        noise = torch.randn(
            centers.shape, generator=generator, device=centers.device, dtype=centers.dtype
        )
        return (centers + noise / math.sqrt(cooling * self.beta)).to(self.patterns.dtype)

    def _mixture(self, cooling: int) -> Pair:
        """Unnormalised log weights (T,) and centres (T, d) of the Gaussians, in float64."""
        count = len(self.patterns)
        size = math.comb(count + require_count("cooling", cooling) - 1, cooling)
        patterns = self.patterns.double()
        if 1 in (cooling, count):
            return 0.5 * cooling * self.beta * patterns.square().sum(-1), patterns
        if size * cooling > LARGEST_MIXTURE:
            raise ValueError(
                f"cooling={cooling} with {count} patterns makes a mixture of {size} Gaussians at the "
                f"means of {cooling} patterns, more than {LARGEST_MIXTURE} members in all"
            )
        multisets = itertools.combinations_with_replacement(range(count), cooling)  # each sorted
        flat = np.fromiter(itertools.chain.from_iterable(multisets), np.int64, size * cooling)
        members = torch.from_numpy(flat).view(size, cooling).to(patterns.device)
        centers = torch.zeros_like(patterns[members[:, 0]])
        for member in members.mT:  # one by one: all at once would be cooling times as large
            centers = centers + patterns[member] / cooling
        # cooling! / prod_mu n_mu! orders of a multiset: the product of each member's rank in its run.
        rank = torch.ones_like(members[:, 0])
        orders = torch.full_like(centers[:, 0], math.lgamma(cooling + 1))
        for before, after in zip(members.mT, members.mT[1:], strict=False):
            rank = torch.where(before == after, rank + 1, 1)
            orders = orders - rank.to(orders.dtype).log()
        return orders + 0.5 * cooling * self.beta * centers.square().sum(-1), centers

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, beta={self.beta:.4g}"


class DenseAssociative(PatternEnergy):
    """``E = -sum_mu F(x_mu.z)`` per token, ``F(y) = y^power`` or ``exp(y - shift)``.

    Gradient ``-sum_mu F'(x_mu.z) x_mu``. Unbounded below: add it to an energy that grows faster, or
    apply it to a bounded activation. Concave in z for even powers and the exponential.

    Shapes and other arguments as for ``PatternEnergy``.

    Args:
        power: an integer >= 2, or ``"exp"``.
        shift: of the exponential, such as the squared norm of a pattern, at which F is 1 then.

    Source: Krotov and Hopfield (2016), https://arxiv.org/abs/1606.01164; for the exponential
    Demircigil et al. (2017), https://arxiv.org/abs/1702.01929.
    """

    def __init__(
        self,
        patterns: Tensor,
        *,
        power: int | str = 3,
        shift: float = 0.0,
        learnable: bool = False,
    ) -> None:
        super().__init__(patterns, learnable=learnable)
        number = isinstance(power, int) and not isinstance(power, bool) and power >= 2
        if not number and power != "exp":
            raise ValueError(f"power must be an integer >= 2 or 'exp', got {power!r}")
        self.power, self.shift = power, require_number("shift", shift)
        if shift and number:
            raise ValueError(f"shift needs power='exp', got shift={shift} and power={power!r}")
        self.concave = isinstance(power, str) or power % 2 == 0

    def token_value_and_force(self, y: Tensor) -> Pair:
        wide = y.to(accumulation_dtype(y.dtype))
        powers = self._exp(wide) if isinstance(self.power, str) else wide.pow(self.power)
        return -powers.sum(-1), self._token_force(y)

    def force_and_curvature(self, y: Tensor, v: Tensor, mask: Tensor | None) -> Pair:
        force = self._token_force(y)
        if isinstance(self.power, str):
            return force, force * v
        return force, (-self.power * (self.power - 1)) * y.pow(self.power - 2) * v

    def _token_force(self, y: Tensor) -> Tensor:
        if isinstance(self.power, str):
            return -self._exp(y)
        return -self.power * y.pow(self.power - 1)

    def _exp(self, y: Tensor) -> Tensor:
        return (y - self.shift).exp() if self.shift else y.exp()

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
