"""Checks of arguments: an error that names the argument, what came and what was expected."""

from __future__ import annotations


def require_number(
    name: str, value: object, *, low: float, high: float, closed: bool = True
) -> None:
    """A hyperparameter within [low, high] (``closed``) or (low, high]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not (low <= value <= high) or (not closed and value == low):
        left = "[" if closed else "("
        raise ValueError(f"{name} must be in {left}{low}, {high}], got {value!r}")


def require_count(name: str, value: object, *, low: int = 1) -> None:
    """A hyperparameter that is an integer >= low."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < low:
        raise ValueError(f"{name} must be >= {low}, got {value}")
