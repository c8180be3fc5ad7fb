"""Energies of queries among given keys, head by head."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from implicit_attn.energies.checks import check_tokens
from implicit_attn.energies.energy import Energy
from implicit_attn.energies.heads.heads_energy import head_width
from implicit_attn.energies.heads.inputs import (
    AttentionInput,
    HeadsContext,
    check_parts,
    masked_key,
    read_memory,
    read_pairs,
)
from implicit_attn.energies.heads.temperatures import (
    Beta,
    HasTemperatures,
    Temperatures,
    by_head,
    describe,
)
from implicit_attn.energies.prepared import Prepared
from implicit_attn.energies.projected import merge_heads, split_heads
from implicit_attn.energies.tokens import Pair, accumulation_dtype, hide, sum_samples
from implicit_attn.kernels import frozen_keys
from solvers.core.checks import require_instance


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
        self.dim, self.heads, self.width = dim, heads, head_width(dim, heads, None)
        self.temperatures = Temperatures(heads, beta, self.width, learned_beta)
        self._renew()
        self.backend = frozen_keys.check_frozen_key_backend(backend)

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Any:
        """The keys (B, H, M, p), their mask and the pairs, as a ``Prepared``."""
        return x if isinstance(x, Prepared) else Prepared(self._context(x, mask))

    def value_and_grad(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Pair:
        query, mean, lse = self._attend(z, x, mask)
        value = sum_samples(hide(self._each(query, lse).mT, mask))
        return value, hide(hide(z, mask) - merge_heads(mean), mask)

    def each(self, z: Tensor, x: Any = None) -> Tensor:
        """The energy of each query, (B, H, N), float32 or wider."""
        query, _, lse = self._attend(z, x, None)
        return self._each(query, lse)

    def _each(self, query: Tensor, lse: Tensor) -> Tensor:
        wide = query.to(accumulation_dtype(query.dtype))
        beta = self.beta
        over = lse / (by_head(beta, 2, lse) if isinstance(beta, Tensor) else beta)
        return 0.5 * wide.square().sum(-1) - over

    def _attend(self, z: Tensor, x: Any, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The queries, their mean keys (B, H, N, p), and the log-sum-exp of their scores."""
        check_tokens(z, mask, "QueryEnergy", dim=self.dim, tokens=True)
        given = x.parts if isinstance(x, Prepared) else self._context(x, mask, z)
        key, seen, pairs = given.key, given.mask, {"pairs": given.allowed, "bias": given.bias}
        assert key is not None  # made of the memory
        if key.shape[0] != z.shape[0]:
            raise ValueError(
                f"QueryEnergy: x must hold {z.shape[0]} samples like z, got {len(key)}"
            )
        if not key.shape[2]:
            (key, seen), pairs = masked_key(key), {}
        query = split_heads(hide(z, mask), self.heads)
        beta = self._score_beta(query)
        if isinstance(beta, Tensor):  # beta q.k is a product of other queries
            scaled = query.to(beta.dtype) * beta, key.to(beta.dtype), 1.0
        else:
            scaled = query, key, beta
        mean, lse = frozen_keys.frozen_key_attention(
            *scaled, mask=seen, **pairs, backend=self.backend
        )
        return query, mean.to(query.dtype), lse

    def _context(self, x: Any, mask: Tensor | None, z: Tensor | None = None) -> HeadsContext:
        name = "QueryEnergy"
        check_parts(x, mask, z, name, cross=True)
        memory, seen = read_memory(x, self.dim, z, name)
        if z is not None and memory.dtype != z.dtype:
            raise TypeError(
                f"{name}: x must have the dtype of z, {z.dtype}, got {memory.dtype}; convert one of "
                "them with .to()"
            )
        return HeadsContext(None, split_heads(memory, self.heads), seen, *read_pairs(x, mask, z))

    def extra_repr(self) -> str:
        return f"dim={self.dim}, heads={self.heads}, {describe(self.beta)}"


