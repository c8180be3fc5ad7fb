"""Checkpoints: model, optimizer and random state in one safetensors file, restored whole or not at all.

Weights are tensors of the file, texts in JSON stand in its header, and a checksum covers both. Format:
https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from implicit_attn.optional import require

FORMAT = "implicit-attn checkpoint 2"
CHECKSUM = "checksum"
TEXTS = ("groups", "optimizer", "progress")
# How safetensors calls the dtypes; a part of the checksum.
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip

# Of an optimizer: by the number of the parameter and the entry.
State = dict[int, dict[str, Tensor]]


def save_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    progress: dict[str, Any] | None = None,
) -> None:
    """Write model, optimizer, the state of torch's CPU generator and ``progress`` to one file.

    The file is written under another name in the same folder, put on the disk and then moved, so an
    interruption leaves the old file or the new one. If several processes save to one path, the last
    one wins.

    Args:
        path: file name, usually ``*.safetensors``; its folder is created.
        model: its ``state_dict`` is written.
        optimizer: its state is written too.
        progress: values that JSON can represent: epoch, history, settings.

    Raises:
        TypeError: the model's state, the optimizer's or ``progress`` holds anything else than
            dense tensors, tensors and numbers, JSON.
        ValueError: a trained parameter is not finite, or the optimizer's state is NaN: no
            checkpoint that :func:`load_checkpoint` accepts could be written.
    """
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    kept = {"state": {}, "param_groups": []} if optimizer is None else optimizer.state_dict()
    for index, entries in kept["state"].items():
        for entry, value in entries.items():
            name = f"optimizer.{index}.{entry}"
            tensors[name] = torch.as_tensor(value) if isinstance(value, int | float) else value
    tensors = {name: _on_cpu(name, value) for name, value in tensors.items()}
    _check_finite(model, tensors)
    tensors["random.torch"] = torch.get_rng_state()
    texts = {
        "format": FORMAT,
        "groups": json.dumps(kept["param_groups"]),
        "optimizer": "" if optimizer is None else type(optimizer).__name__,
        "progress": json.dumps(progress or {}),
    }
    texts[CHECKSUM] = checksum(tensors, texts)
    save = require("safetensors.torch", extra=None).save
    replace_file(Path(path), save(tensors, metadata=texts))


def load_checkpoint(
    path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Restore model, optimizer and random state from a file of :func:`save_checkpoint`, all or nothing.

    Everything is read and checked before anything is changed: the checksum; names, shapes and dtypes
    of the weights; the optimizer's class, groups and state; the random state; ``progress``. Trained
    parameters must be finite. After an error all is as it was.

    Args:
        path: the file.
        model: with the parameters and buffers that were saved, of the same dtypes.
        optimizer: of the saved class and parameter groups; None: its state is not restored.

    Returns:
        ``progress``.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a checkpoint, it is damaged, or it does not fit the model or the
            optimizer; the message begins with the file's name.
    """
    path = Path(path)
    texts, tensors = _read(path)
    with _naming(path):
        progress = _parse(texts, "progress", dict)
        groups = _parse(texts, "groups", list)
        weights = _below("model.", tensors)
        state = _optimizer_state(_below("optimizer.", tensors))
        random = _random_state(tensors)
        _check_weights(model, weights)
        _check_finite(model, tensors)
        if optimizer is not None:
            _check_optimizer(optimizer, texts["optimizer"], groups, state)
    with contextlib.ExitStack() as undo:
        if optimizer is not None:
            # It takes new containers for its state, so that the old ones can be put back.
            before = {"state": optimizer.state, "param_groups": optimizer.param_groups}
            undo.callback(vars(optimizer).update, before)
            _restore(optimizer, groups, state)
        model.load_state_dict(weights)
        undo.pop_all()
    torch.set_rng_state(random)
    return progress


def read_progress(path: str | Path) -> dict[str, Any]:
    """The ``progress`` of a checkpoint, whose file is checked; errors as for :func:`load_checkpoint`."""
    path = Path(path)
    texts, _ = _read(path)
    with _naming(path):
        return _parse(texts, "progress", dict)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: under another name beside it, onto the disk, then moved.

    The folder is created. The file has the mode that the umask leaves.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)  # after a failure


def remove_unfinished(path: Path) -> None:
    """Remove what killed processes left of :func:`replace_file` for ``path``; nobody may be writing it."""
    for part in path.parent.glob(f"{path.name}.*.part"):
        part.unlink(missing_ok=True)


