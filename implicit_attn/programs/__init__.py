"""What training programs share: options, presets, the folder of the results, the end of a run."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import nn

import solvers
from implicit_attn.checkpoint import read_progress, save_checkpoint
from implicit_attn.data import ImageData
from implicit_attn.optional import require
from implicit_attn.training import NonFiniteLoss, Recipe, Training, alone, in_first, start_processes
from implicit_attn.training.tasks import Task

# Parameters up to which one thread is as fast as two, and not disturbed by others.
SMALL = 1_000_000
INTERRUPTED = 130  # exit code of Ctrl-C, as in a shell
# What a wrong argument, a wrong file or a missing package raises.
MISTAKES = (ValueError, TypeError, OverflowError, ImportError, OSError)
RECIPE = frozenset(field.name for field in fields(Recipe)) - {"iterations"}
Values = dict[str, Any]


@contextlib.contextmanager
def mistakes(
    *, first: bool = True, kinds: tuple[type[Exception], ...] = MISTAKES
) -> Iterator[None]:
    """The part of a program whose errors are those of what the user gave: options, files, packages.

    They become a SystemExit with the message, which the command prints as one line; in the further
    processes of a training, where the ``first`` one says the same, with 0: one that fails would have the
    first killed.
    """
    try:
        yield
    except kinds as error:
        raise SystemExit((str(error) or type(error).__name__) if first else 0) from error


def make_folder(path: Path) -> None:
    """Make a folder, and see that a file can be written there, before work begins; OSError if not."""
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path):  # permissions alone do not tell: think of /proc
        pass


@dataclass(frozen=True)
class Job:
    """What a program trains; the arguments of ``Training``."""

    model: nn.Module
    task: ImageData | Task
    recipe: Recipe
    settings: Values
    observe: Callable[[Any], Any] | None = None


@dataclass(kw_only=True)
class Program:
    """A training program: its options, of which presets give those that are not named.

    A subclass says its :meth:`job`, its :meth:`report` and ``folder``, the pattern of the results' name below
    ``runs``.
    """

    folder: ClassVar[str]
    epochs: int | None = None
    """passes over the training samples"""
    batch: int | None = None
    """samples at once, of all processes"""
    rate: float | None = None
    """peak learning rate"""
    seed: int = 0
    """of the weights and of all that is drawn"""
    options: tuple[str, ...] = ()
    """further values of the preset, model or recipe, as KEY=VALUE: dim=32 weight_decay=0.1"""
    out: Path | None = None
    """folder of the results"""
    resume: bool = False
    """continue from the checkpoint in that folder"""
    overwrite: bool = False
    """replace an earlier run's files in that folder"""
    devices: int = 1
    """processes, one per card or sharing the CPU"""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    compile: bool = False
    """compile the repeated layer (a minute at the start)"""
    tensorboard: bool = False
    """write events for TensorBoard, too"""

    def job(self, first: bool) -> Job:
        """What is trained; of several processes the ``first`` one may print."""
        raise NotImplementedError

    def report(self, training: Training) -> None:
        """After the training, in every process."""
        raise NotImplementedError

    @property
    def place(self) -> Path:
        """The folder of the results."""
        return self.out or Path("runs") / self.folder.format(**vars(self))

    def further(self) -> Values:
        """The values in ``options``, read as JSON where they are, else as text."""
        found: Values = {}
        for word in self.options:
            key, equal, text = word.partition("=")
            if not key or not equal:
                raise ValueError(f"options must be KEY=VALUE, got {word!r}")
            found[key.replace("-", "_")] = text
            with contextlib.suppress(ValueError):
                found[key.replace("-", "_")] = json.loads(text)
        return found

    def defaults(self) -> Values:
        """The values of options that are not given, which may depend on others; ``--help`` shows them."""
        return {}

    def values(self, *names: str) -> Values:
        """The defaults, over them the named options and the recipe's, over these ``options``."""
        given = {name: getattr(self, name) for name in ("epochs", "batch", "rate", *names)}
        given = {name: value for name, value in given.items() if value is not None}
        return {**self.defaults(), **given, **self.further()}

    def run(self) -> None:
        """Train to the end and report; SystemExit as of :func:`mistakes`, 130 after Ctrl-C."""
        with mistakes():
            fabric = self._start()
        # A further process that fails would have the first one killed, which says the same.
        first = fabric.global_rank == 0
        with contextlib.ExitStack() as held:
            with mistakes(first=first):
                in_first(fabric, lambda: self._claim(held))
                job = self.job(first)
                choose_threads(job.model)
                training = self._training(job, fabric)
                if self.resume:
                    training.resume()
            try:
                with mistakes(first=first, kinds=(NonFiniteLoss,)):
                    training.run(overwrite=self.overwrite)
            except KeyboardInterrupt:
                if first:
                    print(
                        f"interrupted; {training.path} holds epoch {training.epoch}: use --resume"
                    )
                raise SystemExit(INTERRUPTED if first else 0) from None
            self.report(training)

    def _start(self) -> Any:
        loggers = None
        if self.tensorboard:
            require("torch.utils.tensorboard", extra="tensorboard")
            kind = require("lightning_fabric.loggers", extra="training").TensorBoardLogger
            loggers = kind(root_dir=self.place, name="tensorboard", version="")
        # A batch of few iterations does not use the low-rank differences of the later ones.
        return start_processes(
            self.devices, self.accelerator, self.precision, unused_parameters=True, loggers=loggers
        )

    def _claim(self, held: contextlib.ExitStack) -> None:
        """The folder, for this run alone, before anything takes time."""
        if self.resume and self.overwrite:
            raise ValueError("resume and overwrite exclude each other")
        path = self.place / "checkpoint.safetensors"
        if self.resume:  # before a folder is made for nothing
            read_progress(path)
        held.enter_context(alone(path))
        names = [each.name for each in sorted(self.place.iterdir()) if each.suffix != ".lock"]
        if names and not self.resume and not self.overwrite:
            raise ValueError(
                f"out must be a new folder, {self.place} holds the files of an earlier run "
                f"({', '.join(names[:9])}): --resume goes on with it, --overwrite replaces it"
            )

    def _training(self, job: Job, fabric: Any, name: str = "checkpoint") -> Training:
        kept = {**asdict(job.recipe), **job.settings}
        kept = json.loads(json.dumps(kept))  # as a checkpoint gives them back
        options: Any = {"observe": job.observe, "compile": self.compile}
        path = self.place / f"{name}.safetensors"
        return Training(job.model, job.task, job.recipe, path, kept, fabric=fabric, **options)