class HeadwiseEnergy(Energy):
    """The sum over the heads of one energy of queries of width p, among that head's keys.

    Every head of every sample is a sample to the energy, so it sees queries (B H, N, p) and, as its
    input, an ``AttentionInput`` whose tokens and memory are those of the head.

    Shapes: ``z`` (B, N, heads p); ``x`` an ``AttentionInput`` with tokens (B, N, heads p), a memory
    (B, M, heads p) and pairs, each optional; or a memory alone, or None. ``mask`` (B, N).

    Args:
        energy: of the queries (B, N, p) of a head; those of one sample must add up, as they do where
            no query influences another.
        heads: their number.
    """

    def __init__(self, energy: Energy, heads: int) -> None:
        super().__init__()
        self.energy = require_instance("energy", energy, Energy, "an Energy")
        self.heads = heads
        self.concave = energy.concave

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return self._sum(self.energy(*self._folded(z, x, mask), mask=self._rows(mask)))

    def value_and_grad(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Pair:
        folded = self._folded(z, x, mask)
        value, gradient = self.energy.value_and_grad(*folded, mask=self._rows(mask))
        return self._sum(value), self._unfold(gradient)

    def grad(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return self._unfold(self.energy.grad(*self._folded(z, x, mask), mask=self._rows(mask)))

    def hvp(self, z: Tensor, v: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        at, given = self._folded(z, x, mask)
        moved = self._fold(v)
        return self._unfold(self.energy.hvp(at, moved, given, mask=self._rows(mask)))

    def each(self, z: Tensor, x: Any = None) -> Tensor:
        """The energy of each query, (B, H, N): every query as a sample of its own."""
        queries, given = self._folded(z, x, None)
        count = queries.shape[1]
        if isinstance(given, AttentionInput):
            rows = [None if t is None else t.flatten(0, 1).unsqueeze(1) for t in given[:3]]
            keys = [None if t is None else t.repeat_interleave(count, 0) for t in given[3:]]
            given = AttentionInput(*rows, *keys)
        value = self.energy(queries.flatten(0, 1).unsqueeze(1), given)
        return value.view(z.shape[0], self.heads, count)

    def _folded(self, z: Tensor, x: Any, mask: Tensor | None) -> tuple[Tensor, Any]:
        """Queries (B H, N, p), and what the energy is given besides them."""
        check_tokens(z, mask, "HeadwiseEnergy", tokens=True)
        if z.shape[2] % self.heads:
            raise ValueError(
                f"HeadwiseEnergy: z must have a multiple of {self.heads} features, one slice a head, "
                f"got shape {tuple(z.shape)}"
            )
        if isinstance(x, Tensor):
            x = AttentionInput(memory=x)
        if not isinstance(x, AttentionInput):
            return self._fold(z), x
        check_parts(x, mask, z, "HeadwiseEnergy", cross=True)
        pairs, bias = (self._spread(t) for t in read_pairs(x, mask, z))
        tokens, memory = (None if t is None else self._fold(t) for t in (x.tokens, x.memory))
        given = AttentionInput(tokens, pairs, bias, memory, self._rows(x.memory_mask))
        return self._fold(z), given

    def _fold(self, y: Tensor) -> Tensor:
        return split_heads(y, self.heads).flatten(0, 1)

    def _unfold(self, y: Tensor) -> Tensor:
        return merge_heads(y.unflatten(0, (-1, self.heads)))

    def _spread(self, pairs: Tensor | None) -> Tensor | None:
        """Pairs (B, 1 or H, N, M) as (B H, N, M)."""
        if pairs is None:
            return None
        return pairs.expand(-1, self.heads, -1, -1).flatten(0, 1)

    def _rows(self, mask: Tensor | None) -> Tensor | None:
        return None if mask is None else mask.repeat_interleave(self.heads, 0)

    def _sum(self, value: Tensor) -> Tensor:
        return value.view(-1, self.heads).sum(1)

    def extra_repr(self) -> str:
        return f"heads={self.heads}"
