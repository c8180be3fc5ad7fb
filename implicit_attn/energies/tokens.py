"""Checks, sums and masks of tensors of tokens, and their features: norm, projection, feature maps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.parametrised import parametrise
from implicit_attn.spectral import spectral_norm
from solvers.core.checks import require_count, require_instance, require_positive

Pair = tuple[Tensor, Tensor]  # such as a value and its gradient
Mask = Tensor | None  # (B, N) bool, False at masked tokens


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: float32 for half precision, else ``dtype`` itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def sum_samples(values: Tensor) -> Tensor:
    """Sum (B, ...) to (B,), accumulated and returned in float32 or wider."""
    if values.dim() == 1:
        return values.to(accumulation_dtype(values.dtype))
    return values.flatten(1).sum(1, dtype=accumulation_dtype(values.dtype))


def sum_squares(values: Tensor) -> Tensor:
    """Return the squared norm of each sample, (B,), accumulated in float32 or wider."""
    return sum_samples(values.to(accumulation_dtype(values.dtype)).square())


def hide(values: Tensor, mask: Mask) -> Tensor:
    """Return ``values`` (B, N, ...) with zeros where ``mask`` (B, N) is False, replacing NaN, too."""
    if mask is None:
        return values
    return values.masked_fill(~mask.reshape(*mask.shape, *[1] * (values.dim() - 2)), 0.0)


def got(value: Any) -> str:
    """Describe an argument in the message of an error."""
    if not isinstance(value, Tensor):
        return f"got {type(value).__name__}"
    return f"got {value.dtype} {tuple(value.shape)} on {value.device}"


def check_values(energy: Any, batch: int, name: str) -> None:
    """Check that ``energy`` is a tensor (B,) with one number per sample."""
    if not isinstance(energy, Tensor):
        raise TypeError(f"{name} must return a tensor of shape (B,), {got(energy)}")
    if tuple(energy.shape) != (batch,):
        what = f"shape {tuple(energy.shape)}" if energy.dim() else "a scalar"
        raise ValueError(
            f"{name} must return one number per sample, shape (B,) = ({batch},), got {what}; sum over "
            "all dimensions except the first"
        )


def check_tensor(
    name: str,
    value: Any,
    shape: str,
    *,
    dtype: torch.dtype | None = None,
    finite: bool = True,
    **sizes: int,
) -> Tensor:
    """Check for a floating-point tensor of a shape such as ``"N N d d"`` (equal letters, equal sizes).

    Args:
        dtype: required dtype; None for any floating-point dtype.
        finite: whether to reject NaN and infinity.
        sizes: required sizes of some letters.
    """
    letters = shape.split()
    text = f"({', '.join(letters)}{',' * (len(letters) == 1)})"
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor {text}, {got(value)}")
    if dtype is not None and value.dtype != dtype:
        raise TypeError(f"{name} must have dtype {dtype}, got {value.dtype}")
    known, given = dict(sizes), tuple(value.shape)
    fits = len(given) == len(letters) and 0 not in given
    if not fits or any(known.setdefault(n, s) != s for n, s in zip(letters, given, strict=True)):
        text += "".join(f", {letter} = {size}" for letter, size in sizes.items())
        raise ValueError(f"{name} must have the shape {text}, got {given}")
    if finite and not value.is_meta and not bool(value.detach().isfinite().all()):
        raise ValueError(f"{name} must be finite, got NaN or infinity")
    return value


def check_mask(mask: Mask, z: Tensor, name: str, *, features: int = 0) -> None:
    """Check for a bool mask (B, N) of a state (B, N, ...) with ``features`` dimensions after N."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise TypeError(f"{name}: mask must be a bool tensor (B, N), {got(mask)}")
    if z.dim() < 2 + features or mask.shape != z.shape[:2] or mask.device != z.device:
        raise ValueError(
            f"{name}: mask must have the shape (B, N) and the device of z (B, N, ...), "
            f"{tuple(z.shape)} on {z.device}, {got(mask)}"
        )


def check_tokens(
    z: Any,
    mask: Mask,
    name: str,
    *,
    dim: int | None = None,
    tokens: bool = False,
    features: int = 1,
) -> None:
    """Check for a floating-point state (B, ..., dim), or (B, N, dim) with ``tokens``, and its mask.

    See :func:`check_mask`.
    """
    shape = "B, N" if tokens else "B, ..."
    if not isinstance(z, Tensor) or not z.is_floating_point():
        raise TypeError(f"{name}: z must be a floating-point tensor ({shape}), {got(z)}")
    fits = z.dim() == 3 if tokens else z.dim() >= (1 if dim is None else 2)
    if not fits or (dim is not None and z.shape[-1] != dim):
        wanted = f"({shape})" if dim is None else f"({shape}, d) with {dim} features (d)"
        raise ValueError(f"{name}: z must have the shape {wanted}, {got(z)}")
    if mask is not None:
        check_mask(mask, z, name, features=features)