def checksum(tensors: dict[str, Tensor], texts: dict[str, str]) -> str:
    """SHA-256 of the texts but the checksum itself, and of names, dtypes, shapes and bytes."""
    known = {name: text for name, text in texts.items() if name != CHECKSUM}
    found = hashlib.sha256(json.dumps(known, sort_keys=True).encode())
    for name in sorted(tensors):
        value = tensors[name]
        found.update(json.dumps([name, DTYPES.get(value.dtype), list(value.shape)]).encode())
        found.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def restore_constants(model: nn.Module, fresh: nn.Module) -> None:
    """Copy the buffers of ``fresh`` that are in no state dict (``persistent=False``) to ``model``.

    Encodings of positions, patterns of pairs and numbers of heads are computed when a model is made, and are
    no part of its weights. Loaders that make a model without memory (on the device "meta") and fill in
    weights alone leave such buffers empty, which nobody notices: ``from_pretrained`` of ``transformers``,
    or ``to_empty`` before FSDP. Dtypes and devices stay those of ``model``, but for "meta".

    Args:
        model: whose buffers are overwritten.
        fresh: a model made with the same arguments.

    Raises:
        ValueError: the two have different buffers, a shape differs, or ``fresh`` is on "meta"; then
            nothing has been overwritten.

    Example:
        >>> from implicit_attn import EquilibriumBlock
        >>> fresh = EquilibriumBlock(8, heads=2)
        >>> with torch.device("meta"):
        ...     model = EquilibriumBlock(8, heads=2)
        >>> loaded = model.to_empty(device="cpu").load_state_dict(fresh.state_dict())
        >>> restored = restore_constants(model, fresh)
    """
    there, here = _constants(fresh), _constants(model)
    sizes = [{k: tuple(b.shape) for k, (_, b) in each.items()} for each in (there, here)]
    if sizes[0] != sizes[1]:
        one_sided = dict(sizes[0].items() ^ sizes[1].items())
        raise ValueError(f"fresh must be made with the arguments of model; other: {one_sided}")
    for name, (_, new) in there.items():
        if new.is_meta:
            raise ValueError(f'fresh must have its numbers; {name} is on the device "meta"')
    for name, (_, new) in there.items():  # when nothing can fail any more
        owner, old = here[name]
        device = new.device if old.is_meta else old.device
        with torch.no_grad():
            owner._buffers[name.rpartition(".")[2]] = new.to(device, old.dtype, copy=True)


def _constants(model: nn.Module) -> dict[str, tuple[nn.Module, Tensor]]:
    """The buffers that are in no state dict, by name, with the modules that have them.

    A tensor that has two names stands under both: loaders may have made two of it.
    """
    return {
        f"{place}.{name}" if place else name: (module, buffer)
        for place, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        if name in module._non_persistent_buffers_set
    }


