"""Checks of arguments: an error that names the argument, what came and what was expected.

Each returns the value, so that a constructor can check and keep it in one line. A wrong type is a
``TypeError``, a value out of range a ``ValueError``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from solvers.core.modes import in_transform

LONGEST = 200  # characters of a wrong value in a message
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def plain_number(value: Any) -> Any:
    """Return a number of numpy, or a tensor without dimensions, as Python's; any other value unchanged.

    A tensor that requires gradients is left as it is, because an option has none.
    """
    if isinstance(value, np.generic) or (
        isinstance(value, Tensor) and value.dim() == 0 and not value.requires_grad
    ):
        return value.item()
    return value


def require_number(
    name: str, value: Any, *, low: float = -math.inf, high: float = math.inf, closed: bool = True
) -> float:
    """A number within [low, high] (``closed``) or (low, high]."""
    value = plain_number(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not (low <= value <= high) or (not closed and value == low):
        left = "[" if closed else "("
        raise ValueError(f"{name} must be in {left}{low}, {high}], got {value!r}")
    return value


def require_positive(name: str, value: Any, *, zero: bool = False) -> float:
    """A finite number > 0, or with ``zero`` >= 0."""
    value = plain_number(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not (0 <= value < math.inf) or (value == 0 and not zero):
        raise ValueError(f"{name} must be finite and {'>=' if zero else '>'} 0, got {value!r}")
    return float(value)


def require_nonnegative(name: str, value: Any) -> float:
    """A finite number >= 0."""
    return require_positive(name, value, zero=True)


def require_count(name: str, value: Any, *, low: int = 1) -> int:
    """An integer >= low."""
    value = plain_number(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < low:
        raise ValueError(f"{name} must be >= {low}, got {value}")
    return value


def require_flag(name: str, value: Any, *, optional: bool = False) -> Any:
    """True or False, or None where that is an option."""
    value = plain_number(value)
    if not isinstance(value, bool) and not (optional and value is None):
        raise TypeError(f"{name} must be True or False{' or None' * optional}, got {value!r}")
    return value


def require_callable(name: str, value: Any, *, optional: bool = False) -> Any:
    """Something that can be called, or None where that is an option."""
    if not callable(value) and not (optional and value is None):
        raise TypeError(f"{name} must be callable{' or None' * optional}, got {type(value)}")
    return value


def require_options(
    callables: dict[str, Any], flags: dict[str, Any], counts: dict[str, Any]
) -> None:
    """Check options at once: things to call or None, flags, and integers >= 1."""
    for name, value in callables.items():
        if value is not None and not callable(value):
            require_callable(name, value, optional=True)
    for name, value in flags.items():
        if type(value) is not bool:
            require_flag(name, value)
    for name, value in counts.items():
        if type(value) is not int or value < 1:
            require_count(name, value)


def require_instance(
    name: str, value: Any, kind: Any, expected: str, *, optional: bool = False
) -> Any:
    """An instance of ``kind``, which the message calls ``expected``, or None as an option."""
    if not isinstance(value, kind) and not (optional and value is None):
        shown = repr(value)
        shown = shown if len(shown) <= LONGEST else str(type(value))  # not a tensor's numbers
        raise TypeError(f"{name} must be {expected}{' or None' * optional}, got {shown}")
    return value


def require_kind(
    name: str, value: Any, kind: type, known: Iterable[type], *, optional: bool = False
) -> Any:
    """An instance of ``kind``; its class, or the name of one of the ``known``, stands for its defaults.

    Names are those of the classes in any case: "anderson".
    """
    if isinstance(value, kind) or (optional and value is None):
        return value
    names = {each.__name__.lower(): each for each in known}
    if isinstance(value, str):
        if value.lower() not in names:
            listed = ", ".join(sorted(names))
            raise ValueError(
                f"{name} must be one of {listed} or a solvers.{kind.__name__}, got {value!r}"
            )
        value = names[value.lower()]
    if isinstance(value, type) and issubclass(value, kind) and not inspect.isabstract(value):
        value = value()
    example = next(iter(names.values())).__name__
    expected = f"a solvers.{kind.__name__} such as {example}(), its class or its name"
    return require_instance(name, value, kind, expected, optional=optional)


def require_finite(name: str, *leaves: Any) -> None:
    """No NaN or infinity in floating-point tensors (B, ...) or (); other leaves count as finite.

    Tensors on a GPU are not examined, because that would wait for the device.
    """
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            continue
        # The sum alone may overflow.
        if leaf.device.type != "cpu" or math.isfinite(leaf.detach().sum().item()):
            continue
        if leaf.dim() == 0:
            raise ValueError(f"{name} must be finite, got {leaf.item()}")
        bad = ~torch.isfinite(leaf.detach()).reshape(leaf.shape[0], -1).all(1)
        if bool(bad.any()):
            rows = torch.nonzero(bad).flatten().tolist()
            raise ValueError(f"{name} must be finite, got NaN or infinity in samples {rows[:10]}")


def require_integers(
    name: str, value: Any, shape: tuple[int | None, ...], *, high: int, low: int = 0
) -> Tensor:
    """A tensor of integers within [low, high], of this ``shape`` behind the batch; None is any size.

    On a GPU, to a compiler and within a transform numbers are not shown: asking would wait, or fail.
    """
    fits = isinstance(value, Tensor) and value.dim() == len(shape) + 1
    sizes = tuple(value.shape[1:]) if fits else shape
    integers = fits and value.dtype in INTEGERS
    if not integers or any(s not in (None, size) for s, size in zip(shape, sizes, strict=True)):
        wanted = ", ".join("N" if size is None else str(size) for size in ("B", *shape))
        got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value)
        raise ValueError(f"{name} must be an integer tensor ({wanted}), got {got}")
    hidden = value.device.type != "cpu" or torch.compiler.is_compiling() or in_transform()
    if value.numel() and not hidden:
        least, most = (int(each) for each in value.aminmax())
        if least < low or most > high:
            raise ValueError(f"{name} must lie in [{low}, {high}], got {least} to {most}")
    return value


def require_choice(name: str, value: Any, choices: Iterable[str]) -> str:
    """One of ``choices``."""
    known = tuple(choices)
    if value not in known:
        raise ValueError(f"{name} must be one of {known}, got {value!r}")
    return value
