"""``implicit-attn demo``: the classifier on the embedded digits, over the report of the last time."""

from __future__ import annotations

from collections.abc import Sequence

from implicit_attn.command_line import Parser
from implicit_attn.programs import classify


def parser() -> Parser:
    """The options are those of ``implicit-attn train classify``."""
    return classify.command_line()


def main(words: Sequence[str]) -> None:
    """Train and report; unlike ``train classify`` it replaces the report of an earlier run."""
    stated = ("--resume", "--overwrite")  # or their beginnings, which argparse takes as well
    kept = any(len(word) > 2 and option.startswith(word) for word in words for option in stated)
    classify.main([*words] if kept else [*words, "--overwrite"])
