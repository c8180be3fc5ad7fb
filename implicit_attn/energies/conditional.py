"""Conditional attention, whose keys and values depend only on the input, and the equilibrium energy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.energies.energy import Energy, Prepared, Quadratic, SummedEnergy
from implicit_attn.energies.feedforward import MemoryEnergy
from implicit_attn.energies.heads import (
    AttentionInput,
    Beta,
    HasHeads,
    HeadsContext,
    check_exclude_self,
    check_held,
    fit_keys,
    project_input,
    read_input,
)
from implicit_attn.energies.tokens import (
    SOFT_NORM,
    Pair,
    Projection,
    RMSNorm,
    accumulation_dtype,
    check_mask,
    check_norm,
    check_tokens,
    hide,
    merge_heads,
    split_heads,
    sum_samples,
)
from implicit_attn.kernels import check_backend, explain_frozen_keys, frozen_key_attention
from implicit_attn.kernels.arguments import Pairs, token_pairs
from solvers.core.checks import require_instance, require_positive
from solvers.core.cuda import on_cuda

# Score of excluded pairs, whose exponential is zero. A solve does not accept -inf as an input.
EXCLUDED = -1e30
# Initial size of Q relative to other weights. Attention starts nearly uniform, so that no head commits
# to a token because of the initial weights.
QUERY_SCALE = 0.1


class FrozenAttention(NamedTuple):
    """Prepared input of ``ConditionalAttention``.

    Attributes:
        log_weights: ``log P0`` (B, H, N, M), ``EXCLUDED`` at excluded pairs, uniform in rows without
            any key. None if no N x M matrix is stored.
        value: v (B, H, M, p), after the norm.
        attends: (B, H or 1, N), False at queries without any key; None if all have one.
        query, key: q (B, H, N, p) times its inverse temperature, and k (B, H, M, p), if
            ``log_weights`` is None.
        lse, mask: ``log sum_j exp(beta q_i.k_j)``, (B, H, N), and the mask (B, M) of the keys.
            On CUDA devices lse is None and computed only for energies.
        pairs: pairs of queries and keys, (B, ...), on CUDA devices only.
    """

    log_weights: Tensor | None
    value: Tensor
    attends: Tensor | None = None
    query: Tensor | None = None
    key: Tensor | None = None
    lse: Tensor | None = None
    mask: Tensor | None = None
    pairs: Pairs = Pairs()


class ConditionalAttention(HasHeads, Energy):
    r"""``E = -tau^-1 sum_h sum_i log sum_j P0_ij exp(tau (W_h z_i).v_j)`` with P0 and v from the input.

    ``P0_ij = softmax_j(beta q_i.k_j + bias_ij)`` are the weights of ordinary attention among the tokens
    of the input, with ``q = Q x + b_q``, ``k = K x + b_k`` and values ``v = norm(V x + b_v)``. The
    negative gradient is ``sum_h W_h^T sum_j P_ij v_j`` with ``P = softmax_j(log P0 + tau (W z).v)``. At
    ``z = 0`` it is multi-head attention with the output weights ``W^T``; elsewhere a token attends
    more to the values that are aligned with its state. E is a cumulant generating function of the values
    and zero at ``z = 0``.

    Keys, values and P0 do not depend on z. Therefore E is concave in z for any weights and x, and tokens
    interact only through x: with ``causal=True`` token i does not depend on later tokens. Because
    ``|v|^2 < p`` and the spectral norm of W is at most 1, the eigenvalues of the Hessian lie between
    ``-curvature`` and 0, for ``tau = curvature / p``.

    Shapes: ``z`` (B, N, dim); ``mask`` (B, N). Self: ``x`` (B, N, context_dim). Cross: an
    ``AttentionInput`` with ``tokens`` (B, N, context_dim), ``memory`` (B, M, memory_dim) and optionally
    ``memory_mask``. Both may contain ``pairs`` and ``pair_bias``. A query without any key has energy 0.

    Args:
        dim: features of the state.
        heads: number of heads H.
        context_dim: features of the input's tokens; None for ``dim``.
        memory_dim: features of the memory, from which cross-attention computes keys and values.
        head_dim: width p of a head; None for ``dim / heads``.
        beta, learned_beta: inverse temperature of ``P0``; see
            :class:`implicit_attn.energies.attention.HeadsEnergy`.
        curvature: bound on the curvature, finite and > 0.
        norm: norm of each head's values.
        score_norm: norm of each head's queries and keys, or None. It bounds the scores of P0 by
            ``beta p``, so that no head concentrates on a single token early in training.
        causal: whether token i attends only to ``j <= i``; self-attention only.
        exclude_self: whether no token attends to itself; self-attention only.
        backend: "reference" (dense), "flash" (no N x M matrix) or "auto"; see
            :func:`implicit_attn.kernels.frozen_key_attention`.

    Example:
        >>> energy = ConditionalAttention(64, heads=4)  # + Quadratic().select("tokens")

    Source: Vaswani et al., https://arxiv.org/abs/1706.03762 (P0); Ren, Ouyang, Tang, Liu,
    https://arxiv.org/abs/2511.00907, equation 3 (the free energy), here with separate keys and values.
    """

    concave = True

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        context_dim: int | None = None,
        memory_dim: int | None = None,
        head_dim: int | None = None,
        beta: Beta = None,
        learned_beta: bool = False,
        curvature: float = 0.45,
        norm: RMSNorm = SOFT_NORM,
        score_norm: RMSNorm | None = SOFT_NORM,
        causal: bool = False,
        exclude_self: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.backend = check_backend(backend, "frozen keys")
        self.set_heads(dim, heads, head_dim=head_dim, beta=beta, learned_beta=learned_beta)
        self.cross, self.causal = memory_dim is not None, causal
        self.exclude_self = check_exclude_self(exclude_self, backend, self.cross, causal)
        self.norm = require_instance("norm", norm, RMSNorm, "RMSNorm(epsilon=...)")
        self.score_norm = check_norm(score_norm)
        self.curvature = require_positive("curvature", curvature)
        self.tau = self.curvature / self.width
        rows, context_dim = heads * self.width, dim if context_dim is None else context_dim
        source = context_dim if memory_dim is None else memory_dim
        self.query, self.key = Projection(context_dim, rows), Projection(source, rows)
        self.value = Projection(source, rows)
        with torch.no_grad():
            self.query.weight *= QUERY_SCALE
        self.query_bias = nn.Parameter(torch.zeros(rows))
        self.key_bias = nn.Parameter(torch.zeros(rows))
        self.value_bias = nn.Parameter(torch.zeros(rows))
        self.state = Projection(dim, rows, bound=1.0)
        if causal and backend == "flash":
            raise ValueError('causal=True needs backend="auto" or "reference", got "flash"')

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Any:
        """Return weights P0 and values, or queries, keys and values, as a ``Prepared``."""
        if isinstance(x, Prepared):
            return x
        name, heads = type(self).__name__, self.heads
        width = self.key.weight.shape[1] if self.cross else None
        tokens, pairs, memory, key_mask = read_input(x, mask, name, width)
        query = project_input(tokens, self.query, self.query_bias, heads, mask, name)
        if self.cross and len(memory) != len(query):
            raise ValueError(
                f"{name}: x.memory must have the batch size of x.tokens, {len(query)}, got {len(memory)}"
            )
        key = project_input(memory, self.key, self.key_bias, heads, key_mask, name)
        value = project_input(memory, self.value, self.value_bias, heads, key_mask, name)
        value = self.norm.normalise(value)[0]
        if self.score_norm is not None:
            query, key = (self.score_norm.normalise(side)[0] for side in (query, key))
        query = query * torch.as_tensor(self.beta_like(query), dtype=query.dtype)
        return Prepared(self._freeze(query, key, value, pairs, key_mask))

    def _freeze(
        self, query: Tensor, key: Tensor, value: Tensor, given: Pairs, key_mask: Tensor | None
    ) -> FrozenAttention:
        """Return the constants of a solve: ``log P0``, or queries and keys for "flash"."""
        tokens = query.shape[2]
        key, key_mask, pairs = fit_keys(given, query, key, key_mask, self.exclude_self)
        value = value if value.shape[2] else torch.zeros_like(key)
        causal = self.causal and tokens > 0
        options: dict[str, Any] = {"mask": key_mask, "causal": causal, "backend": self.backend}
        options |= {"pairs": pairs.allowed, "bias": pairs.bias}
        wide = accumulation_dtype(query.dtype)
        if explain_frozen_keys(query, key, 1.0, **options).backend != "reference":
            batch, lse, attends = len(query), None, None
            if not on_cuda(query):
                _, lse = frozen_key_attention(query, key, 1.0, **options)
            if key_mask is not None:
                attends = key_mask.any(1)[:, None, None].expand(-1, 1, tokens)
            pairs = Pairs(*(None if t is None else _expanded(t, batch) for t in pairs))
            return FrozenAttention(None, value, attends, query, key, lse, key_mask, pairs)
        pairs = pairs.intersect(token_pairs(None, causal, tokens, query.device))
        pairs = pairs.intersect(None if key_mask is None else key_mask[:, None, None, :])
        scores = query.to(wide) @ key.to(wide).mT
        if pairs.bias is not None:
            scores = scores + pairs.bias.to(wide)
        if pairs.allowed is None:
            return FrozenAttention(scores.log_softmax(-1), value)
        allowed = pairs.allowed if pairs.allowed.dim() == 4 else pairs.allowed[None, None]
        attends = allowed.any(-1).expand(query.shape[0], -1, -1)
        # A row without any key is uniform, and its result is set to zero.
        scores = scores.masked_fill(~allowed, EXCLUDED).log_softmax(-1)
        return FrozenAttention(scores, value, attends)

    def value_and_grad(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Pair:
        frozen, y, weight = self._evaluate(z, x, mask)
        if frozen.log_weights is None:
            attended, lse = self._among_keys(frozen, y)
        else:
            scores = self._scores(frozen, y)
            lse = scores.logsumexp(-1)
            attended = (scores - lse.unsqueeze(-1)).exp().to(y.dtype) @ frozen.value
        if frozen.attends is not None:
            lse = lse.masked_fill(~frozen.attends, 0.0)
        if mask is not None:
            lse = lse.masked_fill(~mask[:, None], 0.0)
        return sum_samples(lse) / -self.tau, self._gradient(frozen, attended, weight, z, mask)

    def grad(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        frozen, y, weight = self._evaluate(z, x, mask)
        if frozen.log_weights is None:
            attended, _ = self._among_keys(frozen, y, need_lse=False)
        else:
            attended = self._scores(frozen, y).softmax(-1).to(y.dtype) @ frozen.value
        return self._gradient(frozen, attended, weight, z, mask)

    @staticmethod
    def _gradient(
        frozen: FrozenAttention, attended: Tensor, weight: Tensor, z: Tensor, mask: Tensor | None
    ) -> Tensor:
        if frozen.attends is not None:
            attended = attended.masked_fill(~frozen.attends.unsqueeze(-1), 0.0)
        return -hide(merge_heads(attended) @ weight, mask).to(z.dtype)

    def _evaluate(
        self, z: Tensor, x: Any, mask: Tensor | None
    ) -> tuple[FrozenAttention, Tensor, Tensor]:
        """Return the prepared input, ``W z`` split into heads (B, H, N, p), and W."""
        name = type(self).__name__
        check_tokens(z, mask, name, dim=self.dim, tokens=True)
        frozen: FrozenAttention = self.prepare(x, mask=mask).parts
        held = frozen.query if frozen.log_weights is None else frozen.log_weights
        check_held(HeadsContext(query=held), z, name)
        weight = self.state.weight
        return frozen, split_heads(nn.functional.linear(hide(z, mask), weight), self.heads), weight

    def _scores(self, frozen: FrozenAttention, y: Tensor) -> Tensor:
        """Return ``log P0_ij + tau y_i.v_j`` (B, H, N, M), float32 or wider."""
        assert frozen.log_weights is not None
        wide, shape = frozen.log_weights.dtype, frozen.log_weights.shape
        scores = torch.baddbmm(
            frozen.log_weights.flatten(0, 1),
            y.to(wide).flatten(0, 1),
            frozen.value.to(wide).flatten(0, 1).mT,
            alpha=self.tau,
        )
        return scores.view(shape)

    def _among_keys(
        self, frozen: FrozenAttention, y: Tensor, need_lse: bool = True
    ) -> tuple[Tensor, Any]:
        """Return ``sum_j P_ij v_j`` and lse without an N x M matrix: queries (q, tau y), keys (k, v)."""
        assert frozen.query is not None and frozen.key is not None
        query = torch.cat((frozen.query, y * self.tau), -1)
        key = torch.cat((frozen.key, frozen.value), -1)
        causal = self.causal and frozen.query.shape[2] > 0
        options: dict[str, Any] = {"mask": frozen.mask, "causal": causal}
        options |= {"pairs": frozen.pairs.allowed, "bias": frozen.pairs.bias}
        options |= {"backend": self.backend}
        mean, lse = frozen_key_attention(query, key, 1.0, need_lse=need_lse, **options)
        if need_lse:
            origin = frozen.lse
            if origin is None:
                origin = frozen_key_attention(frozen.query, frozen.key, 1.0, **options)[1]
            lse = lse - origin
        return mean[..., self.width :], lse

    def extra_repr(self) -> str:
        return (
            f"dim={self.dim}, heads={self.heads}, {self.described()}, "
            f"curvature={self.curvature}, cross={self.cross}, causal={self.causal}"
        )


def _expanded(pairs: Tensor, batch: int) -> Tensor:
    """Expand (N, M) or (B or 1, H or 1, N, M) to (B, H or 1, N, M), without a copy."""
    return (pairs if pairs.dim() == 4 else pairs[None, None]).expand(batch, -1, -1, -1)


# Added to the mean square of a token in ``c(x)``, typically of order 1, to bound the gradient of a token
# of zeros.
EPSILON = 1e-2


class EquilibriumEnergy(SummedEnergy):
    r"""Energy of the equilibrium block, ``E(z; x) = 1/2 |z|^2 + E_attention(z; c(x)) + E_memory(z; x)``.

    The input of the attention is ``c(x) = rms_norm(x - dE_memory/dz(0; x))``, the input plus the memory's
    first gradient step. The first gradient step from ``z = 0`` is therefore a feed-forward block followed
    by multi-head attention, with the transposed weights as output weights.

    If the Hessians of attention and memory are at least ``-a`` and ``-b`` with ``a + b < 1``, E is strongly
    convex. Its unique minimum depends continuously on x and the weights, and any descent converges to it.

    Args:
        attention: a ``ConditionalAttention``, or None.
        memory: a feed-forward energy with ``context_dim`` and without norm, or None; not both None. (It is
            unrelated to the ``memory`` of an ``AttentionInput``, the tokens of cross-attention.)
        output: map O from the state (..., s) to the width of x if they differ; then
            ``c(x) = rms_norm(x - O dE_memory/dz(0; x))``.

    Shapes: ``z`` (B, N, s); ``x`` (B, N, d), or an ``AttentionInput`` whose ``tokens`` are x;
    ``mask`` (B, N) bool.
    """

    def __init__(
        self,
        attention: ConditionalAttention | None,
        memory: MemoryEnergy | None,
        output: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if attention is None and memory is None:
            raise ValueError("attention and memory must not both be None")
        if memory is not None and (memory.context_dim is None or memory.norm is not None):
            raise ValueError("memory must have a context_dim and norm=None")
        self.quadratic = Quadratic()
        self.attention, self.memory, self.output = attention, memory, output

    def summands(self) -> Iterable[Any]:
        terms = (self.quadratic, self.attention, self.memory)
        return [term for term in terms if term is not None]

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Any:
        """Return the prepared inputs of attention and memory.

        A solve may start at ``-dE_memory/dz(0; x)``, which ``c(x)`` needs anyway.
        """
        if isinstance(x, Prepared):
            return x
        given = x if isinstance(x, AttentionInput) else AttentionInput(tokens=x)
        tokens, parts, answer = given.tokens, [None], None
        if isinstance(tokens, Tensor):
            check_mask(mask, tokens, type(self).__name__, features=1)
            tokens = hide(tokens, mask)
        recalled = None if self.memory is None else self.memory.prepare(tokens, mask=mask)
        if self.memory is not None and tokens is not None:
            origin = tokens.new_zeros(*tokens.shape[:-1], self.memory.dim)
            answer = -self.memory.grad(origin, recalled, mask=mask)
        if self.attention is not None:
            context = tokens if answer is None else self.context(tokens, answer)
            parts.append(self.attention.prepare(given._replace(tokens=context), mask=mask))
        if self.memory is not None:
            parts.append(recalled)
        return Prepared(tuple(parts), None if answer is None else answer.detach())

    def with_parts(self, x: Any, mask: Tensor | None) -> Iterable[tuple[Any, Any]]:
        return super().with_parts(self.prepare(x, mask=mask), mask)

    def context(self, x: Any, answer: Tensor) -> Tensor:
        """Return ``c(x)``, like ``x``, for ``answer = -dE_memory/dz(0; x)`` (..., s)."""
        if self.output is not None:
            answer = self.output(answer)
        if answer.shape != x.shape:
            raise ValueError(
                f"{type(self).__name__}: output must map the state to the width of x, "
                f"{x.shape[-1]}, got {answer.shape[-1]}"
            )
        return F.rms_norm(x + answer, (x.shape[-1],), eps=EPSILON)
