"""Attention energies of one projection: bi-softmax, sigmoid and linear."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.energies.checks import check_count, check_positive
from implicit_attn.energies.norms import SOFT_NORM, RMSNorm
from implicit_attn.energies.projected import ProjectedEnergy
from implicit_attn.energies.tokens import accumulation_dtype, hide, sum_samples
from implicit_attn.kernels import (
    bisoftmax,
    bisoftmax_hvp,
    check_backend,
    check_sigmoid_backend,
    sigmoid_attention,
    sigmoid_attention_hvp,
)


def head_width(dim: int, heads: int, head_dim: int | None) -> int:
    """Width p of a head; ``dim / heads`` where none is given."""
    dim, heads = check_count(dim, "dim"), check_count(heads, "heads")
    if head_dim is not None:
        return check_count(head_dim, "head_dim")
    if dim % heads:
        raise ValueError(f"heads must divide dim={dim} where head_dim is not given, got {heads}")
    return dim // heads


class HeadsEnergy(ProjectedEnergy):
    """Projected energies of heads with one weight (heads p, d) for queries and keys.

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
        super().__init__(dim, heads * width, heads=heads, norm=norm, bound=bound)
        self.beta = width**-0.5 if beta is None else check_positive(beta, "beta")

    def extra_repr(self) -> str:
        return f"heads={self.heads}, beta={self.beta:.4g}, {super().extra_repr()}"


class BiSoftmaxAttention(HeadsEnergy):
    """``E = beta^-1 sum_h sum_i log sum_j exp(beta y_i.y_j)``, ``y = norm(W_h z)``.

    Gradient by y: ``(P + P^T) Y``, ``P`` the row softmax. Tokens repel each other in each head's
    subspace (Hu, Zou, Xu, "Hyper-SET", arXiv 2502.11646, equations 3 and 7, with the full
    derivative of the norm). Neither convex nor concave.

    ``causal`` restricts the energy of token i to ``j <= i``; the gradient still moves information
    from later to earlier tokens through the column term, so this is no autoregressive layer.

    ``backend`` says who computes gradient and Hessian-vector product: "auto", "reference" (dense),
    "blocks" (memory linear in N), "triton"; ``implicit_attn.kernels.explain`` tells what "auto" is.

    Shapes: ``z`` (B, N, d); ``x`` is ignored; ``mask`` (B, N). For the other arguments see
    ``HeadsEnergy``.
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

    def potential(self, y: Tensor, mask: Tensor | None) -> Tensor:
        return self.potential_and_force(y, mask)[0]

    def potential_and_force(self, y: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        force, lse = self._bisoftmax(y, mask)
        return sum_samples(lse) / self.beta, force

    def force(self, y: Tensor, mask: Tensor | None) -> Tensor:
        return self._bisoftmax(y, mask)[0]

    def force_and_curvature(
        self, y: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        force, lse = self._bisoftmax(y, mask)
        return force, bisoftmax_hvp(y, v, self.beta, mask=mask, lse=lse, **self._options())

    def _bisoftmax(self, y: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        return bisoftmax(y, self.beta, mask=mask, **self._options())

    def _options(self) -> dict[str, Any]:
        return {"causal": self.causal, "limit": self._limit, "backend": self.backend}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, causal={self.causal}, backend={self.backend!r}"


class SigmoidAttention(HeadsEnergy):
    """``E = 1/(2 beta) sum_h sum_ij sigma(beta y_i.y_j)``, ``y = norm(W_h z)``.

    Gradient by y: ``sigma'(S) Y`` with ``S = beta Y Y^T``: no normalisation over tokens (Hyper-SET,
    arXiv 2502.11646, table 18, with the sign that makes it the gradient). Not concave.

    ``backend`` says who computes gradient and Hessian-vector product: "auto", "reference" (dense),
    "blocks" (memory linear in N); ``implicit_attn.kernels.explain_sigmoid`` tells what "auto" is.

    Shapes: ``z`` (B, N, d); ``x`` is ignored; ``mask`` (B, N). For the other arguments see
    ``HeadsEnergy``.
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

    def potential(self, y: Tensor, mask: Tensor | None) -> Tensor:
        return self.potential_and_force(y, mask)[0]

    def potential_and_force(self, y: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        force, value = sigmoid_attention(y, self.beta, mask=mask, backend=self.backend)
        return sum_samples(value), force

    def force_and_curvature(
        self, y: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        force = self.force(y, mask)
        curved = sigmoid_attention_hvp(y, v, self.beta, mask=mask, backend=self.backend)
        return force, curved

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, backend={self.backend!r}"


class LinearAttention(HeadsEnergy):
    """``E = 1/(4 beta) sum_h sum_ij (beta phi(y_i).phi(y_j))^2``, ``y = norm(W_h z)``.

    Gradient by y: ``phi'(Y) * beta Phi (Phi^T Phi)``; of the products only the (p, p) matrix
    ``Phi^T Phi`` is formed, so the cost is linear in N (Hyper-SET, arXiv 2502.11646, table 18). Not
    concave.

    Shapes: ``z`` (B, N, d); ``x`` is ignored; ``mask`` (B, N). For the other arguments see
    ``HeadsEnergy``.

    Args:
        feature_map: phi, one of ``"identity"``, ``"relu"``, ``"elu"`` (``elu(y) + 1``).
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
        if feature_map not in _FEATURE_MAPS:
            raise ValueError(f"feature_map must be one of {_FEATURE_MAPS}, got {feature_map!r}")
        self.feature_map = feature_map

    def potential(self, y: Tensor, mask: Tensor | None) -> Tensor:
        phi = self._phi(y, mask)
        return self._value(phi.mT @ phi)

    def potential_and_force(self, y: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        phi = self._phi(y, mask)
        moment = phi.mT @ phi
        force = (phi @ moment) * self.beta
        slope = self._slope(y)
        return self._value(moment), force if slope is None else force * slope

    def force_and_curvature(
        self, y: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
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
        return _hide_heads(F.elu(y) + 1.0, mask)  # phi(0) = 1

    def _slope(self, y: Tensor) -> Tensor | None:
        """``phi'(y)``, None for 1."""
        if self.feature_map == "identity":
            return None
        if self.feature_map == "relu":
            return (y > 0).to(y.dtype)
        return y.clamp_max(0.0).exp()

    def _value(self, moment: Tensor) -> Tensor:
        wide = moment.to(accumulation_dtype(moment.dtype))
        return sum_samples(wide.square()) * (self.beta / 4.0)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, feature_map={self.feature_map}"


_FEATURE_MAPS = ("identity", "relu", "elu")


def _hide_heads(values: Tensor, mask: Tensor | None) -> Tensor:
    """(B, H, N, p) with zeros at the tokens that do not count."""
    return hide(values.transpose(1, 2), mask).transpose(1, 2)
