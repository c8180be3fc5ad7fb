"""One run: a model is trained, measured, and becomes a line of the CSV file."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import solvers
from benchmarks.learns.model import TokenModel
from benchmarks.learns.registry import task_of
from benchmarks.learns.rows import DIM, ROWS, layers_of
from benchmarks.learns.runs import Run
from benchmarks.learns.task import Task
from implicit_attn.data import epoch_generator
from implicit_attn.optional import require
from implicit_attn.training.solves import SUMS, SolveCounts

BATCH, CLIP, DECAY = 64, 1.0, 0.01
MOST_TRAINED_SEEN = 10_000  # training samples of which the accuracy is measured
TIMED_SECONDS, MOST_TIMED = 2.0, 20
Split = tuple[Tensor, Tensor, Tensor, Tensor]  # inputs and labels to train on, then to judge by


def perform(run: Run) -> dict[str, Any]:
    """What a run gives, by the names of ``runs.RESULTS``; NaN where there is nothing to tell.

    In the part "validation" the last fifth of the training samples stands for the test set.
    """
    task = task_of(run.task, run.limit or None)
    split = (task.inputs, task.labels, task.test_inputs, task.test_labels)
    if run.part == "validation":
        kept = len(task.labels) - task.validation
        inputs, labels = task.inputs, task.labels
        split = (inputs[:kept], labels[:kept], inputs[kept:], labels[kept:])
    wall, cpu = time.perf_counter(), time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", solvers.SolveWarning)  # counted instead
        found = (
            regress(run, split) if ROWS[run.row].regression else Training(run, task, split).run()
        )
    spent = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    return spent | found


def regress(run: Run, split: Split) -> dict[str, Any]:
    """Multinomial logistic regression on the pixels in [0, 1]; the rate is scikit-learn's C."""
    inputs, labels, other, others = split
    pixels, unseen = (((each + 1) / 2).flatten(1).numpy() for each in (inputs, other))
    regression = require("sklearn.linear_model", extra="examples").LogisticRegression
    unfinished = require("sklearn.exceptions", extra="examples").ConvergenceWarning
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", unfinished)  # a thousand iterations are enough to compare
        model = regression(C=run.rate, max_iter=1000).fit(pixels, labels.numpy())
    chances = torch.from_numpy(model.predict_proba(unseen)).clamp_min(1e-12)
    loss = F.nll_loss(chances.log(), others).item()
    seen = pixels[:MOST_TRAINED_SEEN], labels[:MOST_TRAINED_SEEN].numpy()
    return {
        "parameters": model.coef_.size + model.intercept_.size,
        "train_accuracy": model.score(*seen),
        "accuracy": model.score(unseen, others.numpy()),
        "loss": loss,
        "status": "ok",
    }


class Training:
    """The training of one model: AdamW, one cycle of the rate, gradients clipped to norm 1."""

    def __init__(self, run: Run, task: Task, split: Split) -> None:
        self.settings, self.split = run, split
        torch.manual_seed(run.seed)
        layers = layers_of(run.row, run.layers or 1, task.tokens + (run.readout == "class"))
        self.model = TokenModel(task, layers, DIM, run.readout)
        self.batches = max(1, len(split[1]) // BATCH)  # an epoch; what is left over waits
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=run.rate, weight_decay=DECAY)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimiser, run.rate, total_steps=run.epochs * self.batches
        )
        self.counts, self.totals = SolveCounts(self.model), SolveCounts(self.model)
        self.worst: dict[str, float] = {}

    def run(self) -> dict[str, Any]:
        wall, cpu = time.perf_counter(), time.process_time()
        parameters = sum(each.numel() for each in self.model.layers.parameters())
        finite = all(self.epoch(number) for number in range(self.settings.epochs))
        found: dict[str, Any] = {
            "parameters": parameters,
            "seconds": time.perf_counter() - wall,
            "cpu_seconds": time.process_time() - cpu,
            "status": "ok" if finite else "not finite",
        }
        if not finite:  # a loss or a gradient: the weights are still those of the step before
            return found
        inputs, labels, other, others = self.split
        seen = slice(MOST_TRAINED_SEEN)
        found["train_accuracy"], _ = self.judge(inputs[seen], labels[seen])
        found["accuracy"], found["loss"] = self.judge(other, others)
        timed = self.settings.part == "test"  # the others are not shown
        return found | self.convergence() | (self.times() if timed else {})

    def epoch(self, number: int) -> bool:
        """False where a loss or gradient was not finite."""
        self.model.train()
        self.counts.reset()
        draw = epoch_generator(self.settings.seed, number)
        order = torch.randperm(len(self.split[1]), generator=draw)
        for index in order[: self.batches * BATCH].split(BATCH):
            if not self.step(self.split[0][index], self.split[1][index]):
                return False
            self.schedule.step()
            self.counts.add(lambda tensor, _: tensor)
        self._close_epoch()
        return True

    def step(self, inputs: Tensor, labels: Tensor) -> bool:
        loss = F.cross_entropy(self.model(inputs), labels)
        self.optimiser.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        if not math.isfinite(loss.item() + norm.item()):
            return False
        self.optimiser.step()
        return True

    @torch.no_grad()
    def judge(self, inputs: Tensor, labels: Tensor) -> tuple[float, float]:
        """Accuracy and mean loss."""
        self.model.eval()
        logits = torch.cat([self.model(part) for part in inputs.split(4 * BATCH)])
        right = (logits.argmax(1) == labels).double().mean().item()
        return right, F.cross_entropy(logits, labels).item()

    def convergence(self) -> dict[str, float]:
        """Of all training steps and of the worst epoch; nothing for layers that solve nothing."""
        if not self.totals.layers:
            return {}
        means = self.totals.means()
        kept = ("converged", "adjoint_converged", "evaluations", "adjoint_products")
        return {name: means[name] for name in kept} | self.worst

    def times(self) -> dict[str, float]:
        """Median milliseconds of a processor, for a batch as in training."""
        inputs, labels = self.split[0][:BATCH], self.split[1][:BATCH]

        @torch.no_grad()
        def evaluate() -> None:
            self.model(inputs)

        self.model.train()
        step = median_time(lambda: self.step(inputs, labels))
        self.model.eval()
        return {"step_ms": step, "evaluation_ms": median_time(evaluate)}

    def _close_epoch(self) -> None:
        """Add an epoch's solves to the total, and keep the smallest shares."""
        if not self.counts.layers:
            return
        for name in SUMS:
            self.totals.sums[name] += self.counts.sums[name]
        spent = zip(self.totals.spent, self.counts.spent, strict=True)
        self.totals.spent = [a + b for a, b in spent]
        means = self.counts.means()
        for name in ("converged", "adjoint_converged"):
            if not math.isnan(means[name]):  # NaN where nothing was solved
                worst = min(self.worst.get(f"{name}_worst", 1.0), means[name])
                self.worst[f"{name}_worst"] = worst


def median_time(work: Callable[[], object]) -> float:
    """Milliseconds of a processor: other programs on the machine add little to them."""
    work()
    found: list[float] = []
    begin = time.perf_counter()
    while len(found) < MOST_TIMED and (
        len(found) < 3 or time.perf_counter() - begin < TIMED_SECONDS
    ):
        start = time.process_time()
        work()
        found.append(1e3 * (time.process_time() - start))
    return statistics.median(found)
