"""What may go into belief propagation: couplings and fields with forbidden states, pairs, clamped sites."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from solvers.spins.belief.evidence import Clamped
from solvers.spins.inputs import check_alike, check_field, read_given, zero_masked

SUM = 1e-3  # by which the probabilities of a clamped site may miss 1


def check_model(couplings: Any, field: Any, edges: Any, mask: Any) -> None:
    """Couplings (N, N, d, d), or (E, d, d) of pairs ``edges``, a field (B, N, d), a mask or None.

    -inf is allowed. On a GPU this waits for the device once a solve.
    """
    _, sites, states = shape = check_field(couplings, field)
    if edges is None:
        expected: tuple[int, ...] = (sites, sites, states, states)
        told = f"(N, N, d, d) = {expected}"
    else:
        _check_edges(edges, sites, field.device)
        expected = (len(edges), states, states)
        told = f"(E, d, d) = {expected} to go with edges {tuple(edges.shape)}"
    if tuple(couplings.shape) != expected:
        raise ValueError(
            f"couplings must have the shape {told} to go with field {shape}, got "
            f"{tuple(couplings.shape)}"
        )
    check_alike(couplings, field, mask)
    for name, values in (("field", field.detach()), ("couplings", couplings.detach())):
        if bool((values.isnan() | (values == math.inf)).any()):
            raise ValueError(f"{name} must be finite or -inf, got NaN or infinity")
    if edges is None:
        _check_symmetric(couplings.detach())


def _check_edges(edges: Any, sites: int, device: torch.device) -> None:
    """Pairs (E, 2) of different sites, each once."""
    if not isinstance(edges, Tensor) or edges.dtype != torch.int64:
        what = edges.dtype if isinstance(edges, Tensor) else type(edges)
        raise TypeError(f"edges must be an int64 tensor (E, 2), got {what}")
    if edges.dim() != 2 or edges.shape[1] != 2:
        raise ValueError(f"edges must have the shape (E, 2), got {tuple(edges.shape)}")
    if edges.device != device:
        raise TypeError(f"edges must be on {device} like field, got {edges.device}")
    if len(edges) == 0:
        return
    low, high = edges.aminmax()
    if int(low) < 0 or int(high) >= sites:
        raise ValueError(f"edges must hold sites 0 .. {sites - 1}, got {int(low)} .. {int(high)}")
    first, second = edges.amin(1), edges.amax(1)
    if bool((first == second).any()):
        raise ValueError("edges must join two different sites, got a site with itself")
    if len((first * sites + second).unique()) < len(edges):
        raise ValueError("edges must hold every pair once, in one direction, got one twice")


def _check_symmetric(couplings: Tensor) -> None:
    """Zero diagonal blocks and ``J_ij^ab = J_ji^ba``, -inf included."""
    if bool((couplings.diagonal() != 0).any()):
        raise ValueError("couplings must have zero diagonal blocks (no site couples to itself)")
    other = couplings.permute(1, 0, 3, 2)
    same = couplings == other  # also of -inf
    apart = torch.where(same, 0.0, couplings - other).abs()
    finite = torch.where(couplings.isfinite(), couplings, 0.0).abs().max()
    if bool((apart > 32 * torch.finfo(couplings.dtype).eps * finite).any()):
        raise ValueError(
            "couplings must be symmetric, J_ij^ab = J_ji^ba; use (J + J.permute(1, 0, 3, 2)) / 2"
        )


def read_clamped(given: Any, field: Tensor, mask: Tensor | None) -> Clamped | None:
    """``given`` as for :func:`solvers.belief_propagation`, without masked sites."""
    if given is None:
        return None
    values, where = read_given(given, field)
    seen = values.detach()[where]
    if bool((seen < 0).any()) or bool(((seen.sum(-1) - 1).abs() > SUM).any()):
        raise ValueError(
            "given must hold probabilities of the d states at the clamped sites, such as one-hot values"
        )
    where = where if mask is None else where & mask
    return Clamped(zero_masked(values, where), where)
