"""Which of a state, an input and a mask somebody's function or method takes, to call it with those."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

_KINDS = inspect.Parameter
_BY_NAME = (_KINDS.POSITIONAL_OR_KEYWORD, _KINDS.KEYWORD_ONLY)
_PLACED = (_KINDS.POSITIONAL_ONLY, _KINDS.POSITIONAL_OR_KEYWORD)

# How many arguments a method has before ``x``, without ``self``.
ENERGY_METHODS = {"forward": 1, "value_and_grad": 1, "grad": 1, "hvp": 2, "prepare": 0}
UPDATE_METHODS = {"forward": 1, "joint": 1, "prepare": 0}


class FunctionCall(NamedTuple):
    """Which of a state, an input and a mask a function takes, to call it with those."""

    name: str
    takes_x: bool
    takes_mask: bool
    mask_has_default: bool

    @classmethod
    def read(cls, function: Any) -> FunctionCall:
        """From the signature, ``function(z)`` or ``function(z, x)``, with or without a ``mask``."""
        if not callable(function):
            raise TypeError(f"function must be callable, got {function!r}")
        name = getattr(function, "__qualname__", type(function).__name__)
        # The signature of a module's __call__ takes anything.
        called = function.forward if isinstance(function, nn.Module) else function
        try:
            signature = inspect.signature(called)
        except ValueError as error:
            raise TypeError(
                f"the signature of {name} cannot be read; wrap it in a function"
            ) from error
        parameters = signature.parameters.values()
        rest = [p for p in parameters if p.name != "mask" or p.kind not in _BY_NAME]
        placed = [p for p in rest if p.kind in _PLACED]
        starred = any(p.kind is _KINDS.VAR_POSITIONAL for p in rest)
        needed = placed[2:] + [p for p in rest if p.kind is _KINDS.KEYWORD_ONLY]
        wrong = any(p.default is _KINDS.empty for p in needed) or not (placed or starred)
        if wrong or _misplaced(list(parameters), 1):
            raise TypeError(
                f"{name} must be callable as function(z) or function(z, x), with mask= after them if it "
                f"takes one, got {name}{signature}"
            )
        masks = [p for p in parameters if p not in rest]
        has_default = all(p.default is not _KINDS.empty for p in masks)
        return cls(name, len(placed) > 1 or starred, bool(masks), has_default)

    def __call__(self, function: Callable[..., Any], z: Any, x: Any, mask: Tensor | None) -> Any:
        if mask is not None and not self.takes_mask:
            raise ValueError(
                f"{self.name} takes no mask, so masked tokens would influence it; give it a parameter "
                f"mask or pass no mask, got {tuple(mask.shape)}"
            )
        arguments = (z, x) if self.takes_x else (z,)
        # A default is left alone: functools.partial may have put somebody's own mask there.
        given = self.takes_mask and not (mask is None and self.mask_has_default)
        return function(*arguments, mask=mask) if given else function(*arguments)


def _misplaced(parameters: list[inspect.Parameter], before: int) -> bool:
    """Whether a call ``(*before, x, mask=mask)`` would put x where the mask belongs, or nowhere."""
    placed = [p for p in parameters if p.kind in _PLACED]
    behind = [p.name for p in placed[: before + 1]]
    mask_first = "mask" in behind and len(placed) > behind.index("mask") + 1
    # functools.partial makes an x that it has bound one by name, too, with a default that is no None.
    by_name = (p for p in parameters if p.kind is _KINDS.KEYWORD_ONLY)
    x_by_name = any(p.name == "x" and p.default is None for p in by_name)
    return mask_first or x_by_name


def complete(cls: type, methods: dict[str, int]) -> None:
    """Let the methods that ``cls`` itself defines be called with an x and a mask that they do not take.

    An energy may define ``forward(self, z)`` or ``forward(self, z, x)``; it is called with x and a mask
    all the same. An x that is not taken is left out. A mask that is not taken raises.

    Args:
        cls: a class whose body may define some of the methods.
        methods: name of a method -> how many arguments it has before ``x``, without ``self``.

    Raises:
        TypeError: for a method that cannot be called with those arguments, x and ``mask=``.
    """
    for name, first in methods.items():
        method = vars(cls).get(name)
        if not inspect.isfunction(method):
            continue
        signature = inspect.signature(method)
        parameters = list(signature.parameters.values())[1:]
        kinds = {p.kind for p in parameters}
        takes_mask = _KINDS.VAR_KEYWORD in kinds or any(
            p.name == "mask" and p.kind in _BY_NAME for p in parameters
        )
        rest = [p for p in parameters if p.name != "mask" or p.kind not in _BY_NAME]
        placed = [p for p in rest if p.kind in _PLACED]
        starred = _KINDS.VAR_POSITIONAL in kinds
        others = placed[first + 1 :] + [p for p in rest if p.kind is _KINDS.KEYWORD_ONLY]
        short = len(placed) < first and not starred
        wrong = short or any(p.default is _KINDS.empty for p in others)
        if wrong or _misplaced(parameters, first):
            raise TypeError(
                f"{cls.__name__}.{name} must be callable with {first} argument(s), x and mask=, of which "
                f"it may leave out x and mask, got {name}{signature}"
            )
        takes_x = len(placed) > first or starred
        if not (takes_x and takes_mask):
            label = f"{cls.__name__}.{name}"
            setattr(cls, name, _completed(method, label, None if takes_x else first, takes_mask))


def _completed(
    method: Callable[..., Any], label: str, alone: int | None, takes_mask: bool
) -> Callable[..., Any]:
    """``method`` that may be given a mask, and an x after its ``alone`` arguments; None: it takes x."""

    @functools.wraps(method)
    def called(self: Any, *state: Any, mask: Tensor | None = None, **named: Any) -> Any:
        if takes_mask:
            named["mask"] = mask
        elif mask is not None:
            raise ValueError(
                f"{label} takes no mask, so masked tokens would influence it; give it a parameter "
                f"mask=None and hide them, or pass no mask, got one of shape {tuple(mask.shape)}"
            )
        if alone is not None:
            named.pop("x", None)
            state = state[:alone] if len(state) == alone + 1 else state
        return method(self, *state, **named)

    return called
