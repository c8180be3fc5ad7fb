"""Couplings of spins in time: checks, and their products with means and covariances."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from solvers.spins.inputs import zero_masked

FORMS = "(N, N), (B, N, N) or (N, N, d, d)"


def drive(couplings: Tensor, mean: Tensor) -> Tensor:
    """``sum_j J_ij m_j`` (B, N, d) of ``mean`` (B, N, d)."""
    if couplings.dim() == 4:
        return torch.einsum("ijab,njb->nia", couplings, mean)
    return _times(couplings, mean)


def noise_matrix(couplings: Tensor, covariance: Tensor) -> Tensor:
    """``B_i = sum_j J_ij C_j J_ij^T`` (B, N, d, d) of ``covariance`` (B, N, d, d)."""
    if couplings.dim() == 4:
        half = torch.einsum("ijab,njbc->nijac", couplings, covariance)
        return torch.einsum("nijac,ijdc->niad", half, couplings)
    return _times(couplings.square(), covariance.flatten(2)).unflatten(-1, covariance.shape[-2:])


def noise_strength(couplings: Tensor, scatter: Tensor) -> Tensor:
    """``sum_j J_ij^2 s_j`` (B, N, 1) of ``scatter`` (B, N, 1), for couplings that are numbers."""
    return _times(couplings.square(), scatter)


def _times(couplings: Tensor, values: Tensor) -> Tensor:
    """``J v`` of ``values`` (B, N, k); couplings that samples share in one product of two matrices."""
    if couplings.dim() == 2:
        rows = values.mT.reshape(-1, values.shape[1]) @ couplings.mT
        return rows.view(len(values), -1, values.shape[1]).mT
    return couplings @ values


def check_finite(mask: Tensor | None = None, **tensors: Tensor) -> None:
    """ValueError that names the first of ``tensors`` with NaN or infinity, (B, N, d) where not masked;
    not on a GPU, where asking would wait for the device."""
    for name, value in tensors.items():
        if value.device.type != "cpu" or bool(value.detach().sum().isfinite()):
            continue
        known = zero_masked(value.detach(), None if name == "couplings" else mask)
        if not bool(known.isfinite().all()):
            raise ValueError(f"{name} must be finite, got NaN or infinity")


def check_network(mean: Any, field: Any, couplings: Any, mask: Any, start: str = "mean") -> None:
    """``mean`` (in errors ``start``) and ``field`` (B, N, d), couplings of one of ``FORMS``, a mask
    (B, N) bool or None."""
    for name, value in ((start, mean), ("field", field), ("couplings", couplings)):
        if not isinstance(value, Tensor) or not value.is_floating_point():
            what = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{name} must be a floating tensor, got {what}")
        if value.dtype != field.dtype or value.device != field.device:
            raise TypeError(
                f"{name} must be like field, {field.dtype} on {field.device}, got {value.dtype} on "
                f"{value.device}"
            )
    shape = tuple(field.shape)
    if len(shape) != 3 or 0 in shape:
        raise ValueError(f"field must have the shape (B, N, d), none of them 0, got {shape}")
    if mean.shape != field.shape:
        raise ValueError(f"{start} must have the shape of field, {shape}, got {tuple(mean.shape)}")
    batch, sites, dim = shape
    allowed = ((sites, sites), (batch, sites, sites), (sites, sites, dim, dim))
    if tuple(couplings.shape) not in allowed:
        raise ValueError(
            f"couplings must have one of the shapes {FORMS} = {allowed} to go with field {shape}, got "
            f"{tuple(couplings.shape)}"
        )
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        what = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask must be a bool tensor (B, N), got {what}")
    if mask.shape != shape[:2] or mask.device != field.device:
        raise ValueError(
            f"mask must have the shape {shape[:2]} on {field.device}, got {tuple(mask.shape)} on "
            f"{mask.device}"
        )
