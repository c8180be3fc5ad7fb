"""What an experiment is, and the progress that studies and experiments show."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from implicit_attn.optional import require
from implicit_attn.studies.tables import Result

Advance = Callable[[str], None]  # called with the name of what is computed next
Option = tuple[str, Callable[[str], Any], Any, str]  # flag, type, default, help


class Experiment(NamedTuple):
    """A sub-command that makes its own data and models; the docstring of ``run`` is its help.

    Attributes:
        run: ``run(options, advance)`` -> the tables and the figure; ``advance(what)`` moves the
            progress bar to the next part. A ``ValueError`` or ``TypeError`` whose text begins with the
            name of an option ends the command in one line.
        title: of the figure.
        options: each a flag, the type that reads it, its default and its help. Flags that take
            several values have a tuple as default.
        quick: words of a command line that keep a run within a second or two; the tests run it.
    """

    run: Callable[[argparse.Namespace, Advance], Result]
    title: str
    options: tuple[Option, ...] = ()
    quick: tuple[str, ...] = ()

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add the options to the sub-command's parser."""
        for flag, kind, value, meaning in self.options:
            many: dict[str, Any] = {"nargs": "+"} if isinstance(value, tuple) else {}
            parser.add_argument(flag, type=kind, default=value, help=meaning, **many)


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
