"""Attention energies with one weight for queries and keys: bi-softmax, sigmoid and linear."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.energies.heads.heads_energy import HeadsEnergy, head_width
from implicit_attn.energies.heads.inputs import PairPattern
from implicit_attn.energies.heads.temperatures import Beta, by_head
from implicit_attn.energies.linear.feature_maps import Mapped, check_feature_map, map_features
from implicit_attn.energies.projected import SOFT_NORM, RMSNorm
from implicit_attn.energies.tokens import Pair, accumulation_dtype, hide, sum_samples
from implicit_attn.kernels import (
    bisoftmax,
    bisoftmax_hvp,
    check_backend,
    check_sigmoid_backend,
    frozen_key_attention,
    sigmoid_attention,
    sigmoid_attention_hvp,
)
from implicit_attn.kernels.arguments import rescaled
from implicit_attn.kernels.pairs import Pairs

__all__ = [
    "BiSoftmaxAttention",
    "HeadsEnergy",
    "LinearAttention",
    "RowSoftmaxAttention",
    "SigmoidAttention",
    "head_width",
]


class BiSoftmaxAttention(HeadsEnergy):
    """``E = beta^-1 sum_h sum_i log sum_j exp(beta y_i.y_j)``, ``y = norm(W_h z)``.

    Gradient by y: ``(P + P^T) Y`` with the row softmax ``P = softmax(beta Y Y^T)``. Descent makes
    tokens repel each other in each head's subspace. Neither convex nor concave.

    Shapes and other arguments as for
    :class:`implicit_attn.energies.attention.HeadsEnergy`.
    A token without any key has energy 0.

    Args:
        causal: restrict the energy of token i to ``j <= i``. The column term of the gradient still
            carries information from later to earlier tokens, so the layer is not autoregressive.
        backend: what computes gradient and Hessian-vector product: "reference" (dense), "blocks"
            (memory linear in N), "cpp", "triton" or "auto"; ``implicit_attn.kernels.explain`` says
            which one "auto" takes. Pairs, their biases and ``exclude_self`` are dense.

    Example:
        >>> import torch
        >>> energy = BiSoftmaxAttention(64, heads=4)
        >>> z = torch.randn(2, 16, 64)
        >>> energy(z).shape, energy.grad(z).shape, energy.hvp(z, z).shape
        (torch.Size([2]), torch.Size([2, 16, 64]), torch.Size([2, 16, 64]))

    Source: Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646, equations 3 and 7, with the
    full derivative of the norm.
    """

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
        causal: bool = False,
        exclude_self: bool = False,
        pairs: Tensor | None = None,
        pair_bias: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(
            dim, heads, head_dim=head_dim, beta=beta, learned_beta=learned_beta,
            context_dim=context_dim, bias=bias, norm=norm, bound=bound,
        )  # fmt: skip
        self.causal = causal
        self.backend = check_backend(backend)
        self.pattern = PairPattern(heads, pairs, pair_bias, exclude_self)
        self.pattern.check_backend(backend)

    def potential_and_force(
        self, y: Tensor, mask: Tensor | None, pairs: Pairs | None = None
    ) -> Pair:
        force, lse = self._bisoftmax(y, mask, pairs)
        return self._over_beta(lse), force

    def force(self, y: Tensor, mask: Tensor | None, pairs: Pairs | None = None) -> Tensor:
        return self._bisoftmax(y, mask, pairs)[0]

    def force_and_curvature(
        self, y: Tensor, v: Tensor, mask: Tensor | None, pairs: Pairs | None = None
    ) -> Pair:
        force, lse = self._bisoftmax(y, mask, pairs)
        options, (beta, root) = self._options(mask, pairs), self._temperature(y)
        if root is None:
            return force, bisoftmax_hvp(y, v, beta, lse=lse, **options)
        moved = v.to(root.dtype)
        curved = bisoftmax_hvp(rescaled(y, root), moved, beta, lse=lse, **options)
        return force, curved.to(y.dtype)

    def _bisoftmax(self, y: Tensor, mask: Tensor | None, pairs: Pairs | None) -> Pair:
        options, (beta, root) = self._options(mask, pairs), self._temperature(y)
        if root is None:
            return bisoftmax(y, beta, **options)
        force, lse = bisoftmax(rescaled(y, root), beta, **options)
        return (force / root).to(y.dtype), lse

    def _options(self, mask: Tensor | None, pairs: Pairs | None) -> dict[str, Any]:
        options: dict[str, Any] = {"mask": mask, "causal": self.causal, "limit": self._limit}
        options["backend"] = self.backend
        if pairs is not None:
            options |= {"pairs": pairs.allowed, "bias": pairs.bias}
        return options

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, causal={self.causal}, backend={self.backend!r}"


class RowSoftmaxAttention(BiSoftmaxAttention):
    """Softmax attention of a step in which each token descends its own term, the others held fixed.

    Value, gradient and Hessian-vector product are those of ``BiSoftmaxAttention``. Only ``force``, and
    with it ``straight_gradient``, differs: it is ``P Y``, the row term of ``(P + P^T) Y``, which is the
    gradient of ``beta^-1 log sum_j exp(beta y_i.k_j)`` by ``y_i`` with the keys ``k = y`` constant.
    Such a step descends no energy of all tokens.

    Shapes and arguments as for ``BiSoftmaxAttention``, but for ``causal``, which must be False.

    Source: Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646.
    """

    def __init__(self, dim: int, heads: int, **options: Any) -> None:
        super().__init__(dim, heads, **options)
        if self.causal:
            raise ValueError(
                "causal must be False for a RowSoftmaxAttention, whose step would not be; got "
                f"{self.causal!r} (pairs may be given)"
            )

    def force(self, y: Tensor, mask: Tensor | None, pairs: Pairs | None = None) -> Tensor:
        if pairs is not None:
            return self._among_pairs(y, mask, pairs)
        attends = None
        if mask is not None:
            # A masked token attends to itself alone: its row of zeros stays zero, without NaN.
            attends = (mask[:, :, None] & mask[:, None, :])[:, None]
            attends = attends | torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
        beta, query = self.beta, y
        if isinstance(beta, Tensor):
            beta, query = 1.0, (y * by_head(beta, 3, y)).to(y.dtype)
        return F.scaled_dot_product_attention(query, y, y, attn_mask=attends, scale=beta)

    def _among_pairs(self, y: Tensor, mask: Tensor | None, pairs: Pairs) -> Tensor:
        beta, query, key = self.beta, y, y
        if isinstance(beta, Tensor):
            scale = by_head(beta, 3, y)
            beta, query, key = 1.0, rescaled(y, scale), y.to(scale.dtype)
        force, _ = frozen_key_attention(
            query, key, beta, mask=mask, pairs=pairs.allowed, bias=pairs.bias
        )
        force = force.to(y.dtype)
        return force if mask is None else force.masked_fill(~mask[:, None, :, None], 0.0)


class SigmoidAttention(HeadsEnergy):
    """``E = 1/(2 beta) sum_h sum_ij sigma(beta y_i.y_j)``, ``y = norm(W_h z)``.

    Gradient by y: ``sigma'(S) Y`` with ``S = beta Y Y^T``; nothing is normalised over the tokens. Not
    concave.

    Shapes and other arguments as for
    :class:`implicit_attn.energies.attention.HeadsEnergy`.

    Args:
        backend: what computes gradient and Hessian-vector product: "reference" (dense), "blocks"
            (memory linear in N) or "auto"; ``implicit_attn.kernels.explain_sigmoid`` says which one
            "auto" takes.

    Source: Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646, table 18, with the sign that
    makes it the gradient.
    """

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
        backend: str = "auto",
    ) -> None:
        super().__init__(
            dim, heads, head_dim=head_dim, beta=beta, learned_beta=learned_beta,
            context_dim=context_dim, bias=bias, norm=norm, bound=bound,
        )  # fmt: skip
        self.backend = check_sigmoid_backend(backend)

    def potential_and_force(self, y: Tensor, mask: Tensor | None) -> Pair:
        beta, root = self._temperature(y)
        if root is None:
            force, value = sigmoid_attention(y, beta, mask=mask, backend=self.backend)
            return sum_samples(value), force
        scaled = rescaled(y, root)
        force, value = sigmoid_attention(scaled, beta, mask=mask, backend=self.backend)
        return sum_samples(value / root.square().flatten()), (force / root).to(y.dtype)

    def force_and_curvature(self, y: Tensor, v: Tensor, mask: Tensor | None) -> Pair:
        options: dict[str, Any] = {"mask": mask, "backend": self.backend}
        beta, root = self._temperature(y)
        if root is None:
            return self.force(y, mask), sigmoid_attention_hvp(y, v, beta, **options)
        moved = v.to(root.dtype)
        curved = sigmoid_attention_hvp(rescaled(y, root), moved, beta, **options).to(y.dtype)
        return self.force(y, mask), curved

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, backend={self.backend!r}"


class LinearAttention(HeadsEnergy):
    """``E = 1/(4 beta) sum_h sum_ij (beta phi(y_i).phi(y_j))^2``, ``y = norm(W_h z)``.

    Gradient by y: ``phi'(Y) * beta Phi (Phi^T Phi)``. Only the (p, p) matrix ``Phi^T Phi`` is formed,
    so the cost is linear in N. Not concave.

    Shapes and other arguments as for
    :class:`implicit_attn.energies.attention.HeadsEnergy`.

    Args:
        feature_map: phi, one of ``"identity"``, ``"relu"``, ``"elu"`` (``elu(y) + 1``),
            ``"plain-elu"``, ``"sigmoid"``, ``"tanh"``, ``"softplus"``, ``"silu"`` and ``"gelu"``.

    Source: Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646, table 18.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        feature_map: str = "identity",
        head_dim: int | None = None,
        beta: Beta = None,
        learned_beta: bool = False,
        context_dim: int | None = None,
        bias: bool = False,
        norm: RMSNorm | None = SOFT_NORM,
        bound: float | None = None,
    ) -> None:
        super().__init__(
            dim, heads, head_dim=head_dim, beta=beta, learned_beta=learned_beta,
            context_dim=context_dim, bias=bias, norm=norm, bound=bound,
        )  # fmt: skip
        self.feature_map = check_feature_map(feature_map)

    def potential_and_force(self, y: Tensor, mask: Tensor | None) -> Pair:
        mapped = self._map(y, mask, bent=False)
        phi = mapped.value
        moment = phi.mT @ phi
        force = (phi @ moment) * self._factor(y)
        squares = moment.to(accumulation_dtype(moment.dtype)).square()
        beta = self.beta
        if isinstance(beta, Tensor):
            squares, beta = squares * by_head(beta, 3, squares), 1.0
        return sum_samples(squares) * (beta / 4.0), mapped.push(force)

    def force_and_curvature(self, y: Tensor, v: Tensor, mask: Tensor | None) -> Pair:
        mapped = self._map(y, mask)
        phi, shift = mapped.value, mapped.push(v)
        moment = phi.mT @ phi
        one_side, beta = shift.mT @ phi, self._factor(y)
        force = (phi @ moment) * beta
        curved = (shift @ moment + phi @ (one_side + one_side.mT)) * beta
        return mapped.push(force), mapped.pull_back_curvature(force, curved, v)

    def _factor(self, y: Tensor) -> float | Tensor:
        beta = self.beta
        return by_head(beta, 3, y).to(y.dtype) if isinstance(beta, Tensor) else beta

    def _map(self, y: Tensor, mask: Tensor | None, *, bent: bool = True) -> Mapped:
        mapped = map_features(self.feature_map, y, bent=bent)
        if mask is None or self.feature_map in ("identity", "relu"):
            return mapped
        # phi(0) may be another number than 0: masked tokens have to be hidden again, (B, H, N, p).
        return mapped._replace(value=hide(mapped.value.transpose(1, 2), mask).transpose(1, 2))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, feature_map={self.feature_map}"
