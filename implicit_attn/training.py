"""Training of an image classifier around a :class:`DEQ`: counted, interruptible, resumable exactly."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.checkpoint import load_checkpoint, read_progress, save_checkpoint
from implicit_attn.data import ImageData, batches, epoch_generator
from implicit_attn.deq import DEQ
from implicit_attn.optional import require

Augment = Callable[[Tensor, torch.Generator], Tensor]
MAXIMA = ("adjoint_residual", "most_evaluations")  # of an epoch; everything else is a mean


class EquilibriumClassifier(Protocol):
    """A module images (B, C, H, W) -> logits (B, classes) whose ``layer`` is a :class:`DEQ`."""

    layer: DEQ

    def __call__(self, images: Tensor) -> Tensor: ...


class Interrupted(Exception):
    """Ctrl-C: the batch was finished and everything saved."""


class SettingsDiffer(ValueError):
    """A checkpoint was made by a run with other settings."""


class NonFiniteLoss(ArithmeticError):
    """The loss is NaN or infinite; the state before that batch was saved."""


@dataclass(frozen=True)
class Recipe:
    """How a classifier is trained: AdamW, linear warm-up, cosine decay, clipped gradients.

    Attributes:
        epochs, batch: passes over the training images, images at once.
        rate: peak learning rate.
        warmup: share of the training in which the rate rises from 0.
        floor: share of the peak rate that is left in the end.
        weight_decay: decoupled.
        clip: largest norm of the gradient of all parameters.
        seed: of the order of the images and of the augmentation.
    """

    epochs: int
    batch: int
    rate: float
    warmup: float = 0.05
    floor: float = 0.01
    weight_decay: float = 1e-2
    clip: float = 1.0
    seed: int = 0

    def rate_at(self, progress: float) -> float:
        """Learning rate where ``progress`` in [0, 1) of the training is done."""
        rise = min(1.0, progress / self.warmup) if self.warmup > 0 else 1.0
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.rate * rise * (self.floor + (1 - self.floor) * cosine)


class Training:
    """State of a training run, all of which the checkpoint holds.

    A run that is interrupted anywhere and resumed ends with the same bits on the CPU as one that
    was not: the order of the images and their augmentation depend on (seed, epoch, batch) alone.

    Args:
        model: an :class:`EquilibriumClassifier`.
        data: training and test images.
        recipe: how to train.
        path: of the checkpoint.
        settings: what else made the run what it is (JSON); a resumed run must agree with them.
        augment: ``augment(images, generator) -> images`` applied to training batches, or None.
        observe: called with the model before training and after every epoch; what it returns
            (JSON) is kept in ``observations``.

    Attributes:
        history: a row an epoch: loss, share of converged samples forward and adjoint, evaluations
            (median), adjoint products, the worst adjoint residual, seconds, test accuracy.
        observations: what ``observe`` returned: before training, and an entry an epoch.
    """

    def __init__(
        self,
        model: nn.Module,
        data: ImageData,
        recipe: Recipe,
        path: str | Path,
        settings: dict[str, Any] | None = None,
        *,
        augment: Augment | None = None,
        observe: Callable[[Any], Any] | None = None,
    ) -> None:
        if not isinstance(getattr(model, "layer", None), DEQ):
            raise TypeError(f"model must have a DEQ for its attribute layer, got {type(model)}")
        self.model, self.data, self.recipe, self.path = model, data, recipe, Path(path)
        self.settings = settings or {}
        self.augment, self.observe = augment, observe
        self.layer: DEQ = model.layer  # type: ignore[assignment]
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=recipe.rate, weight_decay=recipe.weight_decay
        )
        self.history: list[dict[str, Any]] = []
        self.observations: list[Any] = [] if observe is None else [observe(model)]
        self.stopping = False
        self._start_epoch(0)

    def _start_epoch(self, epoch: int) -> None:
        self.epoch, self.batch = epoch, 0
        self.sums: dict[str, float] = {}
        self.spent = [0] * (self.layer.max_steps + 1)  # samples of the epoch by their evaluations
        self.seconds = 0.0  # of training in this epoch

    KEPT = ("epoch", "batch", "sums", "spent", "seconds", "history", "observations", "settings")

    def save(self) -> None:
        """Write the checkpoint."""
        progress = {name: getattr(self, name) for name in self.KEPT}
        save_checkpoint(self.path, self.model, self.optimizer, progress)

    def resume(self) -> None:
        """Go back to what the checkpoint holds.

        Raises:
            FileNotFoundError: there is none.
            SettingsDiffer: it was made with other settings.
        """
        if not self.path.is_file():
            raise FileNotFoundError(f"nothing to resume: there is no {self.path}")
        progress = read_progress(self.path)
        if progress["settings"] != self.settings:
            raise SettingsDiffer(
                f"{self.path} was made with other settings: {progress['settings']}; "
                "give the same options, or another folder"
            )
        load_checkpoint(self.path, self.model, self.optimizer)
        for name in self.KEPT:
            setattr(self, name, progress[name])

    def run(self) -> None:
        """Train to the end of the last epoch, saving after each.

        Ctrl-C finishes the batch, saves and raises :class:`Interrupted`; a second one raises
        ``KeyboardInterrupt`` at once.
        """
        handler = signal.signal(signal.SIGINT, lambda *_: self._stop())
        try:
            while self.epoch < self.recipe.epochs:
                self._run_epoch()
                self._start_epoch(self.epoch + 1)
                self.save()
        finally:
            signal.signal(signal.SIGINT, handler)

    def _stop(self) -> None:
        self.stopping = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def _run_epoch(self) -> None:
        tqdm = require("tqdm", extra="examples").tqdm
        recipe, data = self.recipe, self.data
        order = epoch_generator(recipe.seed, self.epoch)
        total = -(-len(data.train_images) // recipe.batch)
        parts = batches(data.train_images, data.train_labels, recipe.batch, order)
        title = f"epoch {self.epoch + 1}/{recipe.epochs}"
        bar = tqdm(parts, desc=title, total=total, unit="batch", leave=False)
        start = time.perf_counter() - self.seconds
        for index, (images, labels) in enumerate(bar):
            if index < self.batch:  # done before an interruption
                continue
            self.step(images, labels, (self.epoch + index / total) / recipe.epochs)
            self.batch = index + 1
            self.seconds = time.perf_counter() - start
            bar.set_postfix_str(self.status())
            if self.stopping:
                bar.close()
                self.save()
                raise Interrupted(f"interrupted; {self.path} holds everything")
        self._end_epoch(tqdm.write)

    def _end_epoch(self, write: Callable[[str], object]) -> None:
        row = {"epoch": self.epoch + 1, **self.means(), "seconds": self.seconds}
        row["test_accuracy"] = accuracy(self.model, self.data.test_images, self.data.test_labels)
        self.history.append(row)
        if self.observe is not None:
            self.observations.append(self.observe(self.model))
        write(
            f"epoch {row['epoch']:3d}  {self.status()}  test {100 * row['test_accuracy']:.2f} %  "
            f"{row['seconds']:.1f} s"
        )

    def step(self, images: Tensor, labels: Tensor, progress: float) -> None:
        """One optimiser step; ``progress`` in [0, 1) sets the learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate_at(progress)
        if self.augment is not None:
            generator = epoch_generator(self.recipe.seed, self.epoch, self.batch)
            images = self.augment(images, generator)
        self.model.train()
        loss = F.cross_entropy(self.model(images), labels)
        if not math.isfinite(loss.item()):
            self.save()
            raise NonFiniteLoss(
                f"the loss is {loss.item()} in epoch {self.epoch + 1}, batch {self.batch + 1}; the "
                f"state before that batch is in {self.path}"
            )
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()
        self._count(loss.item(), len(images))

    def _count(self, loss: float, number: int) -> None:
        solve = self.layer.last
        assert solve is not None and solve.adjoint.solution is not None  # a step was just made
        adjoint = solve.adjoint.solution
        for name, value in {
            "samples": number,
            "loss": loss * number,
            "converged": int(solve.converged.sum()),
            "adjoint_converged": int(adjoint.converged.sum()),
            "adjoint_products": int(adjoint.evaluations.sum()),
        }.items():
            self.sums[name] = self.sums.get(name, 0) + value
        for evaluations in solve.evaluations.tolist():
            self.spent[evaluations] += 1
        worst = {
            "adjoint_residual": adjoint.residual.max().item(),
            "most_evaluations": int(solve.evaluations.max()),
        }
        for name, value in worst.items():
            self.sums[name] = max(self.sums.get(name, 0), value)

    def means(self) -> dict[str, Any]:
        """The epoch so far, per sample."""
        number = max(self.sums.get("samples", 0), 1)
        others = (*MAXIMA, "samples")
        mean: dict[str, Any] = {n: v / number for n, v in self.sums.items() if n not in others}
        mean["evaluations"] = median_of_counts(self.spent)
        return mean | {name: self.sums.get(name, 0.0) for name in MAXIMA}

    def status(self) -> str:
        """One line about the epoch so far."""
        row = self.means()
        return (
            f"loss {row['loss']:.4f}  converged {100 * row['converged']:.1f} %  "
            f"evaluations {row['evaluations']}  adjoint {row['adjoint_residual']:.0e}"
        )

    def summary(self) -> str:
        """Time, convergence and evaluations of the whole training, for the end of a log."""
        seconds = sum(row["seconds"] for row in self.history)
        share = 100 * min(row["converged"] for row in self.history)
        spent = max(row["evaluations"] for row in self.history)
        return (
            f"training {seconds:.0f} s; worst epoch: {share:.2f} % of training samples converged, "
            f"median evaluations per sample {spent:g}"
        )


def median_of_counts(counts: list[int]) -> int:
    """Median of numbers given as how often each occurs."""
    half, seen = sum(counts) / 2, 0
    for number, count in enumerate(counts):
        seen += count
        if seen >= half:
            return number
    return 0


def accuracy(model: nn.Module, images: Tensor, labels: Tensor, size: int = 256) -> float:
    """Share of ``images`` (N, C, H, W) that ``model`` gives its label (N,), in evaluation mode."""
    model.eval()
    right = 0
    with torch.no_grad():
        for part, answers in batches(images, labels, size):
            right += int((model(part).argmax(1) == answers).sum())
    return right / len(images)
