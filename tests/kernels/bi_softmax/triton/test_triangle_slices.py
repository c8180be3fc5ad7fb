"""What each program of the triangle really did, by its slot of partial sums."""

from __future__ import annotations

import importlib

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
arguments = importlib.import_module("implicit_attn.kernels.bi_softmax.triton.arguments")
launch = importlib.import_module("implicit_attn.kernels.bi_softmax.triton.launch")


@pytest.mark.defect("E4")
@pytest.mark.skipif(not arguments.INTERPRETED, reason="counts what the interpreter did")
def test_programs_of_the_triangle_do_about_equally_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of zero tokens each entry of a tile is 1: a slot sums to its tiles, those off the diagonal twice."""
    monkeypatch.setattr(launch, "MOST_SLICES", 4)
    monkeypatch.setattr(torch, "empty", torch.zeros)  # rows that no tile of a slot has
    block = arguments.INTERPRETER.rows
    z = torch.zeros(1, 1, 16 * block, 16)
    given = arguments.LaunchArguments(z, 1.0, None, None, False, True)
    slots, slices, rows = launch._triangle(given, None)
    assert (slices, rows) == (4, block)
    entries = slots.double().sum(1) / block**2  # twice the tiles, less those on the diagonal
    assert float(entries.sum()) == 16**2
    assert float(entries.max() - entries.min()) <= 2 * slices
