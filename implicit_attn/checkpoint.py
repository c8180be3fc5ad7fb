"""Checkpoints of a training run: safetensors files, written atomically, that restore it exactly."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from implicit_attn.optional import require

FORMAT = "implicit-attn checkpoint 1"


def save_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    progress: dict[str, Any] | None = None,
) -> None:
    """Write model, optimizer, the state of torch's CPU generator and ``progress`` to one file.

    The file is written under a temporary name in the same folder and then moved, so an interruption
    leaves the old file intact. If several processes save to one path, the last one wins.

    Args:
        path: file name, usually ``*.safetensors``; its folder is created.
        model: its ``state_dict`` is written.
        optimizer: its state is written too.
        progress: values that JSON can represent: epoch, position in the epoch, history, settings.

    Raises:
        TypeError: if the optimizer's state or ``progress`` holds anything else.
        ImportError: if safetensors is not installed.
    """
    path = Path(path)
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    tensors["random.torch"] = torch.get_rng_state()
    groups: list[dict[str, Any]] = []
    if optimizer is not None:
        state = optimizer.state_dict()
        groups = state["param_groups"]
        for index, entries in state["state"].items():
            for name, value in entries.items():
                if not isinstance(value, (Tensor, int, float)):
                    raise TypeError(
                        f"the state {name!r} of {type(optimizer).__name__} is a {type(value).__name__}; "
                        "only tensors and numbers can be kept"
                    )
                tensors[f"optimizer.{index}.{name}"] = torch.as_tensor(value)
    header = {
        "format": FORMAT,
        "groups": json.dumps(groups),
        "optimizer": "" if optimizer is None else type(optimizer).__name__,
        "progress": json.dumps(progress or {}),
    }
    stored = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    files = require("safetensors.torch", extra="examples")
    path.parent.mkdir(parents=True, exist_ok=True)
    # A unique name, so that another process saving to this path does not move an unfinished file.
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        files.save_file(stored, str(part), metadata=header)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)  # after a failure


def load_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    restore_random: bool = True,
) -> dict[str, Any]:
    """Restore model and optimizer from a file of :func:`save_checkpoint`.

    Args:
        path: the file.
        model: with the parameters and buffers that were saved.
        optimizer: of the saved class and parameter groups; None: its state is not restored.
        restore_random: restore the state of torch's CPU generator too.

    Returns:
        ``progress``.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a checkpoint, or it does not fit the model or the optimizer.
    """
    header, tensors = _read(Path(path))
    weights, entries = _with_prefix(tensors, "model."), _with_prefix(tensors, "optimizer.")
    groups = json.loads(header["groups"])
    # Everything is checked before anything is changed.
    _check_weights(model, weights, path)
    if optimizer is not None:
        _check_optimizer(optimizer, header["optimizer"], groups, path)
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in entries.items():
            index, entry = name.split(".", 1)
            state.setdefault(int(index), {})[entry] = value
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    model.load_state_dict(weights)
    if restore_random:
        torch.set_rng_state(tensors["random.torch"])
    return json.loads(header["progress"])


def read_progress(path: str | Path) -> dict[str, Any]:
    """The ``progress`` of a checkpoint; errors as for :func:`load_checkpoint`."""
    return json.loads(_read(Path(path))[0]["progress"])


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    safetensors = require("safetensors", extra="examples")
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            header: dict[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is not a checkpoint, or it is damaged: {error}") from error
    if header.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not a checkpoint of this package: format {header.get('format')!r}"
        )
    return header, tensors


def _check_weights(model: nn.Module, weights: dict[str, Tensor], path: str | Path) -> None:
    own = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    held = {name: tuple(value.shape) for name, value in weights.items()}
    wrong = sorted(n for n in own.keys() | held.keys() if own.get(n) != held.get(n))
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"{path} does not fit the model in {len(wrong)} tensors: {name} is {held.get(name)} in "
            f"the file and {own.get(name)} in the model"
        )


def _check_optimizer(
    optimizer: torch.optim.Optimizer, name: str, groups: list[Any], path: str | Path
) -> None:
    if not groups:
        raise ValueError(f"{path} holds no optimizer state")
    if name != type(optimizer).__name__:
        raise ValueError(f"{path} was made with {name}, got {type(optimizer).__name__}")
    own = [len(group["params"]) for group in optimizer.param_groups]
    held = [len(group["params"]) for group in groups]
    if own != held:
        raise ValueError(
            f"{path} does not fit the optimizer: groups of {held} parameters, expected {own}"
        )


def _with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
