"""Random directions: unit vectors with the density ``exp(field.u)`` (von Mises and Fisher)."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_directions(field: Tensor, generator: torch.Generator | None) -> Tensor:
    r"""Unit vectors (K, d) with densities ``exp(field.u)``, d >= 2, by Wood's rejection.

    A uniform direction g has the component t along the field and, independent of t, a uniform direction
    across it. With ``k = |field|`` and ``b = (d-1) / (2k + sqrt(4k^2 + (d-1)^2))`` the proposal is::

        w = ((1+b) t + 1-b) / ((1-b) t + 1+b)

    along the field; it is accepted with probability ``exp(k w + (d-1) log(1 - x w) - c)``, where
    ``x = (1-b)/(1+b)`` and c is the maximum of the rest. About two thirds of the proposals or more are
    accepted, for any d and k.
    """
    size = field.norm(dim=-1)
    axis = torch.zeros_like(field)
    axis[:, 0] = 1.0  # any direction, where there is no field
    axis = torch.where((size > 0).unsqueeze(-1), field / size.unsqueeze(-1), axis)
    found = torch.full_like(field, torch.nan)
    rows = torch.nonzero(field.isfinite().all(-1)).flatten()  # NaN stays NaN
    while rows.numel():
        drawn, accepted = _propose(axis[rows], size[rows], generator)
        found[rows[accepted]] = drawn[accepted]
        rows = rows[~accepted]
    return found


def _propose(
    axis: Tensor, size: Tensor, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Proposals (K, d) and which are accepted (K,)."""
    like = {"generator": generator, "dtype": axis.dtype, "device": axis.device}
    normal, uniform = torch.randn(axis.shape, **like), torch.rand(size.shape, **like)
    rest = axis.shape[-1] - 1
    along = (normal * axis).sum(-1)
    across = normal - along.unsqueeze(-1) * axis
    across = across - (across * axis).sum(-1, keepdim=True) * axis  # again: rounding
    t = along / normal.norm(dim=-1)
    b = rest / (2 * size + torch.hypot(2 * size, torch.full_like(size, float(rest))))
    below = b * (1 - t) / ((1 + b) + (1 - b) * t) * 2  # 1 - w, without cancellation
    w = 1 - below
    # Differences of 1 - w and 1 - x, not of w and x: they keep their digits in strong fields.
    x, gap = (1 - b) / (1 + b), 2 * b / (1 + b)
    ratio = (below + w * gap) / (gap * (1 + x))
    accepted = size * (gap - below) + rest * ratio.log() >= uniform.log()
    radial = (below * (1 + w)).clamp_min(0).sqrt()
    direction = across / across.norm(dim=-1, keepdim=True)
    return w.unsqueeze(-1) * axis + radial.unsqueeze(-1) * direction, accepted
