"""How a model is trained: optimiser, learning rate, clipping, number of iterations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from solvers.core.checks import require_choice, require_count, require_nonnegative

OPTIMIZERS = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}
DECAYS = ("cosine", "linear")
DECAYED = ("all", "matrices")


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of a training: Adam or AdamW, linear warm-up, cosine or linear decay, clipping.

    Attributes:
        epochs: passes over the training samples.
        batch: samples of a batch, over all processes.
        rate: peak learning rate.
        warmup: share of the training in which the learning rate rises from 0.
        floor: final learning rate as a share of the peak; 1 keeps it constant.
        weight_decay: decoupled with "adamw", added to the gradient with "adam".
        clip: largest norm of the gradient of all parameters; None: not clipped.
        seed: of the order of the samples, of the augmentation, of random iterations and of dropout.
        optimizer: "adamw" or "adam".
        betas: decay rates of the optimiser's two moving averages.
        iterations: of a recurrent model: a number, a pair (least, most) from which each batch draws
            one, or None for a model that is not asked for any.
        decay: how the learning rate falls to the floor: "cosine" over the whole training, times the
            warm-up; "linear" from the end of the warm-up on.
        decayed: what the weight decay acts on: "all" parameters, or "matrices", those of two
            dimensions or more, which leaves out biases, norms and single numbers.

    Raises:
        TypeError: a number of epochs, samples or iterations is no integer.
        ValueError: a value is out of range; the message names it.
    """

    epochs: int
    batch: int
    rate: float
    warmup: float = 0.05
    floor: float = 0.01
    weight_decay: float = 1e-2
    clip: float | None = 1.0
    seed: int = 0
    optimizer: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    iterations: int | tuple[int, int] | None = None
    decay: str = "cosine"
    decayed: str = "all"

    def __post_init__(self) -> None:
        require_count("epochs", self.epochs)
        require_count("batch", self.batch)
        require_nonnegative("rate", self.rate)
        require_nonnegative("weight_decay", self.weight_decay)
        for name, value in (("warmup", self.warmup), ("floor", self.floor)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must lie in [0, 1], got {value!r}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be > 0 or None, got {self.clip!r}")
        require_choice("optimizer", self.optimizer, OPTIMIZERS)
        require_choice("decay", self.decay, DECAYS)
        require_choice("decayed", self.decayed, DECAYED)
        if isinstance(self.iterations, tuple):
            least, most = self.iterations
            require_count("iterations[0]", least)
            require_count("iterations[1]", most)
            if least > most:
                raise ValueError(f"iterations must be (least, most), got {self.iterations!r}")
        elif self.iterations is not None:
            require_count("iterations", self.iterations)

    def rate_at(self, progress: float) -> float:
        """Learning rate where ``progress`` in [0, 1) of the training is done."""
        rise = min(1.0, progress / self.warmup) if self.warmup > 0 else 1.0
        if self.decay == "linear":
            left = min(1.0, (1 - progress) / (1 - self.warmup)) if self.warmup < 1 else 1.0
        else:
            left = 0.5 * (1 + math.cos(math.pi * progress))
        return self.rate * rise * (self.floor + (1 - self.floor) * left)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimiser of all parameters of ``model``."""
        options = {"lr": self.rate, "betas": self.betas, "weight_decay": self.weight_decay}
        if self.decayed == "all":
            return OPTIMIZERS[self.optimizer](model.parameters(), **options)
        parameters = list(model.parameters())
        groups: list[dict[str, Any]] = [
            {"params": [p for p in parameters if p.dim() > 1]},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        return OPTIMIZERS[self.optimizer](groups, **options)

    def draw_iterations(self, generator: torch.Generator) -> int | None:
        """Iterations of one batch; draws from ``generator`` only where they are random."""
        if not isinstance(self.iterations, tuple):
            return self.iterations
        least, most = self.iterations
        return int(torch.randint(least, most + 1, (), generator=generator))
