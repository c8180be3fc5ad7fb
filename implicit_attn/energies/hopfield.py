"""Associative memories: energies of stored patterns, and of queries among given keys."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from implicit_attn.energies.energy import Energy
from implicit_attn.energies.heads import (
    Beta,
    HasTemperatures,
    HeadsContext,
    by_head,
    fit_pairs,
    masked_key,
    read_memory,
    read_pairs,
)
from implicit_attn.energies.projected import Given, ProjectedEnergy, merge_heads, split_heads
from implicit_attn.energies.tokens import (
    Pair,
    accumulation_dtype,
    check_tensor,
    check_tokens,
    hide,
    sum_samples,
    sum_squares,
)
from implicit_attn.kernels import check_backend, frozen_key_attention
from implicit_attn.kernels.pairs import Pairs
from solvers.core.checks import require_count, require_number, require_positive

LARGEST_MIXTURE = 2_000_000  # members of all multisets of a density at a lower temperature


class PatternEnergy(ProjectedEnergy):
    """A function of the overlaps ``y_mu = x_mu.z`` with stored patterns, summed over the tokens.

    Shapes: ``z`` (B, ..., d); ``x`` is ignored; ``mask`` (B, N) for ``z`` (B, N, ..., d).

    Args:
        patterns: (M, d) floating, one pattern ``x_mu`` a row; copied.
        learnable: make what is stored parameters; else buffers.
        bias: b, (d,), of a term ``- b.z``, or None; copied.
        confined: add ``1/2 |z|^2``.
    """

    patterns: Tensor
    bias: Tensor | None

    def __init__(
        self,
        patterns: Tensor,
        *,
        learnable: bool,
        bias: Tensor | None = None,
        confined: bool = False,
    ) -> None:
        dim = check_tensor("patterns", patterns, "M d", finite=False).shape[1]
        super().__init__(dim)
        self.confined = confined
        self._store("patterns", patterns.detach().clone(), learnable)
        if bias is not None:
            check_tensor("bias", bias, "d", finite=False, d=dim)
            bias = bias.detach().to(patterns.dtype, copy=True)
        self._store("bias", bias, learnable and bias is not None)

    def _store(self, name: str, value: Tensor | None, learnable: bool) -> None:
        if learnable and value is not None:
            self.register_parameter(name, nn.Parameter(value))
        else:
            self.register_buffer(name, value)

    @property
    def weight(self) -> Tensor:
        return self.patterns

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return super().forward(z, x, mask=mask) + self._own_value(hide(z, mask))

    def value_and_grad(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Pair:
        value, gradient = super().value_and_grad(z, x, mask=mask)
        visible = hide(z, mask)
        return value + self._own_value(visible), self._with_own(gradient, visible, mask)

    def grad(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return self._with_own(super().grad(z, x, mask=mask), hide(z, mask), mask)

    def _own_value(self, z: Tensor) -> Tensor | float:
        """The terms of the state alone."""
        value = 0.5 * sum_squares(z) if self.confined else 0.0
        return value if self.bias is None else value - sum_samples(z * self.bias)

    def _with_own(self, gradient: Tensor, z: Tensor, mask: Tensor | None) -> Tensor:
        gradient = z + gradient if self.confined else gradient
        return gradient if self.bias is None else hide(gradient - self.bias, mask)

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
    integer (``cooling``), the density is a mixture over the means of k patterns, each of k from all.

    Shapes and other arguments as for ``PatternEnergy``.

    Args:
        beta: inverse temperature, > 0.

    Source: Ramsauer et al., "Hopfield Networks is All You Need", https://arxiv.org/abs/2008.02217,
    equations 2 and 3, without the constant; Bal, "An Energy-Based Perspective on Attention Mechanisms
    in Transformers" (2020), https://mcbal.github.io/post/an-energy-based-perspective-on-attention-mechanisms-in-transformers/,
    for the mixture.
    """

    def __init__(self, patterns: Tensor, *, beta: float = 1.0, learnable: bool = False) -> None:
        super().__init__(patterns, learnable=learnable, confined=True)
        self.beta = require_positive("beta", beta)

    def token_value(self, y: Tensor, given: Given) -> Tensor:
        return (y.to(accumulation_dtype(y.dtype)) * self.beta).logsumexp(-1) / -self.beta

    def force(self, y: Tensor, given: Given) -> Tensor:
        return -(y * self.beta).softmax(-1)

    def log_partition(self, cooling: int = 1) -> Tensor:
        """``log Z`` of one token at temperature ``1 / (cooling beta)``, a scalar, differentiable.

        ``Z`` is a sum over all multisets of ``cooling`` patterns, an integer >= 1; ValueError where these
        have more than two million members together.
        """
        return self._log_partition(cooling).to(accumulation_dtype(self.patterns.dtype))

    def _log_partition(self, cooling: int) -> Tensor:
        logits, _ = self._mixture(cooling)
        volume = 0.5 * self.dim * math.log(2 * math.pi / (cooling * self.beta))
        return logits.logsumexp(0) + volume

    def log_prob(self, z: Tensor, cooling: int = 1) -> Tensor:
        """``log p(z)`` at temperature ``1 / (cooling beta)``, differentiable by z and the patterns.

        ``z`` (..., d), each token on its own -> (...), in the widest dtype of z, the patterns and
        float32; computed in float64, as large norms cancel.
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
        """Independent draws (count, d) from ``p`` at temperature ``1 / (cooling beta)``; no gradients.

        ``generator``: on the device of the patterns; None: PyTorch's own.
        """
        require_count("count", count)
        logits, centers = self._mixture(cooling)
        # Not multinomial, which takes no more than 2^24 categories and rounds in float32.
        shares = logits.softmax(0).cumsum(0)
        draws = torch.rand(count, generator=generator, device=logits.device, dtype=torch.float64)
        chosen = torch.searchsorted(shares, draws * shares[-1]).clamp_max(len(shares) - 1)
        centers = centers[chosen]
        noise = centers.new_empty(centers.shape).normal_(generator=generator)
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
        self, patterns: Tensor, *, power: int | str = 3, shift: float = 0.0, learnable: bool = False
    ) -> None:
        super().__init__(patterns, learnable=learnable)
        number = isinstance(power, int) and not isinstance(power, bool) and power >= 2
        if not number and power != "exp":
            raise ValueError(f"power must be an integer >= 2 or 'exp', got {power!r}")
        self.power, self.shift = power, require_number("shift", shift)
        if shift and number:
            raise ValueError(f"shift needs power='exp', got shift={shift} and power={power!r}")
        self.concave = isinstance(power, str) or power % 2 == 0

    def token_value(self, y: Tensor, given: Given) -> Tensor:
        wide = y.to(accumulation_dtype(y.dtype))
        powers = (wide - self.shift).exp() if isinstance(self.power, str) else wide.pow(self.power)
        return -powers.sum(-1)

    def force(self, y: Tensor, given: Given) -> Tensor:
        if isinstance(self.power, str):
            return -(y - self.shift).exp()
        return -self.power * y.pow(self.power - 1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, power={self.power!r}"


class QueryEnergy(HasTemperatures, Energy):
    """The modern Hopfield energy of queries whose stored patterns are the keys, without any weight.

    ``E = sum_h sum_i [ 1/2 |q_hi|^2 - beta^-1 log sum_j exp(beta q_hi.k_hj) ]``. Gradient by the queries:
    ``q_i - sum_j softmax_j(beta q_i.k_j) k_j``. A unit step is therefore softmax attention with the keys
    for values, and never raises the energy. A query without any key has the energy ``1/2 |q|^2``.

    Shapes: ``z`` (B, N, d), the queries, each head a slice of ``p = d / heads`` features. ``x``: the keys
    (B, M, d), or a pair of them and a mask (B, M) bool, False at masked keys; or an ``AttentionInput``
    with such a ``memory``, which may also hold pairs and their biases. ``mask`` (B, N), of the queries.

    Args:
        dim: features d of queries and keys.
        heads: a divisor of ``dim``.
        beta: inverse temperature, > 0, or one for each head; None: ``1 / sqrt(p)``.
        learned_beta: train one for each head.
        backend: as for ``SoftmaxAttention`` with ``cross``.

    Source: Ramsauer et al., "Hopfield Networks is All You Need", https://arxiv.org/abs/2008.02217,
    equations 2 and 3; with keys for patterns Bal, "Attention as Energy Minimization: Visualizing
    Energy Landscapes" (2021), https://mcbal.github.io/post/attention-as-energy-minimization-visualizing-energy-landscapes/
    """

    def __init__(
        self,
        dim: int,
        heads: int = 1,
        *,
        beta: Beta = None,
        learned_beta: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.set_heads(dim, heads, beta=beta, learned_beta=learned_beta)
        self.backend = check_backend(backend, "frozen keys")

    def value_and_grad(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Pair:
        each, mean = self._attend(z, x, mask)
        return sum_samples(hide(each.mT, mask)), hide(hide(z, mask) - merge_heads(mean), mask)

    def each(self, z: Tensor, x: Any = None) -> Tensor:
        """The energy of each query, (B, H, N), float32 or wider."""
        return self._attend(z, x, None)[0]

    def _attend(self, z: Tensor, x: Any, mask: Tensor | None) -> Pair:
        """The energy of each query (B, H, N), and its mean key (B, H, N, p)."""
        check_tokens(z, mask, "QueryEnergy", dim=self.dim, tokens=True)
        given = self.context_of(x, z, mask)
        key, seen = given.key, given.mask
        assert key is not None  # made of the memory
        if (key.dtype, key.device) != (z.dtype, z.device):
            wanted, got = f"{z.dtype} on {z.device}", f"{key.dtype} on {key.device}"
            raise TypeError(f"QueryEnergy: x must be of {wanted} like z, got {got}")
        shape = (len(z), self.heads, z.shape[1], key.shape[2])
        pairs = fit_pairs(given.pairs, shape, z.device) or Pairs()
        if not key.shape[2]:
            (key, seen), pairs = masked_key(key), Pairs()
        query = split_heads(hide(z, mask), self.heads)
        options: dict[str, Any] = {"pairs": pairs.allowed, "bias": pairs.bias}
        mean, lse = frozen_key_attention(
            *self.at_one(query, key), mask=seen, backend=self.backend, **options
        )
        beta, wide = self.beta, query.to(accumulation_dtype(query.dtype))
        over = lse / (by_head(beta, 2, lse) if isinstance(beta, Tensor) else beta)
        return 0.5 * wide.square().sum(-1) - over, mean.to(query.dtype)

    def read(self, x: Any, mask: Tensor | None) -> HeadsContext:
        pairs = read_pairs(x, mask, "QueryEnergy", cross=True)
        memory, seen = read_memory(x, self.dim, "QueryEnergy")
        return HeadsContext(None, split_heads(memory, self.heads), seen, pairs)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, heads={self.heads}, {self.described()}"
