"""Attention energies with one weight for queries and keys: bi-softmax, functions of a score, linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.energies.heads import (
    AttentionInput,
    HasTemperatures,
    HeadOptions,
    HeadsContext,
    by_head,
    check_exclude_self,
    fit_pairs,
    project_input,
    read_pairs,
)
from implicit_attn.energies.projected import FEATURE_MAPS, Given, ProjectedEnergy, Projection
from implicit_attn.energies.tokens import Pair, accumulation_dtype, sum_samples
from implicit_attn.kernels import (
    bisoftmax,
    check_backend,
    frozen_key_attention,
)
from implicit_attn.kernels.arguments import rescaled
from implicit_attn.kernels.pairs import Pairs
from implicit_attn.kernels.tiling import recomputed
from solvers.core.checks import require_choice
from solvers.core.modes import without_autocast

if TYPE_CHECKING:
    from typing_extensions import Unpack


class HeadsEnergy(HasTemperatures, ProjectedEnergy):
    """A function of the features ``y = norm(W_h z)`` of each head h, queries and keys in one.

    ``projection.weight`` holds the W_h one below the other, (heads p, d). With ``context_dim`` the
    features see the layer's input, ``y = norm(W_h z + P_h x + b_h)``: ``context.weight`` holds the P_h,
    (heads p, context_dim), and ``bias`` the b_h. ``P_h x + b_h`` is computed once a solve.

    Shapes: ``z`` (B, N, d); ``x`` is ignored without ``context_dim``, else (B, N, context_dim), or an
    ``AttentionInput`` with such tokens; ``mask`` (B, N).

    Args:
        dim: features d of the tokens.
        heads: number of heads.
        head_dim: width p of a head; None: ``dim / heads``.
        beta: inverse temperature, or one for each head; None: ``1 / sqrt(p)``.
        learned_beta: train the inverse temperatures, one for each head, kept > 0.
        context_dim: features of the input that the features see; None: they see none.
        bias: learn the b_h, zero at first; with ``context_dim`` they are there anyway.
        norm: norm of each head's projections, ``RMSNorm(epsilon)`` or None.
        bound: bound on the spectral norm of the weight of z, or None.
    """

    def __init__(self, dim: int, heads: int, **shared: Unpack[HeadOptions]) -> None:
        super().__init__(dim, heads=heads)
        options = self.set_heads(dim, heads, **shared)
        self.norm = options.norm
        rows, seen = heads * self.width, options.context_dim
        self.projection = Projection(dim, rows, options.bound)
        self.exclude_self: bool | None = None  # None: an energy that knows no pairs
        self.context = None if seen is None else Projection(seen, rows)
        has_bias = options.bias or seen is not None
        self.bias = nn.Parameter(torch.zeros(rows)) if has_bias else None

    def seen(self, x: Any, mask: Tensor | None, z: Tensor) -> tuple[Tensor | None, Given]:
        context = self.context_of(x, z, mask)
        shape = z.shape[0], self.heads, z.shape[1], z.shape[1]
        pairs = fit_pairs(context.pairs, shape, z.device, bool(self.exclude_self))
        added = self.bias if context.query is None else context.query
        return added, Given(mask, pairs=pairs)

    def sees(self, x: Any) -> bool:
        return self.context is not None or isinstance(x, AttentionInput)

    def read(self, x: Any, mask: Tensor | None) -> HeadsContext:
        name, query = type(self).__name__, None
        pairs = read_pairs(x, mask, name)
        if self.exclude_self is None and pairs is not None:
            raise ValueError(f"{name} takes no pairs, got them in x; BiSoftmaxAttention does")
        x = x.tokens if isinstance(x, AttentionInput) else x
        if self.context is not None:
            query = project_input(x, self.context, self.bias, self.heads, mask, name)
        return HeadsContext(query=query, pairs=pairs)

    def potential(self, y: Tensor, given: Given) -> Tensor:
        return self.potential_and_force(y, given)[0]

    def force(self, y: Tensor, given: Given) -> Tensor:
        return self.potential_and_force(y, given)[1]

    def _roots(self, y: Tensor) -> tuple[Tensor, float, Tensor | None]:
        """Features and a number for beta that give the scores, and ``beta^1/2`` where heads differ.

        ``beta y.y' = u.u'`` for the features ``u = beta^1/2 y`` at one, beta^1/2 (heads, 1, 1).
        """
        beta = self.beta
        if not isinstance(beta, Tensor):
            return y, beta, None
        root = by_head(beta, 3, y).sqrt()
        return rescaled(y, root), 1.0, root

    def extra_repr(self) -> str:
        return f"heads={self.heads}, {self.described()}, {super().extra_repr()}"


class BiSoftmaxAttention(HeadsEnergy):
    """``E = beta^-1 sum_h sum_i log sum_j exp(beta y_i.y_j)``, ``y = norm(W_h z)``.

    Gradient by y: ``(P + P^T) Y`` with the row softmax ``P = softmax(beta Y Y^T)``. Descent makes
    tokens repel each other in each head's subspace. Neither convex nor concave.

    Shapes and other arguments as for :class:`implicit_attn.energies.attention.HeadsEnergy`.
    A token without any key has energy 0.

    Args:
        causal: restrict the energy of token i to ``j <= i``. The column term of the gradient still
            carries information from later to earlier tokens, so the layer is not autoregressive.
        exclude_self: no token attends to itself.
        backend: what computes the gradient and its derivatives: "reference" (dense), "blocks"
            (memory linear in N), "cpp", "triton" or "auto"; ``implicit_attn.kernels.explain`` says
            which one "auto" takes. Pairs, their biases and ``exclude_self`` are dense.

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

    def potential_and_force(self, y: Tensor, given: Given) -> Pair:
        u, beta, root = self._roots(y)
        limit = self.temperatures.largest  # |y_i| <= sqrt(p) after the norm
        limit = None if self.norm is None or limit is None else limit * self.width
        pairs, bias = given.pairs or Pairs()
        options: dict[str, Any] = {"causal": self.causal, "limit": limit, "backend": self.backend}
        force, lse = bisoftmax(u, beta, mask=given.mask, pairs=pairs, bias=bias, **options)
        return self.over_beta(lse), force if root is None else (force / root).to(y.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, causal={self.causal}, backend={self.backend!r}"


class RowSoftmaxAttention(BiSoftmaxAttention):
    """Softmax attention of a step in which each token descends its own term, the others held fixed.

    Value and gradient are those of ``BiSoftmaxAttention``. Only
    ``straight_gradient`` differs: its force is ``P Y``, the row term of ``(P + P^T) Y``, which is the
    gradient of ``beta^-1 log sum_j exp(beta y_i.k_j)`` by ``y_i`` with the keys ``k = y`` constant.
    Such a step descends no energy of all tokens.

    Shapes and arguments as for ``BiSoftmaxAttention``, but for ``causal``, which must be False.

    Source: Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646.
    """

    def __init__(self, dim: int, heads: int, **options: Any) -> None:
        super().__init__(dim, heads, **options)
        if self.causal:
            raise ValueError("causal must be False for a RowSoftmaxAttention (pairs may be given)")

    def straight_force(self, y: Tensor, given: Given) -> Tensor:
        attends, mask = None, given.mask
        if given.pairs is not None:
            pairs: dict[str, Any] = {"pairs": given.pairs.allowed, "bias": given.pairs.bias}
            force = frozen_key_attention(*self.at_one(y, y), mask=mask, **pairs)[0].to(y.dtype)
            return force if mask is None else force.masked_fill(~mask[:, None, :, None], 0.0)
        if mask is not None:
            # A masked token attends to itself alone: its row of zeros stays zero, without NaN.
            attends = (mask[:, :, None] & mask[:, None, :])[:, None]
            attends = attends | torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
        beta, query = self.beta, y
        if isinstance(beta, Tensor):
            beta, query = 1.0, (y * by_head(beta, 3, y)).to(y.dtype)
        return F.scaled_dot_product_attention(query, y, y, attn_mask=attends, scale=beta)


DENSE_TOKENS, STRIP_ROWS = 256, 128  # of scores: up to so many tokens at once, else so many rows


class Score(NamedTuple):
    """A function F of a score and the weight ``w = 2 F'``, entry by entry."""

    value: Callable[[Tensor], Tensor]
    weight: Callable[[Tensor], Tensor]


def _weight_of_gates(scores: Tensor, power: int) -> Tensor:
    """``g^power (1 - g)`` of ``g = sigma(s)``."""
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

    Gradient by y: ``w(S) Y`` with ``S = beta Y Y^T`` and the weights ``w = 2 F'``; nothing is normalised
    over the tokens. Neither convex nor concave.

    - ``"sigmoid"``: ``F(s) = sigma(s) / 2``, ``w = sigma(s) (1 - sigma(s))``;
    - ``"relu"``: ``F(s) = relu(s)^2 / 4``, ``w = relu(s)``;
    - ``"sigmoid-squared"``: ``F(s) = sigma(s)^2 / 4``, ``w = sigma(s)^2 (1 - sigma(s))``.

    Shapes and other arguments as for :class:`implicit_attn.energies.attention.HeadsEnergy`.

    Args:
        score: F, one of those names.

    From ``DENSE_TOKENS`` tokens on scores are computed by strips of rows, and again for derivatives, so
    that memory is linear in N.

    Source: the forms are those of the code of Hu, Zou, Xu, "Hyper-SET"
    (https://arxiv.org/abs/2502.11646, table 18 for the sigmoid), with the sign and the factors that
    make each the gradient of this energy.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        score: str = "sigmoid",
        **shared: Unpack[HeadOptions],
    ) -> None:
        super().__init__(dim, heads, **shared)
        self.score = require_choice("score", score, SCORES)

    def potential_and_force(self, y: Tensor, given: Given) -> Pair:
        u, beta, root = self._roots(y)
        count, wide = u.shape[2], u.to(accumulation_dtype(u.dtype))
        rows = count if count <= DENSE_TOKENS else STRIP_ROWS
        with without_autocast(y.device.type):
            parts = recomputed(self._strip, count, rows, wide, beta, given.mask)
            values = torch.stack([value for value, _ in parts]).sum(0)
            force = torch.cat([force for _, force in parts], 2)
            values = values / (beta if root is None else root.square().flatten())
            return values.sum(1), (force if root is None else force / root).to(y.dtype)

    def _strip(self, rows: slice, u: Tensor, beta: float, mask: Tensor | None) -> Pair:
        """The sum of F (B, H) over some rows of the scores, and their ``w(S) U``."""
        score, scores = SCORES[self.score], (u[:, :, rows] @ u.mT) * beta
        values = score.value(scores)
        if mask is not None:  # F(0) may be another number than 0
            both = mask[:, None, rows, None] & mask[:, None, None, :]
            values = values.masked_fill(~both, 0.0)
        return values.sum((2, 3)), score.weight(scores) @ u

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, score={self.score!r}"


class LinearAttention(HeadsEnergy):
    """``E = 1/(4 beta) sum_h sum_ij (beta phi(y_i).phi(y_j))^2``, ``y = norm(W_h z)``.

    Gradient by y: ``phi'(Y) * beta Phi (Phi^T Phi)``. Only the (p, p) matrix ``Phi^T Phi`` is formed,
    so the cost is linear in N. Not concave.

    Shapes and other arguments as for :class:`implicit_attn.energies.attention.HeadsEnergy`.

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

    def potential_and_force(self, y: Tensor, given: Given) -> Pair:
        mapped, beta = FEATURE_MAPS[self.feature_map](y), self.score_beta(y)
        phi = mapped.value
        if given.mask is not None:  # phi(0) may be another number than 0
            phi = phi.masked_fill(~given.mask[:, None, :, None], 0.0)
        moment = phi.mT @ phi
        squares = moment.to(accumulation_dtype(moment.dtype)).square() * (beta / 4.0)
        factor = beta.to(y.dtype) if isinstance(beta, Tensor) else beta
        return sum_samples(squares), mapped.push((phi @ moment) * factor)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, feature_map={self.feature_map}"
