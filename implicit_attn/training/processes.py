"""Where a training runs: device, precision, processes and their random numbers, compilation."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from implicit_attn.data.images import hash_seed
from implicit_attn.optional import require
from solvers.core.checks import require_choice, require_count

ACCELERATORS = ("auto", "cpu", "cuda")
PRECISIONS = ("32-true", "bf16-mixed")


@contextmanager
def first_interrupt(call: Callable[[], object]) -> Iterator[None]:
    """``call()`` at the first Ctrl-C within; the second is a ``KeyboardInterrupt`` as ever.

    Python hands signals to the main thread alone: in another one Ctrl-C stops nothing here.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        call()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def start_processes(
    devices: int = 1,
    accelerator: str = "auto",
    precision: str = "32-true",
    *,
    unused_parameters: bool = False,
) -> Any:
    """A launched ``lightning_fabric.Fabric``.

    With several devices the running script is started again once for each further one; the
    processes meet here and keep their gradients equal (gloo on CPUs, NCCL on CUDA cards).

    Args:
        devices: processes, one per card or, on the CPU, sharing it.
        accelerator: "cpu", "cuda", or "auto": CUDA where there is a card.
        precision: "32-true", or "bf16-mixed" for autocast to bfloat16.
        unused_parameters: some batches leave some parameters without a gradient.

    Raises:
        ImportError: lightning-fabric is not installed (extra ``training``).
        ValueError: there is no CUDA card, or fewer than ``devices``.
    """
    require_count("devices", devices)
    require_choice("precision", precision, PRECISIONS)
    if require_choice("accelerator", accelerator, ACCELERATORS) == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    if accelerator == "cuda":
        _check_cards(devices)
    strategy = "auto"
    if devices > 1:
        strategy = "ddp_find_unused_parameters_true" if unused_parameters else "ddp"
    fabric = require("lightning_fabric", extra="training").Fabric(
        accelerator=accelerator, devices=devices, strategy=strategy, precision=precision
    )
    fabric.launch()
    return fabric


def _check_cards(devices: int) -> None:
    """Before Fabric does, by the name of the argument."""
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if cards == 0:
        raise ValueError("accelerator must be 'cpu' or 'auto' without a CUDA card, got 'cuda'")
    if devices > cards:
        raise ValueError(f"devices must be <= {cards}, the CUDA cards here, got {devices}")


def share(length: int, rank: int, world: int) -> tuple[slice, bool]:
    """Which samples of a batch a process takes, and whether they are its own.

    Consecutive parts whose lengths differ by one at most. Where there are fewer samples than
    processes, those left over take the first one, and must not count it.
    """
    low, high = rank * length // world, (rank + 1) * length // world
    return (slice(low, high), True) if high > low else (slice(0, 1), False)


def reduce_over(fabric: Any, values: Tensor, how: str) -> Tensor:
    """``values`` summed ("sum") or the largest ("max") over the processes, on the CPU."""
    if fabric.world_size == 1:
        return values.cpu()
    # Cards may not reduce float64 without a loss of speed; these vectors are a few numbers long.
    return fabric.all_reduce(values.to(fabric.device), reduce_op=how).cpu()


def mean_measures(fabric: Any, measures: dict[str, tuple[float, float]]) -> dict[str, float]:
    """The means of measures, pairs of a sum and a number, over all processes."""
    pairs = torch.tensor(list(measures.values()), dtype=torch.float64)
    sums = reduce_over(fabric, pairs, "sum").tolist()
    return {name: top / below for name, (top, below) in zip(measures, sums, strict=True)}


def step_seed(seed: int, epoch: int, batch: int, rank: int) -> int:
    """The seed, below 2^64, of what a model draws by itself in a training step (dropout)."""
    return hash_seed((2,), seed=seed, epoch=epoch, batch=batch, rank=rank)


def seed_generators(seed: int, epoch: int, batch: int, rank: int, device: torch.device) -> None:
    """Seed torch's global generators of the CPU and of ``device`` with :func:`step_seed`."""
    number = step_seed(seed, epoch, batch, rank)
    # torch.manual_seed also seeds devices that are not in use, several hundred times as slowly.
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(number)


def compile_step(model: nn.Module, backend: Any = "inductor") -> nn.Module:
    """The model with what it repeats compiled once, or compiled whole where nothing is repeated.

    A layer with ``context`` and ``advance`` (of ``implicit_attn.models.RecurrentBackbone``) has its
    ``advance`` replaced by a compiled one, so that any number of iterations shares one graph.

    Returns:
        ``model`` itself, changed, or a compiled wrapper around it.
    """
    repeated: list[Any] = [
        module
        for module in model.modules()
        if callable(getattr(module, "advance", None)) and callable(getattr(module, "context", None))
    ]
    for layer in repeated:
        layer.advance = torch.compile(layer.advance, backend=backend)
    return model if repeated else torch.compile(model, backend=backend)  # type: ignore[return-value]
