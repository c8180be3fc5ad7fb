"""Which of a state, an input and a mask somebody's function or method takes, to call it with those."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn


class FunctionCall(NamedTuple):
    """How a function ``(z)`` or ``(z, x)``, with or without ``mask=``, is called with all three."""

    name: str
    takes_x: bool
    takes_mask: bool
    mask_has_default: bool

    @classmethod
    def read(cls, function: Any) -> FunctionCall:
        """From the signature of a function, or of a module's ``forward``."""
        if not callable(function):
            raise TypeError(f"function must be callable, got {function!r}")
        name = getattr(function, "__qualname__", type(function).__name__)
        # The signature of a module's __call__ takes anything.
        called = function.forward if isinstance(function, nn.Module) else function
        try:
            return cls._of(name, inspect.signature(called), f"{name} must be callable as function")
        except ValueError as error:
            raise TypeError(
                f"the signature of {name} cannot be read; wrap it in a function"
            ) from error

    @classmethod
    def of_forward(cls, module: type[nn.Module]) -> FunctionCall:
        """From the signature of a class's ``forward``."""
        name, signature = f"{module.__name__}.forward", inspect.signature(module.forward)
        without_self = signature.replace(parameters=list(signature.parameters.values())[1:])
        return cls._of(name, without_self, f"{name} must be callable as forward")

    @classmethod
    def _of(cls, name: str, signature: inspect.Signature, wanted: str) -> FunctionCall:
        parameters = signature.parameters
        for takes_x, takes_mask in ((True, True), (False, True), (True, False), (False, False)):
            if _binds(signature, 1 + takes_x, {"mask"} if takes_mask else ()):
                break
        else:
            takes_x = takes_mask = False
            parameters = {}  # type: ignore[assignment]
        # An x by name alone would be left out, but for one that functools.partial has bound.
        lost = not takes_x and "x" in parameters and parameters["x"].default is None
        if not parameters or lost or ("mask" in parameters and not takes_mask):
            raise TypeError(
                f"{wanted}(z) or {wanted.split()[-1]}(z, x), with mask= after them if it takes one, got "
                f"{name}{signature}"
            )
        default = "mask" not in parameters or parameters["mask"].default is not inspect._empty
        return cls(name, takes_x, takes_mask, default)

    def __call__(self, function: Callable[..., Any], z: Any, x: Any, mask: Tensor | None) -> Any:
        if mask is not None and not self.takes_mask:
            raise ValueError(
                f"{self.name} takes no mask, so masked tokens would influence it; give it a parameter "
                f"mask=None and hide them, or pass no mask, got one of shape {tuple(mask.shape)}"
            )
        arguments = (z, x) if self.takes_x else (z,)
        # A default is left alone: functools.partial may have put somebody's own mask there.
        given = self.takes_mask and not (mask is None and self.mask_has_default)
        return function(*arguments, mask=mask) if given else function(*arguments)


def check_methods(cls: type, methods: dict[str, str]) -> None:
    """The methods that ``cls`` defines must take the arguments (``"z x"``) and ``mask=``.

    Raises:
        TypeError: one does not.
    """
    for name, arguments in methods.items():
        method = vars(cls).get(name)
        if not inspect.isfunction(method):
            continue
        signature, names = inspect.signature(method), arguments.split()
        if not _binds(signature, 1 + len(names), {"mask"}):
            raise TypeError(
                f"{cls.__name__}.{name} must be callable as {name}({', '.join(names)}, mask=mask), got "
                f"{name}{signature}"
            )


def _binds(signature: inspect.Signature, count: int, names: Any) -> bool:
    try:
        signature.bind(*[None] * count, **dict.fromkeys(names))
    except TypeError:
        return False
    return True
