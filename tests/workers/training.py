"""A small training run, in this process or as a script that is started by tests.

    python tests/workers/training.py FOLDER [--devices N] [--kill-at STEP] [--spoil RANK] [--resume]

Digits, a Hyper-SET with random numbers of iterations, augmentation; then, with several devices, an
equilibrium classifier. With --kill-at the process ends itself by SIGKILL before that step. With
--spoil the gradient of that process alone is NaN in a batch, and every process writes how it ended.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from implicit_attn.data import ImageData, RandomAffine, load
from implicit_attn.models import HyperSET, HyperSETEquilibrium, ImageClassifier
from implicit_attn.training import Classification, NonFiniteLoss, Recipe, Training, start_processes

# 50 + 50 + 1 images: parts of different lengths, and a batch with fewer samples than processes.
IMAGES, BATCH, EPOCHS = 101, 50, 4
SPOILT = 4  # steps before the batch with a gradient that is not finite


class Watched(Training):
    """A training that counts its steps, and may end its process as nothing in it could prevent."""

    steps = 0
    kill_at: int | None = None

    def step(self, batch: int, inputs: Tensor, targets: Tensor) -> tuple[float, int]:
        if self.steps == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        found = super().step(batch, inputs, targets)
        self.steps += 1
        return found


def digits() -> ImageData:
    return load("digits").first(IMAGES)


def unrolled(folder: Path, fabric: Any = None, kill_at: int | None = None) -> Watched:
    """The Hyper-SET classifier, not yet trained."""
    torch.manual_seed(3)
    # Differences by iteration: a batch with few iterations leaves those of the later ones alone.
    backbone = HyperSET(16, 2, 16, iterations=3, initial_step=0.2, time_dim=8, lora_rank=1)
    training = Watched(
        ImageClassifier(backbone, 8, 1, 10, patch=2, readout="tokens"),
        Classification(digits(), RandomAffine(shift=0.5)),
        Recipe(EPOCHS, BATCH, 1e-2, iterations=(1, 3), seed=5),
        folder / "checkpoint.safetensors",
        {"some": "settings"},
        fabric=fabric,
    )
    training.kill_at = kill_at
    return training


def equilibrium(folder: Path, fabric: Any = None) -> Training:
    """A classifier around a DEQ, two epochs, not yet trained."""
    torch.manual_seed(4)
    model = ImageClassifier(HyperSETEquilibrium(8, 2, 8), 8, 1, 10, patch=4)
    recipe = Recipe(2, BATCH, 1e-2)
    return Training(model, digits(), recipe, folder / "deq.safetensors", fabric=fabric)


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
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    fabric = start_processes(options.devices, "cpu", unused_parameters=True)
    if options.spoil is not None:
        spoilt(options.folder, fabric, options.spoil)
        return
    training = unrolled(options.folder, fabric, options.kill_at)
    if options.resume:
        training.resume()
    training.run()
    if options.devices > 1:
        equilibrium(options.folder, fabric).run()


if __name__ == "__main__":
    main()
