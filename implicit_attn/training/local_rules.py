"""Training by local learning rules: the model itself says the gradient, and no graph is recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from solvers.core.checks import require_count, require_positive


class LocallyTrained(Protocol):
    """What :func:`fit_locally` needs of a model, such as a ``BareAttention``."""

    def parameters(self) -> Iterator[Any]:
        """What an optimiser moves."""
        ...

    def local_gradient(self, z: Tensor, rule: str, /) -> Tensor:
        """The gradient by the rule ``rule`` from samples (B, ...)."""
        ...

    def assign_gradient(self, gradient: Tensor, /) -> None:
        """Put it where an optimiser looks for it."""
        ...

    def cap_norms(self, maximum: float, /) -> None:
        """Scale down couplings whose norm is above ``maximum``."""
        ...


def fit_locally(
    model: LocallyTrained,
    samples: Tensor,
    *,
    rule: str = "exact",
    steps: int = 400,
    batch: int = 128,
    rate: float = 0.02,
    cap: float | None = None,
    generator: torch.Generator,
    watch: Callable[[int], object] | None = None,
) -> None:
    """Adam on the gradients of ``model.local_gradient(batch, rule)``.

    Args:
        model: changed in place.
        samples: (M, ...); each step draws a batch with replacement.
        rule: of the model.
        steps: >= 1.
        batch: >= 1.
        rate: learning rate of Adam, > 0.
        cap: the largest Frobenius norm of a coupling block, applied after every step; None: none.
        generator: of the batches, on the CPU.
        watch: called with the number of steps done, after each.

    Raises:
        TypeError, ValueError: an argument out of range; the rule "source" or "hebb" without ``cap``,
            since their losses are unbounded below; ``samples`` without a sample; a ``rate`` at which
            the couplings leave the range of numbers.
    """
    require_count("steps", steps)
    require_count("batch", batch)
    if cap is not None:
        require_positive("cap", cap)
    elif rule in ("source", "hebb"):
        raise ValueError(
            f"cap must be given with rule={rule!r}, whose loss has no minimum, got None"
        )
    if len(samples) == 0:
        raise ValueError("samples must hold at least one sample, got none")
    optimizer = torch.optim.Adam(model.parameters(), lr=require_positive("rate", rate))
    for step in range(1, steps + 1):
        chosen = torch.randint(len(samples), (batch,), generator=generator)
        gradient = model.local_gradient(samples[chosen.to(samples.device)], rule)
        if not bool(gradient.isfinite().all()):
            raise ValueError(f"rate is too large, got {rate}: step {step} has no finite gradient")
        model.assign_gradient(gradient)
        optimizer.step()
        if cap is not None:
            model.cap_norms(cap)
        if watch is not None:
            watch(step)
