"""One step down an energy's gradient."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from implicit_attn.energies.energy import Energy
from implicit_attn.updates.update import Update


class StepSize(nn.Module):
    """A positive step: one number, or one per channel; constant or learned.

    A learned step is ``log(1 + exp(raw))``, so it stays positive.

    Args:
        initial: > 0.
        channels: None for one number, else d for a vector (d,).
        learned: make it a parameter.
    """

    def __init__(self, initial: float, channels: int | None = None, learned: bool = False) -> None:
        super().__init__()
        if isinstance(initial, bool) or not isinstance(initial, (int, float)):
            raise TypeError(f"step_size must be a number, got {initial!r}")
        if not (math.isfinite(initial) and initial > 0):
            raise ValueError(f"step_size must be finite and > 0, got {initial!r}")
        whole = isinstance(channels, int) and not isinstance(channels, bool)
        if channels is not None and (not whole or channels < 1):
            raise ValueError(f"channels must be None or an integer >= 1, got {channels!r}")
        self.initial, self.channels, self.learned = float(initial), channels, learned
        shape = () if channels is None else (channels,)
        if learned:
            raw = initial + math.log(-math.expm1(-initial))
            self.raw = nn.Parameter(torch.full(shape, raw))
        elif channels is not None:
            self.register_buffer("constant", torch.full(shape, float(initial)))

    def forward(self) -> float | Tensor:
        """The step: a float, or a tensor of shape () or (d,)."""
        if self.learned:
            return F.softplus(self.raw)
        return self.initial if self.channels is None else self.constant  # type: ignore[return-value]

    def extra_repr(self) -> str:
        return f"initial={self.initial}, channels={self.channels}, learned={self.learned}"


class GradientStep(Update):
    r"""``f(z, x) = z - eta dE/dz(z, x)``: fixed points are the stationary points of E.

    They do not depend on eta > 0; the step only sets the scale of the residual
    ``|f(z) - z| / |f(z)|`` and of solvers without a step control of their own. With one number the
    Jacobian ``I - eta H`` is symmetric; with one number per channel it is not.

    Args:
        energy: an :class:`Energy`.
        step_size: eta, > 0.
        channels: d for a step per channel of z (..., d).
        learned: train the step.

    Source: Hu et al., Hyper-SET (arXiv 2502.11646), eqs. 9, 11 for learned steps.
    """

    monitored = True

    def __init__(
        self,
        energy: Energy,
        step_size: float = 1.0,
        *,
        channels: int | None = None,
        learned: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(energy, Energy):
            raise TypeError(f"energy must be an Energy, got {type(energy)}")
        self.energy = energy
        self.step_size = StepSize(step_size, channels, learned)
        self.symmetric = channels is None

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Any:
        return self._descend(z, self.energy.grad(z, x, mask=mask))

    def joint(
        self, z: Any, x: Any = None, *, mask: Tensor | None = None
    ) -> tuple[Any, Tensor, Any]:
        value, gradient = self.energy.value_and_grad(z, x, mask=mask)
        return self._descend(z, gradient), value, gradient

    def _descend(self, z: Any, gradient: Any) -> Any:
        step = self.step_size()
        if isinstance(z, Tensor):
            return move(z, gradient, step)
        return pytree.tree_map(lambda leaf, slope: move(leaf, slope, step), z, gradient)


def move(z: Tensor, gradient: Tensor, step: float | Tensor) -> Tensor:
    """``z - step * gradient`` in the dtype of ``z``; ``step`` a number or (), (d,) for z (..., d)."""
    if isinstance(step, Tensor) and step.dim() and step.shape[0] != z.shape[-1]:
        raise ValueError(
            f"channels={step.shape[0]} does not fit a state with {z.shape[-1]} channels, got shape "
            f"{tuple(z.shape)}"
        )
    if not isinstance(step, Tensor):
        return torch.sub(z, gradient, alpha=step)
    return z - step.to(z.dtype) * gradient
