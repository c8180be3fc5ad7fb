"""Attention energies: bi-softmax, functions of a score, linear; softmax with separate queries and keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.energies.energy import AttentionContext, ClosedForm, Evaluation
from implicit_attn.energies.heads import (
    AttentionInput,
    Beta,
    HasHeads,
    HeadOptions,
    ProjectedEnergy,
    check_exclude_self,
    fit_keys,
    fit_pairs,
    input_terms,
    project_input,
    read_input,
)
from implicit_attn.energies.tokens import (
    FEATURE_MAPS,
    SOFT_NORM,
    Features,
    Mask,
    Pair,
    Projection,
    RMSNorm,
    accumulation_dtype,
    check_dtype,
    check_norm,
    hide,
    like_state,
    project,
    sum_samples,
    sum_squares,
)
from implicit_attn.kernels import bisoftmax, check_backend, frozen_key_attention
from implicit_attn.kernels.arguments import Pairs, token_pairs
from implicit_attn.kernels.reference import Attended, attend
from implicit_attn.kernels.strips import recomputed
from solvers.core.argument_names import hint_names
from solvers.core.checks import require_choice, require_count
from solvers.core.modes import without_autocast

if TYPE_CHECKING:
    from typing_extensions import Unpack


class HeadsEnergy(HasHeads, ProjectedEnergy):
    """Base class of energies of the features ``y = norm(W_h z)`` of each head h, both queries and keys.

    ``projection.weight`` stacks the W_h, (heads p, d). With ``context_dim`` the features depend on the
    layer's input, ``y = norm(W_h z + P_h x + b_h)``: ``context.weight`` stacks the P_h,
    (heads p, context_dim), and ``bias`` the b_h. ``P_h x + b_h`` is computed once per solve.

    Shapes: ``z`` (B, N, d); ``x`` is ignored without ``context_dim``, else (B, N, context_dim), or an
    ``AttentionInput`` with such tokens; ``mask`` (B, N).

    Args:
        dim: features d of the tokens.
        heads: number of heads.
        head_dim: width p of a head; None for ``dim / heads``.
        beta: inverse temperature, or one per head; None for ``1 / sqrt(p)``.
        learned_beta: whether to train one positive inverse temperature per head.
        context_dim: features of the input; None if the features do not depend on it.
        bias: whether to train the b_h, initially zero; always True with ``context_dim``.
        norm: norm of each head's features, ``RMSNorm(epsilon)`` or None.
        bound: bound on the spectral norm of the weight of z, or None.
    """

    @hint_names
    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        head_dim: int | None = None,
        beta: Beta = None,
        learned_beta: bool = False,
        context_dim: int | None = None,
        bias: bool = False,
        norm: RMSNorm | None = SOFT_NORM,
        bound: float | None = None,
    ) -> None:
        super().__init__(dim, heads=heads, norm=norm)
        self.set_heads(dim, heads, head_dim, beta, learned_beta)
        rows = heads * self.width
        self.projection = Projection(dim, rows, bound)
        self.exclude_self: bool | None = None  # None if the energy does not support pairs
        self.context, self.bias = input_terms(rows, context_dim, bias)

    def read(self, x: Any, mask: Mask) -> AttentionContext:
        if self.context is None and not isinstance(x, AttentionInput):
            return AttentionContext(mask=mask)
        name, query = type(self).__name__, None
        tokens, pairs, _, _ = read_input(x, mask, name)
        if self.exclude_self is None and any(part is not None for part in pairs):
            raise ValueError(f"{name} does not support x.pairs; use BiSoftmaxAttention")
        if self.context is not None:
            query = project_input(tokens, self.context, self.bias, self.heads, mask, name)
        return AttentionContext(query=query, pairs=pairs, mask=mask)

    def added(self, context: AttentionContext) -> Tensor | None:
        return self.bias if context.query is None else context.query

    def extra_repr(self) -> str:
        return f"heads={self.heads}, {self.described()}, {super().extra_repr()}"


class BiSoftmaxAttention(HeadsEnergy):
    """``E = beta^-1 sum_h sum_i log sum_j exp(beta y_i.y_j)``, ``y = norm(W_h z)``.

    The gradient with respect to y is ``(P + P^T) Y`` with the row softmax ``P = softmax(beta Y Y^T)``.
    Descent makes tokens repel each other in each head's subspace. The energy is neither convex nor concave.

    Shapes and other arguments are those of :class:`implicit_attn.energies.attention.HeadsEnergy`.
    A token without any key has energy 0.

    Args:
        causal: whether to restrict the energy of token i to ``j <= i``. The column term of the gradient
            still carries information from later to earlier tokens, so the layer is not autoregressive.
        exclude_self: whether no token attends to itself.
        backend: implementation of the gradient and its derivatives: "reference" (dense), "blocks"
            (memory linear in N), "cpp", "triton" or "auto"; ``implicit_attn.kernels.explain`` shows the
            choice of "auto". Pairs, their biases and ``exclude_self`` are dense.

    Example:
        >>> import torch
        >>> energy = BiSoftmaxAttention(64, heads=4)
        >>> z = torch.randn(2, 16, 64)
        >>> energy(z).shape, energy.grad(z).shape
        (torch.Size([2]), torch.Size([2, 16, 64]))

    Source: Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646, equations 3 and 7, with the
    full derivative of the norm.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = False,
        exclude_self: bool = False,
        backend: str = "auto",
        **shared: Unpack[HeadOptions],
    ) -> None:
        super().__init__(dim, heads, **shared)
        self.causal = causal
        self.backend = check_backend(backend)
        self.exclude_self = check_exclude_self(exclude_self, backend)

    def potential(self, y: Tensor, context: AttentionContext, need_value: bool) -> Evaluation:
        allowed, bias = self.pairs(y, context)
        gradient, lse = bisoftmax(
            y, self.beta_like(y), causal=self.causal, limit=self.score_limit(self.norm),
            backend=self.backend, mask=context.mask, pairs=allowed, bias=bias,
        )  # fmt: skip
        return sum_samples(lse / self.beta_like(lse)) if need_value else None, gradient

    def pairs(self, y: Tensor, context: AttentionContext) -> Pairs:
        """Return the allowed pairs of tokens and their biases for features y."""
        shape = (*y.shape[:3], y.shape[2])
        return fit_pairs(context.pairs, shape, y.device, bool(self.exclude_self))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, causal={self.causal}, backend={self.backend!r}"


