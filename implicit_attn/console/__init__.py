"""The command ``implicit-attn``; a sub-command is imported when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from solvers.lazy import lazy_names

if TYPE_CHECKING:
    from implicit_attn.console import completion, demo, info, study, weights
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "implicit_attn.console.completion": "",
            "implicit_attn.console.demo": "",
            "implicit_attn.console.info": "",
            "implicit_attn.console.study": "",
            "implicit_attn.console.weights": "",
        },
    )

__all__ = ["completion", "demo", "info", "study", "weights"]
