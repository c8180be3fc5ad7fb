"""What ``f`` and the energy must return."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from solvers.core.layout import Layout


def check_output(
    output: Any, energy: Tensor | None, z: Tensor, layout: Layout, autocast: torch.dtype | None
) -> None:
    """Raise TypeError or ValueError unless ``output`` is like the state z (B, D) of this ``layout``.

    An ``energy`` must be one number per sample. Under ``autocast`` the output may be of another dtype.
    """
    refuse_forward_mode(output)
    leaves, spec = [output], layout.spec
    if not (isinstance(output, Tensor) and spec.is_leaf()):
        leaves, spec = pytree.tree_flatten(layout.ordered(output))
    if spec != layout.spec:
        raise TypeError(f"f must return a state structured like z0, got {spec}")
    for leaf, shape, dtype in zip(leaves, layout.shapes, layout.dtypes, strict=True):
        expected = (z.shape[0], *shape)
        if not isinstance(leaf, Tensor):
            raise TypeError(f"f must return tensors, got {type(leaf)}")
        if tuple(leaf.shape) != expected:
            raise ValueError(f"f must return shape {expected} like z0, got {tuple(leaf.shape)}")
        if leaf.device != z.device:
            raise ValueError(f"f must return tensors on {z.device} like z0, got {leaf.device}")
        if leaf.dtype != dtype and (autocast is None or not leaf.is_floating_point()):
            raise TypeError(f"f must return dtype {dtype} like z0, got {leaf.dtype}")
    if energy is not None:
        check_energy(energy, z.shape[0])


def refuse_forward_mode(output: Any) -> None:
    """Raise NotImplementedError for a forward-mode tangent, which the solve would drop."""
    if getattr(forward_ad, "_current_level", -1) < 0:
        return
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor) and forward_ad.unpack_dual(leaf).tangent is not None:
            raise NotImplementedError(
                "forward-mode differentiation through a fixed point is not implemented; use "
                "reverse mode (backward, torch.autograd.grad)"
            )


def check_energy(energy: Any, batch: int) -> None:
    """Raise TypeError or ValueError unless ``energy`` is a tensor of one number per sample."""
    if not isinstance(energy, Tensor):
        raise TypeError(f"energy must return a tensor of shape ({batch},), got {type(energy)}")
    if tuple(energy.shape) != (batch,):
        raise ValueError(
            f"energy must return one number per sample, shape ({batch},), got shape "
            f"{tuple(energy.shape)}; do not reduce over the batch"
        )
