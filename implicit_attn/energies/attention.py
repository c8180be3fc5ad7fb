"""Attention energies with one weight for queries and keys: bi-softmax, sigmoid and linear."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.energies.projected import SOFT_NORM, ProjectedEnergy, Projection, RMSNorm
from implicit_attn.energies.tokens import Pair, accumulation_dtype, hide, sum_samples
from implicit_attn.kernels import (
    bisoftmax,
    bisoftmax_hvp,
    check_backend,
    check_sigmoid_backend,
    sigmoid_attention,
    sigmoid_attention_hvp,
)
from solvers.core.checks import require_choice, require_count, require_positive

FEATURE_MAPS = ("identity", "relu", "elu")


def head_width(dim: int, heads: int, head_dim: int | None) -> int:
    """Width p of a head: ``head_dim``, or ``dim / heads`` for None."""
    dim, heads = require_count("dim", dim), require_count("heads", heads)
    if head_dim is not None:
        return require_count("head_dim", head_dim)
    if dim % heads:
        raise ValueError(f"heads must divide dim={dim} where head_dim is not given, got {heads}")
    return dim // heads


class HeadsEnergy(ProjectedEnergy):
    """A function of the features ``y = norm(W_h z)`` of each head h, queries and keys in one.

    ``projection.weight`` holds the W_h one below the other, (heads p, d).

    Shapes: ``z`` (B, N, d); ``x`` is ignored; ``mask`` (B, N).

    Args:
        dim: features d of the tokens.
        heads: number of heads.
        head_dim: width p of a head; None: ``dim / heads``.
        beta: inverse temperature; None: ``1 / sqrt(p)``.
        norm: norm of each head's projections, ``RMSNorm(epsilon)`` or None.
        bound: bound on the spectral norm of the weight, or None.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        head_dim: int | None = None,
        beta: float | None = None,
        norm: RMSNorm | None = SOFT_NORM,
        bound: float | None = None,
    ) -> None:
        width = head_width(dim, heads, head_dim)
        super().__init__(dim, heads=heads, norm=norm)
        self.projection = Projection(dim, heads * width, bound)
        self.beta = width**-0.5 if beta is None else require_positive("beta", beta)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, beta={self.beta:.4g}, {super().extra_repr()}"


