"""Scripts of the examples and benchmarks as modules."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def load_script(path: Path) -> Any:
    """The module of a file that is in no package."""
    found = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module
