"""Compiled solves by single evaluations, as Inductor on a CPU has them, without generating code."""

from __future__ import annotations

import sys

import pytest

import implicit_attn.deq.preparing
import solvers.compiled.backward
import solvers.compiled.turns  # noqa: F401

PLACES = ("implicit_attn.deq.preparing", "solvers.compiled.backward", "solvers.compiled.turns")


def take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled layers solve in turns on CPUs, whatever their backend; others are as they are."""
    for place in PLACES:
        monkeypatch.setattr(
            sys.modules[place], "one_by_one", lambda programs, device: device.type == "cpu"
        )
