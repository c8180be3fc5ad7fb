"""Files of ``examples`` are imported as if they were run in their folder."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = str(Path(__file__).resolve().parents[2] / "examples")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Import a file of ``examples`` by its name; another test imports it anew."""
    threads, known = torch.get_num_threads(), set(sys.modules)
    monkeypatch.syspath_prepend(EXAMPLES)
    yield importlib.import_module
    torch.set_num_threads(threads)
    for name in set(sys.modules) - known:
        if EXAMPLES in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]
