"""Hints for users who misspell an argument, or use its name in another library."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

# Argument names of other libraries and of this package.
OURS = {
    "d_model": "dim", "embed_dim": "dim", "hidden_size": "dim", "n_embd": "dim",
    "nhead": "heads", "num_heads": "heads", "num_attention_heads": "heads", "n_head": "heads",
    "dim_feedforward": "hidden", "intermediate_size": "hidden",
    "num_layers": "layers", "num_hidden_layers": "layers", "n_layer": "layers",
    "vocab_size": "vocabulary", "max_position_embeddings": "length",
    "max_new_tokens": "count", "top_k": "most",
    "tol": "tolerance", "f_tol": "tolerance", "max_iter": "max_steps", "maxiter": "max_steps",
    "f_max_iter": "max_steps", "max_iterations": "max_steps", "f_solver": "solver", "method": "solver",
    "z0": "start",
}  # fmt: skip


def closest_name(name: str, known: Collection[str]) -> str:
    """Return a question that suggests a known name of this meaning or spelling, or "" if there is none."""
    own = OURS.get(name)
    close = [own] if own in known else difflib.get_close_matches(name, sorted(known), 1)
    return f"; did you mean {close[0]}?" if close else ""


def hint_names(function: Function, passed: Callable[..., Any] | None = None) -> Function:
    """Make ``function`` raise a TypeError that suggests names for unknown arguments.

    ``passed``: the function that gets its ``**options``.
    """
    parameters = inspect.signature(function).parameters
    accepts_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    known = frozenset(parameters)
    if passed is not None:
        accepts_any, known = False, known | frozenset(inspect.signature(passed).parameters)

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if known.issuperset(named):
            return function(*arguments, **named)
        unknown = [name for name in named if name not in known]
        owner = function.__qualname__
        if owner.endswith(".__init__"):
            owner = type(arguments[0]).__name__  # of the subclass
        if foreign := [name for name in unknown if OURS.get(name) in known]:
            hints = ", ".join(f"{name} is called {OURS[name]} here" for name in foreign)
            raise TypeError(f"{owner}: {hints}")
        if not accepts_any:
            hint = closest_name(unknown[0], known)
            if not hint and "layer" in known:
                hint = "; options of the equilibrium layer go into layer={...}"
            raise TypeError(f"{owner} has no argument {unknown[0]!r}{hint}")
        return function(*arguments, **named)

    return cast(Function, call)
