"""The loss on the way to a fixed point: fixed-point correction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from implicit_attn.deq import DEQ
from solvers import Implicit, OneStep
from solvers.core.checks import (
    require_callable,
    require_choice,
    require_count,
    require_increasing,
    require_instance,
    require_nonnegative,
    require_number,
)

KINDS = ("exponential", "linear", "constant")
DEFAULT_GAMMA = {"exponential": 0.8, "linear": 0.9, "constant": 1.0}


def correction_weights(
    count: int, kind: str = "exponential", *, gamma: float | None = None
) -> list[float]:
    """Weights of ``count`` losses from the first state to the solution, whose weight is 1.

    With ``m = 0`` for the solution, ``m = 1`` for the state before it, and so on::

        "exponential"   gamma^m                 gamma 0.8 by default
        "linear"        1 - gamma m / count     gamma 0.9 by default
        "constant"      1

    ``count``: the number of losses, >= 1; ``gamma``: in [0, 1], None: the default; not for "constant".
    """
    require_count("count", count)
    require_choice("kind", kind, KINDS)
    if gamma is None:
        gamma = DEFAULT_GAMMA[kind]
    elif kind == "constant":
        raise ValueError(f'gamma belongs to "exponential" and "linear" weights, got {gamma!r}')
    gamma = require_number("gamma", gamma, low=0.0, high=1.0)
    before = range(count - 1, -1, -1)
    if kind == "linear":
        return [1 - gamma * m / count for m in before]
    return [gamma**m for m in before]


def states_at(
    layer: DEQ, x: Any, numbers: Sequence[int], mask: Tensor | None = None, *, z0: Any = None
) -> list[Any]:
    """What the layer's solve has after each of these numbers of evaluations, with gradients.

    The state after k evaluations is ``layer.solve(x, mask, max_steps=k).value``, which takes k evaluations
    more. Its gradient is that of the layer's adjoint, if that differentiates steps (``Unrolled``,
    ``Phantom``, ``OneStep``); else of one step from it, as the equation of the fixed point does not hold
    there. ``layer.last`` stays that of the solve before. Dropout draws masks of its own.

    ``numbers`` are increasing, ``layer.max_steps`` at most; ``x``, ``mask``, ``z0`` as for ``layer.solve``.
    """
    require_instance("layer", layer, DEQ, "a DEQ")
    limits = require_increasing("numbers", numbers, high=layer.max_steps, what="max_steps")
    options: dict[str, Any] = {"z0": z0, "on_failure": "ignore"}
    if layer.adjoint is None or isinstance(layer.adjoint, Implicit):
        options["adjoint"] = OneStep()
    before = layer.last, layer._seeds, layer.observer
    layer.observer = None
    try:
        return [layer.solve(x, mask, max_steps=limit, **options).value for limit in limits]
    finally:
        layer.last, layer._seeds, layer.observer = before


def fixed_point_correction(
    loss: Callable[[Any], Tensor], states: Sequence[Any], weights: Sequence[float] | None = None
) -> Tensor:
    """``sum_k w_k loss(z_k)`` over states on the way to the fixed point and the fixed point itself.

    It asks states that the solver passes for the answer too. So a short solve learns to be useful, and
    the solve as a whole to converge.

    Args:
        loss: of one state, a scalar, or any shape that is the same for all states.
        states: z_1, ..., z_n from the first to the solution, n >= 1: ``[*states_at(layer, x, numbers),
            layer(x)]``.
        weights: n finite numbers >= 0; None: ``correction_weights(n)``.

    Example:
        >>> import torch
        >>> from implicit_attn import DEQ
        >>> layer = DEQ.from_update(lambda z, x: 0.5 * torch.tanh(z) + x)
        >>> x = torch.ones(2, 3, 4)
        >>> every = [*states_at(layer, x, [2, 4]), layer(x)]
        >>> fixed_point_correction(lambda z: z.square().mean(), every).shape
        torch.Size([])

    Source: Bai, Geng, Savani, Kolter, "Deep Equilibrium Optical Flow Estimation" (2022), section 4.3,
    https://arxiv.org/abs/2204.08442.
    """
    require_callable("loss", loss)
    if isinstance(states, Tensor) or not isinstance(states, Sequence) or not states:
        raise TypeError(
            "states must be a sequence of at least one state, such as [*states_at(layer, x, [2, 4]), "
            f"layer(x)], got {type(states)}"
        )
    numbers = correction_weights(len(states)) if weights is None else list(weights)
    if len(numbers) != len(states):
        raise ValueError(f"weights must be {len(states)} numbers like states, got {len(numbers)}")
    terms = []
    for at, (weight, state) in enumerate(zip(numbers, states, strict=True)):
        term = loss(state)
        if not isinstance(term, Tensor) or (terms and term.shape != terms[0].shape):
            raise TypeError(f"loss must return a tensor of one shape for all states, got {term!r}")
        terms.append(require_nonnegative(f"weights[{at}]", weight) * term)
    return torch.stack(terms).sum(0)
