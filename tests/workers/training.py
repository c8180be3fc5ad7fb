"""A small training run, in this process or as a script that is started by tests.

    python tests/workers/training.py FOLDER [--devices N] [--kill-at STEP] [--spoil RANK]

Digits, a Hyper-SET with random numbers of iterations, augmentation; then, with several devices, an
equilibrium classifier. With --kill-at the process ends itself by SIGKILL after that step. With
--spoil the gradient of that process alone is NaN in a batch, and every process writes how it ended.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch

from implicit_attn.data import ImageData, RandomAffine, load
from implicit_attn.models import HyperSET, ImageClassifier, PatchClassifier
from implicit_attn.training import CsvLog, NonFiniteLoss, Recipe, Training, start_processes

# 50 + 50 + 1 images: parts of different lengths, and a batch with fewer samples than processes.
IMAGES, BATCH, EPOCHS = 101, 50, 7
STEPS = 3 * EPOCHS
SAVE_EVERY = 4
SPOILT = 5  # steps before the batch with a gradient that is not finite


class KillAt:
    """A log that ends the process, as nothing in it could prevent, after a step."""

    def __init__(self, at: int) -> None:
        self.at = at

    def start(self, step: int, epochs: int) -> None:
        """Nothing to do."""

    def step(self, step: int, values: dict[str, Any]) -> None:
        if step == self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def epoch(self, step: int, values: dict[str, Any]) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


def digits() -> ImageData:
    return load("digits").first(IMAGES)


def unrolled(folder: Path, fabric: Any = None, kill_at: int | None = None) -> Training:
    """The Hyper-SET classifier, not yet trained."""
    torch.manual_seed(3)
    # Differences by iteration: a batch with few iterations leaves those of the later ones alone.
    backbone = HyperSET(16, 2, 16, iterations=3, initial_step=0.2, time_dim=8, lora_rank=1)
    logs: list[Any] = [CsvLog(folder, every=1)]
    return Training(
        ImageClassifier(backbone, 8, 1, 10, patch=2, readout="tokens"),
        digits(),
        Recipe(EPOCHS, BATCH, 1e-2, iterations=(1, 3), seed=5),
        folder / "checkpoint.safetensors",
        {"some": "settings"},
        augment=RandomAffine(shift=0.5),
        fabric=fabric,
        save_every=SAVE_EVERY,
        logs=logs if kill_at is None else [*logs, KillAt(kill_at)],
    )


def equilibrium(folder: Path, fabric: Any = None) -> Training:
    """A classifier around a DEQ, two epochs, not yet trained."""
    torch.manual_seed(4)
    model = PatchClassifier(8, 1, 10, patch=4, stem="patch", dim=8, heads=2, memories=8)
    recipe = Recipe(2, BATCH, 1e-2)
    return Training(
        model,
        digits(),
        recipe,
        folder / "deq.safetensors",
        fabric=fabric,
        logs=[CsvLog(folder / "deq", 1)],
    )


def spoilt(folder: Path, fabric: Any, rank: int) -> None:
    """A run in which one process has a NaN in its own gradient, once; how each process ended."""
    training = unrolled(folder, fabric)
    if fabric.global_rank == rank:
        parameter = next(training.model.parameters())
        parameter.register_hook(lambda g: g * float("nan") if training.steps == SPOILT else g)
    try:
        training.run()
    except NonFiniteLoss as error:
        (folder / f"end-{fabric.global_rank}.txt").write_text(str(error))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--spoil", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    fabric = start_processes(options.devices, "cpu", unused_parameters=True)
    if options.spoil is not None:
        spoilt(options.folder, fabric, options.spoil)
        return
    unrolled(options.folder, fabric, options.kill_at).run()
    if options.devices > 1:
        equilibrium(options.folder, fabric).run()


if __name__ == "__main__":
    main()