class RowSoftmaxAttention(BiSoftmaxAttention):
    """Softmax attention, in which each token descends its own term with the others held fixed.

    Value and gradient are those of ``BiSoftmaxAttention``; only ``straight_gradient`` differs. It uses
    ``P Y``, the row term of ``(P + P^T) Y``: the gradient of ``beta^-1 log sum_j exp(beta y_i.k_j)`` with
    respect to ``y_i`` with constant keys ``k = y``. Such a step descends no joint energy of all tokens.

    Shapes and arguments are those of ``BiSoftmaxAttention``, except ``causal``, which must be False.

    Source: Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646.
    """

    def __init__(self, dim: int, heads: int, **options: Any) -> None:
        super().__init__(dim, heads, **options)
        if self.causal:
            raise ValueError("causal must be False for RowSoftmaxAttention, got True; use pairs")

    def straight_by_features(self, y: Tensor, context: AttentionContext) -> Tensor:
        allowed, bias = self.pairs(y, context)
        return frozen_key_attention(
            y, y, self.beta_like(y), mask=context.mask, pairs=allowed, bias=bias, need_lse=False
        )[0]


# Up to this number of tokens the scores are dense; beyond, they are computed in strips of rows.
DENSE_TOKENS, STRIP_ROWS = 256, 128


class Score(NamedTuple):
    """An elementwise function F of the scores and its weight ``w = 2 F'``."""

    value: Callable[[Tensor], Tensor]
    weight: Callable[[Tensor], Tensor]


def _weight_of_gates(scores: Tensor, power: int) -> Tensor:
    """Return ``g^power (1 - g)`` for ``g = sigma(s)``."""
    gate = scores.sigmoid()
    return gate**power * (1.0 - gate)


SCORES = {
    "sigmoid": Score(lambda s: s.sigmoid() / 2.0, lambda s: _weight_of_gates(s, 1)),
    "relu": Score(lambda s: F.relu(s).square() / 4.0, F.relu),
    "sigmoid-squared": Score(
        lambda s: s.sigmoid().square() / 4.0, lambda s: _weight_of_gates(s, 2)
    ),
}


