"""Whether the contents of a checkpoint fit a model and an optimizer; nothing is changed."""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import Tensor, nn

State = dict[int, dict[str, Tensor]]


def parse(text: str, name: str, kind: type) -> Any:
    """A value from JSON.

    Raises:
        ValueError: it is no JSON, or no ``kind``.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its {name} cannot be read ({error})") from error
    if not isinstance(value, kind):
        raise ValueError(f"its {name} must be a {kind.__name__}, got a {type(value).__name__}")
    return value


def check_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
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
    check_finite(model, weights)


def _shown(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"


def check_finite(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """A trained parameter is finite; others and buffers may hold infinities on purpose."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad and name in weights and not _all_finite(weights[name]):
            raise ValueError(f"the trained parameter {name} is not finite")


def _all_finite(value: Tensor) -> bool:
    if value.is_floating_point() and value.element_size() == 1:  # float8 has no isfinite
        value = value.float()
    return bool(value.isfinite().all())


def check_numbers(state: State) -> None:
    """No entry of an optimizer's state is NaN. (A square may overflow, which it survives.)"""
    for index, entries in state.items():
        for name, value in entries.items():
            if value.is_floating_point() and value.element_size() == 1:
                value = value.float()
            if bool(value.isnan().any()):
                raise ValueError(f"the optimizer's {name} of its parameter {index} is NaN")


def check_random(state: Tensor | None) -> None:
    """It is a state of torch's CPU generator."""
    if state is None:
        raise ValueError("it holds no random state")
    try:
        torch.Generator().set_state(state)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"its random state is none of torch's generator ({error})") from error


def optimizer_state(entries: dict[str, Tensor]) -> State:
    """The tensors "INDEX.NAME" by index and name."""
    state: State = {}
    for name, value in entries.items():
        index, _, entry = name.partition(".")
        if not (index.isascii() and index.isdecimal() and str(int(index)) == index and entry):
            raise ValueError(f"it holds optimizer.{name}, which is no number and name")
        state.setdefault(int(index), {})[entry] = value
    return state


def check_optimizer(
    optimizer: torch.optim.Optimizer, name: str, groups: list[Any], state: State
) -> None:
    """Class, groups, options and state are those of the optimizer."""
    if not groups:
        raise ValueError("it holds no optimizer state")
    if name != type(optimizer).__name__:
        raise ValueError(f"it was made with {name}, got {type(optimizer).__name__}")
    own = [group["params"] for group in optimizer.state_dict()["param_groups"]]
    held = [group.get("params") if isinstance(group, dict) else None for group in groups]
    if own != held:
        sizes = [len(each) if isinstance(each, list) else each for each in held]
        raise ValueError(
            f"it does not fit the optimizer: groups of {sizes} parameters, expected "
            f"{[len(each) for each in own]}"
        )
    for number, (group, ours) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        _check_options(number, group, ours, optimizer.defaults)
    number = sum(len(each) for each in own)
    beyond = [index for index in state if index >= number]
    if beyond:
        raise ValueError(f"it holds a state of parameter {beyond[0]}, there are {number}")
    check_numbers(state)
    # What others keep, and in which shapes, is their own affair.
    if type(optimizer).__module__.startswith("torch.optim."):
        _check_entries(optimizer, groups, state)


def _check_options(
    number: int, group: dict[str, Any], ours: dict[str, Any], defaults: dict[str, Any]
) -> None:
    for name, default in defaults.items():
        if name not in group:
            # Later versions of torch add switches, which it sets by itself; they are no numbers.
            if default is None or isinstance(default, bool):
                continue
            raise ValueError(f"its optimizer's group {number} has no {name!r}")
        value, own = group[name], ours.get(name)
        if not _alike(value, default if default is not None else own):
            raise ValueError(
                f"its optimizer's group {number} has {name}={value!r}, expected one like {own!r}"
            )


def is_finite(value: float) -> bool:
    """Whether a number of a JSON text is one that a float holds; its integers have any length."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _alike(value: Any, example: Any) -> bool:
    """Whether an option could be in place of another one."""
    if example is None or isinstance(example, bool):
        return value is None or isinstance(value, (bool, int, float, str))
    if isinstance(example, (tuple, list)):
        same = isinstance(value, list) and len(value) == len(example)
        return same and all(map(_alike, value, example))
    if isinstance(example, (int, float, Tensor)):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        free = not isinstance(example, Tensor) and not math.isfinite(example)
        return number and (is_finite(value) or (free and value in (math.inf, -math.inf)))
    return isinstance(value, type(example))


def _check_entries(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: State
) -> None:
    """The state of torch's own optimizers: per parameter, of its shape and dtype.

    A parameter that never had a gradient has none. Others in a group have the same entries, each of
    the parameter's shape or one number. Adafactor alone keeps, of matrices, means over rows and columns.
    """
    means = type(optimizer).__name__ == "Adafactor"
    for group, ours in zip(groups, optimizer.param_groups, strict=True):
        names: dict[bool, set[str]] = {}
        for index, parameter in zip(group["params"], ours["params"], strict=True):
            if index not in state:
                continue
            entries = state[index]
            expected = names.setdefault(means and parameter.dim() > 1, set(entries))
            missing = expected ^ set(entries)
            if missing:
                raise ValueError(
                    f"its optimizer state {min(missing)!r} is not there for all parameters, "
                    f"{index} among them"
                )
            for name, value in entries.items():
                if not _entry_fits(name, value, parameter, means):
                    raise ValueError(
                        f"its optimizer state {name!r} of parameter {index} is {_shown(value)}, which "
                        f"does not fit {_shown(parameter)}"
                    )


def _entry_fits(name: str, value: Tensor, parameter: Tensor, means: bool) -> bool:
    if name == "step":
        return value.numel() == 1 and not value.is_complex() and value.item() >= 0
    if value.dim() == 0:
        return value.is_floating_point() or value.dtype == parameter.dtype
    sizes = zip(value.shape, parameter.shape, strict=False)
    fits = value.dim() == parameter.dim() and all(a == b or (means and a == 1) for a, b in sizes)
    return fits and value.dtype == parameter.dtype
