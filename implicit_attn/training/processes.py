"""Device, precision and processes, by Lightning Fabric."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from implicit_attn.optional import require

ACCELERATORS = ("auto", "cpu", "cuda")
PRECISIONS = ("32-true", "bf16-mixed")


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
        ValueError: an argument is not one of the above.
    """
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise ValueError(f"devices must be an integer >= 1, got {devices!r}")
    if accelerator not in ACCELERATORS:
        raise ValueError(f"accelerator must be one of {ACCELERATORS}, got {accelerator!r}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {PRECISIONS}, got {precision!r}")
    if accelerator == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    strategy = "auto"
    if devices > 1:
        strategy = "ddp_find_unused_parameters_true" if unused_parameters else "ddp"
    fabric = require("lightning_fabric", extra="training").Fabric(
        accelerator=accelerator, devices=devices, strategy=strategy, precision=precision
    )
    fabric.launch()
    return fabric


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
