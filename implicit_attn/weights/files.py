"""Where the files of the shipped weights are."""

from __future__ import annotations

import difflib
from pathlib import Path

from implicit_attn.command_line import place

FOLDER = Path(__file__).resolve().parent
SUFFIX = ".safetensors"


def shipped_names() -> list[str]:
    """The names of all models whose weights come along."""
    return sorted(path.stem for path in FOLDER.glob(f"*{SUFFIX}"))


def weights_path(name: str) -> Path:
    """The file of the shipped weights ``name``, ``"mnist-hyperset"`` for example.

    Raises:
        ValueError: there are none of that name; the message has the nearest ones.
    """
    known = shipped_names()
    if name not in known:
        near = difflib.get_close_matches(name, known, cutoff=0.4) or known
        raise ValueError(f"name must be that of shipped weights, {' or '.join(near)}, got {name!r}")
    return FOLDER / f"{name}{SUFFIX}"


def weights_file(text: str) -> Path:
    """``type=`` of an option: a file, or the name of shipped weights where no such file is."""
    path = place(text)
    return weights_path(text) if text in shipped_names() and not path.exists() else path