class BiSoftmaxAttention(HeadsEnergy):
    """``E = beta^-1 sum_h sum_i log sum_j exp(beta y_i.y_j)``, ``y = norm(W_h z)``.

    Gradient by y: ``(P + P^T) Y`` with the row softmax ``P = softmax(beta Y Y^T)``. Descent makes
    tokens repel each other in each head's subspace. Neither convex nor concave.

    Shapes and other arguments as for
    :class:`implicit_attn.energies.attention.HeadsEnergy`.

    Args:
        causal: restrict the energy of token i to ``j <= i``. The column term of the gradient still
            carries information from later to earlier tokens, so the layer is not autoregressive.
        backend: what computes gradient and Hessian-vector product: "reference" (dense), "blocks"
            (memory linear in N), "triton" or "auto"; ``implicit_attn.kernels.explain`` says which
            one "auto" takes.

    Source: Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646, equations 3 and 7, with the
    full derivative of the norm.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        head_dim: int | None = None,
        beta: float | None = None,
        norm: RMSNorm | None = SOFT_NORM,
        bound: float | None = None,
        causal: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__(dim, heads, head_dim=head_dim, beta=beta, norm=norm, bound=bound)
        self.causal = causal
        self.backend = check_backend(backend)
        # |y_i| <= sqrt(p) after the norm.
        self._limit = None if norm is None else self.beta * head_width(dim, heads, head_dim)

    def potential_and_force(self, y: Tensor, mask: Tensor | None) -> Pair:
        force, lse = self._bisoftmax(y, mask)
        return sum_samples(lse) / self.beta, force

    def force(self, y: Tensor, mask: Tensor | None) -> Tensor:
        return self._bisoftmax(y, mask)[0]

    def force_and_curvature(self, y: Tensor, v: Tensor, mask: Tensor | None) -> Pair:
        force, lse = self._bisoftmax(y, mask)
        return force, bisoftmax_hvp(y, v, self.beta, mask=mask, lse=lse, **self._options())

    def _bisoftmax(self, y: Tensor, mask: Tensor | None) -> Pair:
        return bisoftmax(y, self.beta, mask=mask, **self._options())

    def _options(self) -> dict[str, Any]:
        return {"causal": self.causal, "limit": self._limit, "backend": self.backend}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, causal={self.causal}, backend={self.backend!r}"


class RowSoftmaxAttention(BiSoftmaxAttention):
    """Softmax attention of a step in which each token descends its own term, the others held fixed.

    Value, gradient and Hessian-vector product are those of ``BiSoftmaxAttention``. Only ``force``, and
    with it ``straight_gradient``, differs: it is ``P Y``, the row term of ``(P + P^T) Y``, which is the
    gradient of ``beta^-1 log sum_j exp(beta y_i.k_j)`` by ``y_i`` with the keys ``k = y`` constant.
    Such a step descends no energy of all tokens.

    Shapes and arguments as for ``BiSoftmaxAttention``; not causal.

    Source: Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646.
    """

    def force(self, y: Tensor, mask: Tensor | None) -> Tensor:
        pairs = None
        if mask is not None:
            # A masked token attends to itself alone: its row of zeros stays zero, without NaN.
            pairs = (mask[:, :, None] & mask[:, None, :])[:, None]
            pairs = pairs | torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
        return F.scaled_dot_product_attention(y, y, y, attn_mask=pairs, scale=self.beta)


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
        beta: float | None = None,
        norm: RMSNorm | None = SOFT_NORM,
        bound: float | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(dim, heads, head_dim=head_dim, beta=beta, norm=norm, bound=bound)
        self.backend = check_sigmoid_backend(backend)

    def potential_and_force(self, y: Tensor, mask: Tensor | None) -> Pair:
        force, value = sigmoid_attention(y, self.beta, mask=mask, backend=self.backend)
        return sum_samples(value), force

    def force_and_curvature(self, y: Tensor, v: Tensor, mask: Tensor | None) -> Pair:
        curved = sigmoid_attention_hvp(y, v, self.beta, mask=mask, backend=self.backend)
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
        feature_map: phi, one of ``"identity"``, ``"relu"``, ``"elu"`` (``elu(y) + 1``).

    Source: Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646, table 18.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        feature_map: str = "identity",
        head_dim: int | None = None,
        beta: float | None = None,
        norm: RMSNorm | None = SOFT_NORM,
        bound: float | None = None,
    ) -> None:
        super().__init__(dim, heads, head_dim=head_dim, beta=beta, norm=norm, bound=bound)
        self.feature_map = require_choice("feature_map", feature_map, FEATURE_MAPS)

    def potential_and_force(self, y: Tensor, mask: Tensor | None) -> Pair:
        phi = self._phi(y, mask)
        moment = phi.mT @ phi
        force = (phi @ moment) * self.beta
        slope = self._slope(y)
        wide = moment.to(accumulation_dtype(moment.dtype))
        value = sum_samples(wide.square()) * (self.beta / 4.0)
        return value, force if slope is None else force * slope

    def force_and_curvature(self, y: Tensor, v: Tensor, mask: Tensor | None) -> Pair:
        phi = self._phi(y, mask)
        slope = self._slope(y)
        shift = v if slope is None else slope * v
        moment = phi.mT @ phi
        one_side = shift.mT @ phi
        force = (phi @ moment) * self.beta
        curved = (shift @ moment + phi @ (one_side + one_side.mT)) * self.beta
        if slope is None:
            return force, curved
        curved = curved * slope
        if self.feature_map == "elu":  # phi'' = exp(y) below 0
            curved = curved + force * torch.where(y > 0, torch.zeros_like(y), slope) * v
        return force * slope, curved

    def _phi(self, y: Tensor, mask: Tensor | None) -> Tensor:
        if self.feature_map == "identity":
            return y
        if self.feature_map == "relu":
            return F.relu(y)
        # phi(0) = 1: masked tokens have to be hidden again, here in (B, H, N, p).
        return hide((F.elu(y) + 1.0).transpose(1, 2), mask).transpose(1, 2)

    def _slope(self, y: Tensor) -> Tensor | None:
        """``phi'(y)``, None for 1."""
        if self.feature_map == "identity":
            return None
        return (y > 0).to(y.dtype) if self.feature_map == "relu" else y.clamp_max(0.0).exp()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, feature_map={self.feature_map}"
