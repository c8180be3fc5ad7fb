"""Saving and restoring a model, its optimizer and the random state: all of it, or none."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from implicit_attn.checkpoint.checks import (
    State,
    check_finite,
    check_numbers,
    check_optimizer,
    check_random,
    check_weights,
    optimizer_state,
    parse,
)
from implicit_attn.checkpoint.store import on_cpu, read_file, write_file
from implicit_attn.optional import require


def save_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    progress: dict[str, Any] | None = None,
) -> None:
    """Write model, optimizer, the state of torch's CPU generator and ``progress`` to one file.

    The file is written under another name in the same folder, put on the disk and then moved, so an
    interruption leaves the old file or the new one. It holds a checksum of its contents. If several
    processes save to one path, the last one wins.

    Args:
        path: file name, usually ``*.safetensors``; its folder is created.
        model: its ``state_dict`` is written.
        optimizer: its state is written too.
        progress: values that JSON can represent: epoch, position in the epoch, history, settings.

    Raises:
        TypeError: if the model's state, the optimizer's or ``progress`` holds anything else than
            dense tensors, tensors and numbers, JSON.
        ValueError: a trained parameter is not finite, or the optimizer's state is NaN: no
            checkpoint that :func:`load_checkpoint` accepts could be written.
        ImportError: if safetensors is not installed.
    """
    require("safetensors", extra=None)  # without it, nobody here could read the file
    weights = {name: on_cpu(f"model.{name}", value) for name, value in model.state_dict().items()}
    check_finite(model, weights)
    tensors = {f"model.{name}": value for name, value in weights.items()}
    tensors["random.torch"] = torch.get_rng_state()
    groups: list[dict[str, Any]] = []
    if optimizer is not None:
        state, groups = _collect(optimizer)
        check_numbers(state)
        for index, entries in state.items():
            for name, value in entries.items():
                tensors[f"optimizer.{index}.{name}"] = value
    texts = {
        "groups": json.dumps(groups),
        "optimizer": "" if optimizer is None else type(optimizer).__name__,
        "progress": json.dumps(progress or {}),
    }
    write_file(Path(path), tensors, texts)


def _collect(optimizer: torch.optim.Optimizer) -> tuple[State, list[dict[str, Any]]]:
    kept = optimizer.state_dict()
    state: State = {}
    for index, entries in kept["state"].items():
        for name, value in entries.items():
            if not isinstance(value, (Tensor, int, float)):
                raise TypeError(
                    f"the state {name!r} of {type(optimizer).__name__} is a {type(value).__name__}; "
                    "only tensors and numbers can be kept"
                )
            held = on_cpu(f"optimizer.{index}.{name}", torch.as_tensor(value))
            state.setdefault(index, {})[name] = held
    return state, kept["param_groups"]


def load_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    restore_random: bool = True,
    check: Callable[[dict[str, Any], State], object] | None = None,
) -> dict[str, Any]:
    """Restore model and optimizer from a file of :func:`save_checkpoint`, all or nothing.

    Everything is read and checked before anything is changed: the checksum, names, shapes and dtypes
    of the weights, the optimizer's class, groups and state, the random state, ``progress``; trained
    parameters must be finite. After an error all is as it was. Files of the format before this one
    have no checksum; the rest is checked all the same.

    Args:
        path: the file.
        model: with the parameters and buffers that were saved, of the same dtypes.
        optimizer: of the saved class and parameter groups; None: its state is not restored.
        restore_random: restore the state of torch's CPU generator too.
        check: called with ``progress`` and the optimizer's state, by the number of the parameter and
            the name of the entry, before anything is changed; what it raises is raised.

    Returns:
        ``progress``.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a checkpoint, it is damaged, or it does not fit the model or the
            optimizer; the message begins with the file's name.
    """
    path = Path(path)
    texts, tensors = read_file(path)
    weights = _with_prefix(tensors, "model.")
    with _naming(path):
        progress = parse(texts["progress"], "progress", dict)
        groups = parse(texts["groups"], "groups", list)
        state = optimizer_state(_with_prefix(tensors, "optimizer."))
        check_random(tensors.get("random.torch"))
    if check is not None:
        check(progress, state)
    with _naming(path):
        check_weights(model, weights)
        if optimizer is not None:
            check_optimizer(optimizer, texts["optimizer"], groups, state)
    with _unchanged_after_errors(optimizer):
        if optimizer is not None:
            _restore(optimizer, groups, state)
        model.load_state_dict(weights)
    if restore_random:
        torch.set_rng_state(tensors["random.torch"])
    return progress


def _restore(optimizer: torch.optim.Optimizer, groups: list[Any], state: State) -> None:
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    # Torch casts every number to its parameter's dtype, single ones that were kept in another as well.
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for index, entries in state.items():
        held = optimizer.state[parameters[index]]
        for name, value in entries.items():
            if held[name].dtype != value.dtype:
                held[name] = value.to(held[name].device)


def read_progress(path: str | Path) -> dict[str, Any]:
    """The ``progress`` of a checkpoint, whose file is checked; errors as for :func:`load_checkpoint`."""
    path = Path(path)
    texts, _ = read_file(path)
    with _naming(path):
        return parse(texts["progress"], "progress", dict)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """The name of the file before the message of a ValueError about its contents."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path} cannot be loaded: {error}") from error


@contextlib.contextmanager
def _unchanged_after_errors(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """An optimizer takes new containers for its state, so that the old ones can be put back."""
    before = None if optimizer is None else (optimizer.state, optimizer.param_groups)
    try:
        yield
    except BaseException:
        if optimizer is not None and before is not None:
            optimizer.state, optimizer.param_groups = before
        raise


def _with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
