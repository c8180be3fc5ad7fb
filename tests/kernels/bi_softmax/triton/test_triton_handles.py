"""Launches by the handle of an earlier one, with a kernel that only notes what it is given."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
handles = importlib.import_module("implicit_attn.kernels.bi_softmax.triton.handles")

pytestmark = pytest.mark.defect("E5")


class Compiled:
    """A compiled kernel: it takes all arguments of the signature, constants included."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.launches.append((grid, args))


class Kernel:
    arg_names = ("x", "y", "count", "scale", "UNIT", "EVEN")

    def __init__(self) -> None:
        self.compiled = Compiled()
        self.bound: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def first(*args: Any, **options: Any) -> Compiled:
            self.bound.append((grid, args, options))
            return self.compiled

        return first


@pytest.fixture(autouse=True)
def compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "INTERPRETED", False)
    monkeypatch.setattr(handles, "_HANDLES", {})


OPTIONS = {"EVEN": True, "num_warps": 4, "UNIT": 8}  # in another order than the signature


def test_a_second_launch_takes_the_handle_with_equal_arguments() -> None:
    kernel, x = Kernel(), torch.zeros(4)
    args = (x, None, 7, 0.5)
    handles.launch(kernel, 3, args, OPTIONS)
    assert kernel.bound == [((3, 1, 1), args, OPTIONS)] and not kernel.compiled.launches
    handles.launch(kernel, 5, (x, None, 7, 0.25), OPTIONS)
    assert len(kernel.bound) == 1
    assert kernel.compiled.launches == [((5, 1, 1), (x, None, 7, 0.25, 8, True))]


@pytest.mark.parametrize(
    "change",
    [
        {"count": 16},
        {"x": torch.zeros(4, dtype=torch.float16)},
        {"x": torch.zeros(8)[1:]},  # not where 16 bytes can be loaded at a time
        {"y": torch.zeros(4)},
        {"UNIT": 1},
        {"num_warps": 8},
    ],
    ids=str,
)
def test_what_is_compiled_differently_gets_a_handle_of_its_own(change: dict[str, Any]) -> None:
    kernel, x = Kernel(), torch.zeros(4)
    given = {"x": x, "y": None, "count": 7, "scale": 0.5, **OPTIONS}
    for options in (given, {**given, **change}):
        names = ("x", "y", "count", "scale")
        rest = {name: options[name] for name in OPTIONS}
        handles.launch(kernel, 3, tuple(options[name] for name in names), rest)
    assert len(kernel.bound) == 2 and not kernel.compiled.launches


def test_handles_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "MOST", 10)
    kernel, x = Kernel(), torch.zeros(4)
    for count in range(25):
        handles.launch(kernel, 1, (x, None, count, 0.5), OPTIONS)
    assert len(handles._HANDLES) <= 10
