"""Couplings, fields and masks of coupled sites: checks, matrix form, symmetry, precision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def as_matrix(couplings: Tensor) -> Tensor:
    """(N, N, d, d) -> (Nd, Nd), rows ``(i, a)``, columns ``(j, b)``; at least float32."""
    size = couplings.shape[0] * couplings.shape[2]
    return as_wide(couplings.transpose(1, 2).reshape(size, size))


def with_symmetries(couplings: Tensor) -> Tensor:
    """The same couplings, whose gradient keeps their symmetry and their zeros."""
    sites = len(couplings)
    outside = 1 - torch.eye(sites, dtype=couplings.dtype, device=couplings.device)
    return (couplings + couplings.permute(1, 0, 3, 2)) / 2 * outside[:, :, None, None]


def zero_masked(tensor: Tensor, mask: Tensor | None) -> Tensor:
    """(B, N, ...) with zeros at the sites where ``mask`` (B, N) is False."""
    if mask is None:
        return tensor
    return torch.where(mask.reshape(*mask.shape, *[1] * (tensor.dim() - 2)), tensor, 0.0)


def as_wide(tensor: Tensor) -> Tensor:
    """At least float32: there is no Cholesky factorisation in half precision."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def check_inputs(couplings: Any, field: Any, mask: Any) -> None:
    """Couplings (N, N, d, d), a field (B, N, d) like them, a mask (B, N) bool or None."""
    shape = check_field(couplings, field)
    _, sites, dim = shape
    if tuple(couplings.shape) != (sites, sites, dim, dim):
        raise ValueError(
            f"couplings must have the shape (N, N, d, d) = {(sites, sites, dim, dim)} to go with field "
            f"{shape}, got {tuple(couplings.shape)}"
        )
    check_alike(couplings, field, mask)
    _check_values(couplings.detach(), field.detach())


def check_field(couplings: Any, field: Any) -> tuple[int, ...]:
    """Both floating tensors; the shape of the field, (B, N, d)."""
    for name, value in (("couplings", couplings), ("field", field)):
        if not isinstance(value, Tensor) or not value.is_floating_point():
            what = value.dtype if isinstance(value, Tensor) else type(value)
            raise TypeError(f"{name} must be a floating tensor, got {what}")
    shape = tuple(field.shape)
    if len(shape) != 3 or 0 in shape:
        raise ValueError(f"field must have the shape (B, N, d), none of them 0, got {shape}")
    return shape


def check_alike(couplings: Tensor, field: Tensor, mask: Any) -> None:
    """Couplings of the field's dtype and device, a mask (B, N) bool or None."""
    shape = tuple(field.shape)
    if couplings.dtype != field.dtype or couplings.device != field.device:
        raise TypeError(
            f"couplings must be like field, {field.dtype} on {field.device}, got {couplings.dtype} on "
            f"{couplings.device}"
        )
    if mask is not None and (not isinstance(mask, Tensor) or mask.dtype != torch.bool):
        what = mask.dtype if isinstance(mask, Tensor) else type(mask)
        raise TypeError(f"mask must be a bool tensor (B, N), got {what}")
    if mask is not None and mask.shape != shape[:2]:
        raise ValueError(f"mask must have the shape {shape[:2]}, got {tuple(mask.shape)}")


def _check_values(couplings: Tensor, field: Tensor) -> None:
    """Finite, without self-coupling, symmetric; on a GPU this waits for the device once a solve."""
    finite = torch.isfinite(field).flatten(1).all(1)
    if not bool(finite.all()):
        rows = torch.nonzero(~finite).flatten().tolist()
        raise ValueError(f"field must be finite, got NaN or infinity in samples {rows[:10]}")
    if not bool(torch.isfinite(couplings).all()):
        raise ValueError("couplings must be finite, got NaN or infinity")
    own = couplings.diagonal(dim1=0, dim2=1).abs().amax((0, 1))
    if bool(own.any()):
        site = int(own.argmax())
        raise ValueError(
            f"couplings must have zero diagonal blocks (no site couples to itself), got "
            f"{float(own[site])} in couplings[{site}, {site}]"
        )
    apart = (couplings - couplings.permute(1, 0, 3, 2)).abs().amax((2, 3))
    allowed = 32 * torch.finfo(couplings.dtype).eps * couplings.abs().max()
    if bool((apart > allowed).any()):
        first, second = divmod(int(apart.argmax()), len(apart))
        raise ValueError(
            "couplings must be symmetric, J_ij^ab = J_ji^ba, got a difference of "
            f"{float(apart.max())} between couplings[{first}, {second}] and the transpose of "
            f"couplings[{second}, {first}]; use (J + J.permute(1, 0, 3, 2)) / 2"
        )


