"""The main part of a training script: start of the processes, training, errors, final weights."""

from __future__ import annotations

import argparse
from typing import Any

from torch import nn

from implicit_attn.checkpoint import save_checkpoint
from implicit_attn.command_line import mistakes
from implicit_attn.data import ImageData
from implicit_attn.training.finite import NonFiniteLoss
from implicit_attn.training.logs import CsvLog, Log, TensorBoardLog
from implicit_attn.training.loop import Interrupted, Training
from implicit_attn.training.options import build_recipe
from implicit_attn.training.processes import start_processes
from implicit_attn.training.tasks import Augment, Task


def start(options: argparse.Namespace) -> Any:
    """The processes that the options of ``add_process_options`` ask for (``start_processes``)."""
    return start_processes(
        options.devices,
        options.accelerator,
        options.precision,
        # A batch of few iterations does not use the low-rank differences of the later ones.
        unused_parameters=options.random_iterations is not None,
    )


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
        with mistakes("--tensorboard"):
            logs.append(TensorBoardLog(options.out / "tensorboard", options.log_every))
    return Training(
        model,
        task,
        build_recipe(options),
        options.out / "checkpoint.safetensors",
        settings,
        augment=augment,
        fabric=fabric,
        save_every=options.save_every,
        logs=logs,
        compile=options.compile,
    )


def run_script(training: Training, *, resume: bool) -> None:
    """Run a training to its end, from its checkpoint if ``resume``, or leave with a message.

    Raises:
        SystemExit: 130 after Ctrl-C; a message where there is nothing to resume, where it is damaged
            or was made with other settings, and where the loss, its gradient or a parameter was not
            finite. :func:`implicit_attn.command_line.command` makes one line of a message.
    """
    first = training.fabric.global_rank == 0
    try:
        if resume:
            with mistakes("--resume"):  # also of a damaged checkpoint
                training.resume()
        elif first and training.path.exists():
            print(f"{training.path} of an earlier run will be replaced (--resume continues it)")
        training.run()
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
