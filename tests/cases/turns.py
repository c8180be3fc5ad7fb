"""Compiled solves by single evaluations, as Inductor on a CPU has them, without generating code."""

from __future__ import annotations

import pytest

from implicit_attn.deq import preparing
from solvers.compiled import backward, turns


def take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled layers solve in turns on CPUs, whatever their backend; others are as they are."""
    for module in (preparing, backward, turns):
        monkeypatch.setattr(module, "one_by_one", lambda programs, device: device.type == "cpu")
