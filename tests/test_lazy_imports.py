"""What ``import implicit_attn`` loads, and the names that are found when they are asked for."""

from __future__ import annotations

import ast
import importlib
import pickle
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import implicit_attn
import solvers

ROOT = Path(__file__).resolve().parents[1]
STUBS = sorted(
    path for name in ("solvers", "implicit_attn") for path in (ROOT / name).rglob("*.pyi")
)

PROGRAM = """
import sys
import numpy, torch
before = set(sys.modules)
import implicit_attn
print(*(set(sys.modules) - before))
x = torch.randn(2, 3, 8, requires_grad=True)
implicit_attn.EquilibriumBlock(8, heads=2)(x).sum().backward()
implicit_attn.DEQ.from_update(lambda z, x: 0.5 * z.tanh() + x)(x).sum().backward()
print(*(set(sys.modules) - before))
for name in implicit_attn.pretrained_models():
    implicit_attn.load_pretrained(name)
print(*(set(sys.modules) - before))
"""


def run(program: str) -> list[set[str]]:
    """The modules that a program prints, a set a line."""
    command = [sys.executable, "-W", "error", "-c", program]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return [set(line.split()) for line in found.stdout.splitlines()]


def test_imports_steps_and_weights_load_nothing_that_is_not_needed() -> None:
    """No torchdeq, no scipy; of torch's compiler, which takes seconds, nothing before a model needs it."""
    imported, loaded, with_weights = run(PROGRAM)
    others = {name.split(".")[0] for name in imported if not name.startswith("_")}
    assert others - sys.stdlib_module_names == {"implicit_attn", "solvers"}
    assert "implicit_attn.models" not in imported | loaded
    assert "torch._dynamo" not in loaded
    assert not {name.split(".")[0] for name in with_weights} & {"scipy", "torchdeq", "sklearn"}


def test_the_core_is_what_dir_shows() -> None:
    names = set(dir(implicit_attn))
    packages = {m.name for m in pkgutil.iter_modules(implicit_attn.__path__) if m.ispkg}
    packages |= {"checkpoint", "regularization"}  # one module each
    assert {
        name for name in names if isinstance(getattr(implicit_attn, name), ModuleType)
    } == packages
    assert {"DEQ", "EquilibriumBlock", "Energy", "load_pretrained"} <= names
    assert len(names - packages) <= 45
    assert vars(implicit_attn)["__all__"] == sorted(names)


@pytest.mark.parametrize("stub", STUBS, ids=lambda stub: stub.parent.name)
def test_a_lazy_name_is_what_its_stub_states(stub: Path) -> None:
    package = importlib.import_module(".".join(stub.parent.relative_to(ROOT).parts))
    below = {module.name for module in pkgutil.iter_modules(package.__path__)}
    stated = [n for n in ast.parse(stub.read_text("utf-8")).body if isinstance(n, ast.ImportFrom)]
    assert stated
    for node in stated:
        home = importlib.import_module(str(node.module))
        for alias in node.names:
            assert getattr(package, alias.name) is getattr(home, alias.name)
            assert alias.name in package.__all__ and alias.name == alias.asname
            assert home is package or alias.name not in below, "a module would hide the name"


def test_sub_packages_and_their_modules_are_attributes() -> None:
    packages = [m.name for m in pkgutil.iter_modules(implicit_attn.__path__) if m.ispkg]
    lines = [f"implicit_attn.{name}.__path__" for name in packages]
    run("\n".join(["import implicit_attn", *lines, "implicit_attn.deq.layer.DEQ"]))
    run("import solvers; solvers.eigen, solvers.spins")


def test_lazy_classes_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(solvers.AdaptiveTAP)) is solvers.AdaptiveTAP


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'solvers' has no attribute 'gibs'"):
        solvers.gibs  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="nothing"):
        exec("from solvers import nothing")
    assert not hasattr(implicit_attn, "__wrapped__")
