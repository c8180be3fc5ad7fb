"""Features of states: norm, projection and its bound, maps of features, and the energies of features."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.energies.energy import Energy
from implicit_attn.energies.tokens import (
    Pair,
    accumulation_dtype,
    check_tokens,
    hide,
    sum_samples,
)
from implicit_attn.kernels.pairs import Pairs
from implicit_attn.parametrised import parametrise
from solvers.core.checks import require_count, require_instance, require_positive
from solvers.core.modes import without_autocast


@dataclass(frozen=True)
class RMSNorm:
    """RMS norm without gain: ``y_hat = y / r``, ``r = sqrt(mean(y^2) + epsilon)`` over the last dimension.

    Its Jacobian ``(I - y_hat y_hat^T / p) / r`` for width p is symmetric. With an epsilon near zero an
    energy of ``y_hat`` has kinks where a projection vanishes, and its minima lie at the kinks; for
    equilibrium layers choose an epsilon of order 1.

    Args:
        epsilon: finite, > 0.

    Source: Zhang and Sennrich (2019), https://arxiv.org/abs/1910.07467, there with a gain.
    """

    epsilon: float = 1.0

    def __post_init__(self) -> None:
        require_positive("epsilon", self.epsilon)

    def normalise(self, y: Tensor) -> Pair:
        """``y`` (..., p) -> ``y_hat`` (..., p) and ``r`` (..., 1), in the dtype of ``y``."""
        radius = self.mean_square(y).sqrt().to(y.dtype)
        return y / radius, radius

    def mean_square(self, y: Tensor) -> Tensor:
        """``r^2 = mean(y^2) + epsilon``, (..., 1), in float32 or wider."""
        wide = y.to(accumulation_dtype(y.dtype))
        return wide.square().mean(-1, keepdim=True) + self.epsilon

    @staticmethod
    def jacobian_product(unit: Tensor, radius: Tensor, g: Tensor) -> Tensor:
        """Jacobian times ``g``, ``(g - y_hat mean(g y_hat)) / r``; ``unit`` is y_hat, ``radius`` r."""
        along = (g * unit).mean(-1, keepdim=True)
        return torch.addcmul(g, unit, along, value=-1.0) / radius


SOFT_NORM = RMSNorm(epsilon=1.0)


def check_norm(norm: Any) -> RMSNorm | None:
    return require_instance("norm", norm, RMSNorm, "RMSNorm(epsilon=...)", optional=True)


class SpectralBound(nn.Module):
    """Parametrisation ``W -> W min(1, bound / sigma)``, ``sigma`` the largest singular value.

    Exact and differentiable, the same in training and evaluation. Each read of the weight costs the
    eigenvalues of a Gram matrix; a solve, like ``torch.nn.utils.parametrize.cached()``, takes one.
    ``bound``: finite, > 0.
    """

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.bound = require_positive("bound", bound)

    def matrix(self, weight: Tensor) -> Tensor:
        """The weight as the matrix that is bounded."""
        return weight

    def forward(self, weight: Tensor) -> Tensor:
        return weight * (self.bound / self.norm_or_bound(weight)).to(weight.dtype)

    def norm_or_bound(self, weight: Tensor) -> Tensor:
        """``max(sigma, bound)``, smooth at a zero weight, too, in float32 or wider."""
        # sigma^2 as an eigenvalue of the smaller Gram matrix takes half the time of singular values. The
        # entries are divided by a bound on them, so that no square over- or underflows. LAPACK raises at
        # a NaN; without it the NaN stays in the weight, and the solve's status reports it.
        wide = self.matrix(weight.to(accumulation_dtype(weight.dtype)))
        wide = torch.where(wide.isfinite(), wide, 0.0)
        size = wide.detach().abs().amax().clamp_min(self.bound)
        wide = wide / size
        with without_autocast(weight.device.type):  # whose products are in half precision
            gram = wide @ wide.mT if len(wide) < wide.shape[1] else wide.mT @ wide
            least = (self.bound / size).square()
            return torch.maximum(torch.linalg.eigvalsh(gram)[-1], least).sqrt() * size

    def right_inverse(self, weight: Tensor) -> Tensor:
        """An assigned weight is stored as it is; the bound applies where it is read."""
        return weight

    def extra_repr(self) -> str:
        return f"bound={self.bound}"


class Projection(nn.Module):
    """A weight (rows, dim) that maps states ``z`` (..., dim) to ``z W^T`` and gradients back.

    Entries are drawn from N(0, 1/dim), so a state with entries of order 1 has such projections.
    ``bound``: on the largest singular value, or None.
    """

    weight: Tensor

    def __init__(self, dim: int, rows: int, bound: float | None = None) -> None:
        super().__init__()
        dim, rows = require_count("dim", dim), require_count("rows", rows)
        self.weight = nn.Parameter(torch.randn(rows, dim) * dim**-0.5)
        if bound is not None:
            parametrise(self, "weight", SpectralBound(bound))

    def extra_repr(self) -> str:
        rows, dim = self.weight.shape
        return f"dim={dim}, rows={rows}"


def split_heads(y: Tensor, heads: int | None) -> Tensor:
    """(B, N, heads p) -> (B, heads, N, p), contiguous; unchanged for None."""
    if heads is None:
        return y
    batch, tokens, rows = y.shape
    return y.view(batch, tokens, heads, rows // heads).transpose(1, 2).contiguous()


def merge_heads(y: Tensor) -> Tensor:
    """(B, H, N, p) -> (B, N, H p)."""
    batch, heads, tokens, width = y.shape
    return y.transpose(1, 2).reshape(batch, tokens, heads * width)


def project(
    z: Tensor, weight: Tensor, added: Tensor | None, heads: int | None, mask: Tensor | None
) -> Tensor:
    """``z W^T + added``, (B, H, N, p), or (B, ..., rows) without heads.

    ``z`` is zero at masked tokens. ``added`` is a bias (rows,), of which masked tokens get nothing, or
    like the result, or None.
    """
    if added is None or added.dim() == 1:
        y = F.linear(z, weight, added)
        return split_heads(y if added is None else hide(y, mask), heads)
    if heads is not None:
        return split_heads(F.linear(z, weight), heads) + added
    # The sum is left to the product of matrices, which saves a pass over the features.
    overlaps = torch.addmm(added.flatten(0, -2), z.flatten(0, -2), weight.mT)
    return overlaps.view(added.shape)


class Features(NamedTuple):
    """Features ``norm(z W^T + constant)``, and the way of gradients back through them.

    Attributes:
        unit: after the norm, (B, H, N, p), or (B, ..., rows) without heads.
        radius: of the norm, (..., 1); None where there is no norm.
        weight: W (rows, d).
        heads: H, or None.
    """

    unit: Tensor
    radius: Tensor | None
    weight: Tensor
    heads: int | None

    @classmethod
    def of(cls, raw: Tensor, norm: RMSNorm | None, weight: Tensor, heads: int | None) -> Features:
        unit, radius = (raw, None) if norm is None else norm.normalise(raw)
        return cls(unit, radius, weight, heads)

    def pull_back(self, force: Tensor, *, straight: bool = False) -> Tensor:
        """A gradient by the features as one by the state; ``straight``: without the norm's derivative."""
        if self.radius is not None and not straight:
            force = RMSNorm.jacobian_product(self.unit, self.radius, force)
        return (force if self.heads is None else merge_heads(force)) @ self.weight


