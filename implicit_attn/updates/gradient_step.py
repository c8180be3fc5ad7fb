"""Updates that take one step down an energy, and their step sizes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from implicit_attn.energies.energy import Energy
from implicit_attn.updates.update import Update
from solvers.core.checks import require_positive


class StepSize(nn.Module):
    """A positive step size: one number, or one per channel; constant or learned.

    A learned step size is ``log(1 + exp(raw))`` of a parameter ``raw``, so it stays positive.

    Args:
        initial: > 0.
        channels: None for one number, else d for a vector (d,).
        learned: make it a parameter.
    """

    def __init__(self, initial: float, channels: int | None = None, learned: bool = False) -> None:
        super().__init__()
        require_positive("step_size", initial)
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
        """The step size: a float, or a tensor of shape () or (d,)."""
        if self.learned:
            return F.softplus(self.raw)
        return self.initial if self.channels is None else self.constant  # type: ignore[return-value]

    def extra_repr(self) -> str:
        return f"initial={self.initial}, channels={self.channels}, learned={self.learned}"


class EnergyStep(Update):
    """A step that depends on the gradient of an energy, with a step size.

    Args:
        energy: an :class:`Energy`.
        step_size: > 0.
        channels: d for a step size per channel of z (..., d), or None.
        learned: train the step size.
    """

    monitored = True

    def __init__(
        self, energy: Energy, step_size: float, *, channels: int | None, learned: bool
    ) -> None:
        super().__init__()
        if not isinstance(energy, Energy):
            raise TypeError(f"energy must be an Energy, got {type(energy)}")
        self.energy = energy
        self.step_size = StepSize(step_size, channels, learned)


class GradientStep(EnergyStep):
    r"""``f(z, x) = z - eta dE/dz(z, x)``: fixed points are the stationary points of E.

    They do not depend on eta > 0, which only scales the residual ``|f(z) - z| / |f(z)|`` and the steps
    of solvers that control no step size. With one number the Jacobian ``I - eta H`` is symmetric; with
    one number per channel it is not.

    Args:
        energy: an :class:`Energy`.
        step_size: eta, > 0.
        channels: d for a step size per channel of z (..., d).
        learned: train the step size.

    Source: for learned step sizes Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646,
    equations 9 and 11.
    """

    def __init__(
        self,
        energy: Energy,
        step_size: float = 1.0,
        *,
        channels: int | None = None,
        learned: bool = False,
    ) -> None:
        super().__init__(energy, step_size, channels=channels, learned=learned)
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
    """``z - step * gradient`` in the dtype of ``z``; ``step`` a number, (), or (d,) for z (..., d)."""
    if isinstance(step, Tensor) and step.dim() and step.shape[0] != z.shape[-1]:
        raise ValueError(
            f"channels={step.shape[0]} does not fit a state with {z.shape[-1]} channels, got shape "
            f"{tuple(z.shape)}"
        )
    if not isinstance(step, Tensor):
        return torch.sub(z, gradient, alpha=step)
    return z - step.to(z.dtype) * gradient