SELECT = "; if x is a dict or a tuple, select its entry with .select(key)"


def check_input(x: Any, z: Tensor, name: str) -> Tensor:
    """Check that ``x`` is a tensor with the shape and device of ``z``."""
    if not isinstance(x, Tensor) or x.shape != z.shape or x.device != z.device:
        shape = tuple(z.shape)
        wanted = f"{name}: x must be a tensor of shape {shape} on {z.device} like z, {got(x)}"
        raise ValueError(wanted) if isinstance(x, Tensor) else TypeError(wanted + SELECT)
    return x


def check_dtype(x: Tensor, weight: Tensor, name: str) -> None:
    """Check that ``x`` has the device and, without autocast, the dtype of the weight."""
    if x.device != weight.device:
        raise ValueError(f"{name}: x must be on {weight.device} like the weights, got {x.device}")
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(
            f"{name}: x must have the dtype of the weights, {weight.dtype}, got {x.dtype}; convert "
            "one of them with .to()"
        )


def visible_input(x: Any, weight: Tensor, mask: Mask, name: str, *, tokens: bool = False) -> Tensor:
    """Check ``x`` (B, ..., k), or (B, N, k) with ``tokens``, and set masked tokens to zero."""
    width = weight.shape[1]
    fits = isinstance(x, Tensor) and x.shape[-1:] == (width,)
    if not fits or (x.dim() != 3 if tokens else x.dim() < 2):
        wanted = f"{name}: x must be a tensor (B, {'N' if tokens else '...'}, {width}), {got(x)}"
        raise ValueError(wanted) if isinstance(x, Tensor) else TypeError(wanted + SELECT)
    check_dtype(x, weight, name)
    if mask is None:
        return x
    check_mask(mask, x, f"{name}, x", features=1)
    return hide(x, mask)


@dataclass(frozen=True)
class RMSNorm:
    """RMS norm without gain, ``y_hat = y / r``, ``r = sqrt(mean(y^2) + epsilon)`` over the last dimension.

    Its Jacobian ``(I - y_hat y_hat^T / p) / r`` for width p is symmetric. With an epsilon near zero an
    energy of ``y_hat`` has kinks where a projection vanishes, and its minima lie at the kinks. For
    equilibrium layers choose an epsilon of order 1.

    Args:
        epsilon: finite number > 0.

    Source: Zhang and Sennrich (2019), https://arxiv.org/abs/1910.07467, with a gain.
    """

    epsilon: float = 1.0

    def __post_init__(self) -> None:
        require_positive("epsilon", self.epsilon)

    def normalise(self, y: Tensor) -> Pair:
        """Return ``y_hat`` (..., p) and ``r`` (..., 1) of ``y`` (..., p), in the dtype of ``y``."""
        radius = self.mean_square(y).sqrt().to(y.dtype)
        return y / radius, radius

    def mean_square(self, y: Tensor) -> Tensor:
        """Return ``r^2 = mean(y^2) + epsilon``, (..., 1), in float32 or wider."""
        wide = y.to(accumulation_dtype(y.dtype))
        return wide.square().mean(-1, keepdim=True) + self.epsilon

    @staticmethod
    def jacobian_product(unit: Tensor, radius: Tensor, g: Tensor) -> Tensor:
        """Return the Jacobian times ``g``, ``(g - y_hat mean(g y_hat)) / r``, with y_hat and r given."""
        along = (g * unit).mean(-1, keepdim=True)
        return torch.addcmul(g, unit, along, value=-1.0) / radius


SOFT_NORM = RMSNorm(epsilon=1.0)


def check_norm(norm: Any) -> RMSNorm | None:
    return require_instance("norm", norm, RMSNorm, "RMSNorm(epsilon=...)", optional=True)


