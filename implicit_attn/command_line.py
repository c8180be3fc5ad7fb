"""Command lines: options with ranges, and mistakes that end in one line instead of a traceback.

parser = Parser(description="...")
parser.add_argument("--heads", type=count)
with command(parser):
    options = parser.parse_args()
    with mistakes():
        model = build(options)  # a ValueError here is the user's
    train(model)  # and here a fault of the program
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import reprlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch

INTERRUPTED, WRONG = 130, 2  # exit codes: of Ctrl-C as in a shell, and of argparse
LONGEST_MESSAGE = 1000  # in characters
LARGEST_SEED = 2**63 - 1  # a generator of torch takes no larger one
LARGEST_COUNT = 2**31 - 1
LARGEST_SIZE = 2**16  # of a dimension of a model; its matrices grow with the square
# A number within this keeps apart from the end of float32, where torch raises errors of its own.
LARGEST_NUMBER = 1e30
# What a wrong argument, a wrong file or a missing package raises.
MISTAKES = (ValueError, TypeError, OverflowError, ImportError, OSError)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line without the usage, ``PROG: error: ...``, exit code 2."""

    def __init__(self, *, prog: str | None = None, **options: Any) -> None:
        super().__init__(prog=prog, **options)
        self.dests: frozenset[str] = frozenset()  # of the options of the last command line

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        found = super().parse_args(args, namespace)
        self.dests = frozenset(vars(found))
        return found

    def error(self, message: str) -> NoReturn:
        """Leave with one line, ``PROG: error: MESSAGE``, exit code 2."""
        self.leave(WRONG, f"error: {message}")

    def leave(self, code: int, message: str) -> NoReturn:
        """Leave with one line, whatever line breaks the message has, and however long it is."""
        line = " ".join(message.split())
        if len(line) > LONGEST_MESSAGE:
            line = f"{line[: LONGEST_MESSAGE // 2]} ... {line[-LONGEST_MESSAGE // 2 :]}"
        self.exit(code, f"{self.prog}: {line}\n")

    def named(self, message: str) -> str:
        """The message with the option in front that its first word is the name of.

        The library's errors begin with the name of the argument, which is that of the option.
        """
        first = re.match(r"\w+", message)
        if first is None or first[0] not in self.dests:
            return message
        return f"argument --{first[0].replace('_', '-')}: {message}"


@contextlib.contextmanager
def command(parser: Parser) -> Iterator[None]:
    """The whole of a program: what ends it ends it in one line.

    ``SystemExit`` with a text (of :func:`mistakes`), an ``OSError`` (a full disk, no permission) and
    want of memory end with the parser's error, Ctrl-C with 130. Any other error is a fault of the
    program and keeps its traceback.

    Raises:
        SystemExit: 2 or 130.
    """
    try:
        yield
        if sys.stdout is not None:  # a process may be started with its output closed
            sys.stdout.flush()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except SystemExit as end:
        if not isinstance(end.code, str):
            raise
        parser.error(parser.named(end.code))
    except BrokenPipeError:
        _silence_output()
        raise SystemExit(1) from None
    except OSError as error:
        parser.error(parser.named(str(error)))
    except (MemoryError, RuntimeError) as error:
        if not _lacks_memory(error):
            raise
        parser.error(f"out of memory: choose smaller sizes ({str(error)[:200]})")


@contextlib.contextmanager
def mistakes(
    option: str | None = None, *, first: bool = True, kinds: tuple[type[Exception], ...] = MISTAKES
) -> Iterator[None]:
    """The part of a program whose errors are those of what the user gave: options, files, packages.

    Args:
        option: the one that is at fault, ``"--data"`` for example; None: the message names it.
        first: this is the first process of a training. The variables of the environment do not tell:
            one that another launcher left behind would have a program end without a word.
        kinds: of errors that are the user's.

    Raises:
        SystemExit: with the message, for :func:`command`. In the further processes of a training,
            where the first one says the same, with 0: one that fails would have the first killed.
    """
    try:
        yield
    except kinds as error:
        message = str(error) or type(error).__name__
        text = message if option is None else f"argument {option}: {message}"
        raise SystemExit(text if first else 0) from error


def _lacks_memory(error: Exception) -> bool:
    """Of PyTorch's CPU allocator the message alone tells."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "DefaultCPUAllocator" in str(error)


def _silence_output() -> None:
    """The reader has gone (``| head``): leave nothing to flush into the closed pipe at the end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def whole(low: int, high: int = LARGEST_COUNT) -> Callable[[str], int]:
    """``type=`` of an option: an integer in [low, high]."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise argparse.ArgumentTypeError(f"must be an integer >= {low}, got {_shown(text)}")
        if value > high:
            raise argparse.ArgumentTypeError(f"must be an integer <= {high}, got {_shown(text)}")
        return value

    return read


def number(
    low: float = -LARGEST_NUMBER,
    high: float = LARGEST_NUMBER,
    *,
    above: bool = False,
    below: bool = False,
) -> Callable[[str], float]:
    """``type=`` of an option: a number in [low, high]; ``above`` and ``below`` leave an end out."""
    left, right = ">" if above else ">=", "<" if below else "<="

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        # Written so that NaN, which compares false, is refused as well.
        if not math.isfinite(value) or value < low or (above and value == low):
            limit = "" if low == -LARGEST_NUMBER else f" {left} {low:g}"
            raise argparse.ArgumentTypeError(f"must be a finite number{limit}, got {_shown(text)}")
        if value > high or (below and value == high):
            raise argparse.ArgumentTypeError(
                f"must be a number {right} {high:g}, got {_shown(text)}"
            )
        return value

    return read


def _shown(text: str) -> str:
    """On one line and short, whatever was given."""
    return reprlib.repr(text)


def place(text: str) -> Path:
    """``type=`` of an option: the name of a file or folder, which need not exist."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(
            f"must be the name of a file or folder, got {_shown(text)}"
        )
    return Path(text)


def folder(text: str) -> Path:
    """``type=`` of an option: a folder, or where one can be made."""
    path = place(text)
    try:
        standing = next(each for each in (path, *path.absolute().parents) if each.exists())
        if not standing.is_dir():
            raise argparse.ArgumentTypeError(f"must be a folder, but {standing} is a file")
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise argparse.ArgumentTypeError(f"must be a folder: {error}") from error
    return path


def make_folder(path: Path) -> None:
    """Make the folder ``path``, and see that a file can be written there, before work begins.

    Raises:
        OSError: it cannot be made or written.
    """
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path):  # permissions alone do not tell: think of /proc
        pass


def device(text: str) -> str:
    """``type=`` of an option: a device of PyTorch that is there."""
    try:
        torch.empty(0, device=text)
    except (RuntimeError, AssertionError) as error:  # a build without CUDA asserts
        reason = str(error).split("\n", 1)[0][:200]
        raise argparse.ArgumentTypeError(
            f"must be a device that is here, got {_shown(text)}: {reason}"
        ) from error
    return text


count = whole(1)
threads = whole(1, 1024)
size = whole(1, LARGEST_SIZE)  # of a dimension of a model
repeats = whole(1, 100_000)  # of a layer
seed_number = whole(0, LARGEST_SEED)
amount = number(0)
positive = number(0, above=True)
learning_rate = number(0, 1e6)  # and of decay: beyond, a step leaves float32
share = number(0, 1, below=True)
