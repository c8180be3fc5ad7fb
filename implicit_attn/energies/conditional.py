"""Conditional attention, whose keys and values depend only on the input, and the equilibrium energy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.energies.energy import (
    AttentionContext,
    ClosedForm,
    Evaluation,
    Quadratic,
    SummedEnergy,
)
from implicit_attn.energies.feedforward import MemoryEnergy
from implicit_attn.energies.heads import (
    AttentionInput,
    Beta,
    HasHeads,
    check_state,
    fit_keys,
    project_input,
    read_input,
)
from implicit_attn.energies.tokens import (
    SOFT_NORM,
    Mask,
    Projection,
    RMSNorm,
    accumulation_dtype,
    check_mask,
    check_norm,
    hide,
    project,
    sum_samples,
    visible_input,
)
from implicit_attn.kernels import check_backend, frozen_key_attention
from implicit_attn.kernels.arguments import Pairs, token_pairs
from implicit_attn.kernels.dispatch import choose_frozen_keys
from solvers.core.checks import require_instance, require_positive
from solvers.core.cuda import on_cuda
from solvers.core.modes import without_autocast

# Score of excluded pairs, whose exponential is zero. A solve does not accept -inf as an input.
EXCLUDED = -1e30
# Initial size of Q relative to other weights. Attention starts nearly uniform, so that no head commits
# to a token because of the initial weights.
QUERY_SCALE = 0.1


class ConditionalAttention(HasHeads, ClosedForm):
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
        heads: number of heads H, a divisor of ``dim``, each of width ``p = dim / H``.
        context_dim: features of the input's tokens; None for ``dim``.
        memory_dim: features of the memory, from which cross-attention computes keys and values.
        beta, learned_beta: inverse temperature of ``P0``; see
            :class:`implicit_attn.energies.attention.HeadsEnergy`.
        curvature: bound on the curvature, finite and > 0.
        norm: norm of each head's values.
        score_norm: norm of each head's queries and keys, or None. It bounds the scores of P0 by
            ``beta p``, so that no head concentrates on a single token early in training.
        causal: whether token i attends only to ``j <= i``; self-attention only.
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
        beta: Beta = None,
        learned_beta: bool = False,
        curvature: float = 0.45,
        norm: RMSNorm = SOFT_NORM,
        score_norm: RMSNorm | None = SOFT_NORM,
        causal: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.backend = check_backend(backend, "frozen keys")
        self.set_heads(dim, heads, None, beta, learned_beta)
        self.cross, self.causal = memory_dim is not None, causal
        if causal and (self.cross or backend == "flash"):
            raise ValueError('causal=True needs self-attention and backend="auto" or "reference"')
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

    def read(self, x: Any, mask: Mask) -> AttentionContext:
        """Compute values and ``log P0``; for "flash" instead queries, keys with the values as features."""
        name, heads = type(self).__name__, self.heads
        width = self.key.weight.shape[1] if self.cross else None
        tokens, given, memory, seen = read_input(x, mask, name, width)
        visible = visible_input(tokens, self.query.weight, mask, name, tokens=True)
        if self.cross and memory.shape[0] != visible.shape[0]:
            wanted = f"the batch size of x.tokens, {len(visible)}"
            raise ValueError(f"{name}: x.memory must have {wanted}, got {len(memory)}")
        source = visible
        if memory is not tokens:
            source = visible_input(memory, self.key.weight, seen, name, tokens=True)
        query = project(visible, self.query.weight, self.query_bias, heads, mask)
        key = project(source, self.key.weight, self.key_bias, heads, seen)
        value = project(source, self.value.weight, self.value_bias, heads, seen)
        query, key, value = self._normalise(query, key, value)
        beta = self.beta_like(query)
        batch, _, count, _ = query.shape
        key, seen, pairs = fit_keys(given, query, key, seen)
        value = value if value.shape[2] else torch.zeros_like(key)
        causal = self.causal and count > 0
        options = self._options(seen, pairs, causal)
        if choose_frozen_keys(query, key, self.backend).backend != "reference":
            lse = keyless = None
            # Beta does not scale the other half of the queries, tau z. As a factor sqrt(beta) of either
            # side it stays in the range of float16; on one side it keeps one tensor less for gradients.
            if accumulation_dtype(query.dtype) == query.dtype:
                query = query * beta
            else:
                query, key = ((side * beta**0.5).to(side.dtype) for side in (query, key))
            if not on_cuda(query):  # computed for energies only, which CUDA solves do not need
                lse = frozen_key_attention(query, key, 1.0, **options)[1]
            if seen is not None:
                keyless = ~seen.any(1)[:, None, None].expand(-1, 1, count)
            pairs = Pairs(*(None if t is None else t.expand(batch, -1, -1, -1) for t in pairs))
            return AttentionContext(
                mask=mask, query=query, key=torch.cat((key, value), -1), lse=lse, key_mask=seen,
                pairs=pairs, keyless=keyless,
            )  # fmt: skip
        allowed, bias = pairs.intersect(token_pairs(None, causal, count, query.device)).intersect(
            None if seen is None else seen[:, None, None, :]
        )
        wide, keyless = accumulation_dtype(query.dtype), None
        with without_autocast(query.device.type):  # which would round the scores to half precision
            scores = query.to(wide) @ key.to(wide).mT * beta
        if bias is not None:
            scores = scores + bias.to(wide)
        if allowed is not None:
            keyless = ~allowed.any(-1).expand(batch, -1, -1)
            # A row without any key is uniform, and its result is set to zero.
            scores = scores.masked_fill(~allowed, EXCLUDED)
        return AttentionContext(
            mask=mask, value=value, log_weights=scores.log_softmax(-1), keyless=keyless
        )

    def _normalise(
        self, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return normalised queries, keys and values."""
        if self.score_norm is not None:
            query, key = self.score_norm.normalise(query)[0], self.score_norm.normalise(key)[0]
        return query, key, self.norm.normalise(value)[0]

    def extend(
        self, x: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[AttentionContext, tuple[Tensor, Tensor]]:
        """Return the context of tokens ``x`` (B, n, k) that follow earlier ones, and all keys and values.

        ``past`` are keys and values (B, H, M, p) of the earlier tokens, or None. The context is that of
        ``read`` with ``causal=True`` for all M + n tokens, restricted to the last n.
        """
        name = type(self).__name__
        parts = (
            (self.query, self.query_bias),
            (self.key, self.key_bias),
            (self.value, self.value_bias),
        )
        query, key, value = self._normalise(
            *(project_input(x, part, bias, self.heads, None, name) for part, bias in parts)
        )
        if past is not None:
            key, value = (torch.cat(pair, 2) for pair in zip(past, (key, value), strict=True))
        wide = accumulation_dtype(query.dtype)
        with without_autocast(query.device.type):
            scores = query.to(wide) @ key.to(wide).mT * self.beta_like(query)
        if x.shape[1] > 1:
            earlier = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device)
            scores = scores.masked_fill(~earlier.tril(key.shape[2] - x.shape[1]), EXCLUDED)
        return AttentionContext(value=value, log_weights=scores.log_softmax(-1)), (key, value)

    def _options(self, mask: Mask, pairs: Pairs, causal: bool) -> dict[str, Any]:
        given = {"mask": mask, "pairs": pairs.allowed, "bias": pairs.bias}
        return {**given, "causal": causal, "backend": self.backend}

    def evaluate(self, z: Tensor, x: AttentionContext, mask: Mask, need_value: bool) -> Evaluation:
        weight, value = self.state.weight, None
        attended, lse = self.attend(hide(z, mask), x, weight, need_value)
        if need_value:
            for none in (x.keyless, None if mask is None else ~mask[:, None]):
                lse = lse if none is None else lse.masked_fill(none, 0.0)
            value = sum_samples(lse) / -self.tau
        return value, -hide(attended @ weight, mask).to(z.dtype)

    def attend(
        self, z: Tensor, context: AttentionContext, weight: Tensor, need_lse: bool = False
    ) -> tuple[Tensor, Any]:
        """Return ``sum_j P_ij v_j`` of all heads, (B, N, H p), and ``log sum_j P0_ij exp(tau y_i.v_j)``.

        ``z`` is zero at masked tokens.
        """
        rows = weight.shape[0]
        y = F.linear(z, weight).view(*z.shape[:2], self.heads, rows // self.heads)
        y = y.transpose(1, 2).contiguous()  # (B, H, N, p)
        given, value = context.log_weights, context.value
        if given is None or value is None:
            attended, lse = self._among_keys(y, context, need_lse)
        else:
            states, keys = y.to(given.dtype).flatten(0, 1), value.to(given.dtype).flatten(0, 1)
            with without_autocast(y.device.type):
                scores = torch.baddbmm(given.flatten(0, 1), states, keys.mT, alpha=self.tau)
            scores = scores.view(given.shape)
            lse = scores.logsumexp(-1) if need_lse else None
            attended = scores.softmax(-1).to(y.dtype) @ value
        if context.keyless is not None:
            attended = attended.masked_fill(context.keyless.unsqueeze(-1), 0.0)
        return attended.transpose(1, 2).reshape(*z.shape[:2], rows), lse

    def _among_keys(
        self, y: Tensor, context: AttentionContext, need_lse: bool
    ) -> tuple[Tensor, Any]:
        """Return ``sum_j P_ij v_j`` and lse without an N x M matrix: queries (q, tau y), keys (k, v)."""
        assert context.query is not None and context.key is not None
        query = torch.cat((context.query, y * self.tau), -1)
        causal = self.causal and query.shape[2] > 0
        options = self._options(context.key_mask, context.pairs, causal)
        mean, lse = frozen_key_attention(query, context.key, 1.0, need_lse=need_lse, **options)
        if need_lse:
            origin = context.lse
            if origin is None:
                key = context.key[..., : self.width]
                origin = frozen_key_attention(context.query, key, 1.0, **options)[1]
            lse = lse - origin
        return mean[..., self.width :], lse

    def extra_repr(self) -> str:
        return (
            f"dim={self.dim}, heads={self.heads}, {self.described()}, "
            f"curvature={self.curvature}, cross={self.cross}, causal={self.causal}"
        )


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
        if attention is not None and memory is not None and attention.dim != memory.dim:
            raise ValueError(f"memory must have dim={attention.dim}, got {memory.dim}")
        self.quadratic = Quadratic()
        self.attention, self.memory, self.output = attention, memory, output

    def summands(self) -> Iterable[Any]:
        terms = (self.quadratic, self.attention, self.memory)
        return [term for term in terms if term is not None]

    def read(self, x: Any, mask: Mask) -> AttentionContext:
        """Return the contexts of attention and memory.

        A solve may start at ``-dE_memory/dz(0; x)``, which ``c(x)`` needs anyway.
        """
        given = x if isinstance(x, AttentionInput) else AttentionInput(tokens=x)
        return self._read(given, mask, None if self.attention is None else self.attention.read)

    def extend(
        self, x: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[AttentionContext, tuple[Tensor, Tensor]]:
        """Return the context of tokens that follow earlier ones; see :meth:`ConditionalAttention.extend`."""
        found: list[tuple[Tensor, Tensor]] = []

        def attend(given: AttentionInput, mask: Mask) -> AttentionContext:
            assert self.attention is not None and given.tokens is not None
            context, known = self.attention.extend(given.tokens, past)
            found.append(known)
            return context

        return self._read(AttentionInput(tokens=x), None, attend), found[0]

    def _read(
        self,
        given: AttentionInput,
        mask: Mask,
        attend: Callable[[AttentionInput, Mask], AttentionContext] | None,
    ) -> AttentionContext:
        """Return the contexts of attention, made by ``attend`` of its input, and of the memory."""
        tokens, answer = given.tokens, None
        parts: list[Any] = [None]  # the quadratic term has no input
        if isinstance(tokens, Tensor):
            check_mask(mask, tokens, type(self).__name__, features=1)
            tokens = hide(tokens, mask)
        recalled: Any = None
        if self.memory is not None:
            recalled = self.memory.read(tokens, mask)
            active = self.memory.activate(recalled.query, recalled.gates, False)[1]
            answer = hide(active @ self.memory.weight, mask).to(tokens.dtype)  # type: ignore[union-attr]
        if attend is not None:
            context = tokens if answer is None else self.context(tokens, answer)
            parts.append(attend(given._replace(tokens=context), mask))
        if self.memory is not None:
            parts.append(recalled)
        start = None if answer is None else answer.detach()
        return AttentionContext(tuple(parts), start, mask)

    def unit_step(self, z: Tensor, x: AttentionContext) -> Tensor:
        """Return ``z - dE/dz`` (B, N, s) in fewer operations, unless a part has been replaced."""
        parts, mask, step = x.parts, x.mask, None
        first: Any = self.memory if self.attention is None else self.attention
        known = None if self.memory is None else parts[-1].query  # (B, N, hidden)
        if known is None or z.shape != (*known.shape[:-1], first.dim):
            check_state(z, parts[1], type(self).__name__, first.dim, self.attention is not None)
        visible = z if mask is None else hide(z, mask)
        if self.attention is not None:
            weight = self.attention.state.weight
            step = self.attention.attend(visible, parts[1], weight)[0] @ weight
        if self.memory is not None:
            weight, recalled = self.memory.projection.weight, parts[-1]
            known = recalled.query.flatten(0, -2)  # a matrix product also adds
            y = torch.addmm(known, visible.flatten(0, -2), weight.mT).view(recalled.query.shape)
            active = self.memory.activate(y, recalled.gates, False)[1]
            if step is None:
                step = active @ weight
            else:
                rows = torch.addmm(step.flatten(0, 1), active.flatten(0, 1), weight)
                step = rows.view(step.shape)
        step = step.to(z.dtype)  # type: ignore[union-attr]
        return step if mask is None else torch.where(mask.unsqueeze(-1), step, z)

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
