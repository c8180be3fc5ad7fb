"""Checks and conversions of couplings, fields and masks of coupled sites, and stationary values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from solvers.core.checks import require_instance, require_positive
from solvers.core.tolerance import Tolerance, read_tolerance


def as_matrix(couplings: Tensor) -> Tensor:
    """Convert (N, N, d, d) to (Nd, Nd), rows ``(i, a)``, columns ``(j, b)``, at least float32."""
    size = couplings.shape[0] * couplings.shape[2]
    return as_wide(couplings.transpose(1, 2).reshape(size, size))


def with_dimensions(couplings: Any, field: Any) -> tuple[Any, Any]:
    """Convert couplings (N, N) to (N, N, 1, 1), and fields (N,) or (B, N) to (B, N, 1)."""
    if isinstance(couplings, Tensor) and couplings.dim() == 2:
        couplings = couplings[:, :, None, None]
        if isinstance(field, Tensor) and field.dim() in (1, 2):
            field = field.reshape(-1, field.shape[-1], 1)
    return couplings, field


def with_symmetries(couplings: Tensor) -> Tensor:
    """Return couplings (N, N, d, d), (N, N) or (B, N, N) with a gradient of their symmetry and zeros."""
    blocks = couplings.dim() == 4
    unit = torch.eye(couplings.shape[1], dtype=couplings.dtype, device=couplings.device)
    outside = (1 - unit)[:, :, None, None] if blocks else 1 - unit
    return (couplings + (couplings.permute(1, 0, 3, 2) if blocks else couplings.mT)) / 2 * outside


def zero_masked(tensor: Tensor, mask: Tensor | None) -> Tensor:
    """Set (B, N, ...) to zero at the sites where ``mask`` (B, N) is False."""
    if mask is None:
        return tensor
    return torch.where(mask.reshape(*mask.shape, *[1] * (tensor.dim() - 2)), tensor, 0.0)


def as_wide(tensor: Tensor) -> Tensor:
    """Convert half precision, which has no Cholesky factorisation, to float32."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def no_variance(mean: Tensor) -> Tensor:
    """Return expanded zeros (B, N, d, d)."""
    return mean.new_zeros(()).expand(*mean.shape, mean.shape[-1])


def check_inputs(couplings: Any, field: Any, mask: Any, scalar: bool = False) -> None:
    """Check couplings (N, N, d, d), or ``scalar`` ones (N, N) or (B, N, N), a field (B, N, d) and a mask
    (B, N) bool or None; on a GPU this waits for the device once per solve."""
    batch, sites, dim = check_field(field)
    numbers = ((sites, sites), (batch, sites, sites))
    check_like_field(
        "couplings", couplings, field, *(numbers if scalar else [(sites, sites, dim, dim)])
    )
    check_mask(mask, field)
    check_values(couplings, field)


def check_field(field: Any) -> tuple[int, ...]:
    """Check that ``field`` is a floating-point tensor (B, N, d) and return its shape."""
    _check_floating("field", field)
    if field.dim() != 3 or 0 in field.shape[1:]:
        got = tuple(field.shape)
        raise ValueError(f"field must have a shape (B, N, d) with N and d of at least 1, got {got}")
    return tuple(field.shape)


def check_like_field(name: str, value: Any, field: Tensor, *shapes: tuple[int, ...]) -> None:
    """Check for a floating-point tensor of one of ``shapes`` with the dtype and device of ``field``."""
    _check_floating(name, value)
    if value.dtype != field.dtype or value.device != field.device:
        got = f"{value.dtype} on {value.device}"
        raise TypeError(f"{name} must be {field.dtype} on {field.device} like field, got {got}")
    if tuple(value.shape) not in shapes:
        wanted = f"the shape {shapes[0]}" if len(shapes) == 1 else f"one of the shapes {shapes}"
        wanted, got = f"{wanted} for a field {tuple(field.shape)}", tuple(value.shape)
        raise ValueError(f"{name} must have {wanted}, got {got}")


def _check_floating(name: str, value: Any) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        what = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name} must be a floating-point tensor, got {what}")