def _on_cpu(name: str, value: object) -> Tensor:
    """A copy of the tensor as it is stored."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.dtype not in DTYPES:
        shown = f"{value.layout} of {value.dtype}" if isinstance(value, Tensor) else type(value)
        raise TypeError(f"{name} must be a dense tensor of a dtype of safetensors, got {shown}")
    # A copy, because safetensors refuses tensors that share memory.
    copy = torch.empty(value.shape, dtype=value.dtype)
    return copy.copy_(value.detach())


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Texts and tensors of a checkpoint, as they were written."""
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    safetensors = require("safetensors", extra=None)
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            texts: dict[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (FileNotFoundError, PermissionError, MemoryError):
        raise
    except Exception as error:  # a dozen kinds, by which of the bytes are wrong
        raise ValueError(f"{path} is not a checkpoint, or it is damaged: {error}") from error
    if texts.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not a checkpoint of this package: its format is {texts.get('format')!r}, "
            f"expected {FORMAT!r}"
        )
    missing = [name for name in (*TEXTS, CHECKSUM) if name not in texts]
    if missing:
        raise ValueError(f"{path} is damaged: it has no {missing[0]!r} in its header")
    if checksum(tensors, texts) != texts[CHECKSUM]:
        raise ValueError(f"{path} is damaged: its contents do not give its checksum")
    return texts, tensors


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """The name of the file before the message of a ValueError about its contents."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path} cannot be loaded: {error}") from error


def _parse(texts: dict[str, str], name: str, kind: type) -> Any:
    try:
        value = json.loads(texts[name])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its {name} cannot be read ({error})") from error
    if not isinstance(value, kind):
        raise ValueError(f"its {name} must be a {kind.__name__}, got a {type(value).__name__}")
    return value


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _random_state(tensors: dict[str, Tensor]) -> Tensor:
    try:
        torch.Generator().set_state(tensors["random.torch"])
    except (KeyError, RuntimeError, TypeError) as error:
        raise ValueError(f"it holds no random state of torch's generator ({error})") from error
    return tensors["random.torch"]


def _optimizer_state(entries: dict[str, Tensor]) -> State:
    """The tensors "INDEX.NAME" by index and name."""
    state: State = {}
    for name, value in entries.items():
        index, _, entry = name.partition(".")
        if not (index.isascii() and index.isdecimal() and entry):
            raise ValueError(f"it holds optimizer.{name}, which is no number and name")
        state.setdefault(int(index), {})[entry] = value
    return state


def _shown(value: Any) -> str:
    return f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else repr(value)


def _check_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Names, shapes and dtypes are the model's, and trained parameters are finite."""
    own = {name: _shown(value) for name, value in model.state_dict().items()}
    held = {name: _shown(value) for name, value in weights.items()}
    wrong = sorted(n for n in own.keys() | held.keys() if own.get(n) != held.get(n))
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"it does not fit the model in {len(wrong)} tensors: {name} is {held.get(name)} in the "
            f"file and {own.get(name)} in the model"
        )


def _check_finite(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Trained parameters are finite, and nothing that the optimizer keeps is NaN.

    Other parameters and buffers may hold infinities on purpose; a mean square may overflow, which an
    optimizer survives.
    """
    trained = {
        f"model.{name}"
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    }
    for name, value in tensors.items():
        if value.is_floating_point():
            value = value.double()  # float8 has no isfinite
        if name in trained and not value.isfinite().all():
            raise ValueError(f"the trained parameter {name.removeprefix('model.')} is not finite")
        if name.startswith("optimizer.") and value.isnan().any():
            raise ValueError(f"{name} is NaN")


def _check_optimizer(
    optimizer: torch.optim.Optimizer, name: str, groups: list[Any], state: State
) -> None:
    """Class, groups and state are those of the optimizer."""
    if name != type(optimizer).__name__:
        raise ValueError(
            f"it holds the state of {name or 'no optimizer'}, expected {type(optimizer).__name__}"
        )
    own = optimizer.state_dict()["param_groups"]
    held = [group.get("params") if isinstance(group, dict) else None for group in groups]
    if held != [group["params"] for group in own]:
        sizes = [len(group["params"]) for group in own]
        raise ValueError(f"its groups of parameters do not fit the optimizer's, of {sizes}")
    for group, ours in zip(groups, own, strict=True):
        # Later versions of torch add switches, which it sets by itself; they are no numbers.
        missing = [k for k, v in ours.items() if k not in group and isinstance(v, (float, tuple))]
        if missing:
            raise ValueError(f"a group of its optimizer has no {missing[0]!r}")
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    if max(state, default=0) >= len(parameters):
        raise ValueError(f"it holds a state of parameter {max(state)}, there are {len(parameters)}")
    # What optimizers other than torch's keep, and in which shapes, is their own affair; so is Adafactor's.
    if not type(optimizer).__module__.startswith("torch.optim.") or name == "Adafactor":
        return
    names = sorted({entry for entries in state.values() for entry in entries})
    for index, entries in state.items():
        for entry in names:  # each a number, or a tensor like the parameter
            shown, like = _shown(entries.get(entry)), _shown(parameters[index])
            value = entries.get(entry)
            number = (
                value is not None and value.dim() == 0 and (entry != "step" or value.item() >= 0)
            )
            if not number and (shown != like or entry == "step"):
                raise ValueError(
                    f"optimizer.{index}.{entry} is {shown}, expected a number or one like the "
                    f"parameter, {like}"
                )


def _restore(optimizer: torch.optim.Optimizer, groups: list[Any], state: State) -> None:
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    # Torch casts every number to its parameter's dtype, single ones that were kept in another as well.
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for index, entries in state.items():
        held = optimizer.state[parameters[index]]
        for name, value in entries.items():
            if held[name].dtype != value.dtype:
                held[name] = value.to(held[name].device)
