"""Training by local learning rules: the model itself says the gradient, and no graph is recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from solvers.core.checks import require_count, require_instance, require_positive

LARGEST_RATE = 1e36  # Adam divides by 0.1 in its first step, in float32


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
            since their losses are unbounded below; ``samples`` without a sample, or with values
            that are not finite; a ``model`` without a finite gradient at the start; a ``rate`` at
            which the couplings or the gradient leave the range of numbers, also in the last step.
            The model is ruined then.
    """
    require_count("steps", steps)
    require_count("batch", batch)
    if cap is not None:
        require_positive("cap", cap)
    elif rule in ("source", "hebb"):
        raise ValueError(
            f"cap must be given with rule={rule!r}, whose loss has no minimum, got None"
        )
    _check_samples(samples)
    if require_positive("rate", rate) > LARGEST_RATE:  # Adam's own error does not name it
        raise ValueError(f"rate must be at most {LARGEST_RATE:g}, got {rate}")
    require_instance("generator", generator, torch.Generator, "a torch.Generator")
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    part = samples[:0]
    for step in range(1, steps + 1):
        chosen = torch.randint(len(samples), (batch,), generator=generator)
        part = samples[chosen.to(samples.device)]
        gradient = model.local_gradient(part, rule)
        if not bool(gradient.isfinite().all()):
            raise _no_gradient(step - 1, rate)
        model.assign_gradient(gradient)
        optimizer.step()
        if cap is not None:
            model.cap_norms(cap)
        if watch is not None:
            watch(step)
    finite = [parameter.isfinite().all() for parameter in model.parameters()]
    finite.append(model.local_gradient(part, rule).isfinite().all())
    if not bool(torch.stack(finite).all()):
        raise _no_gradient(steps, rate)


def _check_samples(samples: object) -> None:
    if not isinstance(samples, Tensor) or not samples.is_floating_point():
        came = samples.dtype if isinstance(samples, Tensor) else type(samples).__name__
        raise TypeError(f"samples must be a floating tensor (M, ...), got {came}")
    if samples.dim() == 0 or len(samples) == 0:
        raise ValueError("samples must hold at least one sample, got none")
    wrong = samples.isfinite().logical_not().sum().item()
    if wrong:
        raise ValueError(f"samples must be finite, got {wrong} values that are not")


def _no_gradient(done: int, rate: float) -> ValueError:
    """After ``done`` steps; before the first one the rate is not to blame."""
    if done == 0:
        return ValueError("model must have a finite gradient at the samples, got none at the start")
    return ValueError(f"rate is too large, got {rate}: no finite gradient after step {done}")