class Given(NamedTuple):
    """What a function of features is given besides them.

    Attributes:
        mask: (B, N) bool, False at masked tokens.
        gates: (B, ..., rows), weights of the features.
        pairs: the pairs of tokens that may attend, and their biases.
    """

    mask: Tensor | None = None
    gates: Tensor | None = None
    pairs: Pairs | None = None


class ProjectedEnergy(Energy):
    """``E(z) = potential(y)`` of features ``y = norm(z W^T)``, with its gradient in closed form.

    A subclass sets ``projection`` (or overrides ``weight``) and says what the potential is, by methods of
    the features ``y``, (B, heads, N, p) or (B, ..., rows), and of what else is :class:`Given`::

        token_value(y, given)         of each token, (B, ...); masked tokens are left out of their sum
        potential(y, given)           in place of that, the value of each sample, (B,)
        force(y, given)               the gradient of the potential by y, like y
        potential_and_force(...)      both at once, where they share work

    What features see of the input comes from ``seen(x, mask, z)``. Features of masked tokens may be
    anything finite: the gradient is zero there all the same.

    Args:
        dim: features d of the state.
        heads: split the features into so many heads, (B, N, d) -> (B, heads, N, rows / heads);
            None: no head dimension, (B, ..., d) -> (B, ..., rows).
        norm: norm over the last dimension of the features, or None.
    """

    projection: Projection

    def __init__(self, dim: int, *, heads: int | None = None, norm: RMSNorm | None = None) -> None:
        super().__init__()
        self.dim, self.heads, self.norm = dim, heads, check_norm(norm)

    @property
    def weight(self) -> Tensor:
        """W (rows, d), read once an evaluation: each read of a bounded weight computes it."""
        return self.projection.weight

    def seen(self, x: Any, mask: Tensor | None, z: Tensor) -> tuple[Tensor | None, Given]:
        """What is added to ``z W^T``, as for :func:`project`, and what else is given."""
        return None, Given(mask)

    def token_value(self, y: Tensor, given: Given) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must define token_value or potential")

    @abstractmethod
    def force(self, y: Tensor, given: Given) -> Tensor: ...

    def potential(self, y: Tensor, given: Given) -> Tensor:
        return sum_samples(hide(self.token_value(y, given), given.mask))

    def potential_and_force(self, y: Tensor, given: Given) -> Pair:
        return self.potential(y, given), self.force(y, given)

    def features(
        self, z: Tensor, x: Any = None, *, mask: Tensor | None = None, weight: Tensor | None = None
    ) -> Tensor:
        """``y``: (B, heads, N, p), or (B, ..., rows) without heads; ``weight`` replaces W."""
        return self._at(z, x, mask, weight)[0].unit

    def straight_gradient(
        self, z: Tensor, x: Any = None, *, mask: Tensor | None = None, weight: Tensor | None = None
    ) -> Tensor:
        """The gradient without the norm's derivative: ``dE/dy W`` at ``y``, like ``z``.

        It is zero at masked tokens, and the gradient of no function of z unless the norm is None;
        ``weight`` replaces W.

        Source: Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646, equations 9 and 11.
        """
        at, given = self._at(z, x, mask, weight)
        force = self.straight_force(at.unit, given)
        return like_state(at.pull_back(force, straight=True), z, mask)

    def straight_force(self, y: Tensor, given: Given) -> Tensor:
        """The force of a :meth:`straight_gradient`."""
        return self.force(y, given)

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        at, given = self._at(z, x, mask)
        return self.potential(at.unit, given)

    def value_and_grad(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Pair:
        at, given = self._at(z, x, mask)
        value, force = self.potential_and_force(at.unit, given)
        return value, like_state(at.pull_back(force), z, mask)

    def grad(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        at, given = self._at(z, x, mask)
        return like_state(at.pull_back(self.force(at.unit, given)), z, mask)

    def _at(
        self, z: Tensor, x: Any, mask: Tensor | None, weight: Tensor | None = None
    ) -> tuple[Features, Given]:
        """The features at a state, and what else is given."""
        tokens = self.heads is not None
        check_tokens(z, mask, type(self).__name__, dim=self.dim, tokens=tokens)
        added, given = self.seen(x, mask, z)
        weight = self.weight if weight is None else weight
        raw = project(hide(z, mask), weight, added, self.heads, mask)
        return Features.of(raw, self.norm, weight, self.heads), given

    def extra_repr(self) -> str:
        return f"norm={self.norm}"


def like_state(gradient: Tensor, z: Tensor, mask: Tensor | None) -> Tensor:
    """A gradient in the dtype of the state, zero at masked tokens."""
    return hide(gradient, mask).to(z.dtype)


class Mapped(NamedTuple):
    """A feature map ``phi(y)`` and its slope ``phi'(y)``, each like y; None stands for a slope of 1."""

    value: Tensor
    slope: Tensor | None

    def push(self, v: Tensor) -> Tensor:
        """``phi'(y) v``, also the pullback of a cotangent."""
        return v if self.slope is None else self.slope * v


def _elu(y: Tensor) -> Mapped:
    slope = y.clamp_max(0.0).exp()
    # max(y, 0) + exp(min(y, 0)): elu(y) + 1 would round to 0 where y is far below 0.
    return Mapped(F.relu(y) + slope, slope)


def _sigmoid(y: Tensor) -> Mapped:
    gate = y.sigmoid()
    return Mapped(gate, gate * (1.0 - gate))


def _tanh(y: Tensor) -> Mapped:
    value = y.tanh()
    return Mapped(value, 1.0 - value.square())


def _silu(y: Tensor) -> Mapped:
    gate = y.sigmoid()
    return Mapped(F.silu(y), gate + y * (gate * (1.0 - gate)))


def normal_density(y: Tensor) -> Tensor:
    """Density of N(0, 1)."""
    return torch.exp(-0.5 * y.square()) / math.sqrt(2.0 * math.pi)


# Entry by entry. "elu" is elu(y) + 1, which is exp(y) for y < 0; "gelu" is the exact one.
FEATURE_MAPS: dict[str, Callable[[Tensor], Mapped]] = {
    "identity": lambda y: Mapped(y, None),
    "relu": lambda y: Mapped(F.relu(y), (y > 0).to(y.dtype)),
    "elu": _elu,
    "plain-elu": lambda y: _elu(y)._replace(value=F.elu(y)),
    "sigmoid": _sigmoid,
    "tanh": _tanh,
    "softplus": lambda y: Mapped(F.softplus(y), y.sigmoid()),
    "silu": _silu,
    "gelu": lambda y: Mapped(F.gelu(y), torch.special.ndtr(y) + y * normal_density(y)),
}
NONLINEAR_MAPS = tuple(FEATURE_MAPS)[1:]
