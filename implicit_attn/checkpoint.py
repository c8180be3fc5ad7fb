"""Checkpoints from which training continues exactly: safetensors, written atomically."""

from __future__ import annotations

import json
import os
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
    """Write model, optimizer, torch's random state and ``progress`` to one file.

    The file is written beside its place and moved there, so an interruption leaves the old one.

    Args:
        path: file name, usually ``*.safetensors``; its folder is made.
        model: whose ``state_dict`` is kept.
        optimizer: whose state is kept too.
        progress: whatever JSON can hold: epoch, position in the epoch, history, settings.
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
                tensors[f"optimizer.{index}.{name}"] = torch.as_tensor(value)
    header = {
        "format": FORMAT,
        "groups": json.dumps(groups),
        "progress": json.dumps(progress or {}),
    }
    stored = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    require("safetensors.torch", extra="examples").save_file(stored, str(part), metadata=header)
    os.replace(part, path)


def load_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    restore_random: bool = True,
) -> dict[str, Any]:
    """Restore what :func:`save_checkpoint` wrote; returns ``progress``.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a checkpoint, or it does not fit the model or the optimizer.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    with require("safetensors", extra="examples").safe_open(str(path), framework="pt") as file:
        header: dict[str, str] = file.metadata() or {}
        tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if header.get("format") != FORMAT:
        raise ValueError(f"{path} is not a checkpoint of this package: format {header.get('format')!r}")
    weights = _with_prefix(tensors, "model.")
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit the model: {error}") from error
    if optimizer is not None:
        _load_optimizer(optimizer, _with_prefix(tensors, "optimizer."), json.loads(header["groups"]), path)
    if restore_random:
        torch.set_rng_state(tensors["random.torch"])
    return json.loads(header["progress"])


def _load_optimizer(
    optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], groups: list[Any], path: Path
) -> None:
    if not groups:
        raise ValueError(f"{path} holds no optimizer state")
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index, entry = name.split(".", 1)
        state.setdefault(int(index), {})[entry] = value
    try:
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path} does not fit the optimizer: {error}") from error


def _with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
