"""Launching a kernel by the handle of an earlier launch of the same kind.

Triton's own way binds, specialises and looks up the arguments of every launch anew, which takes the
host longer than a small layer takes the device.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from implicit_attn.kernels.bi_softmax.triton.arguments import INTERPRETED

# A compiled kernel, and the values of the constants that follow its arguments.
Handle = tuple[Any, tuple[Any, ...]]
_HANDLES: dict[tuple[object, ...], Handle] = {}
MOST = 4096  # kinds of launches that are remembered


def launch(kernel: Any, programs: int, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """``kernel[(programs,)](*args, **options)`` on the current device, that of ``args[0]``.

    ``args`` are tensors, numbers and None, in the kernel's order; ``options`` its constants and what
    the compiler is told. Numbers that are whole are compared by value, so whatever Triton makes of
    an argument (a constant 1, a multiple of 16), it made the same of it before.
    """
    grid = (programs, 1, 1)
    if INTERPRETED:
        kernel[grid](*args, **options)
        return
    key = kind(kernel, args, options)
    handle = _HANDLES.get(key)
    if handle is None:
        compiled = kernel[grid](*args, **options)
        if compiled is not None:
            if len(_HANDLES) >= MOST:
                _HANDLES.clear()
            names = kernel.arg_names[len(args) :]
            _HANDLES[key] = compiled, tuple(options[name] for name in names)
        return
    compiled, constants = handle
    compiled[grid](*args, *constants)


def kind(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[object, ...]:
    """Launches of one kind take the same compiled kernel: floats differ, and where tensors lie."""
    found: list[object] = [id(kernel), args[0].device.index]
    for value in args:
        if isinstance(value, Tensor):
            found += value.dtype, value.data_ptr() % 16
        elif type(value) is float:
            found.append(float)
        else:
            found.append(value)
    found.extend(options.values())
    return tuple(found)
