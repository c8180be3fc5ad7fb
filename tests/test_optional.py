"""Optional dependencies: found, or an error that says how to install them."""

from __future__ import annotations

import json
import sys

import pytest

from implicit_attn.optional import require


def test_an_installed_module_is_returned() -> None:
    assert require("json", extra="examples") is json
    assert require("os.path", extra="examples") is sys.modules["os.path"]


def test_a_missing_module_names_the_extra_and_the_cause() -> None:
    with pytest.raises(
        ImportError, match=r"no_such_module.*pip install \"\.\[examples\]\"` in a checkout"
    ) as caught:
        require("no_such_module.part", extra="examples")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_module_blocked_by_its_own_import_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(ImportError, match=r"pooch could not be imported.*\[test\]"):
        require("pooch", extra="test")
