"""The training loop: interruptible, resumable bit by bit, in one or several processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from implicit_attn.checkpoint import load_checkpoint, save_checkpoint
from implicit_attn.checkpoint.files import RunLock
from implicit_attn.command_line import Stopped
from implicit_attn.data import ImageData, epoch_generator
from implicit_attn.optional import require
from implicit_attn.training.claims import check_place, in_first, locked
from implicit_attn.training.finite import check_parameters, check_step, clip_gradients
from implicit_attn.training.logs import Log, check_logs, write_evaluation
from implicit_attn.training.processes import (
    compile_step,
    first_interrupt,
    mean_measures,
    reduce_over,
    seed_generators,
    share,
    start_processes,
)
from implicit_attn.training.progress import check_progress
from implicit_attn.training.recipe import Recipe
from implicit_attn.training.solves import SolveCounts, status_of, summary_of
from implicit_attn.training.tasks import Augment, Classification, Task, describe
from solvers.core.checks import require_count


class Interrupted(Stopped):
    """Ctrl-C: the batch was finished and everything saved."""


class Training:
    """A training run and its state, all of which the checkpoint holds.

    On the CPU, a run that is interrupted or killed anywhere and resumed ends bit-equal to one that
    was not. The order of the samples, their augmentation and random numbers of iterations depend on
    (seed, epoch, batch) alone; what the model draws from torch's global generators (dropout) depends
    on these and the process. Several processes split every batch among them. The loss and its
    gradient are those of the whole batch; they differ from those of one process by rounding and by
    the masks of dropout, which every process draws for its own samples.

    Args:
        model: inputs (B, ...) -> outputs; called with ``iterations=`` where the recipe names them.
        task: samples, loss and measures; :class:`ImageData` stands for :class:`Classification`.
        recipe: hyperparameters.
        path: of the checkpoint.
        settings: further settings of the run (JSON); a resumed run must have equal ones.
        augment: ``augment(images, generator) -> images`` applied to training batches, or None;
            for image data only, another task augments by itself.
        observe: called with the model before training and after every epoch; what it returns
            (JSON) is kept in ``observations``.
        fabric: from :func:`start_processes`; None: one process on the CPU.
        save_every: a checkpoint every so many steps, besides that after each epoch.
        evaluate_every: measures on the test samples every so many steps, kept in ``evaluations``.
        logs: where the numbers of steps and epochs are written.
        compile: compile the model's repeated layers, or the whole model (:func:`compile_step`).

    Attributes:
        history: a row an epoch: loss, seconds, the task's measures on the test samples, and for
            models with :class:`DEQ` layers how these were solved: share of converged samples
            forward and adjoint, evaluations (median), adjoint products, worst adjoint residual.
        evaluations: a row every ``evaluate_every`` steps: the step, the task's measures.
        observations: what ``observe`` returned: before training, and an entry an epoch.

    Raises:
        TypeError: ``augment`` is given with a task, or a number of steps is no integer.
        ValueError: ``save_every`` or ``evaluate_every`` is below 1.
    """

    def __init__(
        self,
        model: nn.Module,
        task: ImageData | Task,
        recipe: Recipe,
        path: str | Path,
        settings: dict[str, Any] | None = None,
        *,
        augment: Augment | None = None,
        observe: Callable[[Any], Any] | None = None,
        fabric: Any = None,
        save_every: int | None = None,
        evaluate_every: int | None = None,
        logs: Sequence[Log] = (),
        compile: bool = False,
    ) -> None:
        if isinstance(task, ImageData):
            task = Classification(task, augment)
        elif augment is not None:
            raise TypeError(f"augment goes with image data; {type(task).__name__} has its own")
        for name, every in (("save_every", save_every), ("evaluate_every", evaluate_every)):
            if every is not None:
                require_count(name, every)
        self.fabric = start_processes(accelerator="cpu") if fabric is None else fabric
        self._reduce = partial(reduce_over, self.fabric)
        self.model: Any = model
        self.recipe, self.path = recipe, Path(path)
        self.optimizer = recipe.build_optimizer(model)
        forward = compile_step(model) if compile else model
        self.forward, self.stepper = self.fabric.setup(forward, self.optimizer)
        self.task: Task = task.to(self.fabric.device)
        self.settings, self.save_every = settings or {}, save_every
        self.logs = check_logs(logs, evaluate_every)
        self.evaluate_every, self.observe = evaluate_every, observe
        self.solves = SolveCounts(model)
        self.batches = -(-len(self.task.inputs) // recipe.batch)  # of an epoch
        self.history: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self.observations: list[Any] = [] if observe is None else [observe(model)]
        self.stopping = False
        self.owner = False  # whether the checkpoint at ``path`` is of this run
        self._start_epoch(0)

    @property
    def data(self) -> Any:
        """The data of the task."""
        return getattr(self.task, "data", None)

    @property
    def steps(self) -> int:
        """Optimiser steps so far."""
        return self.epoch * self.batches + self.batch

    def _start_epoch(self, epoch: int) -> None:
        self.epoch, self.batch = epoch, 0  # complete epochs, and batches of the next one
        self.sums: dict[str, float] = {"loss": 0.0, "terms": 0}
        self.seconds = 0.0  # of training in this epoch
        self.solves.reset()

    KEPT = (
        "epoch", "batch", "sums", "seconds", "history", "observations", "settings", "evaluations"
    )  # fmt: skip

    def save(self) -> None:
        """Write the checkpoint, from the first process; the others wait for it.

        Raises:
            NonFiniteLoss: a parameter is not finite; nothing is written.
        """
        check_parameters(self.model, self.steps, self.path)
        if self.fabric.global_rank == 0:
            progress = {name: getattr(self, name) for name in self.KEPT}
            progress["solves"] = self._kept_solves()
            save_checkpoint(self.path, self.model, self.optimizer, progress)
        self.fabric.barrier()

    def _kept_solves(self) -> dict[str, Any]:
        return {"sums": self.solves.sums, "spent": self.solves.spent}

    def resume(self) -> None:
        """Load the checkpoint: :meth:`run` then goes on at the batch before which it was saved.

        After an error, model, optimizer and random state are as they were.

        Raises:
            FileNotFoundError: there is none.
            SettingsDiffer: it was made with other settings.
            ValueError: it is damaged, or no checkpoint of such a training.
        """
        if not self.path.is_file():
            raise FileNotFoundError(f"nothing to resume: there is no {self.path}")
        progress = load_checkpoint(self.path, self.model, self.optimizer, check=self._check)
        progress.setdefault("evaluations", [])  # of a checkpoint from before there were any
        for name in self.KEPT:
            setattr(self, name, progress[name])
        solves = progress["solves"]
        self.solves.sums, self.solves.spent = solves["sums"], solves["spent"]
        self.owner = True

    def _check(self, progress: dict[str, Any], state: dict[int, Any]) -> None:
        keeps = {"observed": self.observe is not None, "solves": self._kept_solves()}
        lengths = {"epochs": self.recipe.epochs, "batches": self.batches, "stateless": not state}
        check_progress(progress, self.path, settings=self.settings, **keeps, **lengths)

    def run(self, *, overwrite: bool = False, lock: RunLock | None = None) -> None:
        """Train to the end of the last epoch, saving before the first and after each.

        Args:
            overwrite: replace the checkpoint of an earlier run, if there is one.
            lock: of the checkpoint, where the caller holds it for longer; None: one of its own, so
                that two runs never write to one checkpoint.

        Raises:
            NotClaimed: another run's checkpoint is there, neither resumed nor to be overwritten;
                another run is writing it; or the folder cannot be written.
            Interrupted: after Ctrl-C, the batch finished and saved; a second one raises
                ``KeyboardInterrupt`` at once.
            NonFiniteLoss: the loss, its gradient or a parameter is NaN or infinite.
        """
        with locked(self.fabric, RunLock(self.path) if lock is None else lock):
            if not self.owner:
                in_first(self.fabric, partial(check_place, self.path, overwrite=overwrite))
                # From here on a kill leaves something to resume; logs of another run go after that.
                self.save()
                self.owner = True
            self._run()

    def _run(self) -> None:
        logs = self.logs if self.fabric.global_rank == 0 else ()
        for log in logs:
            log.start(self.steps, len(self.history))
        try:
            with first_interrupt(self._stop):
                while self.epoch < self.recipe.epochs:
                    self._run_epoch(logs)
                    self._start_epoch(self.epoch + 1)
                    self.save()
        finally:
            for log in logs:
                log.close()

    def _stop(self) -> None:
        self.stopping = True

    def _run_epoch(self, logs: Sequence[Log]) -> None:
        tqdm = require("tqdm", extra="training").tqdm
        generator = epoch_generator(self.recipe.seed, self.epoch)
        order = torch.randperm(len(self.task.inputs), generator=generator)
        parts = order.to(self.fabric.device).split(self.recipe.batch)
        title = f"epoch {self.epoch + 1}/{self.recipe.epochs}"
        silent = True if self.fabric.global_rank else None  # None: tqdm's own default
        bar = tqdm(desc=title, total=self.batches, unit="batch", leave=False, disable=silent)
        bar.update(self.batch)
        start = time.perf_counter() - self.seconds
        while self.batch < self.batches:
            index = parts[self.batch]
            row = self.step(self.task.inputs[index], self.task.targets[index])
            self.batch += 1
            self.seconds = time.perf_counter() - start
            bar.update()
            bar.set_postfix_str(self.status())
            for log in logs:
                log.step(self.steps, row)
            if self.evaluate_every is not None and self.steps % self.evaluate_every == 0:
                self.evaluations.append({"step": self.steps, **self.evaluate()})
                write_evaluation(logs, self.steps, self.evaluations[-1])
                start = time.perf_counter() - self.seconds
            # All processes must stop after the same batch, whichever of them got Ctrl-C.
            if self._reduce(torch.tensor([float(self.stopping)]), "max").item():
                bar.close()
                self.save()
                raise Interrupted(f"interrupted; {self.path} holds everything")
            if self.save_every is not None and self.steps % self.save_every == 0:
                self.save()
        bar.close()
        self._end_epoch(logs, tqdm.write)

    def _end_epoch(self, logs: Sequence[Log], write: Callable[[str], object]) -> None:
        measures = self.evaluate()
        row = {"epoch": self.epoch + 1, **self.means(), "seconds": self.seconds, **measures}
        self.history.append(row)
        if self.observe is not None:
            self.observations.append(self.observe(self.model))
        for log in logs:
            log.epoch(self.steps, row)
        if self.fabric.global_rank == 0:
            shown = "  ".join(describe(name, value) for name, value in measures.items())
            write(f"epoch {row['epoch']:3d}  {self.status()}  {shown}  {row['seconds']:.1f} s")

    def evaluate(self, iterations: int | None = None) -> dict[str, float]:
        """The task's measures of the model on the test samples, each a mean.

        ``iterations`` of a recurrent model; None: as many as it makes by itself.
        """
        with self.fabric.autocast():
            rank, world = self.fabric.global_rank, self.fabric.world_size
            found = self.task.evaluate(self.model, rank, world, iterations)
        return mean_measures(self.fabric, found)

    def step(self, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
        """One optimiser step on this process's share of a batch; returns the row for the logs."""
        rate = self.recipe.rate_at((self.epoch + self.batch / self.batches) / self.recipe.epochs)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        generator = epoch_generator(self.recipe.seed, self.epoch, self.batch)
        iterations = self.recipe.draw_iterations(generator)
        options = {} if iterations is None else {"iterations": iterations}
        inputs, targets = self.task.augmented(inputs, targets, generator)
        terms = self.task.terms(inputs, targets)
        rank, world = self.fabric.global_rank, self.fabric.world_size
        part, own = share(len(inputs), rank, world)
        self.model.train()
        seed_generators(self.recipe.seed, self.epoch, self.batch, rank, self.fabric.device)
        inputs, targets = inputs[part], targets[part]
        total = self.task.loss(self.forward(inputs, **options), inputs, targets) * own
        # The processes' gradients are averaged, so each counts its terms world times.
        loss = total * (world / terms)
        value = self._reduce(total.detach().double().reshape(1), "sum").item() / terms
        check_step(self, "loss", value)
        self.optimizer.zero_grad()
        self.fabric.backward(loss)
        norm = clip_gradients(self.fabric, self.forward, self.stepper, self.recipe.clip)
        check_step(self, "gradient's norm", norm)
        self.stepper.step()
        self.sums["loss"] += value * terms
        self.sums["terms"] += terms
        self.solves.add(self._reduce, own)
        return {"epoch": self.epoch + 1, "loss": value, "rate": rate, **options}

    def means(self) -> dict[str, Any]:
        """Means of the epoch so far: the loss, and how the equilibria were solved."""
        return {"loss": self.sums["loss"] / max(self.sums["terms"], 1), **self.solves.means()}

    def status(self) -> str:
        """One line about the epoch so far: the loss, and how the equilibria were solved."""
        return status_of(self.means())

    def summary(self) -> str:
        """Time, and the worst convergence of the whole training, for the end of a log."""
        return summary_of(self.history)