class ScoreAttention(HeadsEnergy):
    """``E = beta^-1 sum_h sum_ij F(beta y_i.y_j)``, ``y = norm(W_h z)``, for a function F of a score.

    The gradient with respect to y is ``w(S) Y`` with ``S = beta Y Y^T`` and the weights ``w = 2 F'``, which
    are not normalised over the tokens. The energy is neither convex nor concave.

    - ``"sigmoid"``: ``F(s) = sigma(s) / 2``, ``w = sigma(s) (1 - sigma(s))``;
    - ``"relu"``: ``F(s) = relu(s)^2 / 4``, ``w = relu(s)``;
    - ``"sigmoid-squared"``: ``F(s) = sigma(s)^2 / 4``, ``w = sigma(s)^2 (1 - sigma(s))``.

    Shapes and other arguments are those of :class:`implicit_attn.energies.attention.HeadsEnergy`.

    Args:
        score: name of F.

    Beyond ``DENSE_TOKENS`` tokens the scores are computed in strips of rows and recomputed in the
    backward pass, so memory is linear in N.

    Source: the code of Hu, Zou, Xu, "Hyper-SET" (https://arxiv.org/abs/2502.11646, table 18 for the
    sigmoid), with the sign and the factors that make each the gradient of this energy.
    """

    def __init__(
        self, dim: int, heads: int, *, score: str = "sigmoid", **shared: Unpack[HeadOptions]
    ) -> None:
        super().__init__(dim, heads, **shared)
        self.score = require_choice("score", score, SCORES)

    def potential(self, y: Tensor, context: AttentionContext, need_value: bool) -> Evaluation:
        count, wide = y.shape[2], y.to(accumulation_dtype(y.dtype))
        rows = count if count <= DENSE_TOKENS else STRIP_ROWS
        with without_autocast(y.device.type):
            parts = recomputed(self._strip, count, rows, wide, self.beta_like(y), context.mask)
            values = torch.stack([value for value, _ in parts]).sum(0)
            gradient = torch.cat([each for _, each in parts], 2)
        return sum_samples(values / self.beta_like(values)), gradient.to(y.dtype)

    def _strip(self, rows: slice, y: Tensor, beta: float | Tensor, mask: Mask) -> Pair:
        """Return the sum of F (B, H) over some rows of the scores, and their ``w(S) Y``."""
        score, scores = SCORES[self.score], (y[:, :, rows] @ y.mT) * beta
        values = score.value(scores)
        if mask is not None:  # F(0) may be nonzero
            both = mask[:, None, rows, None] & mask[:, None, None, :]
            values = values.masked_fill(~both, 0.0)
        return values.sum((2, 3)), score.weight(scores) @ y

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, score={self.score!r}"


class LinearAttention(HeadsEnergy):
    """``E = 1/(4 beta) sum_h sum_ij (beta phi(y_i).phi(y_j))^2``, ``y = norm(W_h z)``.

    The gradient with respect to y is ``phi'(Y) * beta Phi (Phi^T Phi)``. Only the (p, p) matrix
    ``Phi^T Phi`` is formed, so the cost is linear in N. The energy is not concave.

    Shapes and other arguments are those of :class:`implicit_attn.energies.attention.HeadsEnergy`.

    Args:
        feature_map: phi, one of ``"identity"``, ``"relu"``, ``"elu"`` (``elu(y) + 1``),
            ``"plain-elu"``, ``"sigmoid"``, ``"tanh"``, ``"softplus"``, ``"silu"`` and ``"gelu"``.

    Source: Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646, table 18.
    """

    def __init__(
        self, dim: int, heads: int, *, feature_map: str = "identity", **shared: Unpack[HeadOptions]
    ) -> None:
        super().__init__(dim, heads, **shared)
        self.feature_map = require_choice("feature_map", feature_map, FEATURE_MAPS)

    def potential(self, y: Tensor, context: AttentionContext, need_value: bool) -> Evaluation:
        mapped, beta, value = FEATURE_MAPS[self.feature_map](y), self.beta_like(y), None
        phi = mapped.value
        if context.mask is not None:  # phi(0) may be nonzero
            phi = phi.masked_fill(~context.mask[:, None, :, None], 0.0)
        moment = phi.mT @ phi
        if need_value:
            squares = moment.to(accumulation_dtype(moment.dtype)).square()
            value = sum_samples(squares * (beta / 4.0))
        factor = beta.to(y.dtype) if isinstance(beta, Tensor) else beta
        return value, mapped.push((phi @ moment) * factor)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, feature_map={self.feature_map}"


