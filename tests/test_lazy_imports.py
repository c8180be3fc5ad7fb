"""What ``import implicit_attn`` loads, and the names that are found when they are asked for."""

from __future__ import annotations

import ast
import importlib
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import solvers
from solvers.lazy import lazy_names

ROOT = Path(__file__).resolve().parents[1]
LAZY = ("solvers", "implicit_attn", "implicit_attn.models")

PROGRAM = """
import sys
import numpy, torch
before = set(sys.modules)
import implicit_attn
print(*(set(sys.modules) - before))
x = torch.randn(2, 3, 4, requires_grad=True)
layer = implicit_attn.DEQ.from_update(lambda z, x: 0.5 * z.tanh() + x)
layer(x).sum().backward()
print(*(set(sys.modules) - before))
"""


def test_an_import_and_a_training_step_load_nothing_that_is_not_needed() -> None:
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    imported, loaded = (set(line.split()) for line in found.stdout.splitlines())
    own = {name for name in imported if name.split(".")[0] in ("solvers", "implicit_attn")}
    assert {"implicit_attn.deq.layer", "solvers.fixed_points"} <= own
    assert not own & {"implicit_attn.models.registry", "solvers.eigen.spectrum"}
    others = {name.split(".")[0] for name in imported - own if not name.startswith("_")}
    assert others - sys.stdlib_module_names <= {"torch", "torchgen"}
    assert "torch._dynamo" not in loaded  # the compiler takes seconds


def stated(package: str) -> Iterator[tuple[str, str]]:
    """Names and their modules, as the package states them for type checkers."""
    source = Path(str(importlib.import_module(package).__file__)).read_text("utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for entry in node.body:
                assert isinstance(entry, ast.ImportFrom)
                yield from ((alias.name, str(entry.module)) for alias in entry.names)


@pytest.mark.parametrize("package", LAZY)
def test_a_lazy_name_is_what_the_package_states(package: str) -> None:
    module, names = importlib.import_module(package), list(stated(package))
    assert names
    for name, home in names:
        assert getattr(module, name) is getattr(importlib.import_module(home), name)
        assert name in module.__all__ and name in dir(module)


def test_sub_packages_are_attributes() -> None:
    program = (
        "import implicit_attn, solvers; implicit_attn.models.hyperset.HyperSET; implicit_attn.data.load;"
        "implicit_attn.checkpoint.save_checkpoint; solvers.eigen.spectrum.Spectrum"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_lazy_classes_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(solvers.AdaptiveTAP)) is solvers.AdaptiveTAP


def test_an_unknown_name_is_an_attribute_error() -> None:
    get, names = lazy_names("solvers", {"solvers.spins.gibbs": "gibbs"})
    assert {"gibbs", "spins", "fixed_point"} <= set(names())
    with pytest.raises(AttributeError, match="module 'solvers' has no attribute 'gibs'"):
        get("gibs")
    with pytest.raises(ImportError, match="nothing"):
        exec("from solvers import nothing")
