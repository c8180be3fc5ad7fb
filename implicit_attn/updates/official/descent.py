"""How a direction becomes a step: as it is, with momentum, or scaled by its past squares."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from solvers.core.checks import require_choice

DESCENTS = ("plain", "momentum", "rmsprop", "rmsprop-momentum", "adam")


@dataclass(frozen=True)
class Descent:
    """The rule by which gradients g_1, g_2, ... of a solve become steps, entry by entry.

    ======================  =========================================================================
    ``"plain"``             ``g``
    ``"momentum"``          ``b``, where ``b <- momentum b + g``
    ``"rmsprop"``           ``g / (v^1/2 + epsilon)``, where ``v <- decay v + (1 - decay) g^2``
    ``"rmsprop-momentum"``  ``b``, where ``b <- momentum b + g / (v^1/2 + epsilon)``, v as above
    ``"adam"``              ``m' / (v'^1/2 + epsilon)`` of the means m of g and v of g^2 with the
                            decays ``first`` and ``second``, ``m' = m / (1 - first^t)`` likewise v'
    ======================  =========================================================================

    All but ``"plain"`` remember what came before, from zero at the beginning of a solve, so a step is
    no function of the state alone and has no fixed point to solve for.

    Args:
        kind: one of ``DESCENTS``.

    Source: the experimental options of the official code of Hu, Zou, Xu, "Hyper-SET"
    (https://arxiv.org/abs/2502.11646), with its numbers; Kingma and Ba, "Adam",
    https://arxiv.org/abs/1412.6980.
    """

    kind: str = "plain"
    momentum: float = 0.9
    decay: float = 0.8
    first: float = 0.9
    second: float = 0.96
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        require_choice("descent", self.kind, DESCENTS)

    def start(self) -> Moments:
        """Nothing remembered yet."""
        return Moments()

    def __call__(self, moments: Moments, gradient: Tensor) -> Tensor:
        """The step for ``gradient``, like it; ``moments`` are updated."""
        if self.kind == "plain":
            return gradient
        moments.steps += 1
        if self.kind == "momentum":
            return moments.add(gradient, self.momentum)
        if self.kind == "adam":
            mean = moments.average(gradient, self.first) / (1.0 - self.first**moments.steps)
            square = moments.average_square(gradient, self.second)
            return mean / self._root(square / (1.0 - self.second**moments.steps))
        scaled = gradient / self._root(moments.average_square(gradient, self.decay))
        return scaled if self.kind == "rmsprop" else moments.add(scaled, self.momentum)

    def _root(self, square: Tensor) -> Tensor:
        # The root of 0 has no derivative, and a masked token's gradient is 0.
        least = torch.finfo(square.dtype).tiny
        return square.clamp_min(least).sqrt() + self.epsilon


class Moments:
    """What a ``Descent`` remembers of the gradients of a solve, from zero."""

    def __init__(self) -> None:
        self.steps = 0
        self._first: Tensor | None = None
        self._second: Tensor | None = None

    def add(self, value: Tensor, decay: float) -> Tensor:
        """``b <- decay b + value``."""
        self._first = value if self._first is None else decay * self._first + value
        return self._first

    def average(self, value: Tensor, decay: float) -> Tensor:
        """``m <- decay m + (1 - decay) value``."""
        return self.add((1.0 - decay) * value, decay)

    def average_square(self, value: Tensor, decay: float) -> Tensor:
        """``v <- decay v + (1 - decay) value^2``."""
        new = (1.0 - decay) * value.square()
        self._second = new if self._second is None else decay * self._second + new
        return self._second