def check_mask(mask: Any, field: Tensor) -> None:
    """Check for a mask (B, N) bool on the device of ``field``, or None."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        what = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask must be a bool tensor (B, N), got {what}")
    if mask.shape != field.shape[:2] or mask.device != field.device:
        got = f"{tuple(mask.shape)} on {mask.device}"
        wanted = f"{tuple(field.shape[:2])} on {field.device}"
        raise ValueError(f"mask must have the shape {wanted}, got {got}")


def check_values(couplings: Tensor, field: Tensor, forbidding: bool = False) -> None:
    """Check for finite symmetric couplings (N, N, d, d), (N, N) or (B, N, N) without self-couplings, or,
    if ``forbidding``, couplings of listed pairs (E, d, d), which may be -inf."""
    couplings = couplings.detach()
    for name, value in (("field", field.detach()), ("couplings", couplings)):
        wrong = ~value.isfinite() & ~((value == -math.inf) & forbidding)
        if bool(wrong.any()):
            rows = torch.nonzero(wrong.flatten(1).any(1)).flatten().tolist()
            where = f" in samples {rows[:10]}" if name == "field" else ""
            allowed = "finite or -inf" if forbidding else "finite"
            raise ValueError(f"{name} must be {allowed}, got NaN or infinity{where}")
    if forbidding:
        return
    blocks = couplings.dim() == 4
    own = couplings.diagonal(dim1=0, dim2=1) if blocks else couplings.diagonal(dim1=-2, dim2=-1)
    if bool((own != 0).any()):
        first = torch.nonzero(own)[0].tolist()
        raise ValueError(
            f"couplings must be zero in couplings[{first[-1]}, {first[-1]}], because no site couples to "
            f"itself, got {float(own[tuple(first)])}"
        )
    other = couplings.permute(1, 0, 3, 2) if blocks else couplings.mT
    apart = (couplings - other).abs()
    if bool((apart > 32 * torch.finfo(couplings.dtype).eps * couplings.abs().max()).any()):
        place = torch.nonzero(apart == apart.max())[0].tolist()
        i, j = place[:2] if blocks else place[-2:]
        formula = "(J + J.permute(1, 0, 3, 2)) / 2" if blocks else "(J + J.mT) / 2"
        raise ValueError(
            f"couplings must be symmetric, J_ij^ab = J_ji^ba, got a difference of {float(apart.max())} "
            f"between couplings[{i}, {j}] and the transpose of couplings[{j}, {i}]; use {formula}"
        )


def read_start(name: str, value: Any, shape: tuple[int, ...], field: Tensor) -> Tensor:
    """Return a detached, finite start of this shape with the dtype and device of ``field``."""
    require_instance(name, value, Tensor, "a tensor")
    if tuple(value.shape) != shape:
        raise ValueError(f"{name} must have the shape {shape}, got {tuple(value.shape)}")
    if value.device != field.device:
        raise TypeError(f"{name} must be on {field.device}, got {value.device}")
    if not bool(value.isfinite().all()):
        raise ValueError(f"{name} must be finite, got NaN or infinity")
    return value.detach().to(field.dtype)


def usual_tolerance(given: Any, dtype: torch.dtype) -> Tolerance:
    """Return ``given``, or rtol 1e-10 in float64, 1e-5 in float32 and 1e-2 in half precision."""
    usual = {torch.float64: 1e-10, torch.float32: 1e-5}.get(dtype, 1e-2)
    return read_tolerance("tolerance", given) or Tolerance(usual)


def read_betas(given: float | Sequence[float]) -> tuple[float, ...]:
    """Return one or several inverse temperatures, finite and > 0."""
    betas = tuple(given) if isinstance(given, Sequence) else (given,)
    if not betas:
        raise ValueError("inverse_temperature must contain at least one number, got none")
    return tuple(require_positive("inverse_temperature", beta) for beta in betas)


def read_given(given: Any, field: Tensor) -> tuple[Tensor, Tensor]:
    """Return values of clamped sites (B, N, d), zero elsewhere, and the clamped sites (B, N) bool.

    ``given`` is a pair of values (N, d) or (B, N, d) and bools (N,) or (B, N); ``field`` is (B, N, d).
    Gradients flow to the values.
    """
    if not (isinstance(given, tuple) and len(given) == 2):
        raise TypeError(f"given must be a pair (values, clamped) of tensors, got {type(given)}")
    values, clamped = given
    _check_floating("given[0]", values)
    require_instance("given[1]", clamped, Tensor, "a bool tensor")
    if clamped.dtype != torch.bool or {values.device, clamped.device} != {field.device}:
        what = f"{clamped.dtype} on {values.device} and {clamped.device}"
        raise TypeError(f"given must contain values and bools on {field.device}, got {what}")
    shape = field.shape
    if values.shape not in (shape, shape[1:]) or clamped.shape not in (shape[:2], shape[1:2]):
        what = f"{tuple(values.shape)} and {tuple(clamped.shape)}"
        raise ValueError(
            f"given must contain values {tuple(shape)} and bools {tuple(shape[:2])}, got {what}"
        )
    clamped = clamped.expand(shape[:2])
    # Values of free sites, which may be NaN, are ignored.
    values = torch.where(clamped.unsqueeze(-1), values.to(field.dtype), 0.0)
    if not bool(torch.isfinite(values.detach()).all()):
        raise ValueError("given must contain finite values at the clamped sites")
    return values, clamped


def stationary_value(function: Callable[[Any, Any], Tensor], args: Any, state: Any) -> Tensor:
    """Return ``function(args, state)`` (B,), which is stationary in the state and needs no adjoint solve.

    Second derivatives go through the state.
    """
    if not torch.is_grad_enabled():
        return function(args, state)
    held = pytree.tree_map(torch.detach, state)
    return _Stationary.apply(function(args, held), function(args, state))


class _Stationary(torch.autograd.Function):
    """Compute the partial derivative, or the total one for second derivatives."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, total: Tensor) -> Tensor:
        return partial.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (cotangent,) = cotangents
        return (None, cotangent) if torch.is_grad_enabled() else (cotangent, None)
