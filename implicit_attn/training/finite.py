"""Gradients and parameters that are not finite end a training before they are saved."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from implicit_attn.command_line import Ending


class NonFiniteLoss(Ending, ArithmeticError):
    """The loss, its gradient or a parameter is NaN or infinite.

    For a loss or a gradient, the state before that batch was saved. For a parameter nothing was:
    the checkpoint is the last one in which all were finite.
    """


def largest_entry(tensors: Iterable[Tensor]) -> float:
    """Largest absolute value in ``tensors``, NaN where any of them holds one, 0 where all are empty.

    Unlike a sum of squares it overflows nowhere, so it is finite exactly where every entry is.
    """
    return get_total_norm([t.detach() for t in tensors if t.numel() > 0], math.inf).item()


def clip_gradients(fabric: Any, forward: Any, stepper: Any, most: float | None) -> float:
    """Scale the gradients to a norm of ``most`` where theirs is larger; the norm before that.

    With ``most`` None they are not scaled, and their largest absolute value is returned. All
    processes have equal gradients by then, and so agree on whether it is finite. No precision in
    ``PRECISIONS`` scales the loss; where one does, an infinite gradient is a normal event.
    """
    if most is None:
        return largest_entry(p.grad for p in forward.parameters() if p.grad is not None)
    norm = fabric.clip_gradients(forward, stepper, max_norm=most, error_if_nonfinite=False)
    return norm.item()


def check_parameters(model: nn.Module, steps: int, path: Path) -> None:
    """Refuse to save a model with a trained parameter that is not finite.

    The processes' copies are equal, so that all of them raise.
    """
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    if math.isfinite(largest_entry(trained.values())):
        return
    wrong = next(name for name, value in trained.items() if not bool(value.isfinite().all()))
    raise NonFiniteLoss(
        f"the parameter {wrong} is not finite after {steps} steps; nothing was saved, and {path} "
        "is as it was before"
    )


def check_step(training: Any, name: str, value: float) -> None:
    """Save and raise before the optimiser's step, with the state before the batch."""
    if not math.isfinite(value):
        training.save()
        raise NonFiniteLoss(
            f"the {name} is {value} in epoch {training.epoch + 1}, batch {training.batch + 1}; the "
            f"state before that batch is in {training.path}"
        )
