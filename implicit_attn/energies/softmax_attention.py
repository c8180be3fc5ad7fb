"""Softmax attention with separate queries and keys, as a free energy of the queries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from implicit_attn.energies.energy import Energy
from implicit_attn.energies.heads import (
    AttentionInput,
    HasTemperatures,
    HeadOptions,
    HeadsContext,
    check_exclude_self,
    fit_pairs,
    masked_key,
    project_input,
    read_memory,
    read_pairs,
)
from implicit_attn.energies.projected import Features, Projection, like_state, project
from implicit_attn.energies.tokens import (
    Pair,
    check_dtype,
    check_tokens,
    hide,
    sum_squares,
)
from implicit_attn.kernels import (
    check_backend,
    frozen_key_attention,
)
from implicit_attn.kernels.pairs import Pairs, token_pairs
from implicit_attn.kernels.softmax import Attended, attend, forces
from solvers.core.checks import require_choice

if TYPE_CHECKING:
    from typing_extensions import Unpack


class _Evaluation(NamedTuple):
    """Queries and keys at a state, and the pairs that attend."""

    query: Features
    key: Features  # in cross-attention their ``unit`` alone has a meaning
    mask: Tensor | None  # (B, M) bool, of the keys in cross-attention
    pairs: Pairs | None


class SoftmaxAttention(HasTemperatures, Energy):
    """Helmholtz free energy of every query among the keys, at the temperature ``1 / beta``.

    ``energy="inner"``: ``E = -beta^-1 sum_h sum_i log sum_j exp(beta q_i.k_j)``. Gradient by q:
    ``-sum_j P_ij k_j``, so a descent step moves a token along its attention output.

    ``energy="elastic"``: ``E = -beta^-1 sum_h sum_i log sum_j exp(-beta |q_i - k_j|^2 / 2)``. Gradient
    by q: ``q_i - sum_j P_ij k_j``. Bounded below. In the queries of a head it is convex where
    ``1/beta >= D^2/4``, D the largest distance of two keys, a sharp bound; where all heads are, so is E
    among constant keys (``cross``) without norm. It is never concave.

    ``q = norm(W_q z)``. In self-attention ``k = norm(W_k z)``: the gradient has a term of the keys. In
    cross-attention ``k = norm(W_k x)`` stays; the inner E is then concave in z without norm, for any x.

    The features of self-attention may see the input, too, with ``context_dim``:
    ``q = norm(W_q z + Q x + b_q)``, ``k = norm(W_k z + K x + b_k)``.

    Shapes: ``z`` (B, N, d), ``mask`` (B, N). Self: ``x`` is ignored without ``context_dim``, else
    (B, N, context_dim). Cross: ``x`` (B, M, context_dim), or a pair of it and a mask (B, M) bool, False
    at masked context tokens. Both: an ``AttentionInput``, which may also hold pairs and their biases.
    A query without any key has energy 0.

    Args:
        dim: features d of the tokens.
        heads: number of heads.
        energy: ``"inner"`` or ``"elastic"``.
        cross: cross-attention: keys from ``x`` in place of ``z``.
        context_dim: cross: features of x, default ``dim``. Self: features of the x that queries and
            keys see; None: they see none.
        shared: head_dim, beta, learned_beta, bias (of ``b_q`` and ``b_k``), norm (of queries and keys) and
            bound (of ``W_q`` and ``W_k``), as for :class:`implicit_attn.energies.attention.HeadsEnergy`.
        causal: for self-attention, restrict the energy of token i to ``j <= i``. The key term of the
            gradient still carries information from later to earlier tokens.
        exclude_self: for self-attention, no token attends to itself.
        backend: what computes cross-attention: "reference" (dense), "flash" (torch's fused attention
            on the CPU, which forms no N x M matrix) or "auto";
            ``implicit_attn.kernels.explain_frozen_keys`` says which one "auto" takes.
            Self-attention is dense, and so is whatever has pairs or their biases.

    Source: Ren, Ouyang, Tang, Liu, "Transformers as Intrinsic Optimizers",
    https://arxiv.org/abs/2511.00907, equation 3 ("inner") and theorem 1 ("elastic").
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        energy: str = "inner",
        cross: bool = False,
        causal: bool = False,
        exclude_self: bool = False,
        backend: str = "auto",
        **shared: Unpack[HeadOptions],
    ) -> None:
        super().__init__()
        require_choice("energy", energy, ("inner", "elastic"))
        check_backend(backend, "frozen keys")
        self.exclude_self = check_exclude_self(exclude_self, backend, cross, causal)
        if backend == "flash" and not cross:
            raise ValueError("backend='flash' needs cross=True, got cross=False")
        options = self.set_heads(dim, heads, **shared)
        self.energy, self.cross, self.causal, self.backend = energy, cross, causal, backend
        self.norm, self._elastic = options.norm, energy == "elastic"
        self.context_dim = options.context_dim or (dim if cross else None)
        rows, seen = heads * self.width, None if cross else self.context_dim
        self.query = Projection(dim, rows, options.bound)
        self.key = Projection(self.context_dim or dim if cross else dim, rows, options.bound)
        self.query_context = None if seen is None else Projection(seen, rows)
        self.key_context = None if seen is None else Projection(seen, rows)
        biased = options.bias or seen is not None
        self.query_bias = nn.Parameter(torch.zeros(rows)) if biased else None
        self.key_bias = nn.Parameter(torch.zeros(rows)) if biased else None
        self.concave = cross and energy == "inner" and options.norm is None

    def value_and_grad(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Pair:
        at = self._evaluate(z, x, mask)
        attended, gradient = (self._across if self.cross else self._within)(at, mask)
        value = -self.over_beta(attended.lse)
        if self._elastic:
            value = value + 0.5 * sum_squares(attended.only(at.query.unit))
        return value, like_state(gradient, z, mask)

    def _within(self, at: _Evaluation, mask: Tensor | None) -> tuple[Attended, Tensor]:
        """What attends to what among the tokens of the state, and the gradient by it."""
        query, key = at.query.unit, at.key.unit
        pairs = at.pairs
        order = token_pairs(mask, self.causal, query.shape[2], query.device)
        if order is not None:
            pairs = (pairs or Pairs()).intersect(order)
        largest, limit = self.temperatures.largest, None
        if self.norm is not None and largest is not None:
            limit = 1.5 * largest * self.width  # of |scores|: |q|, |k| <= sqrt(p) after the norm
        options: dict[str, Any] = {"elastic": self._elastic, "pairs": pairs, "limit": limit}
        attended = attend(query, key, self.score_beta(query), **options)
        by_query, by_key = forces(query, key, attended, elastic=self._elastic)
        return attended, at.query.pull_back(by_query) + at.key.pull_back(by_key)

    def _across(self, at: _Evaluation, mask: Tensor | None) -> tuple[Attended, Tensor]:
        """Likewise among keys that stay, without the weights."""
        own, key = at.query.unit, at.key.unit
        query, (allowed, bias) = own, at.pairs or Pairs()
        if self._elastic:  # q.k - |k|^2 / 2, as a product of wider features
            half = key.square().sum(-1, keepdim=True) * -0.5
            query = torch.cat((query, torch.ones_like(query[..., :1])), -1)
            key = torch.cat((key, half), -1)
        options: dict[str, Any] = {"mask": at.mask, "pairs": allowed, "bias": bias}
        arguments = self.at_one(query, key)
        mean, lse = frozen_key_attention(*arguments, **options, backend=self.backend)
        attends = None if mask is None else mask[:, None]  # the queries that have a key
        if at.mask is not None:
            seen = at.mask[:, None, None]
            allowed = seen if allowed is None else allowed & seen
        if allowed is not None:
            attends = allowed.any(-1) if attends is None else allowed.any(-1) & attends
        lse = lse if attends is None else lse.masked_fill(~attends, 0.0)
        attended = Attended(mean[..., : self.width].to(own.dtype), lse, attends)
        force = -attended.only(attended.weights)
        force = force + attended.only(own) if self._elastic else force
        return attended, at.query.pull_back(force)

    def sees(self, x: Any) -> bool:
        return self.cross or isinstance(x, AttentionInput) or self.query_context is not None

    def _evaluate(self, z: Tensor, x: Any, mask: Tensor | None) -> _Evaluation:
        check_tokens(z, mask, self._name(), dim=self.dim, tokens=True)
        context = self.context_of(x, z, mask)
        z = hide(z, mask)
        bias = self.query_bias if context.query is None else context.query
        query = self._features(z, self.query, bias, mask)
        if self.cross:
            assert context.key is not None  # made of the memory
            key = Features(context.key, None, self.key.weight, self.heads)
        else:
            bias = self.key_bias if context.key is None else context.key
            key = self._features(z, self.key, bias, mask)
        shape = z.shape[0], self.heads, z.shape[1], key.unit.shape[2]
        seen = context.mask
        pairs = fit_pairs(context.pairs, shape, z.device, self.exclude_self)
        if self.cross and not shape[3]:
            (unit, seen), pairs = masked_key(key.unit), None
            key = key._replace(unit=unit)
        return _Evaluation(query, key, seen, pairs)

    def _features(
        self, z: Tensor, side: Projection, bias: Tensor | None, mask: Tensor | None
    ) -> Features:
        """``norm(z W^T + bias)``; of ``bias``, like the features or (rows,), see :func:`project`."""
        weight = side.weight
        raw = project(z, weight, bias, self.heads, mask)
        return Features.of(raw, self.norm, weight, self.heads)

    def read(self, x: Any, mask: Tensor | None) -> HeadsContext:
        name, heads = self._name(), self.heads
        pairs = read_pairs(x, mask, name, cross=self.cross)
        tokens = x.tokens if isinstance(x, AttentionInput) else x
        query = key = memory_mask = None
        if self.cross:
            memory, memory_mask = read_memory(x, self.key.weight.shape[1], name)
            check_dtype(memory, self.key.weight, name)
            key = self._features(memory, self.key, self.key_bias, memory_mask).unit
        elif self.query_context is not None and self.key_context is not None:
            query = project_input(tokens, self.query_context, self.query_bias, heads, mask, name)
            key = project_input(tokens, self.key_context, self.key_bias, heads, mask, name)
        return HeadsContext(query, key, memory_mask, pairs)

    def _name(self) -> str:
        return f"{type(self).__name__} (cross)" if self.cross else type(self).__name__

    def extra_repr(self) -> str:
        return (
            f"heads={self.heads}, energy={self.energy}, cross={self.cross}, {self.described()}, "
            f"norm={self.norm}, causal={self.causal}"
        )
