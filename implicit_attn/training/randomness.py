"""Random numbers that a model draws by itself in training: the masks of dropout."""

from __future__ import annotations

import numpy as np
import torch


def step_seed(seed: int, epoch: int, batch: int, rank: int) -> int:
    """A seed below 2^64, hashed from its arguments by numpy's ``SeedSequence``.

    Raises:
        ValueError: an argument is negative.
    """
    numbers = {"seed": seed, "epoch": epoch, "batch": batch, "rank": rank}
    for name, value in numbers.items():
        if value < 0:
            raise ValueError(f"{name} must be >= 0, got {value!r}")
    # The streams of epoch_generator have the keys () and (1,): no rank may share one of theirs.
    sequence = np.random.SeedSequence([*numbers.values()], spawn_key=(2,))
    return int(sequence.generate_state(1, np.uint64)[0])


def seed_step(seed: int, epoch: int, batch: int, rank: int, device: torch.device) -> None:
    """Seed torch's global generators of the CPU and of ``device`` with :func:`step_seed`.

    What a model draws in a training step then depends on these numbers alone, not on what was drawn
    before, and differs between the processes, each of which has other samples of the batch.
    """
    number = step_seed(seed, epoch, batch, rank)
    # torch.manual_seed also seeds devices that are not in use, several hundred times as slowly.
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(number)
