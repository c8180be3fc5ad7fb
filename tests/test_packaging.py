"""What an installed package must hold and name, read from the sources; ``make dist-test`` installs it."""

from __future__ import annotations

import configparser
import functools
import importlib
import importlib.metadata
import re
import sys
from pathlib import Path

import pytest

import implicit_attn
from workers.distribution import imported, requirements, unnamed

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("implicit_attn", "solvers")


def setup() -> configparser.ConfigParser:
    found = configparser.ConfigParser()
    found.read(ROOT / "setup.cfg", encoding="utf-8")
    return found


def stated_requirements() -> dict[str, list[str]]:
    """Of setup.cfg, in the form that metadata have."""
    found = setup()
    lines = found["options"]["install_requires"].split("\n")
    for extra, text in found["options.extras_require"].items():
        for line in filter(None, text.split("\n")):
            name, _, marker = line.partition(";")
            condition = f"{marker.strip()} and " if marker else ""
            lines.append(f'{name}; {condition}extra == "{extra}"')
    return requirements([line for line in lines if line])


@functools.cache
def sources() -> list[str]:
    return [path.read_text("utf-8") for name in PACKAGES for path in (ROOT / name).rglob("*.py")]


# Python 3.10 knows the modules of a distribution only from top_level.txt, which scikit-learn does not have.
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not know scikit-learn")
def test_the_metadata_name_what_is_imported() -> None:
    assert unnamed(sources(), stated_requirements()) == []


def test_nothing_is_required_that_nothing_imports() -> None:
    homes = importlib.metadata.packages_distributions()
    used = {name for module in imported(sources()) for name in homes.get(module, [module])}
    assert {name for name in stated_requirements()[""] if name not in used} == set()


def test_data_files_are_named() -> None:
    stated = setup()["options.package_data"]
    for name in PACKAGES:
        for path in (ROOT / name).rglob("*"):
            compiled = (
                path.suffix in (".cpp", ".h", ".so") or path.parent.name == "lib"
            )  # by setup.py
            if path.is_dir() or path.suffix in (".py", ".pyc") or compiled:
                continue
            package = ".".join(path.parent.relative_to(ROOT).parts)
            patterns = [*stated["*"].split(), *stated.get(package, "").split()]
            assert any(path.match(pattern) for pattern in patterns), path


def test_the_version_stands_in_one_place() -> None:
    """In the package, where the build reads it; the newest changes are told under it."""
    assert setup()["metadata"]["version"] == "attr: implicit_attn.__version__"
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    newest = re.findall(r"^## \[(.+)\] - (.+)$", changes, re.M)[0]
    assert implicit_attn.__version__ in newest