def choose_threads(model: nn.Module) -> None:
    """One thread of torch for a small model on the CPU, where ``OMP_NUM_THREADS`` says nothing.

    A second one gains nothing for up to a million parameters, and waits wherever another program is
    busy on its core: a training step then takes four times as long.
    """
    size = sum(parameter.numel() for parameter in model.parameters())
    if size < SMALL and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def take_recipe(values: Values, seed: int) -> Recipe:
    """The recipe, whose values are taken out of ``values``; others stay there."""
    found = {name: values.pop(name) for name in RECIPE & values.keys()}
    if "betas" in found:
        found["betas"] = tuple(found["betas"])
    draws = values.pop("random_iterations", None)
    if draws is not None:
        found["iterations"] = tuple(draws)
    return Recipe(**found, seed=seed)


def layer_options(rtol: float | None = None, **options: Any) -> Values:
    """Options of a ``DEQ`` in training: what does not converge is counted, not warned about."""
    layer: Values = {"on_failure": "ignore", "adjoint": solvers.Implicit(on_failure="ignore")}
    tolerance = {} if rtol is None else {"tolerance": solvers.Tolerance(rtol=rtol)}
    return layer | tolerance | options


def save_weights(training: Training) -> None:
    """Write ``weights.safetensors`` beside the checkpoint: the model without the optimiser's state."""
    progress = {"settings": training.settings, "history": training.history}
    if training.observe is not None:
        progress["observations"] = training.observations
    path = training.path.with_name("weights.safetensors")
    save_checkpoint(path, training.model, progress=progress)
