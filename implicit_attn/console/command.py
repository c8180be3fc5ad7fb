"""The entry of ``implicit-attn``: which module runs a command line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import implicit_attn.console as console
import implicit_attn.programs as programs
import implicit_attn.programs.systems as systems
from implicit_attn import __version__
from implicit_attn.command_line import Parser, called, command, mistakes
from implicit_attn.console.tables import COMMANDS, EPILOG, GROUPS

PROGRAM = "implicit-attn"
SHELLS = ("bash", "zsh", "tcsh")
HOMES: dict[str, Any] = {"train": programs, "run": systems}
Entry = Callable[[Sequence[str]], None]


def main(words: Sequence[str] | None = None) -> None:
    """Run the command ``implicit-attn``.

    Args:
        words: of the command line, without the name of the program; None: those of the process.

    Raises:
        SystemExit: as the sub-command has it; 2 with one line where the words name none.
    """
    words = list(sys.argv[1:] if words is None else words)
    top = top_parser()
    own = _until(words, COMMANDS)
    with command(top):
        options = top.parse_args(words[:own])
        if options.print_completion is not None:
            with mistakes():
                print(console.completion.script(top_parser(full=True), options.print_completion))
            return
        if options.command is None:
            top.error(
                f"a command is missing: one of {', '.join(COMMANDS)}; --help says what they do"
            )
    name, words = options.command, words[own:]
    if name not in GROUPS:
        start(getattr(console, name).main, words, name)
        return
    group = group_parser(name)
    own = _until(words, GROUPS[name])
    with command(group):
        program = group.parse_args(words[:own]).program
        if program is None:
            group.error(f"a program is missing: one of {', '.join(GROUPS[name])}")
    start(program_of(name, program).main, words[own:], name, program)


def start(entry: Entry, words: Sequence[str], *names: str) -> None:
    """Run ``entry``, whose parser calls itself ``implicit-attn NAMES``."""
    with called(" ".join((PROGRAM, *names))):
        entry(words)


def program_of(group: str, name: str) -> Any:
    """The module of a program, imported now."""
    return getattr(HOMES[group], name.replace("-", "_"))


def top_parser(full: bool = False) -> Parser:
    """Knows the sub-commands by name; with ``full``, for the completion, also all their options."""
    parser = Parser(
        prog=PROGRAM,
        description="Attention layers defined by an energy: trainings, studies, trained models.",
        epilog=EPILOG[""],
    )
    version = f"{PROGRAM} {__version__}"
    parser.add_argument("--version", action="version", version=version)
    parser.add_argument(
        "--print-completion",
        choices=SHELLS,
        metavar="SHELL",
        help=f"print what completes this command in {', '.join(SHELLS)}, to be sourced",
    )
    _add_names(parser, "command", COMMANDS, _options_of if full else None)
    return parser


def group_parser(group: str, full: bool = False) -> Parser:
    """Knows the programs of ``train`` or ``run`` by name; ``full`` as above."""
    parser = Parser(prog=f"{PROGRAM} {group}", description=COMMANDS[group], epilog=EPILOG[group])
    options = partial(_options_of_program, group) if full else None
    _add_names(parser, "program", GROUPS[group], options)
    return parser


def _add_names(
    parser: Parser,
    kind: str,
    table: Mapping[str, str],
    options_of: Callable[[str], Parser] | None,
) -> None:
    under = parser.add_subparsers(title=f"{kind}s", dest=kind, metavar=kind.upper())
    for name, text in table.items():
        parents = [] if options_of is None else [options_of(name)]
        under.add_parser(name, help=text, add_help=False, parents=parents)


def _options_of(name: str) -> Parser:
    return group_parser(name, full=True) if name in GROUPS else getattr(console, name).parser()


def _options_of_program(group: str, name: str) -> Parser:
    return program_of(group, name).command_line()


def _until(words: Sequence[str], names: Iterable[str]) -> int:
    """How many words there are up to the first of ``names``; all where there is none."""
    known = set(names)
    return next((k + 1 for k, word in enumerate(words) if word in known), len(words))
