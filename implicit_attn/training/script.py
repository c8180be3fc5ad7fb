"""The main part of a training script: start of the processes, training, errors, final weights."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import nn

from implicit_attn.checkpoint import save_checkpoint
from implicit_attn.checkpoint.files import RunLock
from implicit_attn.command_line import mistakes
from implicit_attn.data import ImageData
from implicit_attn.training.claims import (
    NotClaimed,
    check_start,
    check_there,
    in_first,
    locked,
    remove_results,
)
from implicit_attn.training.finite import NonFiniteLoss
from implicit_attn.training.logs import CsvLog, Log, TensorBoardLog
from implicit_attn.training.loop import Interrupted, Training
from implicit_attn.training.options import build_recipe
from implicit_attn.training.processes import start_processes
from implicit_attn.training.tasks import Augment, Task

ALONE = SimpleNamespace(global_rank=0, world_size=1)  # one process, before there is a fabric


def start(options: argparse.Namespace) -> Any:
    """The processes that the options of ``add_process_options`` ask for (``start_processes``)."""
    return start_processes(
        options.devices,
        options.accelerator,
        options.precision,
        # A batch of few iterations does not use the low-rank differences of the later ones.
        unused_parameters=options.random_iterations is not None,
    )


@contextlib.contextmanager
def claim(options: argparse.Namespace, fabric: Any = None) -> Iterator[RunLock]:
    """The folder ``options.out``, for this run alone until the end of the block.

    To be entered before anything takes time: the folder is made, and it is refused if it cannot be
    written, if another run is writing it, if an earlier run's files are in it and neither
    ``options.resume`` nor ``options.overwrite`` is set, and if there is no whole checkpoint to resume.

    Args:
        options: of ``add_result_options``.
        fabric: of :func:`start`; None: there is one process.

    Returns:
        The lock, for :func:`run_script`.

    Raises:
        SystemExit: with a message that names the option.
    """
    fabric = ALONE if fabric is None else fabric
    path = checkpoint_path(options)
    lock = RunLock(path)
    check = partial(check_start, path, resume=options.resume, overwrite=options.overwrite)
    if options.resume:  # before a folder is made for nothing
        with _refusing("--resume", fabric):
            in_first(fabric, partial(check_there, path))
    with contextlib.ExitStack() as held:
        with _refusing("--out", fabric):
            held.enter_context(locked(fabric, lock))
        with _refusing("--resume" if options.resume else "--out", fabric):
            in_first(fabric, check)
        yield lock


def checkpoint_path(options: argparse.Namespace) -> Path:
    """Where the checkpoint of a script is: ``checkpoint.safetensors`` in ``options.out``."""
    return options.out / "checkpoint.safetensors"


@contextlib.contextmanager
def _refusing(option: str, fabric: Any) -> Iterator[None]:
    try:
        yield
    except NotClaimed as error:
        # A further process that fails would have the first one killed, which says the same.
        first = fabric.global_rank == 0
        raise SystemExit(f"argument {option}: {error}" if first else 0) from error


def build_training(
    options: argparse.Namespace,
    model: nn.Module,
    task: ImageData | Task,
    settings: dict[str, Any],
    *,
    fabric: Any,
    augment: Augment | None = None,
) -> Training:
    """The training of a script with all groups of options; its files are in ``options.out``."""
    logs: list[Log] = [CsvLog(options.out, options.log_every)]
    if options.tensorboard:
        with mistakes("--tensorboard", first=fabric.global_rank == 0):
            logs.append(TensorBoardLog(options.out / "tensorboard", options.log_every))
    return Training(
        model,
        task,
        build_recipe(options),
        checkpoint_path(options),
        settings,
        augment=augment,
        fabric=fabric,
        save_every=options.save_every,
        evaluate_every=getattr(options, "evaluate_every", None),
        logs=logs,
        compile=options.compile,
    )


def run_script(
    training: Training, *, resume: bool, overwrite: bool = False, lock: RunLock | None = None
) -> None:
    """Run a training to its end, from its checkpoint if ``resume``, or leave with a message.

    Args:
        training: not run yet.
        resume: go on from its checkpoint.
        overwrite: replace the files of an earlier run in its folder.
        lock: of :func:`claim`; None: one for the time of the training.

    Raises:
        SystemExit: 130 after Ctrl-C; a message where there is nothing to resume, where it is damaged
            or was made with other settings, where the folder is in use or holds another run, and where
            the loss, its gradient or a parameter was not finite.
            :func:`implicit_attn.command_line.command` makes one line of a message.
    """
    first = training.fabric.global_rank == 0
    lock = RunLock(training.path) if lock is None else lock
    try:
        with _refusing("--out", training.fabric), locked(training.fabric, lock):
            if resume:
                with mistakes("--resume", first=first):  # also of a damaged checkpoint
                    training.resume()
            elif overwrite and first:
                remove_results(training.path)
            training.run(overwrite=overwrite, lock=lock)
    except Interrupted as stop:
        if not first:  # a process that fails would have the first one killed
            raise SystemExit(0) from None
        print(f"{stop}: continue with --resume")
        raise SystemExit(130) from None
    except NonFiniteLoss as error:
        raise SystemExit(str(error) if first else 0) from None


def save_weights(training: Training) -> None:
    """Write ``weights.safetensors`` beside the checkpoint: the model without the optimiser's state."""
    progress = {"settings": training.settings, "history": training.history}
    if training.observe is not None:
        progress["observations"] = training.observations
    path = training.path.with_name("weights.safetensors")
    save_checkpoint(path, training.model, progress=progress)