class SpectralBound(nn.Module):
    """Parametrisation ``W -> W min(1, bound / sigma)`` with the largest singular value ``sigma``.

    It is differentiable and the same in training and evaluation. On CUDA devices sigma is replaced by the
    upper bound :func:`implicit_attn.spectral.gram_bound`. Each read of the weight recomputes sigma,
    except in a solve of a layer, which computes it once.

    Args:
        bound: finite number > 0.
        dim: dimension of the outputs of a weight with more than two dimensions, which is treated as a
            matrix (outputs, everything else).
    """

    symmetric = False  # whether the matrix equals its transpose

    def __init__(self, bound: float, dim: int = 0) -> None:
        super().__init__()
        self.bound, self.dim = require_positive("bound", bound), dim

    def matrix(self, weight: Tensor) -> Tensor:
        """Return the weight as the matrix to bound."""
        return weight if weight.dim() == 2 else weight.movedim(self.dim, 0).flatten(1)

    def forward(self, weight: Tensor) -> Tensor:
        return weight * (self.bound / self.norm_or_bound(weight)).to(weight.dtype)

    def norm_or_bound(self, weight: Tensor) -> Tensor:
        """Return ``max(sigma, bound)``, smooth at a zero weight, in float32 or wider."""
        wide = self.matrix(weight.to(accumulation_dtype(weight.dtype)))
        return spectral_norm(wide, self.bound, symmetric=self.symmetric)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Return an assigned weight unchanged; the bound applies when it is read."""
        return weight

    def extra_repr(self) -> str:
        return f"bound={self.bound}"


class Projection(nn.Module):
    """A weight (rows, dim) that maps states ``z`` (..., dim) to ``z W^T`` and gradients back.

    Entries are drawn from N(0, 1/dim), so projections of a state with entries of order 1 are of order 1.
    ``bound`` limits the largest singular value, or is None.
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
    """Convert (B, N, heads p) to contiguous (B, heads, N, p); unchanged for None."""
    if heads is None:
        return y
    batch, tokens, rows = y.shape
    return y.view(batch, tokens, heads, rows // heads).transpose(1, 2).contiguous()


def merge_heads(y: Tensor) -> Tensor:
    """Convert (B, H, N, p) to (B, N, H p)."""
    batch, heads, tokens, width = y.shape
    return y.transpose(1, 2).reshape(batch, tokens, heads * width)


def project(
    z: Tensor, weight: Tensor, added: Tensor | None, heads: int | None, mask: Mask
) -> Tensor:
    """Return ``z W^T + added``, (B, H, N, p), or (B, ..., rows) without heads.

    ``z`` is zero at masked tokens. ``added`` is a bias (rows,), which is not added to masked tokens, or
    like the result, or None.
    """
    if added is None or added.dim() == 1:
        y = F.linear(z, weight, added)
        return split_heads(y if added is None or mask is None else hide(y, mask), heads)
    if heads is not None:
        return split_heads(F.linear(z, weight), heads) + added
    # The matrix product also adds, which saves a pass over the features.
    overlaps = torch.addmm(added.flatten(0, -2), z.flatten(0, -2), weight.mT)
    return overlaps.view(added.shape)


class Features(NamedTuple):
    """Features ``norm(z W^T + constant)`` and their backward pass.

    Attributes:
        unit: features after the norm, (B, H, N, p), or (B, ..., rows) without heads.
        radius: radius of the norm, (..., 1), or None without a norm.
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

    def pull_back(self, gradient: Tensor, *, straight: bool = False) -> Tensor:
        """Pull a gradient of the features back to the state, if ``straight`` ignoring the norm."""
        if self.radius is not None and not straight:
            gradient = RMSNorm.jacobian_product(self.unit, self.radius, gradient)
        return (gradient if self.heads is None else merge_heads(gradient)) @ self.weight


def like_state(gradient: Tensor, z: Tensor, mask: Mask) -> Tensor:
    """Return a gradient in the dtype of the state, zero at masked tokens."""
    return hide(gradient, mask).to(z.dtype)


class Mapped(NamedTuple):
    """A feature map ``phi(y)`` and its slope ``phi'(y)``, each like y, or None for a slope of 1."""

    value: Tensor
    slope: Tensor | None

    def push(self, v: Tensor) -> Tensor:
        """Return ``phi'(y) v``, which is also the pullback of a cotangent."""
        return v if self.slope is None else self.slope * v


def _elu(y: Tensor) -> Mapped:
    slope = y.clamp_max(0.0).exp()
    # max(y, 0) + exp(min(y, 0)) does not round to 0 for very negative y, unlike elu(y) + 1.
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
    """Return the density of N(0, 1)."""
    return torch.exp(-0.5 * y.square()) / math.sqrt(2.0 * math.pi)


# Elementwise functions. "elu" is elu(y) + 1, which is exp(y) for y < 0; "gelu" is the exact one.
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