def read_betas(given: float | Sequence[float]) -> tuple[float, ...]:
    """One or several inverse temperatures, finite and > 0."""
    betas = tuple(given) if isinstance(given, Sequence) else (given,)
    for beta in betas:
        if isinstance(beta, bool) or not isinstance(beta, (int, float)):
            raise TypeError(
                "inverse_temperature must be a number or a list of numbers (of a tensor or an array, its "
                f"tolist()), got {given!r}"
            )
        if not 0 < beta < math.inf:
            raise ValueError(f"inverse_temperature must be > 0 and finite, got {given!r}")
    if not betas:
        raise ValueError("inverse_temperature must hold at least one number, got none")
    return betas


def read_given(given: Any, field: Tensor) -> tuple[Tensor, Tensor]:
    """Values of clamped sites (B, N, d), zero elsewhere, and where they are clamped, (B, N) bool.

    ``given`` is a pair of values (N, d) or (B, N, d) and of bools (N,) or (B, N); ``field`` (B, N, d).
    Gradients flow to the values.
    """
    if not (isinstance(given, tuple) and len(given) == 2):
        what = f"{len(given)} of them" if isinstance(given, tuple) else type(given)
        raise TypeError(f"given must be a pair (values, clamped) of tensors, got {what}")
    shape, (values, clamped) = field.shape, given
    if not isinstance(values, Tensor) or not values.is_floating_point():
        what = values.dtype if isinstance(values, Tensor) else type(values)
        raise TypeError(f"given must hold values of a floating dtype first, got {what}")
    if not isinstance(clamped, Tensor) or clamped.dtype != torch.bool:
        what = clamped.dtype if isinstance(clamped, Tensor) else type(clamped)
        raise TypeError(f"given must hold a bool tensor (B, N) second, got {what}")
    if values.shape not in (shape, shape[1:]):
        raise ValueError(
            f"given must hold values of the shape {tuple(shape)}, got {tuple(values.shape)}"
        )
    if clamped.shape not in (shape[:2], shape[1:2]):
        raise ValueError(
            f"given must hold bools of the shape {tuple(shape[:2])}, got {tuple(clamped.shape)}"
        )
    if values.device != field.device or clamped.device != field.device:
        raise TypeError(
            f"given must be on {field.device}, got {values.device} and {clamped.device}"
        )
    clamped = clamped.expand(shape[:2])
    # Values of free sites, NaN for example, take no part in anything.
    values = torch.where(clamped.unsqueeze(-1), values.to(field.dtype), 0.0)
    if not bool(torch.isfinite(values.detach()).all()):
        raise ValueError("given must hold finite values at the clamped sites")
    return values, clamped


def with_scalar_symmetries(couplings: Tensor, mask: Tensor | None) -> Tensor:
    """(B or 1, N, N): the gradient keeps symmetry and zeros; masked sites are uncoupled."""
    k = couplings if couplings.dim() == 3 else couplings.unsqueeze(0)
    outside = 1 - torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    k = (k + k.mT) / 2 * outside
    if mask is None:
        return k
    return torch.where(mask.unsqueeze(1) & mask.unsqueeze(2), k, 0.0)


def check_scalar_inputs(couplings: Any, field: Any, mask: Any) -> None:
    """Couplings (N, N) or (B, N, N), a field (B, N, d) like them, a mask (B, N) bool or None."""
    shape = check_field(couplings, field)
    batch, sites, _ = shape
    if tuple(couplings.shape) not in ((sites, sites), (batch, sites, sites)):
        raise ValueError(
            f"couplings must have the shape {(sites, sites)} or {(batch, sites, sites)} to go with field "
            f"{shape}, got {tuple(couplings.shape)}"
        )
    check_alike(couplings, field, mask)
    k, x = couplings.detach(), field.detach()
    for name, value in (("field", x), ("couplings", k)):
        if not bool(value.isfinite().all()):
            raise ValueError(f"{name} must be finite, got NaN or infinity")
    if bool(k.diagonal(dim1=-2, dim2=-1).any()):
        raise ValueError("couplings must have a zero diagonal (no site couples to itself)")
    allowed = 32 * torch.finfo(k.dtype).eps * k.abs().max()
    if bool((k - k.mT).abs().max() > allowed):
        raise ValueError("couplings must be symmetric; use (K + K.mT) / 2")
