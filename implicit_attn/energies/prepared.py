"""What energies compute from the layer's input once a solve."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class Prepared(NamedTuple):
    """What ``Energy.prepare`` made of the layer's input: a pytree of tensors (B, ...) or None.

    It takes the place of ``x`` in the evaluations of a solve. Of a sum it holds one part for each term:
    what that term prepared, or ``x`` itself.
    """

    parts: Any


class Preparing(Protocol):
    """An energy, as far as its input is concerned."""

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Any: ...

    def held(self, x: Any) -> Any: ...


def prepare_each(terms: Iterable[Preparing], x: Any, mask: Tensor | None) -> Any:
    """What the terms of a sum prepare, ``Prepared((one part a term))``; ``x`` if none does.

    Where some do, the others keep only the part of ``x`` that they look at.
    """
    each = list(terms)
    parts = [term.prepare(x, mask=mask) for term in each]
    if all(part is x for part in parts):
        return x
    pairs = zip(each, parts, strict=True)
    return Prepared(tuple(term.held(x) if part is x else part for term, part in pairs))


def with_parts(terms: Iterable[Any], x: Any) -> Iterable[tuple[Any, Any]]:
    """Each term of a sum with its input: its part of what :func:`prepare_each` returned, or ``x``."""
    if isinstance(x, Prepared):
        return zip(terms, x.parts, strict=True)
    return ((term, x) for term in terms)


def part_of(x: Any, key: Any) -> Any:
    """``x[key]`` of a dict, tuple or list, or ``x.key``; TypeError, ValueError where there is none."""
    if not isinstance(x, (dict, tuple, list)):
        kind = type(x).__name__
        raise TypeError(f"x must be a dict or a tuple that holds {key!r}, got {kind}")
    try:
        fields = getattr(x, "_fields", None)
        if isinstance(key, str) and fields is not None:
            # A tuple has methods, too.
            return x[fields.index(key)]  # type: ignore[call-overload]
        return x[key]  # type: ignore[call-overload]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        held = list(x) if isinstance(x, dict) else f"{len(x)} parts"
        raise ValueError(f"x must hold {key!r}, it holds {held}") from error
