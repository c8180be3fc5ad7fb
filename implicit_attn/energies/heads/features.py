"""Features of tokens in each head, and the way of derivatives through them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.energies.projected import RMSNorm, merge_heads, split_heads
from implicit_attn.energies.tokens import hide


def project(
    z: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    heads: int,
    mask: Tensor | None,
    added: Tensor | None = None,
) -> Tensor:
    """Features before the norm, ``z W^T + bias`` or ``z W^T + added``, (B, H, N, p).

    ``z`` (B, N, d) is zero at masked tokens, and so are the features; ``added`` (B, H, N, p) holds a
    bias already.
    """
    if added is not None:
        return split_heads(F.linear(z, weight), heads) + added
    y = F.linear(z, weight, bias)
    return split_heads(y if bias is None else hide(y, mask), heads)


class Features(NamedTuple):
    """Features ``norm(z W^T + constant)`` of one kind, queries or keys.

    Attributes:
        unit: (B, H, N, p), after the norm.
        radius: of the norm, (B, H, N, 1); None where there is no norm.
        weight: W (H p, d); None where the features do not depend on the state.
    """

    unit: Tensor
    radius: Tensor | None
    weight: Tensor | None

    @classmethod
    def of(cls, raw: Tensor, norm: RMSNorm | None, weight: Tensor | None) -> Features:
        unit, radius = (raw, None) if norm is None else norm.normalise(raw)
        return cls(unit, radius, weight)

    def push(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """What a change ``v`` (B, N, d) of the state changes, before and after the norm."""
        if self.weight is None:
            still = torch.zeros_like(self.unit)
            return still, still
        raw = split_heads(F.linear(v, self.weight), self.unit.shape[1])
        if self.radius is None:
            return raw, raw
        return raw, RMSNorm.jacobian_product(self.unit, self.radius, raw)

    def pull_back(self, force: Tensor) -> Tensor | None:
        """A gradient by the features as one by the state, (B, N, d); None where they are constant."""
        if self.weight is None:
            return None
        if self.radius is not None:
            force = RMSNorm.jacobian_product(self.unit, self.radius, force)
        return merge_heads(force) @ self.weight

    def pull_back_curvature(self, force: Tensor, curved: Tensor, raw: Tensor) -> Tensor | None:
        """The change of :meth:`pull_back` of ``force`` as that changes by ``curved``.

        ``raw`` is the change of the features before the norm.
        """
        if self.weight is None:
            return None
        if self.radius is not None:
            curved = RMSNorm.hessian_product(self.unit, self.radius, force, curved, raw)
        return merge_heads(curved) @ self.weight


def add_parts(first: Tensor | None, second: Tensor | None) -> Tensor:
    """The sum of those that are there, at least one."""
    if first is None or second is None:
        present = second if first is None else first
        assert present is not None
        return present
    return first + second
