"""What a step must not take further: gradients and parameters that are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from implicit_attn.training.errors import NonFiniteLoss


def largest_entry(tensors: Iterable[Tensor]) -> float:
    """Largest absolute value in ``tensors``, NaN where any of them holds one, 0 where all are empty.

    Unlike a sum of squares it overflows nowhere, so it is finite exactly where every entry is.
    """
    return get_total_norm([t.detach() for t in tensors if t.numel() > 0], math.inf).item()


def clip_gradients(fabric: Any, forward: Any, stepper: Any, most: float | None) -> float:
    """Scale the gradients to a norm of ``most`` where theirs is larger; the norm before that.

    With ``most`` None they are left alone, and their largest absolute value is returned. Either is
    the number of all processes, whose gradients are equal by then, so that they agree on whether it
    is finite. To return it a program on a card waits for the backward pass: once more a step, after
    the wait for the loss.

    Args:
        fabric: of the training; of a precision that does not scale the loss (all of ``PRECISIONS``),
            or an infinite gradient would be a normal event.
        forward, stepper: model and optimiser as ``fabric`` wrapped them.
        most: largest norm, or None.
    """
    if most is None:
        return largest_entry(p.grad for p in forward.parameters() if p.grad is not None)
    norm = fabric.clip_gradients(forward, stepper, max_norm=most, error_if_nonfinite=False)
    return norm.item()


def check_parameters(model: nn.Module, steps: int, path: Path) -> None:
    """Refuse to save a model with a trained parameter that is not finite.

    Every process looks at its own copy, all of them equal, so that they leave together.

    Raises:
        NonFiniteLoss: there is one; the message names it.
    """
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    if math.isfinite(largest_entry(trained.values())):
        return
    wrong = next(name for name, value in trained.items() if not bool(value.isfinite().all()))
    raise NonFiniteLoss(
        f"the parameter {wrong} is not finite after {steps} steps; nothing was saved, and {path} "
        "is as it was before"
    )
