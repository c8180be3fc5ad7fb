"""The entry of ``implicit-attn``: which module runs a command line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import implicit_attn.console as console
import implicit_attn.programs as programs
import implicit_attn.programs.systems as systems
from implicit_attn.command_line import Parser, called, command

PROGRAM = "implicit-attn"
TRAIN = (
    "classify", "language-model", "masked-images", "mnist-spins", "solve-sudoku", "sudoku", "vit-images",
)  # fmt: skip
RUN = (
    "bare-attention", "easy-to-hard", "hopfield-density", "potts-recovery", "sudoku-potts", "tap-vs-exact",
)  # fmt: skip
GROUPS: dict[str, tuple[Any, tuple[str, ...]]] = {"train": (programs, TRAIN), "run": (systems, RUN)}
ALONE = ("demo", "study")


def main(words: Sequence[str] | None = None) -> None:
    """Run ``implicit-attn WORDS``; None: the words of the process."""
    words = sys.argv[1:] if words is None else words
    parser = Parser(prog=PROGRAM, description="Implicit attention: trainings, studies, a demo.")
    parser.add_argument("command", choices=(*ALONE, *GROUPS))
    with command(parser):
        name = parser.parse_args(words[:1]).command
    if name in ALONE:
        start(getattr(console, name).main, words[1:], name)
        return
    module, names = GROUPS[name]
    parser = Parser(prog=f"{PROGRAM} {name}")
    parser.add_argument("program", choices=names)
    with command(parser):
        program = parser.parse_args(words[1:2]).program
    start(getattr(module, program.replace("-", "_")).main, words[2:], name, program)


def start(entry: Callable[[Sequence[str]], None], words: Sequence[str], *names: str) -> None:
    """Run ``entry``, whose parser says ``implicit-attn NAMES``."""
    with called(" ".join((PROGRAM, *names))):
        entry(words)
