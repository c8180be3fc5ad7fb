"""What an import gives, loads and lacks: names, hidden and missing packages; logs that stay silent."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import logging
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import implicit_attn
import solvers
from implicit_attn.optional import require

ROOT = Path(__file__).resolve().parents[1]
STUBS = sorted(
    path for name in ("solvers", "implicit_attn") for path in (ROOT / name).rglob("*.pyi")
)


def run(program: str) -> list[str]:
    """The lines that a program prints."""
    command = [sys.executable, "-W", "error", "-c", program]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout.splitlines()


def test_the_core_is_what_dir_shows() -> None:
    names = set(dir(implicit_attn))
    packages = {m.name for m in pkgutil.iter_modules(implicit_attn.__path__) if m.ispkg}
    packages |= {"regularization", "solvers"}  # one module each
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


SOLVERS = """
import sys
{first}
import solvers
import implicit_attn.solvers
from implicit_attn.solvers import fixed_point

assert fixed_point is solvers.fixed_point is implicit_attn.solvers.fixed_point
assert implicit_attn.solvers.core is solvers.core
assert dir(implicit_attn.solvers) == dir(solvers)
assert "solvers.spins" not in sys.modules
"""


@pytest.mark.parametrize("first", ["", "import solvers", "import implicit_attn.solvers"])
def test_solvers_have_their_names_in_the_package_too(first: str) -> None:
    """The very same objects, whichever name is imported first."""
    run(SOLVERS.format(first=first))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="gibs"):
        solvers.gibs  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="nothing"):
        exec("from solvers import nothing")


@pytest.mark.parametrize(
    ("file", "script"),
    [("solvers.py", "mine.py"), ("solvers.py", "solvers.py"), ("solvers/__init__.py", "mine.py")],
    ids=["file", "script", "folder"],
)
def test_another_module_named_solvers_is_refused(file: str, script: str, tmp_path: Path) -> None:
    """Told before torch is imported, and before a circular import could be blamed."""
    other = tmp_path / file
    other.parent.mkdir(exist_ok=True)
    other.write_text("from implicit_attn import DEQ")
    (tmp_path / "mine.py").write_text("import implicit_attn")
    here = Path(implicit_attn.__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(here)}, capture_output=True, text=True,
    )  # fmt: skip
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError") and str(other) in last


@pytest.mark.parametrize("name", ["implicit_attn", "solvers"])
def test_the_logs_are_silent_unless_asked(name: str) -> None:
    log = logging.getLogger(name)
    assert any(isinstance(handler, logging.NullHandler) for handler in log.handlers)
    assert log.level == logging.NOTSET


def test_a_missing_module_names_the_extra_and_the_cause() -> None:
    with pytest.raises(ImportError, match=r"no_such_module.*examples") as caught:
        require("no_such_module.part", extra="examples")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


WITHOUT_SCIPY_AND_TORCHDEQ = """
import sys


class Absent:  # torch asks whether scipy can be found: it must not be listed as a module without a spec
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("scipy", "torchdeq"):
            raise ModuleNotFoundError(name, name=name)


sys.meta_path.insert(0, Absent())
import numpy, torch
before = set(sys.modules)
import implicit_attn

others = {name.split(".")[0] for name in set(sys.modules) - before if not name.startswith("_")}
assert others - sys.stdlib_module_names == {"implicit_attn", "solvers"}, others
implicit_attn.EquilibriumBlock(16, heads=2)(torch.randn(2, 4, 16)).sum().backward()
layer = implicit_attn.DEQ.from_update(lambda z, x: 0.5 * z.tanh() + x)
layer(torch.randn(2, 3, requires_grad=True)).sum().backward()
assert not {"torch._dynamo", "implicit_attn.models"} & set(sys.modules)
import solvers
from solvers.spins import sites

x = torch.randn(3, 4)
descent = solvers.Descent(lambda z: z.cosh().log().sum(1))
assert solvers.fixed_point(descent, x, tolerance=solvers.Tolerance(atol=1e-6)).converged.all()
assert solvers.solve_linear(lambda v: 2 * v, x).converged.all()
couplings = torch.zeros(4, 4, 1, 1)
assert solvers.adaptive_tap(couplings, x[:, :, None], site=sites.IsingSite()).converged.all()
assert (solvers.spectral_radius(lambda z: 0.5 * z, x) - 0.5).abs().max() < 1e-6
for name in implicit_attn.pretrained_models():
    implicit_attn.load_pretrained(name)
print([name for name in sys.modules if name in ("scipy", "torchdeq", "sklearn")])
for use in (
    lambda: solvers.spectral_radius(lambda z: z, torch.ones(1, 99)),
    lambda: __import__("solvers.torchdeq_bridge"),
):
    try:
        use()
    except ImportError as error:
        print(error)
"""


@pytest.mark.slow
def test_neither_is_needed_and_what_needs_one_says_so() -> None:
    """Solves, a block and all weights work; the spectrum of a large map and the bridge ask for one.

    Of torch's compiler, which takes seconds, nothing is loaded before a model needs it.
    """
    loaded, spectrum, bridge = run(WITHOUT_SCIPY_AND_TORCHDEQ)
    assert loaded == "[]"
    assert "scipy" in spectrum and "pip install" in spectrum
    assert "torchdeq" in bridge and "pip install" in bridge


MODULES = """
import sys
import numpy, torch

before = set(sys.modules)
import implicit_attn

print(len(set(sys.modules) - before))
implicit_attn.EquilibriumBlock
own = {name for name in sys.modules if name.split(".")[0] in ("implicit_attn", "solvers")}
print(len(own))
"""


def test_an_import_loads_few_modules() -> None:
    """An import loads three modules, and the first use of the block those that a layer needs."""
    package, block = map(int, run(MODULES))
    assert package == 3
    assert block <= 80
