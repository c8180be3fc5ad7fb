"""Files of ``examples`` as modules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """A file of ``examples`` as a module, imported as if it were run there."""
    threads, known = torch.get_num_threads(), set(sys.modules)

    def loaded(name: str) -> ModuleType:
        path = EXAMPLES / name
        monkeypatch.syspath_prepend(str(path.parent))
        return importlib.import_module(path.name)

    yield loaded
    torch.set_num_threads(threads)
    for name in set(sys.modules) - known:
        if str(EXAMPLES) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]
