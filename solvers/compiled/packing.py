"""Records of tensors as flat lists, for programs that take and return tensors alone."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class _Place:
    """Stands in a skeleton for the tensor of this number."""

    number: int


@dataclass(frozen=True)
class Skeleton:
    """A record with places where its tensors were, and the key of all else in it."""

    record: Any
    key: Hashable


@dataclass
class Packed:
    """A record as the list of its tensors, each once, and its skeleton.

    ``kind`` tells records apart for which programs differ: by their structure and by what :func:`look`
    sees of the tensors. Whoever knows that it is always the same may say so by another value.
    """

    tensors: list[Tensor]
    skeleton: Skeleton
    kind: Hashable

    def record(self) -> Any:
        return unpack(self.tensors, self.skeleton)

    def get(self, name: str) -> Tensor:
        """The tensor in the field ``name`` of the record."""
        return self.tensors[getattr(self.skeleton.record, name).number]


def pack(record: Any) -> Packed:
    """Take a record apart.

    A record is a tensor, None, a plain value, or a tuple, list, dict, dataclass or object with
    ``__dict__`` of records. A tensor that stands at several places is one tensor at all of them.
    """
    tensors: list[Tensor] = []
    numbers: dict[int, int] = {}

    def walk(value: Any) -> tuple[Any, Hashable]:
        if isinstance(value, Tensor):
            number = numbers.setdefault(id(value), len(tensors))
            if number == len(tensors):
                tensors.append(value)
            return _Place(number), number
        if isinstance(value, (tuple, list)):
            parts = [walk(item) for item in value]
            return _sequence(value, [part for part, _ in parts]), (
                type(value),
                *(k for _, k in parts),
            )
        if isinstance(value, dict):
            found = {name: walk(item) for name, item in value.items()}
            keys = tuple((name, key) for name, (_, key) in found.items())
            return {name: part for name, (part, _) in found.items()}, (dict, *keys)
        names = _names(value)
        if names is None:
            return value, _checked(value)
        bare, keys = copy(value), []
        for name in names:
            part, key = walk(getattr(value, name))
            object.__setattr__(bare, name, part)
            keys.append((name, key))
        return bare, (type(value), *keys)

    bare, key = walk(record)
    return Packed(tensors, Skeleton(bare, key), (key, look(tensors)))


def _sequence(like: Any, parts: list[Any]) -> Any:
    """A list, tuple or named tuple like ``like``."""
    return type(like)(*parts) if hasattr(like, "_fields") else type(like)(parts)


def _checked(value: Any) -> Hashable:
    """The fingerprint of what is no record; TypeError for an object that could hold tensors."""
    if hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        frozen = getattr(type(value), "__dataclass_params__", None)
        if frozen is None or not frozen.frozen:
            raise TypeError(
                f"a compiled layer cannot look into a {type(value).__name__}: pass tensors, numbers, tuples, "
                "lists and dicts, or register it as a pytree"
            )
    return fingerprint(value)


@dataclass(frozen=True)
class _Same:
    """An object by its identity; it stays alive."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def fingerprint(value: Any) -> Hashable:
    """A key that differs where ``value`` does: by value for what is hashable so, else by identity."""
    if isinstance(value, (bool, int, float, str, bytes, type(None))):
        return type(value), value
    if isinstance(value, (tuple, list)):
        return (type(value), *[fingerprint(item) for item in value])
    if isinstance(value, dict):
        return (
            dict,
            *[(_Same(k) if k.__hash__ is None else k, fingerprint(v)) for k, v in value.items()],
        )
    if is_dataclass(value) and not isinstance(value, type):
        return (
            type(value),
            *[(e.name, fingerprint(getattr(value, e.name))) for e in fields(value)],
        )
    return _Same(value)


def look(tensors: Iterable[Tensor]) -> Hashable:
    """What a program depends on of the tensors that it is given."""
    return tuple([(t.shape, t.stride(), t.dtype, t.device) for t in tensors])


def unpack(tensors: list[Tensor], skeleton: Skeleton) -> Any:
    """The record that :func:`pack` took apart, made of ``tensors``."""

    def walk(value: Any) -> Any:
        if isinstance(value, _Place):
            return tensors[value.number]
        if isinstance(value, (tuple, list)):
            return _sequence(value, [walk(item) for item in value])
        if isinstance(value, dict):
            return {name: walk(item) for name, item in value.items()}
        names = _names(value)
        if names is None:
            return value
        whole = copy(value)
        for name in names:
            object.__setattr__(whole, name, walk(getattr(value, name)))
        return whole

    return walk(skeleton.record)


def _names(value: Any) -> list[str] | None:
    """Names of the fields of a record; None for a plain value."""
    if is_dataclass(value) and not isinstance(value, type):
        # A frozen dataclass holds hyperparameters: its own equality tells them apart.
        frozen = type(value).__dataclass_params__.frozen  # type: ignore[attr-defined]
        return None if frozen else [entry.name for entry in fields(value)]
    if type(value).__module__.startswith("solvers.") and hasattr(value, "__dict__"):
        return sorted(vars(value))
    return None
