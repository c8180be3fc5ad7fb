"""The progress that studies show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from implicit_attn.optional import require

Advance = Callable[[str], object]  # called with the name of what is computed next


@contextmanager
def progress(title: str, total: int | None = None) -> Iterator[Advance]:
    """A progress bar; what is yielded is called with the name of what is computed next."""
    tqdm: Any = require("tqdm", extra="examples").tqdm
    with tqdm(total=total, desc=title, leave=False, disable=None) as bar:  # None: silent in a log

        def advance(what: str) -> None:
            if getattr(bar, "postfix", None):
                bar.update()
            bar.set_postfix_str(what)

        yield advance
