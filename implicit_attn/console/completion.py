"""``implicit-attn --print-completion SHELL``: a static script, so that TAB starts no Python."""

from __future__ import annotations

import argparse

from implicit_attn.optional import require


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """What a shell sources to complete the command of ``parser``.

    Raises:
        ImportError: shtab is not installed; the message names the extra.
    """
    return require("shtab", extra="completion").complete(parser, shell)
