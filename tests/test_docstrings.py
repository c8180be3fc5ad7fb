"""The examples in docstrings run, and print what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest
import torch
from torch import nn

import implicit_attn
import solvers

ROOT = Path(__file__).resolve().parents[1]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# The public objects that programs use most; each has an example.
MOST_USED = (
    implicit_attn.DEQ,
    implicit_attn.EquilibriumBlock,
    implicit_attn.Energy,
    implicit_attn.GradientStep,
    importlib.import_module("implicit_attn.energies").BiSoftmaxAttention,
    importlib.import_module("implicit_attn.energies").ReLUFeedForward,
    solvers.fixed_point,
    solvers.solve_linear,
    solvers.Tolerance,
    solvers.Anderson,
    solvers.Implicit,
    solvers.Solution,
)


def modules_with_examples() -> list[str]:
    paths = [path for name in ("solvers", "implicit_attn") for path in (ROOT / name).rglob("*.py")]
    found = [path for path in sorted(paths) if ">>> " in path.read_text("utf-8")]
    parts = [path.relative_to(ROOT).with_suffix("").parts for path in found]
    return [".".join(part[:-1] if part[-1] == "__init__" else part) for part in parts]


@pytest.mark.parametrize("name", modules_with_examples())
def test_the_examples_of_a_module_run(name: str) -> None:
    """With the names of their module, torch and nn at hand."""
    module = importlib.import_module(name)
    scope = {**vars(module), "torch": torch, "nn": nn}
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(optionflags=FLAGS)
    report: list[str] = []
    for test in finder.find(module, globs=scope):
        torch.manual_seed(0)
        runner.run(test, out=report.append)
    assert runner.failures == 0, "".join(report)
    assert runner.tries > 0


@pytest.mark.parametrize("thing", MOST_USED, ids=lambda thing: thing.__name__)
def test_what_is_used_most_has_an_example(thing: object) -> None:
    assert ">>> " in (thing.__doc__ or "")
