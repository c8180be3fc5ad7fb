"""Trainings that are done, in files: a run that was cut off goes on after the last of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from implicit_attn.studies.experiments.harder.found import Found


def kept(folder: Path | None, name: str, seed: int, by: Any, make: Callable[[], Found]) -> Found:
    """What an earlier run found and left in ``folder``, else what ``make`` finds, which is left there.

    Args:
        folder: of the files, made where there is none; None: nothing is kept.
        name, seed: of the model, for the name of the file.
        by: everything that the numbers depend on, as JSON can hold it.

    Raises:
        ValueError: the file is of other options, or no such file.
    """
    if folder is None:
        return make()
    path = folder / f"{name.replace(',', '').replace(' ', '-')}-{seed}.json"
    wanted = json.loads(json.dumps(by))
    if path.is_file():
        return _read(path, wanted)
    found = make()
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")  # a kill in between leaves no half of a file
    part.write_text(json.dumps({"by": wanted, **found.as_plain()}))
    os.replace(part, path)
    return found


def _read(path: Path, wanted: Any) -> Found:
    try:
        read = json.loads(path.read_text())
        by, found = read.pop("by"), Found.from_plain(read)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"keep must hold files of this experiment, but {path} is none") from error
    if by != wanted:
        raise ValueError(f"keep must be of the same options, but {path} is of {by}, not {wanted}")
    return found