class SoftmaxAttention(HasHeads, ClosedForm):
    """Helmholtz free energy of every query among the keys at temperature ``1 / beta``.

    ``energy="inner"``: ``E = -beta^-1 sum_h sum_i log sum_j exp(beta q_i.k_j)``. The gradient with respect
    to q is ``-sum_j P_ij k_j``, so a descent step moves a token along its attention output.

    ``energy="elastic"``: ``E = -beta^-1 sum_h sum_i log sum_j exp(-beta |q_i - k_j|^2 / 2)``. The gradient
    with respect to q is ``q_i - sum_j P_ij k_j``. E is bounded below and never concave. In the queries of a
    head it is convex if ``1/beta >= D^2/4``, where D is the largest distance between two keys, a sharp
    bound. If this holds for all heads, E is convex in z for constant keys (``cross``) without norm.

    The queries are ``q = norm(W_q z)``. In self-attention the keys are ``k = norm(W_k z)``, and the gradient
    has a key term. In cross-attention the keys ``k = norm(W_k x)`` are constant, and the inner E without
    norm is concave in z for any x.

    With ``context_dim`` the features of self-attention depend on the input:
    ``q = norm(W_q z + Q x + b_q)``, ``k = norm(W_k z + K x + b_k)``.

    Shapes: ``z`` (B, N, d), ``mask`` (B, N). Self: ``x`` is ignored without ``context_dim``, else
    (B, N, context_dim). Cross: ``x`` (B, M, context_dim), or a pair of it and a mask (B, M) bool, False
    at masked context tokens. Both: an ``AttentionInput``, which may contain pairs and their biases.
    A query without any key has energy 0.

    Args:
        dim: features d of the tokens.
        heads: number of heads.
        energy: ``"inner"`` or ``"elastic"``.
        cross: whether keys come from ``x`` (cross-attention) instead of ``z``.
        context_dim: features of x in cross-attention, by default ``dim``. In self-attention, features of
            the input that queries and keys depend on, or None.
        shared: head_dim, beta, learned_beta, bias (of ``b_q`` and ``b_k``), norm (of queries and keys) and
            bound (of ``W_q`` and ``W_k``); see :class:`implicit_attn.energies.attention.HeadsEnergy`.
        causal: whether to restrict the energy of token i to ``j <= i`` in self-attention. The key term of
            the gradient still carries information from later to earlier tokens.
        exclude_self: whether no token attends to itself in self-attention.
        backend: implementation of cross-attention: "reference" (dense), "flash" (torch's fused attention,
            which forms no N x M matrix) or "auto"; ``implicit_attn.kernels.explain_frozen_keys`` shows the
            choice of "auto". Self-attention is dense.

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
        head_dim: int | None = None,
        beta: Beta = None,
        learned_beta: bool = False,
        context_dim: int | None = None,
        bias: bool = False,
        norm: RMSNorm | None = SOFT_NORM,
        bound: float | None = None,
    ) -> None:
        super().__init__()
        self._elastic = require_choice("energy", energy, ("inner", "elastic")) == "elastic"
        check_backend(backend, "frozen keys")
        self.exclude_self = check_exclude_self(exclude_self, backend, cross, causal)
        if backend == "flash" and not cross:
            raise ValueError("backend='flash' needs cross=True, got cross=False")
        self.set_heads(dim, heads, head_dim, beta, learned_beta)
        self.energy, self.cross, self.causal, self.backend = energy, cross, causal, backend
        self.norm = check_norm(norm)
        self.context_dim = dim if cross and context_dim is None else context_dim
        source = require_count("context_dim", self.context_dim) if cross else dim
        rows = heads * self.width
        self.query, self.key = Projection(dim, rows, bound), Projection(source, rows, bound)
        seen = None if cross else self.context_dim
        self.query_context, self.query_bias = input_terms(rows, seen, bias)
        self.key_context, self.key_bias = input_terms(rows, seen, bias)
        self.concave = cross and energy == "inner" and norm is None

    def read(self, x: Any, mask: Mask) -> AttentionContext:
        name, heads = type(self).__name__, self.heads
        if not (self.cross or self.query_context is not None or isinstance(x, AttentionInput)):
            return AttentionContext(mask=mask)
        width = self.context_dim if self.cross else None
        tokens, pairs, memory, seen = read_input(x, mask, name, width)
        if self.cross:
            check_dtype(memory, self.key.weight, name)
            key = self._features(memory, self.key, self.key_bias, None, seen).unit
            key = self._widened(key, is_key=True)
            return AttentionContext(key=key, key_mask=seen, pairs=pairs, mask=mask)
        if self.query_context is None or self.key_context is None:
            return AttentionContext(pairs=pairs, mask=mask)
        query = project_input(tokens, self.query_context, self.query_bias, heads, mask, name)
        key = project_input(tokens, self.key_context, self.key_bias, heads, mask, name)
        return AttentionContext(query=query, key=key, pairs=pairs, mask=mask)

    def evaluate(self, z: Tensor, x: AttentionContext, mask: Mask, need_value: bool) -> Evaluation:
        visible, value, key = hide(z, mask), None, None
        query = self._features(visible, self.query, self.query_bias, x.query, mask)
        if self.cross:
            attended, mean = self._across(query.unit, x)
        else:
            key = self._features(visible, self.key, self.key_bias, x.key, mask)
            attended, mean = self._within(query.unit, key.unit, x)
        by_query = attended.only(query.unit) - mean if self._elastic else -mean
        gradient = query.pull_back(by_query)
        if key is not None:
            weights = attended.weights.to(query.unit.dtype)
            by_key = -(weights.mT @ query.unit)
            if self._elastic:
                by_key = by_key + weights.sum(-2).unsqueeze(-1) * key.unit
            gradient = gradient + key.pull_back(by_key)
        if need_value:
            value = -sum_samples(attended.lse / self.beta_like(attended.lse))
            if self._elastic:
                value = value + 0.5 * sum_squares(attended.only(query.unit))
        return value, like_state(gradient, z, mask)

    def _within(
        self, query: Tensor, key: Tensor, context: AttentionContext
    ) -> tuple[Attended, Tensor]:
        """Return the self-attention of the state, and the mean key of each query."""
        order = token_pairs(context.mask, self.causal, query.shape[2], query.device)
        _, _, pairs = fit_keys(context.pairs, query, key, None, self.exclude_self)
        limit = self.score_limit(self.norm)
        if limit is not None and self._elastic:
            limit *= 1.5  # |q.k - |k|^2 / 2| for |q|, |k| <= sqrt(p)
        wide = accumulation_dtype(query.dtype)
        attended = attend(
            self._widened(query.to(wide), is_key=False), self._widened(key.to(wide), is_key=True),
            self.beta_like(query), pairs=pairs.intersect(order), limit=limit,
        )  # fmt: skip
        return attended, attended.weights.to(query.dtype) @ key

    def _across(self, own: Tensor, context: AttentionContext) -> tuple[Attended, Tensor]:
        """Return the log-sum-exps for constant keys, without weights, and the mean key of each query."""
        assert context.key is not None  # set by ``read`` of a cross-attention
        key, seen, (allowed, bias) = fit_keys(context.pairs, own, context.key, context.key_mask)
        query, mask = self._widened(own, is_key=False), context.mask
        options: dict[str, Any] = {"mask": seen, "pairs": allowed, "bias": bias}
        mean, lse = frozen_key_attention(
            query, key, self.beta_like(query), **options, backend=self.backend
        )
        # The queries that have a key.
        given = Pairs(allowed).intersect(None if seen is None else seen[:, None, None]).allowed
        attends = None if given is None else given.any(-1)
        if mask is not None:
            attends = mask[:, None] if attends is None else attends & mask[:, None]
        if attends is not None:
            lse = lse.masked_fill(~attends, 0.0)  # type: ignore[union-attr]
        return Attended(None, lse, attends), mean[..., : self.width].to(own.dtype)  # type: ignore[arg-type]

    def _widened(self, side: Tensor, *, is_key: bool) -> Tensor:
        """Widen features so that products of queries and keys are ``q.k - |k|^2 / 2``, if elastic."""
        if not self._elastic:
            return side
        last = -0.5 * side.square().sum(-1, True) if is_key else torch.ones_like(side[..., :1])
        return torch.cat((side, last), -1)

    def _features(
        self, z: Tensor, side: Projection, bias: Tensor | None, added: Tensor | None, mask: Mask
    ) -> Features:
        """Return ``norm(z W^T + bias)`` of queries or keys; ``added``, from the input, includes the bias."""
        weight = side.weight
        raw = project(z, weight, bias if added is None else added, self.heads, mask)
        return Features.of(raw, self.norm, weight, self.heads)

    def extra_repr(self) -> str:
        return (
            f"heads={self.heads}, energy={self.energy}, cross={self.cross}, {self.described()}, "
            f"norm={self.norm}, causal={self.causal}"
        )
