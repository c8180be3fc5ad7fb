"""Functions that draw random numbers have no fixed point of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from solvers.core.guards.reading import parts_of

RANDOM = (
    "f returns another value when it is evaluated at the same point again (dropout, RReLU, noise?), so "
    "it has no fixed point: call eval(), or draw the random numbers once, before the solve"
)


class Draws:
    """The states of torch's random generators at one moment."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.states = device, _random_state(device)

    def any(self) -> bool:
        """Whether random numbers have been drawn since."""
        now = _random_state(self.device)
        return any(not _same(a, b) for a, b in zip(self.states, now, strict=False))


class Evaluated(Protocol):
    """What is compared of an evaluation at z (B, D)."""

    @property
    def z(self) -> Tensor: ...

    @property
    def residual(self) -> Tensor: ...

    @property
    def energy(self) -> Tensor | None: ...


@torch.no_grad()
def refuse_random(
    evaluate: Callable[[Tensor], Evaluated], first: Evaluated, mask: Tensor | None
) -> None:
    """Raise ValueError where f or the energy gives two answers at one point: that of ``first``, or others.

    For functions that have drawn random numbers; it is harmless where a seed is set first, or the
    numbers are not used.
    """
    start = first.z.detach()
    if _differ(first, evaluate(start)):
        raise ValueError(RANDOM)
    for point in _probes(start, start + first.residual.detach()):
        if mask is not None:
            point = torch.where(mask, point, start)
        try:
            pair = evaluate(point), evaluate(point)
        except Exception:  # the point is ours: f need not be defined there
            continue
        if _differ(*pair):
            raise ValueError(RANDOM)


def _differ(first: Evaluated, second: Evaluated) -> bool:
    same = same_numbers(first.residual, second.residual)
    return not (same and same_numbers(first.energy, second.energy))


def _probes(z: Tensor, value: Tensor) -> list[Tensor]:
    """Two points (B, D) where a draw shows that ``z`` and ``value`` hide: a dropped 0 is still 0.

    No coordinate is 0, both signs occur at each, and neighbours differ in sign.
    """
    number = torch.arange(z.numel(), device=z.device).reshape(z.shape)
    size = 1 + torch.nan_to_num(z + value, posinf=1, neginf=1).abs()
    point = torch.where(number % 2 == 0, size, -size).to(z.dtype)
    return [point, -point]


def same_numbers(first: Tensor | None, second: Tensor | None) -> bool:
    """Whether all numbers are equal, NaN to NaN."""
    if first is None or second is None:
        return first is second
    return torch.equal(first.detach().nan_to_num(), second.detach().nan_to_num())


def refuse_drawing_modules(module: nn.Module, name: str) -> None:
    """Raise ValueError for modules in training mode that draw random numbers when they are called."""
    for place, part in parts_of(module):
        if part.training and _draws(part):
            path = place.removesuffix(".")
            raise ValueError(
                f"{name} holds {part} ({path!r}) in training mode, which changes the map at every "
                "evaluation; call eval() on it, or drop out the layer's input or output instead"
            )


def _draws(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, nn.MultiheadAttention):
        return module.dropout > 0
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0 and module.num_layers > 1
    if isinstance(module, nn.RReLU):
        return module.lower != module.upper
    return False


def _random_state(device: torch.device) -> list[Any]:
    """States of torch's own generators, known to the host."""
    states: list[Any] = [torch.default_generator.get_state()]
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        generator = torch.cuda.default_generators[device.index or 0]
        states += [generator.initial_seed(), generator.get_offset()]
    return states


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    return first == second
