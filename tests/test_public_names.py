"""Public names: what an import provides and loads, from files and from a zip, and what it does without."""

from __future__ import annotations

import compileall
import os
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import implicit_attn
import solvers
from implicit_attn.optional import require
from tools.names import public_names

ROOT = Path(__file__).resolve().parents[1]


def run(program: str) -> list[str]:
    """The lines that a program prints."""
    command = [sys.executable, "-W", "error", "-c", program]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout.splitlines()


def test_the_core_is_small() -> None:
    names = public_names(implicit_attn)
    packages = {m.name for m in pkgutil.iter_modules(implicit_attn.__path__) if m.ispkg}
    packages |= {"regularization", "solvers"}  # one module each
    assert {n for n in names if isinstance(getattr(implicit_attn, n), ModuleType)} == packages
    assert {"DEQ", "EquilibriumBlock", "Energy", "load_pretrained"} <= names
    assert len(names - packages) <= 45


PACKAGES = ["solvers", "implicit_attn"] + [
    f"implicit_attn.{name}"
    for name in ("data", "energies", "models", "solvers", "studies", "updates", "weights")
]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_star_brings_no_modules_and_nothing_from_elsewhere(package: str) -> None:
    names: dict[str, object] = {}
    exec(f"from {package} import *", names)
    del names["__builtins__"]
    for name, value in names.items():
        home = "solvers" if name.isupper() else getattr(value, "__module__", "")
        assert home.partition(".")[0] in ("solvers", "implicit_attn"), name
    module = sys.modules[package]
    public = public_names(module)
    assert {n for n in public if not isinstance(getattr(module, n), ModuleType)} == set(names)


SOLVERS = """
import sys
{first}
import solvers
import implicit_attn.solvers
from implicit_attn.solvers import fixed_point

assert fixed_point is solvers.fixed_point is implicit_attn.solvers.fixed_point
assert implicit_attn.solvers.core is solvers.core
assert dir(implicit_attn.solvers) == dir(solvers)
"""


@pytest.mark.parametrize("first", ["", "import solvers", "import implicit_attn.solvers"])
def test_solvers_have_their_names_in_the_package_too(first: str) -> None:
    """The very same objects, whichever name is imported first."""
    run(SOLVERS.format(first=first))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="gibs"):
        implicit_attn.solvers.gibs  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="nothing"):
        exec("from implicit_attn.solvers import nothing")


INSIDE = """
import sys
sys.path.insert(0, {path!r})
import torch
import implicit_attn

assert implicit_attn.__file__.startswith({path!r}), implicit_attn.__file__
layer = implicit_attn.DEQ(implicit_attn.Quadratic())
layer(torch.randn(2, 3, 4, requires_grad=True)).sum().backward()
print(layer.last.counts())
"""


@pytest.mark.parametrize("kind", ["bytecode", "zip"])
def test_it_works_without_its_source_files(kind: str, tmp_path: Path) -> None:
    """From a zip archive, and as bytecode alone, as in a frozen application."""
    site = tmp_path / "site"
    for package in (implicit_attn, solvers):
        skipped = shutil.ignore_patterns("__pycache__", "*.safetensors", "*.so")
        folder = Path(str(package.__file__)).parent
        shutil.copytree(folder, site / folder.name, ignore=skipped)
    if kind == "zip":
        path = shutil.make_archive(str(tmp_path / "all"), "zip", site)
    else:
        path = str(site)
        assert compileall.compile_dir(site, quiet=1, legacy=True)
        for source in site.rglob("*.py"):
            source.unlink()
    assert run(INSIDE.format(path=path)) == ["{'CONVERGED': 2}"]


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
assert "torch._dynamo" not in sys.modules
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

print(*sorted({name.split(".")[0] for name in set(sys.modules) - before}))
print(len(set(sys.modules) - before))
"""


def test_an_import_loads_few_modules() -> None:
    """Of other packages an import loads none that torch and numpy have not loaded, apart from Python's."""
    packages, number = run(MODULES)
    assert set(packages.split()) - sys.stdlib_module_names == {"implicit_attn", "solvers"}
    assert int(number) <= 130
