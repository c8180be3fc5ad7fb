"""Hints for users who use the argument names of ``torch.nn`` or Hugging Face."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
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
}  # fmt: skip


def hint_names(function: Function) -> Function:
    """Make ``function`` raise a TypeError with this package's name for arguments of other libraries."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        foreign = [name for name in named if name not in known and OURS.get(name) in known]
        if foreign:
            hints = ", ".join(f"{name} is called {OURS[name]} here" for name in foreign)
            raise TypeError(f"{function.__qualname__.removesuffix('.__init__')}: {hints}")
        return function(*arguments, **named)

    return cast(Function, call)
